"""``keyshard check --live`` on a real broker."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.cli import main
from keyshard.core.position.entry import full_topic_name
from keyshard.core.ring.hash_range import split_ring
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.history import read_history

pytestmark = pytest.mark.broker


def check(
    capsys: pytest.CaptureFixture[str], broker: DevBroker, topic: str, *options: str
) -> tuple[int, str, str]:
    where = ("--service-url", broker.service_url, "--admin-url", broker.admin_url)
    with pytest.raises(SystemExit) as caught:
        main(["check", "--live", "--topic", topic, *where, *options])
    output = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0), output.out, output.err


def subscriptions(broker: DevBroker, topic: str) -> list[str]:
    path = f"{broker.admin_url}/admin/v2/persistent/public/default/{topic}-partition-0"
    answer = httpx.get(f"{path}/subscriptions", trust_env=False)
    names: list[str] = answer.raise_for_status().json()
    return names


def test_a_right_broker_passes_and_is_left_as_it_was(
    dev_broker: DevBroker, topic_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "history.jsonl"
    load = ("--messages", "4000", "--keys", "40", "--partitions", "3", "--parallelism", "7")
    code, out, err = check(capsys, dev_broker, topic_name, *load, "--json", "--history", str(kept))
    assert (code, err) == (0, ""), out
    result = json.loads(out)
    assert result["holds"]
    unchecked = {one["name"] for one in result["verdicts"] if not one["checked"]}
    assert unchecked == {"one handler per key"}
    assert result["live"]["rows"] == result["live"]["sent"] == 4_000
    assert result["live"]["restarts"] == 2
    with closing(PulsarAdmin(dev_broker.connection)) as admin:
        assert admin.partition_count(full_topic_name(topic_name)) == 3
    assert subscriptions(dev_broker, topic_name) == []
    ranges = {event.range for event in read_history(kept) if event.kind == "range_gained"}
    assert ranges == {str(one) for count in (7, 8, 9) for one in split_ring(count)}

    code, out, err = check(capsys, dev_broker, topic_name, *load)
    assert (code, out) == (2, "")
    assert "contains messages" in err
    code, out, err = check(capsys, dev_broker, topic_name, *load, "--append")
    assert (code, err) == (0, "")
    assert "4,000 rows of 4,000 messages" in out
