"""The actors of a job: started, called with a deadline, and had again after a death.

An actor restarts as often as it dies (``max_restarts=-1``), and Ray runs none of its tasks again
(``max_task_retries=0``), because it would run a later one first. Who calls an actor has one task
there, and calls it with the same rows again before any others.
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
from keyshard.core.lanes.failure import text_of
from keyshard.errors import (
    ClusterError,
    ConfigError,
    HandlerProcessError,
    KeyShardError,
    UnfitHandlerError,
    WorkerEnvironmentError,
)
from keyshard.reading.message_data import MessageData
from ray_adapter.actor import HandlerActor, Loaded, Outcome
from ray_adapter.cluster import NOWHERE_S, START_TIMEOUT_S, fits_nowhere, shortage
from ray_adapter.options import JobOptions
from ray_adapter.session import Actor, GivenUp, Session, forget

LOOK_S = 0.2
"""Longest time in which a wait for an actor does not notice that the job was given up, seconds."""
UNSENDABLE_S = 10.0
"""Longest time in which an actor finds out which result cannot be sent, seconds."""
DEATHS = (
    exceptions.RayActorError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.ObjectLostError,
)
"""What Ray raises where an actor, or its node, is gone or was not reached."""


class Unsendable(Exception):  # noqa: N818 - the feeder makes it an error that names the message
    """What a handler returned for a row cannot be sent from its actor.

    Args:
        row: Which, of the rows of the call.
        reason: Why.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row = row
        self.reason = (
            f"what it returned cannot be sent from its actor: {reason}. Return plain values or "
            "Arrow tables"
        )


