"""The parts of the development broker that need no broker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keyshard.config.connection import Connection
from keyshard.errors import ConfigError, DevBrokerError
from keyshard.testing.devbroker import DEFAULT_VERSION, DevBroker, process, registry
from keyshard.testing.devbroker.devbroker import render_config
from keyshard.testing.devbroker.process import LogWatch, StartResult, wait_until_ready
from tests.helpers import wait_until

pytestmark = pytest.mark.usefixtures("own_cache")


def test_settings_replace_lines_and_are_added() -> None:
    text = render_config("# a=0\na=1\nb = 2\nab=3\n a=4\n", {"a": "9", "c": "x=y"})
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == ["b = 2", "ab=3", "a=9", "c=x=y"]


@pytest.mark.parametrize(("name", "value"), [("a b", "1"), ("a", "1\nb=2"), ("", "1")])
def test_settings_that_cannot_stand_in_the_file_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="is not valid"):
        DevBroker(settings={name: value})


def test_ports_are_checked() -> None:
    with pytest.raises(ConfigError, match="1 to 65535"):
        DevBroker(port=0)
    with pytest.raises(ConfigError, match="must differ"):
        DevBroker(port=6650, admin_port=6650)


def test_a_broker_with_tls_only_needs_the_argument_tls() -> None:
    with pytest.raises(ConfigError, match=r"(?s)webServicePort is empty.*tls=True"):
        DevBroker(settings={"webServicePort": ""})
    DevBroker(settings={"webServicePort": ""}, tls=True)


def test_free_ports_are_outside_the_ephemeral_range() -> None:
    found = [process.free_port() for _ in range(20)]
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in found if low <= port <= high]
    assert all(process.port_is_free(port) for port in found)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a port be held for a server")
def test_a_port_is_given_to_one_and_a_server_may_listen_on_it() -> None:
    port = process.free_port()
    assert not _another_process_may_hold(port)
    with socket.create_server((process.LOOPBACK, port)):
        assert not process.port_is_free(port)
    process.give_back(port)
    assert _another_process_may_hold(port)


def _another_process_may_hold(port: int) -> bool:
    code = f"from keyshard.testing.devbroker import process; print(process._hold({port}))"
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr, "a port is given back at the end of a process"
    return done.stdout == "True\n"


def test_a_broker_names_a_port_that_was_taken_meanwhile(tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    log.write_text("bind(..) failed with error(-98): Address already in use\n")

    def outcome(start: int) -> StartResult:
        watch = LogWatch(log, start)
        nobody = Connection("pulsar://127.0.0.1:1", "http://127.0.0.1:1")
        return wait_until_ready(nobody, returncode=lambda: 1, log=watch, deadline=0)

    assert outcome(0) is StartResult.TAKEN
    assert outcome(log.stat().st_size) is StartResult.DIED


def test_a_broker_has_its_addresses_before_it_runs(tmp_path: Path) -> None:
    broker = DevBroker(port=1234, admin_port=1235, data_dir=tmp_path)
    assert broker.service_url == "pulsar://127.0.0.1:1234"
    assert broker.admin_url == "http://127.0.0.1:1235"
    assert broker.pid is None
    assert not broker.is_running()
    assert repr(broker) == f"<DevBroker {DEFAULT_VERSION} on 1234, {tmp_path}: not running>"


def test_a_data_directory_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    def prepare(version: str) -> str:
        DevBroker(version, data_dir=tmp_path)._prepare(tmp_path)
        found = json.loads((tmp_path / "devbroker.json").read_text())
        return str(found["pulsar"])

    (tmp_path / "devbroker.json").write_text('{"bookie_port": 1}')
    assert [prepare(one) for one in ("4.0.8", "4.2.4", "4.0.8")] == ["4.0.8", "4.2.4", "4.2.4"]
    assert prepare("5.0.1") == "5.0.1"
    with pytest.raises(DevBrokerError, match=r"Pulsar 5\.0\.1 has written .* 4\.2\.4 cannot read"):
        prepare("4.2.4")
    assert prepare("5.0.1") == "5.0.1"


@pytest.mark.parametrize("optimised", [False, True])
def test_only_an_optimised_broker_uses_the_full_jit_compiler(
    tmp_path: Path, optimised: bool
) -> None:
    broker = DevBroker(data_dir=tmp_path, optimised=optimised)
    command = broker._command(tmp_path, tmp_path)
    assert ("-XX:TieredStopAtLevel=1" in command) is not optimised


LOST = (
    "Lock on resource /ledgers/available/127.0.0.1:1 was invalidated. state Valid",
    "Lock on resource was invalidated {path=/ledgers/available/bk-0, state=Valid}",
)
"""The same message of Pulsar 4 and of Pulsar 5."""
OTHER = (
    "Lock on resource /loadbalance/b was invalidated. state Valid",
    "Lock on resource was invalidated {path=/loadbalance/b, state=Valid}",
)


@pytest.mark.parametrize(("lost", "other"), [*zip(LOST, OTHER, strict=True)])
def test_a_storage_that_loses_its_registration_is_recognised(
    tmp_path: Path, lost: str, other: str
) -> None:
    log = tmp_path / "broker.log"
    line = f"x INFO - {lost}\n"
    log.write_text(line * 5)
    watch = LogWatch(log, log.stat().st_size)
    assert not watch.stuck()
    with log.open("a") as file:
        file.write(f"{other}\n" * 9)
        file.write(line * 2 + line[:40])
    assert not watch.stuck()
    with log.open("a") as file:
        file.write(line[40:])
    assert watch.stuck()


def sleeper(tmp_path: Path, *, deaf: bool = False, detached: bool = False) -> process.BrokerProcess:
    script = "trap '' TERM; " if deaf else ""
    command = ["/bin/sh", "-c", f"{script}echo up; exec sleep 600"]
    log = tmp_path / "log"
    started = process.BrokerProcess(command, log)
    if detached:
        started.let_go()
    wait_until(lambda: log.read_text() == "up\n")
    return started


@pytest.mark.parametrize("deaf", [False, True])
def test_stop_also_ends_a_process_that_ignores_it(tmp_path: Path, deaf: bool) -> None:
    running = sleeper(tmp_path, deaf=deaf)
    assert running.returncode() is None
    running.stop(timeout_s=0.1 if deaf else 10.0)
    assert running.returncode() == -(signal.SIGKILL if deaf else signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)


def test_kill_returns_when_the_group_is_gone(tmp_path: Path) -> None:
    running = sleeper(tmp_path)
    running.kill()
    assert running.returncode() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)
    running.kill()


def test_a_broker_process_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from keyshard.testing.devbroker.process import BrokerProcess\n"
        "log, data = map(Path, sys.argv[1:])\n"
        "command = ['/bin/sh', '-c', 'exec sleep 600']\n"
        "print(BrokerProcess(command, log, remove_if_orphaned=data).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "log"), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert process.start_ticks(pid) is not None
        parent.kill()
    wait_until(lambda: process.start_ticks(pid) is None)
    wait_until(lambda: not data.exists())


@pytest.mark.parametrize("ready", [False, True])
def test_a_detached_broker_outlives_its_starter_once_it_is_ready(
    tmp_path: Path, ready: bool
) -> None:
    """A start that was ended left a broker behind that no command knew of."""
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from keyshard.testing.devbroker import devbroker\n"
        "from keyshard.testing.devbroker.process import StartResult\n"
        "class Slow(devbroker.DevBroker):\n"
        "    def _command(self, home, java):\n"
        "        return ['/bin/sh', '-c', 'echo $$; exec sleep 600']\n"
        "def wait(*_, **__):\n"
        "    print('waits', flush=True)\n"
        "    if sys.argv[2] == 'False': time.sleep(600)\n"
        "    return StartResult.READY\n"
        "devbroker.wait_until_ready = wait\n"
        "data = Path(sys.argv[1])\n"
        "Slow('4.0.8', 6650, 8080, data, detached=True)._launch(data, data, 0, 0.0)\n"
        "print(flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "broker.log"
    command = [sys.executable, "-c", script, str(tmp_path), str(ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"waits\n"
        wait_until(lambda: log.read_text().endswith("\n"))
        pid = int(log.read_text())
        if ready:
            parent.stdout.readline()
        parent.terminate()
    try:
        if ready:
            time.sleep(0.5)
            assert process.start_ticks(pid) is not None
        else:
            wait_until(lambda: process.start_ticks(pid) is None)
    finally:
        process.kill_group(pid)


def test_a_record_of_another_process_is_not_believed(tmp_path: Path) -> None:
    folder = registry.data_dir(tmp_path / "data")
    assert registry.find(folder) is None
    record = registry.remember(os.getpid(), "4.0.8", 1, 2, folder)
    assert registry.find(folder) == record
    wait_until(lambda: process.start_ticks(os.getpid()) == record.started)
    path = next((tmp_path / "cache" / "brokers").iterdir())
    path.write_text(path.read_text().replace(f'"{record.started}"', '"1"'))
    assert registry.find(folder) is None
    assert not path.exists()
    path.write_text("{")
    assert registry.find(folder) is None


def test_a_recorded_process_is_stopped(tmp_path: Path) -> None:
    running = sleeper(tmp_path, detached=True)
    record = registry.remember(running.pid, "4.0.8", 1, 2, tmp_path)
    registry.stop(record)
    assert registry.find(tmp_path) is None
    assert running.returncode() == -signal.SIGTERM


def test_a_dead_process_is_not_remembered(tmp_path: Path) -> None:
    running = sleeper(tmp_path)
    running.kill()
    with pytest.raises(DevBrokerError, match="ended immediately"):
        registry.remember(running.pid, "4.0.8", 1, 2, tmp_path)
