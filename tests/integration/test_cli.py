"""The command line: errors are one sentence, and help is light."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keyshard.testing.devbroker import DEFAULT_VERSION, registry
from tests.helpers import DEADLINE_S
from tests.support.command_line import run
from tests.support.error_text import has_error_form

pytestmark = pytest.mark.usefixtures("own_cache")


def test_bad_input_is_one_error_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in [
        (("produce", "t", "--keys", "0"), "keys is 0; it must be from 1"),
        (("produce", "t", "--batching", "no"), "it must be one of"),
        (("produce", "t", "--partitions", "0"), "partitions is 0; it must be from 1"),
        (("produce", "a/b", "--messages", "1"), "is not a topic name"),
        (("produce", "t", "--admin-url", "nowhere"), "Write http://host:port"),
        (("broker", "start", "--version", "new"), "is not a Pulsar version"),
        (("broker", "start", "--port", "70000"), "1 to 65535"),
    ]:
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("[KEYSHARD_BAD_OPTION] ")
        assert text in err
        assert has_error_form(err), err


def test_a_broker_that_is_not_there_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "produce", "t", "--admin-url", "http://127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith("[KEYSHARD_BROKER_UNAVAILABLE] ")
    assert has_error_form(err), err


def test_unknown_options_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "produce", "t", "--nonsense")
    assert code == 2
    assert "nonsense" in err


def test_broker_commands_report_a_broker_that_does_not_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = ("--data", str(tmp_path / "data"))
    code, out, _ = run(capsys, "broker", "status", *data)
    assert code == 1
    assert "No broker runs on" in out
    code, out, _ = run(capsys, "broker", "stop", *data)
    assert code == 0
    assert "No broker runs on" in out
    code, _, err = run(capsys, "broker", "logs", *data)
    assert code == 1
    assert err.startswith("[KEYSHARD_DEVBROKER] The log")


def test_a_broker_is_found_where_its_data_is_not_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    brokers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in folders]
    threads = [threading.Thread(target=one.wait) for one in brokers]
    for thread in threads:  # as init does with a broker that was detached
        thread.start()
    try:
        for started, folder in zip(brokers, folders, strict=True):
            registry.remember(started.pid, DEFAULT_VERSION, 6650, 8080, folder)
        code, out, _ = run(capsys, "broker", "status")
        assert (code, out.count("Running.")) == (0, 2)
        for left in (folders, folders[1:]):
            code, out, err = run(capsys, "broker", "stop")
            assert (code, out) == (1, ""), "a broker of somebody else's folder is not stopped"
            for folder in left:
                assert f"at port 6650: keyshard broker stop --data {folder}" in err
            code, out, _ = run(capsys, "broker", "stop", "--data", str(left[0]))
            assert (code, out) == (0, f"Stopped the broker on {left[0]}.\n")
        assert run(capsys, "broker", "status")[:2] == (1, "No broker runs.\n")
    finally:
        for started, thread in zip(brokers, threads, strict=True):
            started.kill()
            thread.join(DEADLINE_S)


def test_the_broker_of_the_default_folder_is_stopped_without_naming_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = [registry.data_dir(None), tmp_path / "other"]
    brokers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in folders]
    threads = [threading.Thread(target=one.wait) for one in brokers]
    for thread in threads:
        thread.start()
    try:
        for started, folder in zip(brokers, folders, strict=True):
            registry.remember(started.pid, DEFAULT_VERSION, 6650, 8080, folder)
        code, out, _ = run(capsys, "broker", "stop")
        assert (code, out) == (0, f"Stopped the broker on {folders[0]}.\n")
        assert [one.data_dir for one in registry.running()] == [str(folders[1])]
    finally:
        for started, thread in zip(brokers, threads, strict=True):
            started.kill()
            thread.join(DEADLINE_S)


def test_the_log_is_printed_from_its_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "broker.log").write_text("one\ntwo\nthree\n")
    code, out, _ = run(capsys, "broker", "logs", "-n", "2", "--data", str(tmp_path))
    assert (code, out) == (0, "two\nthree\n")


COMMANDS = (
    "broker", "produce", "check", "ps", "status", "explain", "dead-letters", "rescale", "doctor",
)  # fmt: skip


@pytest.mark.parametrize("arguments", [[], ["broker", "start"], *([name] for name in COMMANDS)])
def test_help_loads_neither_client_nor_spark(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from keyshard.cli import main\n"
        "try:\n"
        f"    main({[*arguments, '--help']!r})\n"
        "finally:\n"
        "    loaded = {'pulsar', '_pulsar', 'pyspark', 'pyarrow', 'httpx'} & set(sys.modules)\n"
        "    assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "Usage" in done.stdout


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keyshard", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("keyshard ")
