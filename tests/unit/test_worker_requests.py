"""Questions to workers and to those that start them: proofs, limits, setups."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyarrow import flight

import keyshard
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.config.connection import Basic, Connection, OAuth2, Token
from keyshard.errors import ConfigError, UnexpectedError, WorkerUnreachableError
from keyshard.workers import authentication as questions
from keyshard.workers.host import ConsumerHost
from keyshard.workers.server import LOOPBACK, WorkerServer, WorkerSetup, at, start_server
from keyshard.workers.worker import AuthenticatedClient, Worker, start_process
from tests.support.worker_servers import worker_server


@contextmanager
def served() -> Iterator[tuple[WorkerServer, WorkerSetup, flight.FlightClient]]:
    host = ConsumerHost(MemoryBroker(MemoryCluster()))
    try:
        with worker_server(host) as made:
            yield made
    finally:
        host.close()


def test_a_request_has_a_longest_size_also_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "REQUEST_BYTES_MAX", 1_000)
    with served() as (server, setup, client):
        worker = Worker(hello_of(server), setup.token, "worker")
        with pytest.raises(WorkerUnreachableError, match="exceeds the limit of 1000 bytes"):
            worker.request("acknowledge", 10.0, number=1, entries=[[1, 2]] * 1_000)
        body = questions.with_token(server.reading_token, {"runs": [[1, 2, 3]] * 1_000})
        with pytest.raises(flight.FlightUnauthenticatedError, match="exceeds the limit"):
            list(client.do_get(flight.Ticket(body)))
        worker.kill()


def test_a_worker_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with served() as (server, setup, _):
        worker = Worker(hello_of(server), setup.token, "worker")
        worker.request("ready", 10.0)
        worker.kill()


@pytest.mark.parametrize(
    ("code", "text"),
    [("import os; os._exit(3)", "ended with exit status 3"),
     ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL (9). The output above")],
)  # fmt: skip
def test_a_process_that_ends_at_its_start_is_explained(
    code: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error said "ended with status None, or was not ready within 60 s"."""
    monkeypatch.setattr("keyshard.workers.worker._START", code)
    with pytest.raises(WorkerUnreachableError, match=re.escape(f"did not start: it {text}")):
        start_process(("", ""))


def test_a_machine_that_cannot_start_a_process_now_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Issue: the replacement of a worker that ran out of memory ended the source as a defect."""

    def no_process(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(WorkerUnreachableError, match="no worker process: Cannot allocate memory"):
        start_process(("", ""))


def test_an_interpreter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue: the remedy was to check the memory, for a removed virtual environment."""
    monkeypatch.setattr(sys, "executable", "/gone/bin/python")
    with pytest.raises(WorkerUnreachableError, match="No such file or directory") as caught:
        start_process(("", ""))
    assert caught.value.remedy == "Check that /gone/bin/python exists and may be executed."


def hello_of(server: WorkerServer) -> str:
    return json.dumps({"endpoint": at(LOOPBACK, server.port), "pid": 7, "host": "there"})


class Stranger(flight.FlightServerBase):  # type: ignore[misc]
    """A server at the address of a worker, with arbitrary answers."""

    def __init__(self, answer: Callable[[flight.Action], bytes]) -> None:
        super().__init__(at(LOOPBACK, 0))
        self.heard: list[bytes] = []
        self._answer = answer

    def do_action(self, _context: object, action: flight.Action) -> list[bytes]:
        self.heard.append(action.body.to_pybytes())
        return [self._answer(action)]


@contextmanager
def answered_by(answer: Callable[[flight.Action], bytes]) -> Iterator[Stranger]:
    stranger = Stranger(answer)
    try:
        yield stranger
    finally:
        stranger.shutdown()


