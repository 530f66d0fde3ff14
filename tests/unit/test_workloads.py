"""Workloads are deterministic, complete and checked on construction."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

import httpx
import pytest

from keyshard.errors import AdminError, AuthorizationError, BrokerUnavailableError, ConfigError
from keyshard.testing.verify import workloads
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, parse_value


def test_the_same_description_gives_the_same_messages() -> None:
    first = list(Workload(5_000, 50, zipf=1.1, seed=7).sequence())
    assert first == list(Workload(5_000, 50, zipf=1.1, seed=7).sequence())
    assert first != list(Workload(5_000, 50, zipf=1.1, seed=8).sequence())


@pytest.mark.parametrize("zipf", [None, 1.2])
@pytest.mark.parametrize("entry_messages", [None, 7])
def test_sequence_numbers_count_each_key_from_zero(
    zipf: float | None, entry_messages: int | None
) -> None:
    following: Counter[str] = Counter()
    for key, seq in Workload(1_000, 30, zipf=zipf, entry_messages=entry_messages).sequence():
        assert seq == following[key]
        following[key] += 1
    assert following.total() == 1_000


def test_keys_are_even_without_zipf() -> None:
    counts = Counter(key for key, _ in Workload(1_000, 30).sequence())
    assert set(counts) == {f"k{number}" for number in range(30)}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_zipf_prefers_the_first_keys() -> None:
    counts = Counter(key for key, _ in Workload(20_000, 100, zipf=1.0).sequence())
    assert counts["k0"] / 20_000 == pytest.approx(1 / sum(1 / n for n in range(1, 101)), rel=0.1)
    assert counts["k0"] > counts["k5"] > counts["k50"]


def test_runs_have_the_length_of_an_entry() -> None:
    keys = (key for key, _ in Workload(1_003, 20, entry_messages=10).sequence())
    lengths = [len(list(group)) for _, group in groupby(keys)]
    assert lengths == [10] * 100 + [3]


def test_values_are_read_back() -> None:
    assert parse_value(b"k12:345:xxxx") == ("k12", 345)
    assert parse_value(b"k1:0:") == ("k1", 0)
    assert parse_value("鍵-1:7:".encode()) == ("鍵-1", 7)
    for bad in (b"", b"k1", b"k1:2", b"k1:x:", b":1:", b"k1:-1:"):
        with pytest.raises(ValueError, match="needs 'key:seq:'"):
            parse_value(bad)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"messages": 0}, "messages is 0; it must be from 1"),
        ({"keys": 0}, "keys is 0; it must be from 1"),
        ({"size_bytes": 0}, "size_bytes is 0; it must be from 1"),
        ({"size_bytes": 5_000_000}, "size_bytes is 5000000; it must be from 1"),
        ({"zipf": 0.0}, "zipf is .*; it must be above 0"),
        ({"rate_per_s": -1.0}, "rate_per_s is .*; it must be above 0"),
        ({"batching": "some"}, "it must be one of keyed, none, default"),
        ({"key_kind": "x"}, "it must be one of key, ordering, none"),
        ({"entry_messages": 0}, "entry_messages is .*; it must be from 1"),
        ({"entry_messages": 2, "batching": "none"}, "needs batching"),
        ({"entry_messages": 1_000, "size_bytes": 10_000}, "the limit of an entry, 4000000 bytes"),
    ],
)
def test_impossible_workloads_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Workload(**{"messages": 10, "keys": 2, **options})


def test_the_partition_key_depends_on_the_key_only() -> None:
    assert workloads.partition_key_of("k1") == workloads.partition_key_of("k1") != "k1"


class Admin:
    """An admin interface with one topic."""

    def __init__(self, partitions: int | None, status: int = 204) -> None:
        self.partitions = partitions
        self.status = status

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/admin/v2/persistent/public/default/t/partitions"
        if request.method == "GET":
            return httpx.Response(200, json={"partitions": self.partitions})
        if self.status >= 400:
            return httpx.Response(self.status, json={"reason": "Not allowed"})
        if self.partitions is not None:
            return httpx.Response(409, json={"reason": "exists"})
        self.partitions = int(request.content)
        return httpx.Response(204)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Admin:
    handler: Admin = request.param
    client = httpx.Client

    def make(**options: Any) -> httpx.Client:
        return client(**options | {"transport": httpx.MockTransport(handler)})

    monkeypatch.setattr(httpx, "Client", make)
    return handler


@pytest.mark.parametrize("admin", [Admin(None)], indirect=True)
def test_a_topic_is_created_once(admin: Admin) -> None:
    assert create_partitioned_topic("http://127.0.0.1:1", "t", 3)
    assert not create_partitioned_topic("http://127.0.0.1:1", "persistent://public/default/t", 3)
    assert admin.partitions == 3


@pytest.mark.parametrize("admin", [Admin(4)], indirect=True)
def test_another_number_of_partitions_is_an_error(admin: Admin) -> None:
    with pytest.raises(AdminError, match="exists with 4 partitions, but 3 partitions"):
        create_partitioned_topic("http://127.0.0.1:1", "t", 3)


@pytest.mark.parametrize("admin", [Admin(0)], indirect=True)
def test_a_plain_topic_is_an_error(admin: Admin) -> None:
    with pytest.raises(AdminError, match="exists without partitions"):
        create_partitioned_topic("http://127.0.0.1:1", "t", 3)


@pytest.mark.parametrize("admin", [Admin(None, 403)], indirect=True)
def test_a_refusal_has_its_reason(admin: Admin) -> None:
    with pytest.raises(AuthorizationError, match="Not allowed"):
        create_partitioned_topic("http://127.0.0.1:1", "t", 3)


def test_a_topic_needs_a_broker_a_valid_address_and_one_partition_or_more() -> None:
    with pytest.raises(BrokerUnavailableError, match="keyshard broker start"):
        create_partitioned_topic("http://127.0.0.1:1", "t", 3)
    for url in ("127.0.0.1:8080", "ftp://x", "http://[", ""):
        with pytest.raises(ConfigError, match="admin_url is"):
            create_partitioned_topic(url, "t", 3)
    with pytest.raises(ConfigError, match="partitions is 0; it must be from 1"):
        create_partitioned_topic("http://127.0.0.1:1", "t", 0)
