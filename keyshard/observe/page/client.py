"""Asks a page for the statuses that it shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from keyshard.control import ANSWER_S, RunningSource
from keyshard.control_requests import releases
from keyshard.errors import ControlError
from keyshard.observe.page.status_watcher import GROUPS
from keyshard.redaction import redacted, shown


@dataclass(frozen=True, slots=True)
class ShownSource(RunningSource):
    """A source, sink or worker that a page lists; its ``path`` is its id there."""

    told: Any
    """Its status; ``None`` if it gave none."""
    error: str
    """Why it gave none; else empty."""

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **fields: Any) -> Any:
        """Return the listed status; the arguments are those of a request for it.

        Raises:
            ControlError: It did not answer the page.
        """
        del do, timeout_s, fields
        if self.error:
            raise ControlError(self.error, "Check that the process is running.")
        return self.told


@dataclass(frozen=True, slots=True)
class Page:
    """A page of keyshard.

    Args:
        url: Its URL.
        token: Its token, if it has one.
    """

    url: str
    token: str | None = field(repr=False)

    def listed(self) -> tuple[list[ShownSource], str]:
        """Return what the page shows, and why something may be missing; else an empty text.

        Raises:
            ControlError: The page does not answer, refuses the token, or is no page of keyshard.
        """
        answer = self._get({})
        self._check(answer)
        told: Any = None
        try:
            told = answer.json()
            statuses = [status for group in GROUPS.values() for status in told[group]]
            answered = iter(statuses)
            found = [
                _listed(one, None if one["error"] else next(answered)) for one in told["running"]
            ]
            return found, str(told["error"])
        except (ValueError, LookupError, TypeError, StopIteration) as exc:
            raise self._not_understood(told) from exc

    def status_of(self, one: RunningSource) -> Any | None:
        """Return the status of a source, sink or worker now; ``None`` once it has ended.

        Raises:
            ControlError: It does not answer, or the page does not.
        """
        answer = self._get({"source": one.path.name})
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        self._check(answer)
        try:
            return answer.json()
        except ValueError as exc:
            raise self._not_understood(None) from exc

    def _get(self, query: dict[str, str]) -> httpx.Response:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        try:
            return httpx.get(
                f"{self.url.rstrip('/')}/api/status", params=query, headers=headers,
                timeout=ANSWER_S, trust_env=False,
            )  # fmt: skip
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise ControlError(
                f"The page at {redacted(self.url)} does not answer: {exc or type(exc).__name__}.",
                "Check the URL, and that keyshard ui or the source is running.",
            ) from exc

    def _check(self, answer: httpx.Response) -> None:
        """Raise ``ControlError`` if the page refuses the request."""
        where = redacted(self.url)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ControlError(
                f"The page at {where} needs its token.", "Give it with --token-file."
            )
        if answer.is_error:
            said = shown(answer.text.strip(), _SAID_MAX)
            remedy = _REMEDIES.get(answer.status_code, "Correct the request.")
            raise ControlError(f"The page at {where} refuses: {said}.", remedy)

    def _not_understood(self, told: Any) -> ControlError:
        """Return the error for an answer of an unexpected shape."""
        where = redacted(self.url)
        match told:
            case {"release": str(release)}:
                pass
            # Pages listed only sources before they told their release.
            case {"sources": list(), "error": str()} if "running" not in told:
                release = ""
            case _:
                return ControlError(
                    f"The server at {where} is not a page of keyshard.", "Correct --url."
                )
        return ControlError(
            f"The answer of the page at {where} cannot be understood.{releases(release)}",
            "Use the same release of keyshard for this command and for the page.",
        )


_SAID_MAX = 500
"""Most characters of a refusal that are shown."""
_REMEDIES: dict[int, str] = {
    httpx.codes.BAD_GATEWAY: "Check that the process is running.",
    httpx.codes.SERVICE_UNAVAILABLE: "Try again later.",
}
"""Remedies for refusals whose request is correct, by status."""


def _listed(one: Any, status: Any) -> ShownSource:
    """Return a source, sink or worker from its object in ``running``."""
    return ShownSource(
        str(one["subscription"] or one["name"]), str(one["serviceUrl"]), str(one["topics"]),
        int(one["pid"]), Path(str(one["id"])), str(one["kind"]), str(one["name"]), status,
        str(one["error"]), release=str(one.get("release", "")),
    )  # fmt: skip
