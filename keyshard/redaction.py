"""Redaction: secrets that are never shown, texts without secrets, and short texts of any value.

Used wherever a URL, a user's value or a broker's text may be shown: errors, ``repr``, logs and
status.
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
"""Most characters of a value in the ``repr`` of a configuration."""
SENTENCE_MAX = 1_600
"""Most characters of an error's message."""
_TWO_STOPS = re.compile(r"(?<=[^\s./])([.!?])\.(?=\s|$)")
KNOWN_CHARS_MIN = 3
"""Shortest secret that is redacted in texts on its own, characters."""
SURE_CHARS_MIN = 16
"""Shortest secret that is redacted even inside a longer word, characters."""
CHAIN_MAX = 20
"""Most chained errors that are redacted."""
_JWT = re.compile(r"\beyJ[\w-]{8,}\.[\w-]+(\.[\w-]*)?")
_TOKEN = re.compile(r"(?i)\btoken:[^\s'\"]+")
_USER = re.compile(r"://\S*@")
_USER_OF_URL = re.compile(r"://.*@", re.DOTALL)
_PARAMETER = re.compile(
    r"(?i)([?&;#][\w.%-]*(?:pass|pwd|secret|token|key|sig|credential|auth)[\w.%-]*=)[^&;#\s'\"]+"
)

_Error = TypeVar("_Error", bound=BaseException)


class Secret:
    """A text that ``repr``, ``str``, formatting, errors and logs do not show.

    While the object lives, :func:`redacted` removes the secret from texts of other origin. A broker
    or a proxy may echo it, also encoded for a URL, a header, JSON or HTML.

    :meth:`reveal` returns the text. Pickling keeps it, because an unpickled copy must work.

    Args:
        text: The secret.
        user: The user name, if the secret is sent as ``user:text``.
    """

    __slots__ = ("__weakref__", "_forms", "_text", "_user")

    def __init__(self, text: str, user: str | None = None) -> None:
        self._text = text
        self._user = user
        self._forms: tuple[Sequence[str], re.Pattern[str]] | None = None
        _alive[id(self)] = self

    def reveal(self) -> str:
        """Return the text itself, for sending."""
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
        """Return a text without this secret."""
        if self._forms is None:
            pair = [] if self._user is None else [f"{self._user}:{self._text}"]
            self._forms = _forms([self._text, *pair])
        long, short = self._forms
        for form in long:
            text = text.replace(form, "***")
        return short.sub("***", text)


_alive: WeakValueDictionary[int, Secret] = WeakValueDictionary()
"""Secrets of this process, by object id."""


def _forms(texts: Iterable[str]) -> tuple[Sequence[str], re.Pattern[str]]:
    """Return the texts in every encoding: long forms, and a pattern for short ones.

    A short form is redacted only as a whole word: a password may be a part of our own words.
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
    """Return a text without the secrets of this process, and without those in URLs.

    ``http://ann:secret@host/?token=abc`` becomes ``http://***@host/?token=***``. Outside of URLs,
    JWTs and text after ``token:`` are redacted as well.
    """
    alive = [secret for reference in _alive.valuerefs() if (secret := reference()) is not None]
    # One secret may begin with another: replace the longest first.
    for secret in sorted(alive, key=lambda one: len(one.reveal()), reverse=True):
        text = secret.hidden_in(text)
    text = _TOKEN.sub("token:***", _JWT.sub("***", text))
    return _PARAMETER.sub(r"\1***", _USER.sub("://***@", text))


def scrubbed(error: _Error) -> _Error:
    """Redact an error of a library and the errors that caused it: tracebacks show them."""
    one: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if one is None:
            break
        one.args = tuple(redacted(arg) if isinstance(arg, str) else arg for arg in one.args)
        if isinstance(one, OSError):
            # An OSError prints these attributes, not its arguments.
            for name in ("strerror", "filename", "filename2"):
                if isinstance(said := getattr(one, name), str):
                    setattr(one, name, redacted(said))
        one = one.__cause__ or one.__context__
    return error


def shown(value: object, length_max: int = SHOWN_MAX) -> str:
    """Return a short ``repr`` of a value, without secrets; never raises."""
    try:
        # The quotes of repr may hide the end of a URL, so a text is redacted first.
        text = repr(_USER_OF_URL.sub("://***@", value) if type(value) is str else value)
    except Exception:  # noqa: BLE001 - whatever a user's own __repr__ raises
        return f"a value of type {type(value).__name__} that cannot be shown"
    text = redacted(text)
    return text if len(text) <= length_max else f"{text[:length_max]}..."


def listed(things: Iterable[object], at_most: int = 3) -> str:
    """Return the first things for a sentence, and the number of the others."""
    texts = [str(one) for one in things]
    more = f" and {len(texts) - at_most} more" if len(texts) > at_most else ""
    return ", ".join(texts[:at_most]) + more


def sentence(text: str) -> str:
    """Return a message without secrets. The middle of a very long one is left out.

    A message that ends with a quoted full stop does not get a second one.
    """
    text = _TWO_STOPS.sub(r"\1", redacted(text))
    if len(text) <= SENTENCE_MAX:
        return text
    return f"{text[: SENTENCE_MAX // 2]} [...] {text[-SENTENCE_MAX // 2 :]}"
