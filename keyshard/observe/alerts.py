"""Alert rules for Prometheus, in one table; ``docs/operations/alerts.yml`` is made from it.

Write the file again with ``python -m keyshard.observe.alerts > docs/operations/alerts.yml``.
``docs/runbook.md`` has a section for each alert.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keyshard.core.diagnosis import NEAR
from keyshard.core.range_watchdog import StallKind, runbook_section
from keyshard.observe.metrics import METRICS, SINK_METRICS

_NAMES = frozenset(metric.name for metric in (*METRICS, *SINK_METRICS))


def known(name: str) -> str:
    """Check that a metric is in the tables, and return its name.

    Raises:
        KeyError: No table has the metric.
    """
    if name not in _NAMES:
        raise KeyError(name)
    return name


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    for_: str
    """Time for which the expression must hold, as Prometheus writes it."""
    severity: str
    """``critical``: messages wait until an operator acts; ``warning``: some do, or all will."""
    summary: str
    """One sentence, with the labels of the expression."""

    @property
    def runbook(self) -> str:
        """Its section in the runbook."""
        return runbook_section(self.name)


_STALLED = {
    StallKind.HANDLER: "a handler has not returned",
    StallKind.DEAD_LETTER: "the broker has not confirmed a dead letter",
    StallKind.OUTPUTS: "the broker has not confirmed the outputs of handlers",
    StallKind.DISCONNECTED: "a consumer is not connected",
    StallKind.CIRCUIT: "most keys fail, and handlers are paused",
    StallKind.RETRIES: "a key fails, and its messages wait for the next attempt",
    StallKind.WORKERS: "all workers are busy with other ranges",
    StallKind.DRAINING: "they are about to move",
    StallKind.UNKNOWN: "messages wait for an unknown reason",
}
_STALLED_PARTITIONS = {
    StallKind.LOOK_AHEAD: "the broker reads nothing, as too many entries wait for ranges",
    StallKind.UNDELIVERED: "the broker delivers nothing, though it has entries",
}
_OF = "of subscription {{ $labels.subscription }}"
_PROCESS = "Handler process or actor {{ $labels.process }} " + _OF
_PARTITION = "Topic partition {{ $labels.topic }}-{{ $labels.partition }} " + _OF


def _stall(kind: StallKind, text: str, several: str, stalled: str) -> Alert:
    return Alert(
        kind.alert,
        f'count by (job, instance, subscription) ({known(stalled)}{{kind="{kind.value}"}})',
        "1m",
        "critical",
        f"{{{{ $value }}}} {several} {_OF} are stalled: {text}.",
    )


def _near(alert: str, count: str, limit: str, effect: str) -> Alert:
    """Return the alert for a count of a topic partition near the limit of the broker."""
    return Alert(
        alert,
        f"{known(count)} / ({known(limit)} > 0) > {NEAR:g}",
        "2m",
        "warning",
        f"{_PARTITION} is at {{{{ $value | humanizePercentage }}}} of a limit. At 100%, {effect}",
    )


ALERTS: tuple[Alert, ...] = (
    *(
        _stall(kind, text, "ranges", "keyshard_range_stalled_seconds")
        for kind, text in _STALLED.items()
    ),
    *(
        _stall(kind, text, "topic partitions", "keyshard_partition_stalled_seconds")
        for kind, text in _STALLED_PARTITIONS.items()
    ),
    _stall(
        StallKind.ACTOR, "calls do not return, or fail again and again", "actors",
        "keyshard_handler_stalled_seconds",
    ),
    Alert(
        "KeyshardDown", 'up{job="keyshard"} == 0', "2m", "critical",
        "{{ $labels.instance }} does not answer Prometheus.",
    ),
    Alert(
        "KeyshardLag", f"{known('keyshard_lag_seconds')} > 300", "5m", "warning",
        f"The oldest message {_OF} is {{{{ $value | humanizeDuration }}}} old.",
    ),
    Alert(
        "KeyshardUncovered", f"{known('keyshard_partition_covered')} == 0", "1m", "critical",
        f"{_PARTITION} has slots without a connected consumer.",
    ),
    Alert(
        "KeyshardBrokerError", f"{known('keyshard_partition_broker_error')} == 1", "1m", "critical",
        f"{_PARTITION}: the broker refuses a consumer or does not answer it.",
    ),
    _near(
        "KeyshardAckGaps", "keyshard_partition_ack_gaps", "keyshard_partition_ack_gaps_limit",
        "the broker delivers entries again after its restart.",
    ),
    _near(
        "KeyshardReplayEntries", "keyshard_partition_replay_entries",
        "keyshard_partition_replay_entries_limit", "the broker stops all ranges.",
    ),
    Alert(
        "KeyshardParkedKeys", f"{known('keyshard_parked_keys')} > 0", "5m", "warning",
        f"{{{{ $value }}}} keys {_OF} are parked. Their messages go to the dead-letter topic.",
    ),
    Alert(
        "KeyshardOutputsFailed", f"increase({known('keyshard_outputs_failed_total')}[5m]) > 0",
        "0m", "warning", f"The broker did not store some outputs of handlers {_OF}.",
    ),
    Alert(
        "KeyshardObserverErrors", f"increase({known('keyshard_observer_errors_total')}[5m]) > 0",
        "0m", "warning", f"Observers {_OF} raise.",
    ),
    Alert(
        "KeyshardWorkerDown", f"{known('keyshard_worker_up')} == 0", "1m", "critical",
        f"Worker {{{{ $labels.worker }}}} {_OF} does not run. Its ranges receive nothing.",
    ),
    Alert(
        "KeyshardHandlerDown", f"{known('keyshard_handler_up')} == 0", "2m", "warning",
        f"{_PROCESS} does not run. Its messages wait.",
    ),
    Alert(
        "KeyshardHandlerRestarts", f"increase({known('keyshard_handler_restarts_total')}[15m]) > 2",
        "0m", "warning", f"{_PROCESS} has ended several times within 15 minutes.",
    ),
    Alert(
        # Without admin_url, the metric begins with the first loss, and has no increase then.
        "KeyshardEntriesLost",
        f"increase({known('keyshard_entries_lost_total')}[5m]) > 0 or "
        f"({known('keyshard_entries_lost_total')} > 0 "
        f"unless {known('keyshard_entries_lost_total')} offset 5m)",
        "0m", "critical", f"Entries {_OF} are lost: acknowledged elsewhere, or no longer stored.",
    ),
    Alert(
        "KeyshardUnreadable",
        f"increase({known('keyshard_entries_corrupt_skipped_total')}[5m]) + "
        f"increase({known('keyshard_entries_encrypted_skipped_total')}[5m]) > 0",
        "0m", "warning", f"Entries {_OF} cannot be read, and are acknowledged without a row.",
    ),
    Alert(
        "KeyshardSinkFailed",
        f"increase({known('keyshard_sink_messages_failed_total')}[5m]) > 0",
        "0m", "warning",
        "Some messages of sink {{ $labels.sink }} were refused, or not confirmed in time.",
    ),
)  # fmt: skip
"""In the order of the file."""


def document(runbook_base: str | None = None) -> str:
    """Return the text of ``docs/operations/alerts.yml``.

    Args:
        runbook_base: URL to which the name of a section is appended, for the annotation
            ``runbook_url`` of each alert; ``None``: alerts have none.
    """
    return "\n".join(_lines(runbook_base)) + "\n"


def _lines(runbook_base: str | None) -> Iterator[str]:
    yield "# Made from the table of metrics: python -m keyshard.observe.alerts"
    yield "groups:"
    yield "  - name: keyshard"
    yield "    rules:"
    for alert in ALERTS:
        # A JSON string is a YAML string.
        yield f"      - alert: {alert.name}"
        yield f"        expr: {json.dumps(alert.expression)}"
        yield f"        for: {alert.for_}"
        yield f"        labels: {{severity: {alert.severity}}}"
        yield "        annotations:"
        yield f"          summary: {json.dumps(alert.summary)}"
        yield f"          runbook: {json.dumps(alert.runbook)}"
        if runbook_base is not None:
            section = alert.runbook.partition("#")[2]
            yield f"          runbook_url: {json.dumps(runbook_base + section)}"


def _base(text: str) -> str:
    """Check the argument ``--runbook-base``."""
    if not text.startswith(("http://", "https://")) or not text.endswith(("#", "/")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no URL to which the name of a section can be appended. It begins with "
            "http:// or https://, and ends with # or /."
        )
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rules; the arguments of the command line are the default."""
    parser = argparse.ArgumentParser(
        prog="python -m keyshard.observe.alerts", description="Print the alert rules."
    )
    parser.add_argument(
        "--runbook-base", type=_base, metavar="URL",
        help="add runbook_url to each alert: this URL, such as https://docs/runbook.html#, and the "
        "name of the section",
    )  # fmt: skip
    sys.stdout.write(document(parser.parse_args(arguments).runbook_base))


if __name__ == "__main__":
    main()
