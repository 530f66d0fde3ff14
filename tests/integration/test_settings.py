"""Settings of files and the environment, in programs and commands on a real broker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keyshard import KeyShardSource, Message, read_settings
from keyshard.testing import run_until_idle
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.support.deadlines import deadline

pytestmark = pytest.mark.broker


def test_programs_and_commands_connect_as_the_settings_say(
    dev_broker: DevBroker, topic_name: str, tmp_path: Path
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
    produce(Workload(50, keys=5), dev_broker.service_url, topic_name)
    (tmp_path / "client.conf").write_text(
        f"brokerServiceUrl={dev_broker.service_url}\nwebServiceUrl=http://127.0.0.1:1\n"
    )
    (tmp_path / "keyshard.toml").write_text(
        '[connection]\nclient_conf = "client.conf"\n'
        '[source]\nsubscription = "settings"\nstarting_position = "earliest"\n[run]\nlanes = 2\n'
    )
    own = {
        "KEYSHARD_CONFIG": str(tmp_path / "keyshard.toml"),
        "KEYSHARD_ADMIN_URL": dev_broker.admin_url,
        "KEYSHARD_TOPICS": topic_name,
    }
    settings = read_settings(environ=own)
    seen: list[Message] = []
    source = KeyShardSource(**settings.for_source())
    status = run_until_idle(source, seen.append, **settings.for_run())
    assert (len(seen), status["lanes"], status["subscription"]) == (50, 2, "settings")

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "keyshard", *arguments]
        done = subprocess.run(
            command, env={**os.environ, **own}, capture_output=True, text=True,
            timeout=deadline(120), check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    assert "environment KEYSHARD_ADMIN_URL" in run("config", "show")
    # It asks the admin interface of the environment, about the broker of the file.
    doctor = run("doctor", "--topic", topic_name, "--subscription", "settings")
    assert "settings" in doctor
    assert "KEYSHARD_" not in doctor, doctor