class Crew:
    """Makes actors for one handler.

    Args:
        handler: A function, or a class that makes one in each actor.
        options: Of the job.
        given_up: Whether nobody waits for actors any more.
        read_data: What decodes messages there.

    Raises:
        ConfigError: The handler cannot be sent to another process, or Ray refuses an option.
    """

    def __init__(
        self,
        handler: object,
        options: JobOptions,
        given_up: Callable[[], bool],
        read_data: MessageData,
    ) -> None:
        self.handler_name = name_of_handler(handler)
        self._options = options
        self._given_up = given_up
        self._read_data = read_data
        self._pickled = _pickled(handler, self.handler_name)
        self.session = Session()
        # By import: the class is found in ray_adapter.actor there.
        try:
            self._class = ray.remote(HandlerActor).options(
                max_restarts=-1, max_task_retries=0, **options.placement
            )
        except Exception as exc:
            raise _refused(exc) from exc

    def start(self, count: int, *, soon: bool = True) -> list[Actor]:
        """Actors that have loaded the handler.

        Args:
            count: How many.
            soon: Whether no node that fits ends the wait soon: the job has just begun. Later, a
                node that is gone may come back.

        Raises:
            ClusterError: The cluster has no place for them in time.
            WorkerEnvironmentError: keyshard is missing there, or is another version.
            UnfitHandlerError: The handler cannot be imported there, does not begin, or not in time.
            HandlerProcessError: An actor died on the way.
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
        """The actor after a death, with the handler; another one where it was killed for good.

        Raises:
            HandlerProcessError: It died again while it loaded the handler.
            KeyShardError: As :meth:`start`.
        """
        deadline_s = time.monotonic() + self._options.start_timeout_s
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

    def call(self, actor: Actor, rows: Any, start: int) -> Outcome:
        """Have rows handled, from row ``start`` on.

        Raises:
            HandlerProcessError: The actor died.
            Unsendable: What the handler returned cannot be had.
            KeyShardError: Why else there is no answer.
            GivenUp: Nobody waits for it any more.
        """
        arrow = self._options.takes == "arrow"
        try:
            method = "handle_arrow" if arrow else "handle_messages"
            outcome: Outcome = self._answer(actor.ask(method, rows, start), None)
        except DEATHS as exc:
            self.session.check()
            raise HandlerProcessError(
                f"The actor ended while it handled rows: {_first_line(exc)}. Look for a crash or "
                "the memory limit."
            ) from exc
        except exceptions.RayError as exc:
            self.session.check()
            raise self._unanswered(actor, start, exc) from exc
        return outcome

    def end(self, actors: Sequence[Actor]) -> None:
        """Kill actors, whatever they do."""
        for actor in actors:
            actor.end()

    def _made(self) -> Actor:
        try:
            return Actor(self.session, lambda: self._class.remote(self._pickled, self._read_data))
        except (TypeError, ValueError, AttributeError) as exc:
            raise _refused(exc) from exc

    def _died_early(self, error: BaseException) -> HandlerProcessError:
        return HandlerProcessError(
            f"An actor ended while it loaded the handler {self.handler_name}: {text_of(error)}."
        )

    def _unanswered(self, actor: Actor, start: int, error: exceptions.RayError) -> Exception:
        unsendable = None
        with suppress(exceptions.RayError, TimeoutError):  # then what is known is said
            unsendable = self._answer(actor.ask("unsendable"), time.monotonic() + UNSENDABLE_S)
        if unsendable is not None:
            return Unsendable(start + unsendable[0], unsendable[1])
        return KeyShardError(
            f"What the handler {self.handler_name} returned cannot be had: {text_of(error)}."
        )

    def _placed(self, actors: Sequence[Actor], deadline_s: float, *, soon: bool) -> None:
        """Every actor runs, on the same keyshard as here."""
        with self._asked(actors, "version") as answers:
            ready = self._ready_or_nowhere(answers, deadline_s, soon=soon)
            for answer in ready:
                try:
                    version = answer.result()
                except DEATHS:
                    raise
                except exceptions.ActorUnschedulableError as exc:
                    raise ClusterError(f"An actor finds no place: {text_of(exc)}.") from exc
                except exceptions.RayError as exc:
                    raise WorkerEnvironmentError(
                        f"An actor cannot begin: {text_of(exc)}. Every node needs keyshard[ray] "
                        f"{keyshard.__version__}, in its environment or by runtime_env."
                    ) from exc
                if version != keyshard.__version__:
                    raise WorkerEnvironmentError(
                        f"keyshard is {keyshard.__version__} here and {version} in an actor. "
                        "Install the same version on every node."
                    )
            if len(ready) < len(answers):
                raise self._shortage(len(ready), len(answers))

    def _ready_or_nowhere(
        self, answers: Sequence[Future[Any]], deadline_s: float, *, soon: bool
    ) -> list[Future[Any]]:
        if soon and self._options.start_timeout_s <= START_TIMEOUT_S:
            # Only an autoscaler helps there; a job that has one sets a longer wait.
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
            for answer in ready:
                loaded: Loaded = answer.result()
                if loaded.missing is not None:
                    raise UnfitHandlerError(
                        f"An actor cannot load the handler {self.handler_name}: "
                        f"{loaded.missing.reason}. Install that module on every node, or send it "
                        "with runtime_env={'working_dir': '.'}."
                    ) from loaded.missing.to_error()
                if loaded.broken is not None:
                    raise UnfitHandlerError(
                        f"The handler {self.handler_name} cannot begin in its actor: "
                        f"{loaded.broken.reason}."
                    ) from loaded.broken.to_error()
            if len(ready) < len(answers):
                raise UnfitHandlerError(
                    f"The handler {self.handler_name} was not loaded within "
                    f"{self._options.start_timeout_s:g} s. Look at what its class and module do "
                    "when they begin, or raise start_timeout_s."
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
                raise GivenUp

    def _answer(self, answer: Future[Any], deadline_s: float | None) -> Any:
        try:
            while not wait_for([answer], LOOK_S).done:
                self.session.check()
                if self._given_up():
                    raise GivenUp
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise TimeoutError
            return answer.result()
        finally:
            forget(answer)


def name_of_handler(handler: Any) -> str:
    """Module and name, for people."""
    while isinstance(handler, partial):
        handler = handler.func
    name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
    return f"{getattr(handler, '__module__', None) or type(handler).__module__}.{name}"


def _pickled(handler: object, name: str) -> bytes:
    try:
        data: bytes = ray.cloudpickle.dumps(handler)
    except Exception as exc:
        raise ConfigError(
            f"The handler {name} cannot be sent to an actor: {text_of(exc)}. What it holds from "
            "outside must be picklable; make the rest in the __init__ of a class, which runs in "
            "the actor."
        ) from exc
    return data


def _refused(error: Exception) -> ConfigError:
    return ConfigError(f"Ray refuses what the actors ask for: {text_of(error)}.")


def _first_line(error: BaseException) -> str:
    return text_of(error).strip().partition("\n")[0].rstrip(".")
