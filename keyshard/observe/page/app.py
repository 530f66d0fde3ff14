"""The HTTP interface of the page: its files, the status, a stream of it, and requests.

::

    GET  /, /page.js, /page.css          the page; no data
    GET  /api/status[?source=ID]         the status of every source, sink and worker, or of one
    GET  /api/rescales[?source=ID]       the rescales of one source
    GET  /runbook/SECTION                a section of the runbook as text; no data
    GET  /api/events[?source=ID]         server-sent events: the status each second
    POST /api/ask {"source": ID, "do": ...}   a request to the control socket of a source
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keyshard.control import RunningSource, has_ended
from keyshard.control_requests import ask
from keyshard.core.range_watchdog import RUNBOOK
from keyshard.core.recent_history import rescales_of
from keyshard.errors import ConfigError, ControlError, KeyShardError
from keyshard.observe.page.guard import Guard
from keyshard.observe.page.status_watcher import (
    GROUPS,
    STATUS_S,
    Answer,
    Look,
    Sockets,
    StatusWatcher,
    answer_of,
)
from keyshard.redaction import shown
from keyshard.threads import Pool
from keyshard.version import VERSION

BODY_BYTES_MAX = 64 * 1024
"""Longest body of a request, bytes."""
BODY_S = 10.0
"""Longest time to receive the body of a request, seconds."""
ASK_S = 60.0
"""Longest wait for the answer of a source, seconds."""
SEND_S = 5.0
"""Time after which a page that does not read its events is disconnected, seconds."""
WATCHERS_MAX = 200
"""Maximum number of pages that get events at the same time."""
ASKED_MAX = 16
"""Maximum number of requests to sources at the same time; further ones are refused."""
KEEP_ALIVE_S = 15.0
"""Longest time without an event, seconds; then a comment is sent."""
COMMANDS = frozenset({
    "status", "explain", "runs", "stack", "dead_letters", "dead_letter", "unpark", "discard",
    "rescale", "pause", "resume",
})  # fmt: skip
"""Requests of the control socket that a page may send."""
FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


T = TypeVar("T")
_MISSING = "Nothing runs with this ID. /api/status lists the IDs."


class _RefusedError(Exception):
    """The answer to a request is an error of HTTP, with a text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


class Cut(Protocol):
    """Closes the connections of a client at once, by its address."""

    def __call__(self, client: object) -> None: ...


