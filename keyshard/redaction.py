"""Secrets that are not shown, texts without secrets, values of any kind as a short text.

Used wherever a URL, a value of the user's or the words of a broker may be shown: errors, ``repr``,
logs and status.
"""

from __future__ import annotations

import hmac
import html
import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import TypeVar
from urllib.parse import quote, quote_plus
from weakref import WeakValueDictionary

SHOWN_MAX = 100
"""Most characters of a value that are shown."""
REPR_MAX = 300
"""The same in the ``repr`` of a configuration."""
SENTENCE_MAX = 1_600
"""Most characters of an error's message."""
_TWO_STOPS = re.compile(r"(?<=[^\s./])([.!?])\.(?=\s|$)")
KNOWN_CHARS_MIN = 3
"""Fewest characters of a secret that is recognised in texts by itself."""
SURE_CHARS_MIN = 16
"""Fewest characters of a secret that is recognised inside a longer word."""
CHAIN_MAX = 20
"""Most errors behind an error that are looked at."""
_JWT = re.compile(r"\beyJ[\w-]{8,}\.[\w-]+(\.[\w-]*)?")
_TOKEN = re.compile(r"(?i)\btoken:[^\s'\"]+")
_USER = re.compile(r"://\S*@")
_USER_OF_URL = re.compile(r"://.*@", re.DOTALL)
_PARAMETER = re.compile(
    r"(?i)([?&;#][\w.%-]*(?:pass|pwd|secret|token|key|sig|credential|auth)[\w.%-]*=)[^&;#\s'\"]+"
)

_Error = TypeVar("_Error", bound=BaseException)


class Secret:
    """A text that is not shown: not by ``repr``, ``str``, formatting, errors or logs.

    While it lives, :func:`redacted` also takes it out of what others say: a broker or a proxy may
    echo it, also encoded for a URL, a header, JSON or HTML.

    :meth:`reveal` gives it. Pickling keeps it, as what is pickled has to work elsewhere.

    Args:
        text: The secret.
        user: The name that it is sent with as ``user:text``, if there is one.
    """

    __slots__ = ("__weakref__", "_forms", "_text", "_user")

    def __init__(self, text: str, user: str | None = None) -> None:
        self._text = text
        self._user = user
        self._forms: tuple[Sequence[str], re.Pattern[str]] | None = None
        _alive[id(self)] = self

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
        return Secret, (self._text, self._user)

    def hidden_in(self, text: str) -> str:
        """A text without this secret."""
        if self._forms is None:
            pair = [] if self._user is None else [f"{self._user}:{self._text}"]
            self._forms = _forms([self._text, *pair])
        long, short = self._forms
        for form in long:
            text = text.replace(form, "***")
        return short.sub("***", text)


_alive: WeakValueDictionary[int, Secret] = WeakValueDictionary()
"""Secrets of this process by their ids."""


def _forms(texts: Iterable[str]) -> tuple[Sequence[str], re.Pattern[str]]:
    """Texts in every encoding: the long forms, and a pattern for the short ones.

    A short form is recognised as a word only: a password may be a part of our own words.
    """
    forms = {form for text in texts if len(text) >= KNOWN_CHARS_MIN for form in _encoded(text)}
    by_length = sorted(forms, key=len, reverse=True)
    long = [form for form in by_length if len(form) >= SURE_CHARS_MIN]
    short = "|".join(_as_word(form) for form in by_length[len(long) :])
    return long, re.compile(short or r"(?!)")


def _encoded(text: str) -> set[str]:
    data = text.encode(errors="replace")
    of_bytes = {b64encode(data).decode(), urlsafe_b64encode(data).decode()}
    forms = {text, *of_bytes, *(one.rstrip("=") for one in of_bytes)}
    forms |= {json.dumps(text)[1:-1], repr(text)[1:-1], repr(data)[2:-1]}
    forms |= {html.escape(text), html.escape(text, quote=False)}
    for form in tuple(forms):
        name = form.encode(errors="replace")
        quoted = {quote(name), quote(name, safe=""), quote_plus(name)}
        forms |= quoted | {re.sub("%..", lambda found: found[0].lower(), one) for one in quoted}
    return forms


def _as_word(form: str) -> str:
    before = r"(?<!\w)" if re.match(r"\w", form) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", form) else ""
    return f"{before}{re.escape(form)}{after}"


def redacted(text: str) -> str:
    """A text without the secrets that this process knows, and without those of URLs.

    ``http://ann:secret@host/?token=abc`` becomes ``http://***@host/?token=***``. Tokens that are
    recognised outside of URLs, too, go: JWT, and what follows ``token:``.
    """
    alive = [secret for reference in _alive.valuerefs() if (secret := reference()) is not None]
    # One may begin with another one.
    for secret in sorted(alive, key=lambda one: len(one.reveal()), reverse=True):
        text = secret.hidden_in(text)
    text = _TOKEN.sub("token:***", _JWT.sub("***", text))
    return _PARAMETER.sub(r"\1***", _USER.sub("://***@", text))


def first_line(error: BaseException) -> str:
    """What an error says before it explains itself, as those of gRPC do at length."""
    return str(error).split("\n", 1)[0].split(". gRPC client debug context:", 1)[0]


def scrubbed(error: _Error) -> _Error:
    """An error of a library, and those behind it, without secrets: tracebacks show them."""
    one: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if one is None:
            break
        one.args = tuple(redacted(arg) if isinstance(arg, str) else arg for arg in one.args)
        if isinstance(one, OSError):
            # It prints these, not its arguments.
            for name in ("strerror", "filename", "filename2"):
                if isinstance(said := getattr(one, name), str):
                    setattr(one, name, redacted(said))
        one = one.__cause__ or one.__context__
    return error


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
    """A message without secrets; where a value made it too long, its middle is left out.

    A quoted text that ends with a full stop does not get a second one.
    """
    text = _TWO_STOPS.sub(r"\1", redacted(text))
    if len(text) <= SENTENCE_MAX:
        return text
    return f"{text[: SENTENCE_MAX // 2]} [...] {text[-SENTENCE_MAX // 2 :]}"
