"""Equivalent hosts: their IP addresses, and a question of which the first answer counts.

A host may hang while its connections stay open. Therefore, the next host is asked while the
previous one has not answered yet, as RFC 8305 ("Happy Eyeballs") does with addresses.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from keyshard.errors import BrokerUnavailableError, KeyShardError
from keyshard.threads import Fail, begin

NEXT_S = 1.0
"""Longest time without an answer after which the next host is asked too, seconds. Many hosts are
all asked within half of the time for the answer."""
ANSWER_MARGIN_S = 1.0
"""Time that questions get beyond their deadline to report why they failed, seconds."""

Host = TypeVar("Host")
Answer = TypeVar("Answer")


def ip_addresses(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a host name, in the order of the resolver.

    Raises:
        OSError: The name is unknown.
    """
    found = [one[4] for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    # The last of the four parts of an IPv6 address is the interface of a link-local one.
    scopes = [f"%{one[3]}" if len(one) == 4 and one[3] else "" for one in found]
    return list(dict.fromkeys(f"{one[0]}{scope}" for one, scope in zip(found, scopes, strict=True)))


class HostQuestions(Generic[Host, Answer]):
    """A question to equivalent hosts. Several hosts are asked in a thread each.

    Args:
        ask: Asks a host, and ends by itself.
        discard: Takes each answer that is not returned.
        fail: Called with the error of a failed thread; it ends the source. Default:
            :func:`keyshard.threads.owner` of the calling thread.
    """

    def __init__(
        self,
        ask: Callable[[Host], Answer],
        discard: Callable[[Answer], object] = lambda _: None,
        fail: Fail | None = None,
    ) -> None:
        self._ask = ask
        self._discard = discard
        self._fail = fail
        self._changed = threading.Condition()
        self._answers: list[Answer] = []
        self._over = False
        """Whether nothing waits for answers any more."""
        self._unexpected: Exception | None = None
        self.failed: list[tuple[Host, KeyShardError]] = []
        """Hosts that did not answer, each with its error, after :meth:`first`."""

    def first(self, hosts: Sequence[Host], timeout_s: float) -> Answer | None:
        """Ask the next host after a failure, or after a while, until one answers.

        Args:
            hosts: The hosts.
            timeout_s: Longest wait, seconds.

        Returns:
            The first answer; ``None`` if none answers.

        Raises:
            Exception: ``ask`` raised an error other than :class:`KeyShardError`.
        """
        end_s = time.monotonic() + timeout_s
        wait_s = min(NEXT_S, timeout_s / 2 / max(1, len(hosts)))
        try:
            if len(hosts) == 1:
                self._put(hosts[0])
            for asked, host in enumerate(hosts if len(hosts) > 1 else (), 1):
                begin(f"keyshard-host-{host}", self._put, host, fail=self._fail)
                last_s = end_s + ANSWER_MARGIN_S
                next_s = time.monotonic() + wait_s
                if self._is_answered(asked, last_s if asked == len(hosts) else next_s):
                    break
        except BaseException:
            self._end()
            raise
        answer = self._end(keep=self._unexpected is None)
        if self._unexpected is not None:
            raise self._unexpected
        if answer is not None:
            return answer
        told = [host for host, _ in self.failed]
        silent = BrokerUnavailableError(
            "The broker did not answer in time.", "Check that it is running."
        )
        self.failed += [(host, silent) for host in hosts if host not in told]
        return None

    def _end(self, *, keep: bool = False) -> Answer | None:
        """Stop waiting. Return the first answer if ``keep``, and discard all others."""
        with self._changed:
            self._over = True
            answers = list(self._answers)
        if answers and keep:
            return answers[0]
        for answer in answers:
            self._discard(answer)
        return None

    def _is_answered(self, asked: int, until_s: float) -> bool:
        """Wait until a host has answered, all that were asked have failed, or the time is over."""
        with self._changed:
            while True:
                if self._answers or self._unexpected is not None:
                    return True
                left_s = until_s - time.monotonic()
                if left_s <= 0 or len(self.failed) == asked:
                    return False
                self._changed.wait(left_s)

    def _put(self, host: Host) -> None:
        try:
            answer = self._ask(host)
        except Exception as exc:  # noqa: BLE001 - raised by the thread that waits for it
            with self._changed:
                if not self._over and isinstance(exc, KeyShardError):
                    self.failed.append((host, exc))
                elif not self._over:
                    self._unexpected = exc
                self._changed.notify()
            return
        with self._changed:
            first = not (self._over or self._answers)
            if first:
                self._answers.append(answer)
                self._changed.notify()
        if not first:
            self._discard(answer)
