"""A query from topic to topic stores each message once, under kills; more by ``make chaos``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.pipeline import LOCAL, Kind, PipelineChaos

FAULTS = (Kind.WORKER_KILLED, Kind.OUTPUT_UNLOADED, Kind.JVM_KILLED)


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staged", [False, True])
def test_each_message_is_stored_once_in_order_under_kills(tmp_path: Path, *, staged: bool) -> None:
    chaos = PipelineChaos(tmp_path, 1, 6_000, print, cluster=LOCAL, faults=FAULTS, staged=staged)
    report = chaos.run(300)
    print(report)
    assert report.holds, report
    assert report.messages == report.stored == 6_000
    assert report.runs >= 2
    assert sum(report.faults.values()) == len(FAULTS)
