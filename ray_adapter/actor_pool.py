"""The actors of a job: start them, call them with a deadline, restart them after a death.

Ray restarts an actor as often as it dies (``max_restarts=-1``). It repeats no task
(``max_task_retries=0``), because it would run a later task first. The caller of an actor has one
task there at a time, and calls it with the same rows again before any others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray import exceptions

import keyshard
from keyshard.base_error import first_line
from keyshard.core.lanes.failure import text_of
from keyshard.errors import (
    ClusterError,
    ConfigError,
    HandlerProcessError,
    KeyShardError,
    UnfitHandlerError,
    WorkerEnvironmentError,
)
from keyshard.handlers.handler_call import Take, as_returned
from keyshard.reading.message_decoder import MessageDecoder
from ray_adapter.actor import CallResult, HandlerActor, Loaded, Traced
from ray_adapter.cluster import (
    NOWHERE_S,
    START_TIMEOUT_S,
    Actor,
    JobCancelled,
    Session,
    fits_nowhere,
    forget,
    shortage,
)
from ray_adapter.options import JobOptions

LOOK_S = 0.2
"""Longest time until a wait for an actor notices that the job has stopped, seconds."""
FLUSH_S = 2.0
"""Longest wait for actors to export their spans before they are killed, seconds."""
UNSENDABLE_S = 10.0
"""Longest wait for an actor to find the result that cannot be sent, seconds."""
DEATHS = (
    exceptions.RayActorError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.ObjectLostError,
)
"""Ray's errors for an actor or a node that is dead or was not reached."""