class PageApp:
    """The application of one server. Its methods run in the event loop of the server.

    Args:
        sockets: Returns the control sockets of the sources, sinks and workers that it shows.
        guard: Decides which requests are served.
        cut: Disconnects a client that does not read its events.
    """

    def __init__(self, sockets: Sockets, guard: Guard, cut: Cut) -> None:
        self._cut = cut
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look: Look | None = None
        self._looked = asyncio.Event()
        self._looking: asyncio.Future[Response] | None = None
        """The look that requests for the status share."""
        self._watchers = self._asked = 0
        self._closing = False
        self._status_watcher = StatusWatcher(sockets, self._told)
        self._pool = Pool(ASKED_MAX, "keyshard-page-ask")
        routes = [Route(path, _file(path)) for path in FILES]
        routes += [
            Route("/runbook/{section}", _runbook()),
            Route("/api/status", self._status),
            Route("/api/rescales", self._rescales),
            Route("/api/events", self._events),
            Route("/api/ask", self._ask, methods=["POST"]),
        ]
        self.asgi: ASGIApp = _Guarded(Starlette(routes=routes), guard)

    def begin(self) -> None:
        """Note the calling event loop, which gets each look. Returns at once."""
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """End all streams of events."""
        self._closing = True
        self._looked.set()

    def close(self) -> None:
        """Stop the watcher and the pool. Called after the event loop has ended. Idempotent."""
        self._status_watcher.close()
        self._pool.shutdown()

    # -- looks -------------------------------------------------------------------------------------

    def _told(self, look: Look) -> None:
        """Pass a new look to the event loop; called in the thread of the status watcher."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._show, look)

    def _show(self, look: Look) -> None:
        self._look = look
        self._looked.set()
        self._looked = asyncio.Event()

    async def _events(self, request: Request) -> Response:
        if self._watchers >= WATCHERS_MAX:
            return _refusal(503, f"{WATCHERS_MAX} pages are open already. Close one.")
        return _EventStream(self, request.query_params.get("source"))

    async def stream(self, wanted: str | None, scope: Scope, send: Send) -> None:
        """Send a look each second until the client is gone or too slow, or the server ends."""
        self._watchers += 1
        self._status_watcher.watched(by=self._watchers)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        shown_number = 0
        try:
            await _sent(send, {"type": "http.response.start", "status": 200, "headers": headers})
            while not self._closing:
                look, looked = self._look, self._looked
                if look is not None and look.number != shown_number:
                    shown_number = look.number
                    await _sent(send, _part(look.event(wanted)))
                    continue
                try:
                    await asyncio.wait_for(looked.wait(), KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    await _sent(send, _part(b": nothing new\n\n"))
            await _sent(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.TimeoutError:
            self._cut(scope.get("client"))
        finally:
            self._watchers -= 1
            self._status_watcher.watched(by=self._watchers)

    # -- requests ----------------------------------------------------------------------------------

    async def _status(self, request: Request) -> Response:
        wanted = request.query_params.get("source")
        if wanted is not None:
            return await self._in_pool(lambda: self._status_of(wanted))
        if self._looking is None or self._looking.done():
            look = self._in_pool(lambda: _listed(*self._status_watcher.answers()))
            self._looking = asyncio.ensure_future(look)
        # A client that leaves cancels its request, and not the look of the others. All of them
        # get one body, made in the pool: it may have many megabytes.
        return await asyncio.shield(self._looking)

    def _status_of(self, wanted: str) -> Response:
        one = self._found(wanted)
        answer = answer_of(one, partial(ask, one.path, {"do": "status"}, STATUS_S))
        if answer is None:  # it has ended since it was found
            raise _RefusedError(404, _MISSING)
        if answer.error:
            raise _RefusedError(502, answer.error)
        return Response(answer.status, media_type="application/json")

    async def _rescales(self, request: Request) -> Response:
        wanted = request.query_params.get("source")
        return await self._in_pool(lambda: _history_of(self._source(wanted)))

    def _source(self, wanted: str | None) -> RunningSource:
        """Return the source with an id, or the only one.

        Raises:
            _RefusedError: There is none or several, or a process does not answer.
        """
        if wanted is not None:
            one = self._found(wanted)
            if one.kind_word != "source":
                raise _RefusedError(400, f"A {one.kind_word} has no rescales. Name a source.")
            return one
        answers, errors = self._status_watcher.answers()
        if errors:
            text = f"Name one with source=ID, see /api/status. {' '.join(errors)}"
            raise _RefusedError(502, text)
        sources = [one.of for one in answers if one.of.kind_word == "source"]
        if len(sources) > 1:
            text = "Several sources run. Name one with source=ID, see /api/status."
            raise _RefusedError(400, text)
        if not sources:
            raise _RefusedError(404, _MISSING)
        return sources[0]

    def _found(self, wanted: str) -> RunningSource:
        """Return what runs with an id.

        Raises:
            _RefusedError: Nothing runs with it, or its process does not answer.
        """
        try:
            one = self._status_watcher.found(wanted)
        except ControlError as exc:
            raise _RefusedError(502, exc.message) from exc
        if one is None:
            raise _RefusedError(404, _MISSING)
        return one

    async def _ask(self, request: Request) -> Response:
        try:
            asked = json.loads(await asyncio.wait_for(_body(request), BODY_S))
        except (ValueError, RecursionError):
            asked = None
        except asyncio.TimeoutError:
            return _refusal(408, "The request did not arrive in time.")
        match asked:
            case {"source": str(source), "do": str(do), **fields}:
                pass
            case _:
                return _refusal(400, "The request must be a JSON object with source and do.")
        named = {str(name): value for name, value in fields.items()}
        if do not in COMMANDS:
            text = f"Command {shown(do)} is not known to the page of keyshard {VERSION}."
            return _refusal(400, text)
        return await self._in_pool(lambda: self._answer_to(source, do, named))

    def _answer_to(self, source: str, do: str, fields: dict[str, Any]) -> Response:
        """Return the answer of a source to a request, as JSON."""
        try:
            one = self._found(source)
            result = _told_by(one, lambda: one.ask(do, timeout_s=ASK_S, **fields))
        except _RefusedError as exc:
            gone = "The source does not run any more. Reload the page."
            status, code, text = exc.status, ControlError.code, exc.text
            text = gone if status == 404 else text
        except KeyShardError as exc:
            status, code, text = 422, exc.code, exc.message
        except TypeError as exc:
            status, code, text = 422, ConfigError.code, str(exc)
        else:
            return JSONResponse({"ok": True, "result": result})
        return JSONResponse({"ok": False, "code": code, "error": text}, status)

    async def _in_pool(self, work: Callable[[], Response]) -> Response:
        if self._asked >= ASKED_MAX:
            return _refusal(503, "Too many requests are being answered. Try again later.")
        self._asked += 1
        try:
            return await asyncio.wrap_future(self._pool.submit(work))
        except _RefusedError as exc:
            return _refusal(exc.status, exc.text)
        finally:
            self._asked -= 1


class _EventStream(Response):
    """The answer that sends events."""

    def __init__(self, app: PageApp, wanted: str | None) -> None:
        super().__init__()
        self._app, self._wanted = app, wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streaming = asyncio.ensure_future(self._app.stream(self._wanted, scope, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            streaming.cancel()
            await asyncio.gather(streaming, leaving, return_exceptions=True)


class _Guarded:
    """Refuses what the guard refuses, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

        async def sends(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), text.encode()) for name, text in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        client, _port = scope.get("client") or ("", 0)
        refusal = self._guard.refusal(
            scope["method"], scope["path"], headers, client=client, now_s=time.monotonic()
        )
        answer = self._app
        if refusal is not None:
            answer = _refusal(refusal.status, refusal.text, refusal.retry_after_s)
        await answer(scope, receive, sends)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _sent(send: Send, message: Message) -> None:
    await asyncio.wait_for(send(message), SEND_S)


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _body(request: Request) -> bytes:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > BODY_BYTES_MAX:
            raise ValueError("the body is too long")
    return bytes(parts)


