"""The table of Pulsar's releases: differences and known faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keyshard.core.diagnosis import Level, judge_faults, judge_version
from keyshard.core.releases import (
    FAULTS,
    LINES,
    TESTED,
    Release,
    Version,
    faults_of,
    knows_every_id,
    release_of,
)

PAGE = Path(__file__).parents[2] / "docs/brokers.md"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("4.0.8", Version(4, 0, 8)),
        ("5.0.1-SNAPSHOT", Version(5, 0, 1)),
        ("10.2", Version(10, 2, 0)),
        ("master", None),
        ("", None),
    ],
)
def test_versions_are_parsed(text: str, version: Version | None) -> None:
    assert Version.of(text) == version


def test_the_oldest_release_is_the_default_and_an_unknown_one_is_the_newest() -> None:
    assert release_of("4.0.8") == Release()
    assert release_of("unknown") == release_of("5.0.1") == release_of("6.1.0") != Release()
    assert release_of("5.0.1").limits.replay(1_000) == 40_000


@pytest.mark.parametrize(
    ("version", "waits"),
    [
        ("4.0.8", False), ("4.0.10", False), ("4.0.11", True), ("4.0.14", True),
        ("4.1.0", False), ("4.1.3", False), ("4.2.1", False), ("4.2.2", True), ("4.2.4", True),
        ("5.0.0", True), ("5.0.9", True), ("5.1.0", True),
    ],
)  # fmt: skip
def test_a_change_that_patch_releases_got_holds_for_these_only(version: str, waits: bool) -> None:
    assert release_of(version).acknowledged_wait is waits


@pytest.mark.parametrize(
    ("server", "knows"),
    [
        ("Pulsar Server", False), ("Pulsar Server4.2.4", False), ("Pulsar Server5.0.1", True),
        ("Pulsar Server6.0.0-SNAPSHOT", True), ("", False),
    ],
)  # fmt: skip
def test_a_broker_without_a_version_counts_as_an_old_one(server: str, knows: bool) -> None:
    assert knows_every_id(server) is knows


def test_a_fault_ends_in_each_line_where_it_was_mended() -> None:
    (stall,) = (one for one in FAULTS if one.source == "apache/pulsar#26236")
    having = "4.0.0", "4.0.12", "4.1.0", "4.1.3", "4.2.0", "4.2.3"
    lacking = "3.3.9", "4.0.13", "4.2.4", "4.3.0", "5.0.0", "6.0.0"
    for versions, has in ((having, True), (lacking, False)):
        for text in versions:
            version = Version.of(text)
            assert version is not None
            assert stall.is_in(version) is has, text
    assert tuple(map(str, stall.mended)) == ("4.0.13", "4.2.4", "5.0.0")


def test_the_doctor_names_each_fault_with_the_releases_that_mend_it() -> None:
    old = judge_faults("4.0.8")
    assert {finding.level for finding in old} == {Level.WARNING}
    assert any(
        "apache/pulsar#26635" in one.text and one.advice == "Mended in 5.0.0." for one in old
    )
    (lasting,) = (one for one in judge_faults("5.0.1") if "apache/pulsar#25592" in one.text)
    assert lasting.advice.startswith("No release has mended it. Keep a consumer on every range")
    assert not any("Mended" in finding.advice for finding in judge_faults("5.0.1"))
    sinks = {finding.text for finding in judge_faults("4.0.8", of_sinks=True)}
    assert any("apache/pulsar#25953" in text for text in sinks)
    assert not sinks & {finding.text for finding in old}
    assert judge_faults("5.0.1", of_sinks=True) == judge_faults("master") == []


def test_the_doctor_says_which_releases_are_tested() -> None:
    finding = judge_version("4.2.0")
    assert finding.level is Level.OK
    assert all(version in finding.text for version in TESTED)


def test_each_tested_release_has_a_line() -> None:
    assert [version.line for text in TESTED if (version := Version.of(text))] == list(LINES)


def test_the_page_of_brokers_has_each_fault_and_the_tested_releases_that_have_it() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE))
    for fault in FAULTS:
        having = [text for text in TESTED if fault in faults_of(text, of_sinks=fault.of_sinks)]
        assert rows[f"{fault.text} ({fault.source})"] == (", ".join(having) or "none")
