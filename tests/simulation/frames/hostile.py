"""Hostile brokers: frames and answers that no broker sends, against the wire transport.

python -m tests.proofs hostile --seeds 1000

Threads, sockets and time are simulated, so a byte each second costs nothing. Each call ends in time
with an answer or one of keyshard's errors, no consumer gets rows of another, no request goes in a
circle, and the memory of a client has a limit.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from keyshard.broker import framing
from keyshard.broker.auth.credentials import Credentials, Shown
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.wire import broker as brokering
from keyshard.broker.wire import connection, keep_alive, schema, stored_entry
from keyshard.broker.wire.broker import CLOSE_S, LEAVE_S, WireBroker
from keyshard.broker.wire.connect import Address
from keyshard.broker.wire.consumer import CONFIRM_S, WireConsumer, WireReader
from keyshard.broker.wire.frames import api, frame_of
from keyshard.broker.wire.schema import ask_schema
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import BrokerUnavailableError, KeyShardError
from tests.helpers import present
from tests.proofs.runner import Options, Outcome, Outcomes, Proof
from tests.simulation.frames.client import Frames
from tests.simulation.frames.sockets import Socket, Way
from tests.simulation.install import installed, replaced
from tests.simulation.scheduler import Scheduler, StuckError
from tests.stored_entries import batch, damaged, extreme, plain, single
from tests.support.frame_broker.session import FrameSession, range_of

TIMEOUT_S = 5.0
"""Of a request, seconds."""
SLACK_S = 1.0
"""Tolerance for the time of a call, seconds: the simulated network is never this slow."""
TASKS_MAX = 40
"""Threads that a client may have at once."""
GIVEN_UP_S = 2 * keep_alive.KEEP_ALIVE_S + TIMEOUT_S
"""Time after which a connection that brings nothing whole has been given up, seconds."""
RUN_S = 2 * GIVEN_UP_S
"""How long a client tries, seconds."""
TOPIC = "persistent://public/default/t"
SILENT = ("nothing", "half", "trickle")
URLS = (
    b"", b"pulsar://", b"pulsar://:6650", b"pulsar://[::1", b"pulsar://broker:99999",
    b"pulsar://broker:-1", b"pulsar://broker:x", b"pulsar://" + b"a" * 300 + b":6650",
    b"pulsar://a..b:6650", b"pulsar://a\0b:6650", b"\xff\xfe", b"http://broker/", b"pulsar://else:1",
)  # fmt: skip
KEPT_BYTES = 300_000
"""Largest frame that is kept whole in a run, bytes: sending frames of the real limit would take
long to send."""
COUNTS = (0, 1, 3, 2**31 - 1, 2**31, 2**32 - 1)


class HarmError(AssertionError):
    """A harm that a broker did."""


class Session(FrameSession):
    """A connection: answers, and does harm."""

    def __init__(self, run: Run, socket: Socket) -> None:
        super().__init__()
        self._run = run
        self._random = run.random
        self._socket = socket
        self._out = Way(run, run.random, run.process, socket.came)
        socket.out = Way(run, run.random, run.process, self.feed)
        socket.closed = self._closed
        self.over = False
        self.consumers: dict[int, str] = {}
        self._silent = self._strange = False
        self._held: list[tuple[str, Any]] | None = None
        """Answers that are not sent yet, while a command is handled."""

    def _closed(self) -> None:
        self.over = True

    def put(self, data: bytes) -> None:
        if not self._silent:
            self._out.put(data)

    def cut(self) -> None:
        self._socket.came(self._out.cut())
        self._socket.end()

    def send(self, name: str, content: Any, stored: bytes = b"") -> None:
        if self._held is None:
            super().send(name, content, stored)
        else:
            self._held.append((name, content))

    def handle(self, name: str, asked: Any) -> None:
        how = "honest" if self._random.random() > self._run.harm else self._random.choice(
            ("nothing", "twice", "other", "refused", "late", "strange", "unknown", "noise")
        )  # fmt: skip
        self._held, self._strange = [], how == "strange"
        super().handle(name, asked)
        held, self._held = self._held, None
        if not held or how == "nothing":
            return
        (answer,) = held
        if how == "refused" and hasattr(asked, "request_id"):
            said = self._random.randbytes(self._random.randrange(9))
            code = self._random.choice((*range(30), 2**31, 2**32 - 1))
            answer = "error", api.Error(request_id=asked.request_id, error=code, message=said)
        elif how == "other" and hasattr(asked, "request_id"):
            answer = self._other(asked.request_id)
        elif how == "unknown" and hasattr(answer[1], "request_id"):
            answer[1].request_id = self._random.choice((0, 2**63, 2**64 - 1))
        elif how == "noise":
            self.noise()
        elif how == "late":
            self._run.scheduler.spawn(self._run.process, "late", lambda: self._later(*answer))
            return
        for _ in range(1 + (how == "twice")):
            self.send(*answer)

    def _later(self, name: str, content: Any) -> None:
        self._run.scheduler.sleep(self._random.random() * 3 * TIMEOUT_S)
        self.send(name, content)

    # -- one command each; with absurd values if the answer is to be strange -----------------------

    def _connect(self, _: Any) -> None:
        absurd = (-1, 0, 600 << 20, 2**31 - 1)
        most = self._random.choice(absurd) if self._strange else 5 << 20
        self.send("connected", api.Connected(server_version=b"h", max_message_size=most))

    def _lookup(self, asked: Any) -> None:
        draw, strange = self._random, self._strange
        url = draw.choice(URLS) if strange else b"pulsar://broker:%d" % draw.choice((6650, 6651))
        self.send("lookup_response", api.LookupResponse(
            request_id=asked.request_id, broker_url=url, authoritative=True,
            response=draw.choice((0, 1, 2, 7)) if strange else 1,
            through_proxy=strange and not draw.randrange(3),
        ))  # fmt: skip

    def _partitioned_metadata(self, asked: Any) -> None:
        self.count_partitions(asked, self._random.choice(COUNTS) if self._strange else 3)

    def _subscribe(self, asked: Any) -> None:
        hash_range = range_of(asked)
        tag = "reader" if hash_range is None else str(hash_range.start)
        self.consumers[asked.consumer_id] = f"{asked.topic.decode()} {tag}"
        self.succeed(asked)

    def _close_consumer(self, asked: Any) -> None:
        self.succeed(asked)

    def _get_last_message_id(self, asked: Any) -> None:
        if self._strange:
            self.name_last(asked, -1, self._random.choice((2**64 - 1, 2**63, 2**63 - 1)))
        else:
            self.name_last(asked, 3, 7)

    def _ack(self, asked: Any) -> None:
        self.confirm(asked)

    def _flow(self, asked: Any) -> None:
        run = self._run
        if not 0 < asked.permits < 2**31:
            raise HarmError(f"{asked.permits} messages are asked for, which no broker takes")
        run.scheduler.spawn(
            run.process, "deliver", lambda: self.send_entries(asked.consumer_id, asked.permits)
        )

    def _get_schema(self, asked: Any) -> None:
        draw = self._random
        told = api.GetSchemaResponse(request_id=asked.request_id, version=bytes(8))
        if self._strange:
            told.version = draw.randbytes(draw.choice((0, 1, 8, 9, 1_000)))
            told.schema.name, told.schema.data = draw.randbytes(3), draw.randbytes(20)
            told.schema.type = draw.choice((0, 2, 2**32 - 1))
            told.schema.properties.add(key=draw.randbytes(3), value=draw.randbytes(3))
        self.send("get_schema_response", told)

    def _other(self, number: int) -> tuple[str, Any]:
        """An answer to another question."""
        where = api.MessageId(ledger=1, entry=1)
        return self._random.choice((
            ("success", api.Success(request_id=number)),
            ("lookup_response", api.LookupResponse(request_id=number, response=1)),
            ("partitioned_metadata_response", api.PartitionedMetadataResponse(request_id=number)),
            ("ack_response", api.AckResponse(request_id=number, consumer_id=1)),
            ("get_last_message_id_response", api.GetLastMessageIdResponse(
                request_id=number, last_message_id=where)),
        ))  # fmt: skip

    # -- unrequested frames ------------------------------------------------------------------------

    def send_entries(self, consumer_id: int, count: int) -> None:
        """Entries, of which some are damaged or have strange ids."""
        draw = self._random
        for _ in range(min(count, 50)):
            harmful = draw.random() < self._run.harm / 3
            self._message(consumer_id, harmful=harmful)
            if draw.random() < 0.1:
                self._run.scheduler.sleep(draw.random())

    def flood(self) -> None:
        """Send far more than the client asked for."""
        for consumer_id in list(self.consumers):
            for _ in range(3 * self._run.queue + 300):
                self._message(consumer_id, harmful=False)

    def _message(self, consumer_id: int, *, harmful: bool) -> None:
        draw, run = self._random, self._run
        run.numbers += 1
        tag = self.consumers.get(consumer_id, "nobody")
        one = plain(b"%s %d" % (tag.encode(), run.numbers), key=f"k{run.numbers % 7}")
        stored = batch([one, one]) if draw.random() < 0.3 else single(one)
        where = api.MessageId(ledger=1, entry=run.numbers)
        content = api.Message(consumer_id=consumer_id, message_id=where)
        if harmful:
            how = draw.randrange(6)
            if how == 0:
                where.ledger = draw.choice((2**63 - 1, 2**63, 2**64 - 1))
                where.entry = draw.choice((2**63 - 1, 2**63, 2**64 - 1, run.numbers))
                content.message_id.CopyFrom(where)
            elif how == 1:
                content.ack_set.extend(draw.choices((-1, 0, 1, 2**63 - 1, -(2**63)), k=9))
                content.redelivery_count = 2**32 - 1
            elif how == 2:
                kinds = ("cut", "flip", "insert")
                damage = [(draw.choice(kinds), draw.randrange(400), draw.randrange(1, 256))]
                stored = damaged(stored, damage)
                # What is read of it may be anything, as long as it is of this entry.
            elif how == 3:
                stored = extreme(draw, 3_000)
                if draw.randrange(2):
                    content.ack_set.extend(draw.choices((-1, 0, 1, 2**63 - 1, -(2**63)), k=3))
            elif how == 4:
                stored = single(plain(bytes(draw.choice((KEPT_BYTES, 2 * KEPT_BYTES)))))
            else:
                content.consumer_id = draw.choice((0, 2**64 - 1, consumer_id + 1_000))
            run.harmed.add(run.numbers)
        self.send("message", content, stored)

    def noise(self) -> None:
        """Send bytes that answer no request, or that are no frames."""
        self._random.choice((self._garbage, self._garbage, self._unasked, self._many, self.flood))()

    def _garbage(self) -> None:
        draw = self._random
        body = draw.randbytes(draw.randrange(1, 60))
        absurd = draw.choice((0, 3, 5, 2**31, 2**32 - 1))
        self.put(draw.choice((
            body,
            struct.pack(">I", absurd),
            struct.pack(">I", 600 << 20) + bytes(2 * KEPT_BYTES),
            struct.pack(">II", 8, absurd) + bytes(4),
            struct.pack(">II", 4 + len(body), len(body)) + body,
            frame_of("ping", api.Nothing())[:-1],  # what follows belongs to it
        )))  # fmt: skip

    def _many(self) -> None:
        challenge = self._random.randrange(2)
        for _ in range(300):
            if challenge:
                self.send("auth_challenge", api.AuthChallenge())
            else:
                self.send("ping", api.Nothing())

    def _unasked(self) -> None:
        draw = self._random
        number = draw.choice((0, 1, 2**64 - 1, *self.consumers))
        moved = api.TopicMigrated(resource_id=number, resource_type=draw.randrange(4))
        moved.broker_url = draw.choice(URLS)
        what: tuple[str, Any] = draw.choice((
            ("connected", api.Connected(server_version=b"again", max_message_size=2**31 - 1)),
            ("close_consumer", api.CloseConsumer(consumer_id=number, request_id=number)),
            ("topic_migrated", moved),
            ("error", api.Error(request_id=number, error=0, message=draw.randbytes(5))),
            ("ack_response", api.AckResponse(consumer_id=number, request_id=number)),
        ))  # fmt: skip
        for _ in range(draw.choice((1, 2, 20))):
            self.send(*what)

    def fall_silent(self) -> None:
        """Send no complete frame any more; the client has to notice."""
        how = self._random.choice(SILENT)
        data = struct.pack(">I", 1 << 20)
        if how != "nothing":
            self._out.put(data)
        self._silent = True
        scheduler = self._run.scheduler
        began = scheduler.now_s
        while not self.over:
            scheduler.sleep(1.0)
            if how == "trickle":
                self._out.put(b"\0")
            if scheduler.now_s - began > GIVEN_UP_S + 2 * SLACK_S:
                raise HarmError(f"a connection that brings nothing whole stands ({how})")


class _Slowly(Credentials):
    """Credentials with a token from a slow source."""

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        self._scheduler, self._random = scheduler, random

    def show(self) -> Shown:
        self._scheduler.sleep(self._random.random())
        return Shown("token", "t")

    def who(self) -> str:
        return "somebody"


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(f"{seed}:harm")
        self.scheduler = Scheduler(Random(f"{seed}:order"))
        self.process = self.scheduler.process("broker")
        self.client = self.scheduler.process("client")
        self.up = True
        self.harm = self.random.choice((0.0, 0.02, 0.1, 0.4))
        """Share of the answers that are none."""
        self.queue = self.random.choice((1, 3, 20, 200))
        self.numbers = 0
        """Entries sent so far, each with a number of its own."""
        self.harmed: set[int] = set()
        """Those whose content is anybody's guess."""
        self.sessions: list[Session] = []
        self._handles: list[WireConsumer | WireReader] = []
        self._frames = Frames(str(seed), self.scheduler)
        self._connection = Connection(
            "pulsar://broker:6650,broker:6651", operation_timeout_ms=int(TIMEOUT_S * 1e3)
        )

    def travel(self) -> None:
        self.scheduler.sleep(self.random.random() * 0.01)

    def dial(self, address: Address, _: Connection, timeout_s: float) -> Socket:
        self.travel()
        if address.host.encode("idna") != b"broker":
            self.scheduler.sleep(min(timeout_s, 0.1))
            raise BrokerUnavailableError(f"No broker answers at {address}.")
        socket = self._frames.socket(self.process)
        self.sessions.append(Session(self, socket))
        return socket

    def _credentials(self, _: Connection) -> Credentials:
        return _Slowly(self.scheduler, self.random)

    def run(self) -> str:
        """The harm done; empty for none."""
        with (
            installed(self.scheduler, Random(f"{self.seed}:waits")),
            self._frames.installed(),
            replaced(
                (connection, "open_socket", self.dial),
                (brokering, "Credentials", self._credentials),
                (schema, "Credentials", self._credentials),
                (framing, "KEPT_BYTES_MAX", KEPT_BYTES),
                (stored_entry, "KEPT_BYTES_MAX", KEPT_BYTES),
            ),
        ):
            try:
                self.scheduler.run(self.client, self._main)
            except (HarmError, StuckError) as exc:
                return f"{type(exc).__name__}: {exc}"
            except Exception as exc:  # noqa: BLE001 - whatever it is, a broker achieved it
                return f"{exc!r} in {self.scheduler.failed_in}"
        return ""

    def _main(self) -> None:
        self.scheduler.spawn(self.process, "trouble", self._trouble)
        self.scheduler.spawn(self.process, "watch", self._watch)
        broker = WireBroker(self._connection)
        self._call("partitions", lambda: broker.partitions(TOPIC), 2 * TIMEOUT_S)
        for number, hash_range in enumerate(split_ring(self.random.choice((1, 3)))):
            where = TopicPartition(TOPIC, number)

            def subscribe(where: TopicPartition = where, of: Any = hash_range) -> None:
                self._handles.append(
                    broker.subscribe(
                        SubscriptionSpec(
                            where, "s", of, consumer_name="c", receiver_queue_size=self.queue
                        ),
                        StartPosition.EARLIEST,
                    )
                )

            self._call("subscribe", subscribe, 2 * TIMEOUT_S)

        def read() -> None:
            self._handles.append(broker.reader(TopicPartition(TOPIC, 9), EntryId(0, 0)))

        self._call("reader", read, 2 * TIMEOUT_S)
        connected = self._connection
        version = self.random.choice((None, 0, 3))
        self._call(
            "schema", lambda: ask_schema(connected, TOPIC, version, TIMEOUT_S), TIMEOUT_S + LEAVE_S
        )
        end_s = self.scheduler.now_s + RUN_S
        while self._handles and self.scheduler.now_s < end_s:
            self._step(self.random.choice(self._handles))
        self._call("close", broker.close, CONFIRM_S + CLOSE_S + 2 * LEAVE_S)
        self.scheduler.sleep(TIMEOUT_S)
        left = [one.name for one in self.client.tasks if not one.done and "wire" in one.name]
        if left:
            raise HarmError(f"threads are left: {left}")

    def _step(self, handle: WireConsumer | WireReader) -> None:
        what = self.random.choice(("take", "take", "take", "last", "connected", "pause"))
        if what == "take":
            # A reader asks the broker whether an entry is missing.
            asks_s = TIMEOUT_S if isinstance(handle, WireReader) else 0.0
            self._call("take", lambda: self._take(handle), 0.1 + asks_s)
        elif what == "last":
            self._call("last", handle.last_entry, TIMEOUT_S)
        elif what == "connected":
            self._call("connected", handle.is_connected, 0.0)
        else:
            self.scheduler.sleep(self.random.choice((0.1, 1.0, 10.0)))

    def _take(self, handle: WireConsumer | WireReader) -> None:
        if isinstance(handle, WireReader):
            blocks, tag = handle.read(100), "reader"
        else:
            blocks, tag = handle.receive(100), str(handle.hash_range.start)
        tag = f"{handle.topic_partition.name} {tag}"
        for block in blocks:
            if block.id.ledger == 1 and block.id.entry in self.harmed:
                continue
            for value in block.values:
                mine, _, number = present(value).decode().rpartition(" ")
                if int(number) not in self.harmed and mine != tag:
                    raise HarmError(f"{tag} got {value!r}")
        if isinstance(handle, WireConsumer):
            handle.acknowledge([block.id for block in blocks])

    def _call(self, what: str, call: Callable[[], object], limit_s: float) -> None:
        began = self.scheduler.now_s
        with suppress(KeyShardError):
            call()
        took_s = self.scheduler.now_s - began
        if took_s > limit_s + SLACK_S:
            raise HarmError(f"{what} took {took_s:.1f} s")

    def _trouble(self) -> None:
        """Actions of brokers without a request."""
        while True:
            self.scheduler.sleep(self.random.expovariate(0.3))
            standing = [one for one in self.sessions if not one.over]
            if not standing or self.random.random() > 2 * self.harm:
                continue
            session = self.random.choice(standing)
            what = self.random.randrange(6)
            if what == 0:
                session.cut()
            elif what == 1:
                self.scheduler.spawn(self.process, "silent", session.fall_silent)
            elif what == 2:
                session.flood()
            else:
                session.noise()

    def _watch(self) -> None:
        """Check that the threads and the memory of a client stay below their limits."""
        while True:
            self.scheduler.sleep(0.05)
            living = [one for one in self.client.tasks if not one.done]
            if len(living) > TASKS_MAX:
                raise HarmError(f"a client has {len(living)} threads")
            for handle in self._handles:
                most = 2 * handle._queue.permits.ahead_max + 200
                if len(handle._queue) > most:
                    raise HarmError(f"{len(handle._queue)} entries wait, where {most} may")
                at, _ = handle.standing()
                held = 0 if at is None else len(at._frames._rest)
                if held > KEPT_BYTES + connection.READ_BYTES:
                    raise HarmError(f"{held} bytes of a frame are held")


def _outcomes(_: Options, seeds: range) -> Outcomes:
    logging.disable(logging.CRITICAL)
    for seed in seeds:
        run = Run(seed)
        yield Outcome(seed, run.run(), counts=Counter({"entries sent": run.numbers}))


PROOF = Proof(_outcomes, seeds=200, seed_start=0)
