"""Secrets that are not shown, texts without those of URLs, values of any kind as a short text.

Used wherever a URL or a value of the user's may be shown: errors, ``repr``, logs and status.
"""

from __future__ import annotations

import hmac
import re

SHOWN_MAX = 100
"""Most characters of a value that are shown."""
REPR_MAX = 1_000
"""The same in the ``repr`` of a configuration."""
SENTENCE_MAX = 1_600
"""Most characters of an error's message."""
_JWT = re.compile(r"\beyJ[\w-]{8,}\.[\w-]+(\.[\w-]*)?")
_TOKEN = re.compile(r"(?i)\btoken:[^\s'\"]+")
_USER = re.compile(r"://\S*@")
_USER_OF_URL = re.compile(r"://.*@", re.DOTALL)
_PARAMETER = re.compile(
    r"(?i)([?&;#][\w.%-]*(?:pass|pwd|secret|token|key|sig|credential|auth)[\w.%-]*=)[^&;#\s'\"]+"
)


class Secret:
    """A text that is not shown: not by ``repr``, ``str``, formatting, errors or logs.

    :meth:`reveal` gives it. Pickling keeps it, as what is pickled has to work elsewhere.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for who has to send it."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(
            self._text.encode(errors="replace"), other._text.encode(errors="replace")
        )

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[object, ...]:
        return Secret, (self._text,)


def redacted(text: str) -> str:
    """A text whose URLs show no user, password or token.

    ``http://ann:secret@host/?token=abc`` becomes ``http://***@host/?token=***``. Tokens that are
    recognised outside of URLs, too, go: JWT, and what follows ``token:``.
    """
    text = _TOKEN.sub("token:***", _JWT.sub("***", text))
    return _PARAMETER.sub(r"\1***", _USER.sub("://***@", text))


def first_line(error: BaseException) -> str:
    """What an error says before it explains itself, as those of gRPC do at length."""
    return str(error).split("\n", 1)[0].split(". gRPC client debug context:", 1)[0]


def shown(value: object, length_max: int = SHOWN_MAX) -> str:
    """``repr`` of a value, short, without secrets; never raises."""
    try:
        # The quotes of repr may hide where a URL ends, so a text is looked at before.
        text = repr(_USER_OF_URL.sub("://***@", value) if type(value) is str else value)
    except Exception:  # noqa: BLE001 - whatever a user's own __repr__ raises
        return f"a value of type {type(value).__name__} that cannot be shown"
    text = redacted(text)
    return text if len(text) <= length_max else f"{text[:length_max]}..."


def sentence(text: str) -> str:
    """A message without secrets; where a value made it too long, its middle is left out."""
    text = redacted(text)
    if len(text) <= SENTENCE_MAX:
        return text
    return f"{text[: SENTENCE_MAX // 2]} [...] {text[-SENTENCE_MAX // 2 :]}"