@pytest.mark.parametrize(
    "said",
    [
        b"", b"nonce proof", b"\xff" * 300, b"a " + b"0" * 64, b'{"result": null}', b"[" * 100_000,
    ],
    ids=lambda said: repr(said[:12]),
)  # fmt: skip
def test_a_program_without_the_token_learns_nothing(said: bytes) -> None:
    """The token and the secrets of the broker went to any program that listened there."""
    with answered_by(lambda _: said) as stranger:
        client = AuthenticatedClient(at(LOOPBACK, stranger.port), "s3cret", "launcher")
        for _ in range(2):
            with pytest.raises(
                WorkerUnreachableError, match=r"does not know the token.*got no request"
            ):
                client.request("start", 10.0, packed="the password")
        client.close()
    heard = b"".join(stranger.heard)
    assert b"s3cret" not in heard
    assert b"password" not in heard


def test_the_proof_of_another_server_is_worth_nothing() -> None:
    """A program that asks the right server in between cannot pass its proof on."""
    with served() as (_, setup, client):

        def relayed(action: flight.Action) -> bytes:
            (result,) = client.do_action(action)  # type: ignore[attr-defined]
            return bytes(result.body)

        with answered_by(relayed) as stranger:
            connection = AuthenticatedClient(at(LOOPBACK, stranger.port), setup.token, "worker")
            with pytest.raises(WorkerUnreachableError, match="does not know the token"):
                connection.request("leave", 10.0)
            client.close()


def test_a_server_shows_the_token_with_every_answer() -> None:
    """Another program may take the port of a worker that died between two questions."""
    servers: list[questions.RequestVerifier] = []
    known = [True]

    def answer(action: flight.Action) -> bytes:
        if action.type == questions.INTRODUCE:
            return servers[0].introduce(action.body)
        _, proof = servers[0].read(action.body, action.type)
        return json.dumps({"result": 7, "proof": proof if known[0] else "0" * 64}).encode()

    with answered_by(answer) as stranger:
        servers.append(questions.RequestVerifier("token", at(LOOPBACK, stranger.port)))
        client = AuthenticatedClient(at(LOOPBACK, stranger.port), "token", "worker")
        assert client.request("last_entry", 10.0) == 7
        known[0] = False
        with pytest.raises(WorkerUnreachableError, match="does not know the token"):
            client.request("last_entry", 10.0)
        client.close()


def test_a_proof_holds_for_one_command_number_asker_server_and_endpoint() -> None:
    prover, verifier = met()
    number, body = prover.request("acknowledge", {"x": 1})
    asked, proof = verifier.read(body, "acknowledge")
    assert asked == {"x": 1}
    assert prover.is_answer(number, proof)
    assert not prover.is_answer(number + 1, proof)
    for wrong in (None, 7, "", "\ud800", proof[:-1], proof.upper()):
        assert not prover.is_answer(number, wrong)
    for refused in (
        lambda: verifier.read(body, "leave"),
        lambda: verifier.read(body.replace(b" 1 ", b" 2 ", 1), "acknowledge"),
        lambda: met()[1].read(body, "acknowledge"),
        lambda: questions.RequestVerifier("token", "grpc://h:2").read(body, "acknowledge"),
        lambda: questions.RequestVerifier("other", "grpc://h:1").read(body, "acknowledge"),
        lambda: verifier.introduce(b"short"),
        lambda: verifier.introduce(b"x" * 10_000),
    ):
        with pytest.raises(flight.FlightUnauthenticatedError):
            refused()
    assert b"token" not in body + prover.introduction()


def met() -> tuple[questions.RequestSigner, questions.RequestVerifier]:
    prover = questions.RequestSigner("token", "grpc://h:1")
    verifier = questions.RequestVerifier("token", "grpc://h:1")
    assert prover.meet(verifier.introduce(prover.introduction()))
    return prover, verifier


def refuses(verifier: questions.RequestVerifier, body: bytes, command: str) -> bool:
    try:
        verifier.read(body, command)
    except flight.FlightUnauthenticatedError:
        return True
    return False


