"""The public API for dead letters: methods of a source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from keyshard.core.dead_letter_filter import DeadLetterFilter
from keyshard.errors import NotRunningError

if TYPE_CHECKING:
    from keyshard.core.dead_letter import DeadLetter


class SourceDeadLetters:
    """Methods of :class:`keyshard.KeyShardSource` for dead letters.

    Their arguments ``key``, ``topic``, ``error``, ``older_than_s``, ``newer_than_s`` and
    ``rejected`` are conditions; a dead letter matches if it fulfils each given one.
    """

    def dead_letters(
        self,
        key: str | None = None,
        *,
        topic: str | None = None,
        error: str | None = None,
        older_than_s: float | None = None,
        newer_than_s: float | None = None,
        rejected: bool = False,
        dead_letter_topic: str | None = None,
    ) -> Iterator[DeadLetter]:
        """Yield stored dead letters, in the order in which they were written.

        The source may run or not, here or elsewhere. Nothing is changed.

        Args:
            key: Dead letters of this routing key: the ordering key, else the partition key.
            topic: Dead letters of messages of this topic.
            error: Dead letters with this ``error_kind``, such as ``"ValueError"``.
            older_than_s: Dead letters that were written longer ago than this, seconds.
            newer_than_s: Dead letters that were written more recently than this, seconds.
            rejected: Instead of those of parked keys: rejected dead letters, and those stored
                without their key. Without ``admin_url``, discarded ones that are still stored are
                included.
            dead_letter_topic: Option ``dead_letter_topic`` of :meth:`run`, if it is not the default
                and the source does not run here.

        Raises:
            ConfigError: A value is wrong, or several default topics contain dead letters.
            ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        wanted = DeadLetterFilter(key, topic, error, older_than_s, newer_than_s, rejected)
        return self._dead_letters(wanted, dead_letter_topic)

    def _dead_letters(self, wanted: DeadLetterFilter, topic: str | None) -> Iterator[DeadLetter]:
        from keyshard.broker.connect import connect, connect_admin  # noqa: PLC0415
        from keyshard.config.source import SourceConfig  # noqa: PLC0415
        from keyshard.core.position.entry import full_topic_name  # noqa: PLC0415
        from keyshard.dead_letters.startup import open_browser  # noqa: PLC0415

        run: Any = self.__dict__.get("_running")
        if hasattr(run, "dead_letters"):
            yield from run.dead_letters().dead_letters.browser.all(wanted)
            return
        assert isinstance(self, SourceConfig)
        self.check_subscribed()
        connection = self.how_to_connect()
        with closing(connect(connection)) as broker:
            admin = None if self.admin_url is None else connect_admin(connection)
            try:
                named = None if topic is None else full_topic_name(topic)
                yield from open_browser(broker, admin, self, named).all(wanted)
            finally:
                if admin is not None:
                    admin.close()

    def unpark(
        self,
        key: str | None = None,
        *,
        all: bool = False,  # noqa: A002 - named as on the command line
        topic: str | None = None,
        error: str | None = None,
        older_than_s: float | None = None,
        newer_than_s: float | None = None,
        dry_run: bool = False,
    ) -> int:
        """Unpark keys: replay their dead letters in order, then let newer messages pass.

        A key is unparked as a whole if one of its dead letters matches: a dead letter is never
        replayed before an earlier one of its key. Returns without waiting for the replay. Only a
        few keys are replayed at a time, so that other keys do not wait. If a dead letter fails
        again, its key is parked again.

        Args:
            key: As for :meth:`dead_letters`.
            all: Every parked key, without other conditions.
            topic: As for :meth:`dead_letters`.
            error: As for :meth:`dead_letters`. The dead-letter topic is read first, as for the
                two ages.
            older_than_s: As for :meth:`dead_letters`.
            newer_than_s: As for :meth:`dead_letters`.
            dry_run: Only count.

        Returns:
            Number of keys. If a key is the only condition, it counts even if it is already being
            unparked.

        Raises:
            ConfigError: No key is selected.
            NotRunningError: :meth:`run` does not run.
            ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        wanted = DeadLetterFilter(key, topic, error, older_than_s, newer_than_s).checked(all)
        keys: int = self._running_dead_letters().unpark(wanted, dry_run=dry_run).keys
        return keys

    def discard(
        self,
        key: str | None = None,
        *,
        all: bool = False,  # noqa: A002 - named as on the command line
        topic: str | None = None,
        error: str | None = None,
        older_than_s: float | None = None,
        newer_than_s: float | None = None,
        rejected: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Give up matching dead letters for good. A key that has none left is no longer parked.

        The other dead letters of a key keep their order. Keys that are being unparked are not
        touched.

        Args:
            key: As for :meth:`dead_letters`.
            all: Every dead letter, without other conditions than ``rejected``.
            topic: As for :meth:`dead_letters`.
            error: As for :meth:`dead_letters`.
            older_than_s: As for :meth:`dead_letters`.
            newer_than_s: As for :meth:`dead_letters`.
            rejected: As for :meth:`dead_letters`. Without another condition: all of them. Without
                ``admin_url``, those that were discarded before and are still stored count again.
            dry_run: Only count.

        Returns:
            Number of dead letters.

        Raises:
            ConfigError: No dead letter is selected.
            NotRunningError: :meth:`run` does not run.
            ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        wanted = DeadLetterFilter(key, topic, error, older_than_s, newer_than_s, rejected)
        wanted = wanted.checked(all)
        count: int = self._running_dead_letters().discard(wanted, dry_run=dry_run).dead_letters
        return count

    def _running_dead_letters(self) -> Any:
        run = self.__dict__.get("_running")
        if run is None:
            raise NotRunningError("The source is not running.", "Call run() first.")
        if not hasattr(run, "dead_letters"):
            raise NotRunningError(
                "Parked keys exist only with run(), not with batches() or a Ray job.", "Call run()."
            )
        return run.dead_letters()