def _file(path: str) -> Callable[[Request], Response]:
    name, kind = FILES[path]
    text = files(__package__).joinpath("static").joinpath(name).read_text(encoding="utf-8")
    content = text.replace("KEYSHARD_RELEASE", VERSION).encode()

    def answer(_request: Request) -> Response:
        return Response(content, media_type=kind)

    async def answered(request: Request) -> Response:
        return answer(request)

    return answered  # type: ignore[return-value]


def _listed(answers: list[Answer], errors: list[str]) -> Response:
    """Return the answer with the status of each source, sink and worker."""
    lists = []
    for kind, group in GROUPS.items():
        texts = [one.status for one in answers if one.of.kind_word == kind and one.status]
        lists.append(f'"{group}": [{",".join(texts)}]')
    running = [
        one.facts() | {"topics": one.of.topics, "serviceUrl": one.of.service_url} for one in answers
    ]
    lists += [f'"running": {json.dumps(running)}', f'"error": {json.dumps(" ".join(errors))}']
    lists.append(f'"release": "{VERSION}"')
    return Response(f"{{{', '.join(lists)}}}", media_type="application/json")


def _history_of(one: RunningSource) -> Response:
    """Return the answer with the rescales of a source.

    Raises:
        _RefusedError: It does not answer, or has no history yet.
    """
    try:
        status = _told_by(one, lambda: one.ask("status", timeout_s=STATUS_S))
        with one.read():
            history = status["history"]
            text = "" if history is None else json.dumps(rescales_of(history), allow_nan=False)
    except KeyShardError as exc:
        raise _RefusedError(502, exc.message) from exc
    if not text:
        raise _RefusedError(503, "The source is still starting. Try again later.")
    return Response(text, media_type="application/json")


def _told_by(one: RunningSource, result: Callable[[], T]) -> T:
    """Return the result of a request to a source.

    Raises:
        _RefusedError: It does not answer, or its answer cannot be understood.
        KeyShardError: It refuses the request.
    """
    try:
        return result()
    except ControlError as exc:
        if has_ended(one.path, exc.__cause__):
            raise _RefusedError(404, _MISSING) from exc
        if exc.__cause__ is not None:  # a refusal has none
            raise _RefusedError(502, exc.message) from exc
        raise


def _runbook() -> Callable[[Request], Response]:
    """Return the answer to requests for a section. The page is used where no site can be read."""
    sections = {
        section.partition("\n")[0].lower(): section
        for section in re.split(r"^###? ", _runbook_text(), flags=re.MULTILINE)[1:]
    }

    async def answered(request: Request) -> Response:
        section = sections.get(request.path_params["section"])
        if section is None:
            return _refusal(404, f"The section is not installed here. Look into {RUNBOOK}.")
        return PlainTextResponse(section)

    return answered  # type: ignore[return-value]


def _runbook_text() -> str:
    """Return the runbook of the checkout or of the installed package; empty without one."""
    places = [Path(__file__).parents[3] / RUNBOOK]
    try:
        installed = metadata.files("keyshard") or []
    except metadata.PackageNotFoundError:
        installed = []
    places += [
        Path(str(one.locate())) for one in installed if one.match(f"share/doc/keyshard/{RUNBOOK}")
    ]
    found = next((place for place in places if place.is_file()), None)
    return "" if found is None else found.read_text(encoding="utf-8")


def _refusal(status: int, text: str, retry_after_s: int | None = None) -> Response:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return PlainTextResponse(f"{text}\n", status, headers)