def test_a_proof_that_was_overheard_is_worth_nothing() -> None:
    """A program on the network sent a request again with other entries to acknowledge.

    It could also repeat a request that keeps the lease of a worker, or that starts a worker.
    """
    prover, verifier = met()
    number, body = prover.request("acknowledge", {"entries": [[1, 2]]})
    credential = body.partition(b"\n")[0]
    assert refuses(verifier, credential + b'\n{"entries": [[1, 3]]}', "acknowledge")
    _, proof = verifier.read(body, "acknowledge")
    assert refuses(verifier, body, "acknowledge")
    own = credential.split()[0].decode()
    for content in (b"{}", b""):
        assert refuses(verifier, f"{own} {number} {proof}\n".encode() + content, "answer")


def test_requests_may_overtake_each_other_and_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    prover, verifier = met()
    monkeypatch.setattr(questions, "EARLY_MAX", 20)
    bodies = [prover.request("take", {})[1] for _ in range(100)]
    for start in range(0, 100, 10):
        for body in reversed(bodies[start + 1 : start + 10]):  # the first of ten is lost
            assert verifier.read(body, "take")
    assert all(refuses(verifier, body, "take") for at, body in enumerate(bodies) if at % 10)
    assert len(verifier._seen) == 1
    assert all(len(early) <= 20 for _, early in verifier._seen.values())


AUTHENTICATIONS = [
    None, Token("t0ken"), Token("file:x"), Basic("ann", "pä".encode().hex()),
    OAuth2(issuer_url="https://i/x", client_id="a", client_secret="s", audience="urn:p", scope="z"),
]  # fmt: skip


@pytest.mark.parametrize("authentication", AUTHENTICATIONS)
def test_a_setup_is_data_and_comes_as_it_was(authentication: Any) -> None:
    """A setup from the network was unpickled. Unpickling runs any code of its sender."""
    connection = Connection(
        "pulsar+ssl://h:1", "https://h:2", authentication=authentication, listener_name="out",
        operation_timeout_ms=7_000, connection_timeout_ms=5_000, tls_hostname_verification=False,
        transport="wire",
    )  # fmt: skip
    setup = WorkerSetup(connection, 4.0, 30, keeps=True)
    version, text = setup.packed()
    assert version == keyshard.__version__
    assert WorkerSetup.unpacked(text) == setup


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "{}", "[" * 100_000, "9" * 5_000,
        ('{"connection": {}, "lease_s": 1, "level": 1, "keeps": true, "token": "", '
        '"source_pid": 1, "source_host": "h"}'),
        ('{"connection": {}, "lease_s": "1", "level": 1, "keeps": true, "token": "t", '
        '"source_pid": 1, "source_host": "h"}'),
        ('{"connection": {"serviceUrl": 7}, "lease_s": 1, "level": 1, "keeps": true, "token": "t", '
        '"source_pid": 1, "source_host": "h"}'),
        ('{"connection": {}, "lease_s": 1, "level": 1, "keeps": true, "token": "t", '
        '"source_pid": "1", "source_host": "h"}'),
        ('{"connection": {"x": "7"}, "lease_s": 1, "level": 1, "keeps": true, "token": "t", '
        '"source_pid": 1, "source_host": "h"}'),
        ('{"connection": {}, "lease_s": 1, "level": 1, "keeps": true, "token": "t", "more": 1, '
        '"source_pid": 1, "source_host": "h"}'),
    ],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_setup_of_something_else_is_refused(text: str) -> None:
    server, hello = start_server(keyshard.__version__, text)
    assert server is None
    with pytest.raises(ConfigError):
        Worker(hello, "token", "worker")


def test_an_unexpected_error_of_a_command_reaches_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source took the error for silence, replaced the worker, and met the error again."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in a thread of Flight")

    with served() as (server, setup, _):
        worker = Worker(hello_of(server), setup.token, "worker")
        server._commands["last_entry"] = broken
        with pytest.raises(UnexpectedError, match=r"last_entry ended.*in a thread of Flight"):
            worker.request("last_entry", 10.0, number=1)
        monkeypatch.setattr(server._host, "take", broken)
        with pytest.raises(UnexpectedError, match="in a thread of Flight"):
            worker.take({})
        worker.kill()