class UnserializableResult(Exception):  # noqa: N818 - the feeder makes it an error that names the message
    """The result of a row cannot be sent from its actor.

    Args:
        row: Index of the row in the call.
        reason: Why the result cannot be sent.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row = row
        self.reason = (
            f"its result cannot be sent from its actor: {reason}. Return plain values or Arrow "
            "tables"
        )


class ActorPool:
    """Makes and calls the actors of one handler.

    Args:
        handler: A function, or a class of which each actor makes one object.
        options: Options of the job.
        given_up: Returns whether the job has stopped.
        read_data: Decodes messages in the actors.
        take: Checks and converts a result of the handler, such as into messages to publish.
        traced: Settings of the actors' spans; ``None``: they make none.

    Raises:
        ConfigError: The handler cannot be pickled, or Ray refuses an option.
    """

    def __init__(
        self,
        handler: object,
        options: JobOptions,
        given_up: Callable[[], bool],
        read_data: MessageDecoder,
        take: Take = as_returned,
        *,
        traced: Traced | None = None,
    ) -> None:
        self.handler_name = name_of_handler(handler)
        self._options = options
        self._given_up = given_up
        self._given = read_data, take, traced
        self._traces = traced is not None
        self._pickled = _pickled(handler, self.handler_name)
        self.session = Session()
        # The class is imported, so that actors find it in ray_adapter.actor without pickle.
        try:
            self._class = ray.remote(HandlerActor).options(
                max_restarts=-1, max_task_retries=0, **options.placement
            )
        except Exception as exc:
            raise _refused(exc) from exc

    def start(self, count: int, *, soon: bool = True) -> list[Actor]:
        """Start actors and load the handler in them.

        Args:
            count: Number of actors.
            soon: Whether to fail soon if no node has the resources. Only at the start of the job;
                later, a lost node may come back.

        Raises:
            ClusterError: The cluster does not place the actors in time.
            WorkerEnvironmentError: Nodes lack keyshard, or have another version.
            UnfitHandlerError: The handler cannot be imported there, raises, or does not load in
                time.
            HandlerProcessError: An actor died while it started.
        """
        deadline_s = time.monotonic() + self._options.start_timeout_s
        actors: list[Actor] = []
        try:
            for _ in range(count):
                actors.append(self._made())  # noqa: PERF401 - killed below
            self._placed(actors, deadline_s, soon=soon)
            self._loaded(actors, deadline_s)
        except BaseException as exc:
            self.end(actors)
            if isinstance(exc, DEATHS):
                raise self._died_early(exc) from exc
            raise
        return actors

    def again(self, actor: Actor) -> Actor:
        """Wait for an actor that died and load its handler; replace it if Ray does not restart it.

        Raises:
            HandlerProcessError: The actor died again while it loaded the handler.
            KeyShardError: As in :meth:`start`.
        """
        deadline_s = time.monotonic() + self._options.start_timeout_s
        if actor.handle is None:  # it was killed, and its replacement died while it started
            if self._given_up():
                raise JobCancelled
            return self.start(1, soon=False)[0]
        while True:
            try:
                self._placed([actor], deadline_s, soon=False)
                self._loaded([actor], deadline_s)
            except exceptions.ActorDiedError:  # noqa: PERF203
                self.end([actor])
                return self.start(1, soon=False)[0]
            except DEATHS as exc:
                if time.monotonic() > deadline_s:
                    raise self._died_early(exc) from exc
                time.sleep(LOOK_S)
            else:
                return actor

    def call(self, actor: Actor, rows: Any, start: int) -> CallResult:
        """Call the handler with rows, from row ``start`` on.

        Raises:
            HandlerProcessError: The actor died.
            UnserializableResult: A result of the handler cannot be sent.
            KeyShardError: There is no answer for another reason.
            JobCancelled: The job has stopped.
        """
        arrow = self._options.takes == "arrow"
        try:
            method = "handle_arrow" if arrow else "handle_messages"
            outcome: CallResult = self._answer(actor.ask(method, rows, start), None)
        except DEATHS as exc:
            self.session.check()
            raise HandlerProcessError(
                f"The actor ended while it handled rows: {first_line(exc).rstrip('.')}.",
                "Look for a crash, or for its memory limit.",
            ) from exc
        except exceptions.RayError as exc:
            self.session.check()
            raise self._unanswered(actor, start, exc) from exc
        return outcome

    def end(self, actors: Sequence[Actor]) -> None:
        """Kill actors, after they have exported their spans."""
        if self._traces:
            self._flush(actors)
        for actor in actors:
            actor.end()

    def _flush(self, actors: Sequence[Actor]) -> None:
        answers: list[Future[Any]] = []
        try:
            for actor in actors:
                with suppress(ClusterError, JobCancelled):
                    answers.append(actor.ask("flush", FLUSH_S))
            wait_for(answers, FLUSH_S)
        finally:
            forget(*answers)

    def _made(self) -> Actor:
        try:
            return Actor(self.session, lambda: self._class.remote(self._pickled, *self._given))
        except (TypeError, ValueError, AttributeError) as exc:
            raise _refused(exc) from exc

    def _died_early(self, error: BaseException) -> HandlerProcessError:
        return HandlerProcessError(
            f"An actor ended while it loaded the handler {self.handler_name}: {text_of(error)}.",
            "Look for a crash, or for its memory limit.",
        )

    def _unanswered(self, actor: Actor, start: int, error: exceptions.RayError) -> Exception:
        unsendable = None
        with suppress(exceptions.RayError, TimeoutError):  # without an answer, no row is named
            unsendable = self._answer(actor.ask("unsendable"), time.monotonic() + UNSENDABLE_S)
        if unsendable is not None:
            return UnserializableResult(start + unsendable[0], unsendable[1])
        return KeyShardError(
            f"The result of the handler {self.handler_name} cannot be read: {text_of(error)}.",
            "Return plain values or Arrow tables.",
        )

    def _placed(self, actors: Sequence[Actor], deadline_s: float, *, soon: bool) -> None:
        """Wait until every actor runs with this version of keyshard."""
        with self._asked(actors, "version") as answers:
            ready = self._ready_or_nowhere(answers, deadline_s, soon=soon)
            for answer in ready:
                try:
                    version = answer.result()
                except DEATHS:
                    raise
                except exceptions.ActorUnschedulableError as exc:
                    raise ClusterError(
                        f"An actor cannot be placed: {text_of(exc)}.",
                        "Add nodes, or request fewer resources.",
                    ) from exc
                except exceptions.RayError as exc:
                    raise WorkerEnvironmentError(
                        f"An actor cannot start: {text_of(exc)}.",
                        f"Install keyshard[ray] {keyshard.__version__} on every node, in its "
                        "environment or by runtime_env.",
                    ) from exc
                if version != keyshard.__version__:
                    raise WorkerEnvironmentError(
                        f"keyshard is {keyshard.__version__} in this process, but {version} in an "
                        "actor.",
                        "Install the same version on every node.",
                    )
            if len(ready) < len(answers):
                raise self._shortage(len(ready), len(answers))

    def _ready_or_nowhere(
        self, answers: Sequence[Future[Any]], deadline_s: float, *, soon: bool
    ) -> list[Future[Any]]:
        if soon and self._options.start_timeout_s <= START_TIMEOUT_S:
            # Only an autoscaler could help. With an autoscaler, a job sets a longer wait.
            first_s = min(deadline_s, time.monotonic() + NOWHERE_S)
            ready = self._ready(answers, first_s)
            if len(ready) == len(answers):
                return ready
            with self.session.inside():
                nowhere = fits_nowhere(self._options.amounts)
            if nowhere:
                raise self._shortage(len(ready), len(answers))
        return self._ready(answers, deadline_s)

    def _shortage(self, ready: int, wanted: int) -> ClusterError:
        options = self._options
        with self.session.inside():
            return shortage(ready, wanted, options.amounts, options.start_timeout_s)

    def _loaded(self, actors: Sequence[Actor], deadline_s: float) -> None:
        with self._asked(actors, "load") as answers:
            ready = self._ready(answers, deadline_s)
            for actor, answer in zip(actors, answers, strict=True):
                if not answer.done():
                    continue
                loaded: Loaded = answer.result()
                actor.process = loaded.pid, loaded.host
                if loaded.missing is not None:
                    raise UnfitHandlerError(
                        f"An actor cannot load the handler {self.handler_name}: "
                        f"{loaded.missing.reason}.",
                        "Install that module on every node, or send it with "
                        "runtime_env={'working_dir': '.'}.",
                    ) from loaded.missing.to_error()
                if loaded.broken is not None:
                    raise UnfitHandlerError(
                        f"The handler {self.handler_name} failed to start in its actor: "
                        f"{loaded.broken.reason}.",
                        "Correct the code that runs at its start.",
                    ) from loaded.broken.to_error()
            if len(ready) < len(answers):
                raise UnfitHandlerError(
                    f"The handler {self.handler_name} was not loaded within "
                    f"{self._options.start_timeout_s:g} s.",
                    "Check the code that its class and module run at the start, or raise "
                    "start_timeout_s.",
                )

    @contextmanager
    def _asked(self, actors: Sequence[Actor], method: str) -> Iterator[list[Future[Any]]]:
        answers: list[Future[Any]] = []
        try:
            for actor in actors:
                answers.append(actor.ask(method))  # noqa: PERF401 - forgotten below
            yield answers
        finally:
            forget(*answers)

    def _ready(self, answers: Sequence[Future[Any]], deadline_s: float) -> list[Future[Any]]:
        while True:
            left_s = deadline_s - time.monotonic()
            ready, waiting = wait_for(answers, max(0.0, min(LOOK_S, left_s)))
            self.session.check()
            if not waiting or left_s <= 0:
                return [answer for answer in answers if answer in ready]
            if self._given_up():
                raise JobCancelled

    def _answer(self, answer: Future[Any], deadline_s: float | None) -> Any:
        try:
            while not wait_for([answer], LOOK_S).done:
                self.session.check()
                if self._given_up():
                    raise JobCancelled
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise TimeoutError
            return answer.result()
        finally:
            forget(answer)


def name_of_handler(handler: Any) -> str:
    """Return module and name of a handler, for messages."""
    while isinstance(handler, partial):
        handler = handler.func
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    return f"{getattr(handler, '__module__', None) or type(handler).__module__}.{name}"


def _pickled(handler: object, name: str) -> bytes:
    try:
        data: bytes = ray.cloudpickle.dumps(handler)
    except Exception as exc:
        raise ConfigError(
            f"The handler {name} cannot be sent to an actor: {text_of(exc)}. The objects that it "
            "captures must be picklable.",
            "Create other objects in the __init__ of a class, which runs in the actor.",
        ) from exc
    return data


def _refused(error: Exception) -> ConfigError:
    return ConfigError(
        f"Ray rejects the resources of the actors: {text_of(error)}.", "Correct them."
    )
