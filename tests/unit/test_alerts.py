"""Alert rules, board and runbook: made from the table of metrics, and parsed by Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from keyshard.cli import app
from keyshard.core.range_watchdog import StallKind
from keyshard.observe import alerts, grafana_board
from keyshard.observe.alerts import ALERTS
from keyshard.observe.metrics import METRICS, SINK_METRICS, MetricKind
from keyshard.observe.status_types import Status
from tests.support.promtool import RULES, check_expressions, fires, promtool
from tests.support.statuses import (
    handler_slots,
    lag,
    metrics_of,
    partition_status,
    progress,
    range_status,
    sink_status,
    status,
)

DOCS = Path(__file__).parents[2] / "docs"
PARTITION = "Topic partition persistent://public/default/t-0 of subscription s"
LIMIT = "is at 60% of a limit. At 100%,"


def queries() -> list[str]:
    """The expressions of the board, with the variables of Grafana filled in."""
    found = [
        target["expr"]
        for panel in grafana_board.board()["panels"]
        for target in panel.get("targets", ())
    ]
    return [one.replace("$__rate_interval", "5m").replace("$subscription", ".*") for one in found]


def exported() -> set[str]:
    """Names of all series."""
    return {metric.name for metric in (*METRICS, *SINK_METRICS)} | {
        f"{metric.name}_bucket" for metric in METRICS if metric.kind is MetricKind.HISTOGRAM
    }


def names_in(expressions: list[str]) -> set[str]:
    return {name for one in expressions for name in re.findall(r"\bkeyshard_\w+", one)}


def test_the_stored_alert_rules_and_board_are_made_from_the_tables() -> None:
    for file, module in [("alerts.yml", alerts), ("grafana.json", grafana_board)]:
        assert (DOCS / "operations" / file).read_text() == module.document(), (
            f"write it: python -m {module.__name__} > docs/operations/{file}"
        )


def test_the_board_shows_every_metric_and_nothing_else() -> None:
    assert names_in(queries()) == {
        f"{metric.name}_bucket" if metric.kind is MetricKind.HISTOGRAM else metric.name
        for metric in (*METRICS, *SINK_METRICS)
    }
    panels = grafana_board.board()["panels"]
    assert len({json.dumps(panel["gridPos"]) for panel in panels}) == len(panels)
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_alerts_use_only_metrics_of_the_table() -> None:
    assert names_in([alert.expression for alert in ALERTS]) <= exported()
    with pytest.raises(KeyError, match="keyshard_renamed"):
        alerts.known("keyshard_renamed")


def test_every_alert_and_every_stall_has_a_section_in_the_runbook() -> None:
    text = (DOCS / "runbook.md").read_text()
    sections = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sections == [alert.name for alert in ALERTS]
    assert {kind.alert for kind in StallKind} <= set(sections)
    for alert in ALERTS:
        assert alert.runbook == f"docs/runbook.md#{alert.name.lower()}"
    status_page = (DOCS / "status.md").read_text()
    for kind in StallKind:
        assert f"`{kind.value}`" in status_page, kind
        assert kind.runbook in {alert.runbook for alert in ALERTS}


def test_alerts_have_the_url_of_their_section_if_it_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = "https://docs.example.com/runbook.html#"
    alerts.main(["--runbook-base", base])
    (group,) = yaml.safe_load(capsys.readouterr().out)["groups"]
    urls = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in group["rules"]}
    assert urls == {alert.name: base + alert.name.lower() for alert in ALERTS}
    alerts.main([])
    assert capsys.readouterr().out == alerts.document()
    assert "runbook_url" not in alerts.document()


@pytest.mark.parametrize("url", ["docs/runbook.md#", "https://docs.example.com/runbook.html"])
def test_a_wrong_url_of_the_runbook_is_refused_in_one_sentence(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        alerts.main(["--runbook-base", url])
    assert end.value.code == 2
    assert f"{url!r} is no URL to which the name of a section" in capsys.readouterr().err


def test_every_command_of_the_runbook_exists_with_its_options() -> None:
    text = (DOCS / "runbook.md").read_text()
    named = re.findall(r"(?:`|^\$ )keyshard ([a-z][^`#\n]*)", text, re.MULTILINE)
    assert {"stacks", "doctor", "status", "explain"} <= {one.split()[0] for one in named}
    for one in named:
        found: Any = get_command(app)
        words = one.split()
        while words and hasattr(found, "commands"):
            assert words[0] in found.commands, one
            found = found.commands[words.pop(0)]
        known = {option for param in found.params for option in param.opts}
        assert {word for word in words if word.startswith("-")} <= known, one


def test_promtool_accepts_the_rules_and_the_queries_of_the_board(tmp_path: Path) -> None:
    assert f"SUCCESS: {len(ALERTS)} rules" in promtool("check", "rules", RULES)
    check_expressions(tmp_path, queries())


def near(name: str) -> Status:
    return status(partitions=[partition_status(0, **{name: 6_000, f"{name}Max": 10_000})])


def counted(name: str, count: int) -> Status:
    return status(counters=status()["counters"] | {name: count})


def lagging(millis: int) -> Status:
    return status(lag=lag(seconds=millis / 1000))


HERE = {"topic": "persistent://public/default/t", "partition": "0"}


@pytest.mark.parametrize(
    ("alert", "shown", "labels", "summary"),
    [
        ("KeyshardLag", lagging(360_000), {},
         "The oldest message of subscription s is 6m 0s old."),
        ("KeyshardUncovered", status(partitions=[partition_status(0, covered=False)]), HERE,
         f"{PARTITION} has slots without a connected consumer."),
        ("KeyshardBrokerError", status(partitions=[partition_status(0, error="no")]), HERE,
         f"{PARTITION}: the broker refuses a consumer or does not answer it."),
        ("KeyshardAckGaps", near("ackGaps"), HERE,
         f"{PARTITION} {LIMIT} the broker delivers entries again after its restart."),
        ("KeyshardReplayEntries", near("replay"), HERE,
         f"{PARTITION} {LIMIT} the broker stops all ranges."),
        ("KeyshardParkedKeys", status(parkedKeys=3), {},
         "3 keys of subscription s are parked. Their messages go to the dead-letter topic."),
        ("KeyshardWorkerDown", status(window=progress() | {"sourceWorkers": [
            {"kind": "processes", "pid": None, "host": None, "consumers": 0, "forSeconds": 9.0,
             "restarts": 3}]}), {"worker": "0", "kind": "processes"},
         "Worker 0 of subscription s does not run. Its ranges receive nothing."),
        ("KeyshardHandlerDown", status(handlerSlots=[handler_slots(1, state="starting")]),
         {"process": "1"},
         "Handler process or actor 1 of subscription s does not run. Its messages wait."),
        ("KeyshardStalledActor", status(handlerSlots=[handler_slots(0), handler_slots(1, stalled={
             "forSeconds": 70.0, "kind": "actor", "reason": "a call has not returned"})]), {},
         "1 actors of subscription s are stalled: calls do not return, or fail again and again."),
        ("KeyshardStalledUnknown", status(ranges=[range_status(0, stalled={
             "forSeconds": 7.0, "kind": "unknown", "reason": "9 messages wait"})]), {},
         "1 ranges of subscription s are stalled: messages wait for an unknown reason."),
    ],
)  # fmt: skip
def test_an_alert_fires_on_the_metrics_of_a_status(
    tmp_path: Path, alert: str, shown: Status, labels: dict[str, str], summary: str
) -> None:
    fires(tmp_path, [metrics_of(shown)], alert, {"subscription": "s", **labels}, summary)


@pytest.mark.parametrize(
    ("alert", "grown", "summary"),
    [
        ("KeyshardOutputsFailed", counted("outputsFailed", 2),
         "The broker did not store some outputs of handlers of subscription s."),
        ("KeyshardObserverErrors", counted("observerErrors", 1),
         "Observers of subscription s raise."),
        ("KeyshardEntriesLost", status(window=progress() | {"entriesLost": 2}),
         "Entries of subscription s are lost: acknowledged elsewhere, or no longer stored."),
        ("KeyshardUnreadable", status(window=progress() | {"corruptSkipped": 1}),
         "Entries of subscription s cannot be read, and are acknowledged without a row."),
    ],
)  # fmt: skip
def test_an_alert_fires_when_a_count_grows(
    tmp_path: Path, alert: str, grown: Status, summary: str
) -> None:
    answers = [metrics_of(status()), metrics_of(status()), metrics_of(grown)]
    fires(tmp_path, answers, alert, {"subscription": "s"}, summary, at="1m")


def test_an_alert_fires_when_a_process_of_handlers_ends_again_and_again(tmp_path: Path) -> None:
    ended = [status(handlerSlots=[handler_slots(0, restarts=count)]) for count in (0, 0, 1, 2, 4)]
    summary = (
        "Handler process or actor 0 of subscription s has ended several times within 15 minutes."
    )
    fires(
        tmp_path, list(map(metrics_of, ended)), "KeyshardHandlerRestarts",
        {"subscription": "s", "process": "0"}, summary, at="3m",
    )  # fmt: skip


def test_an_alert_fires_when_messages_of_a_sink_fail(tmp_path: Path) -> None:
    failed = sink_status(counters=sink_status()["counters"] | {"failed": 2})
    answers = [metrics_of(one, SINK_METRICS) for one in (sink_status(), sink_status(), failed)]
    summary = "Some messages of sink bills were refused, or not confirmed in time."
    fires(tmp_path, answers, "KeyshardSinkFailed", {"sink": "bills"}, summary, at="1m")
