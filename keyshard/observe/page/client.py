"""Asks a page for the statuses that it shows."""

from __future__ import annotations

from typing import cast

import httpx

from keyshard.errors import ControlError
from keyshard.observe.status_types import Status
from keyshard.redaction import redacted, shown

ANSWER_S = 10.0
"""Longest wait for an answer, seconds."""


def statuses_at(url: str, token: str | None) -> list[Status]:
    """Return the status of every source that a page shows.

    Args:
        url: URL of the page.
        token: Its token, if it has one.

    Raises:
        ControlError: The page does not answer, refuses the token, or is no page of keyshard.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    where = redacted(url)
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/api/status", headers=headers, timeout=ANSWER_S, trust_env=False
        )
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ControlError(
                f"The page at {where} needs its token.", "Give it with --token-file."
            )
        if answer.is_error:
            said = shown(answer.text.strip())
            raise ControlError(f"The page at {where} refuses: {said}.", "Correct the request.")
        return cast("list[Status]", answer.json()["sources"])
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise ControlError(
            f"The page at {where} does not answer: {exc or type(exc).__name__}.",
            "Check the URL, and that keyshard ui or the source is running.",
        ) from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise ControlError(
            f"The server at {where} is not a page of keyshard.", "Correct --url."
        ) from exc
