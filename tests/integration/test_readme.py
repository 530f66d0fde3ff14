"""The blocks of the README, as they stand and in the order of the page, on a real broker.

It is run with other ports, in a folder of its own. Of ``make demo`` and ``make test``
only what they would run is looked at: they are long, and this is part of the second.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from keyshard.testing.devbroker.ports import free_port
from keyshard.testing.verify.file_sink import committed_files

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```(console|python)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)
MESSAGES = 20_000
DEADLINE_S = 120.0

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.ray]


@dataclass
class Page:
    """Where the blocks run, and what those before have left."""

    folder: Path
    port: int
    admin_port: int
    metrics_port: int
    environ: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def adapted(self, text: str) -> str:
        """The text of a block, for the ports of this test."""
        urls = (
            f"--service-url pulsar://127.0.0.1:{self.port} "
            f"--admin-url http://127.0.0.1:{self.admin_port} "
        )
        ports = f"--port {self.port} --admin-port {self.admin_port} --data broker"
        if "service_url" not in text:
            where = f'service_url="pulsar://127.0.0.1:{self.port}"'
            text = text.replace('KeyShardSource("orders", ', f'KeyShardSource("orders", {where}, ')
        for old, new in [
            ("127.0.0.1:6650", f"127.0.0.1:{self.port}"),
            ("127.0.0.1:8080", f"127.0.0.1:{self.admin_port}"),
            ("metrics_port=9464", f"metrics_port={self.metrics_port}"),
            ("keyshard broker start", f"keyshard broker start {ports}"),
            ("keyshard broker stop", "keyshard broker stop --data broker"),
            ("keyshard produce ", f"keyshard produce {urls}"),
            ("keyshard doctor ", f"keyshard doctor {urls}"),
            ("keyshard check --live ", f"keyshard check --live {urls}"),
            # The packages are here: only whether they would do is asked.
            ("pip install '.[", f"python -m pip install --dry-run -q '{ROOT}["),
        ]:
            text = text.replace(old, new)
        return text

    def start(self, text: str) -> subprocess.Popen[bytes]:
        """Run a command of a shell, or a Python program; its output goes to ``<number>.out``."""
        number = len(self.running)
        if not text.startswith("$ "):
            (self.folder / f"block{number}.py").write_text(self.adapted(text))
            text = f"$ exec python block{number}.py"
        with (self.folder / f"{number}.out").open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", self.adapted(text).removeprefix("$ ")],
                cwd=self.folder, env=self.environ, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def out(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"{self.running.index(process)}.out").read_text(errors="replace")

    def run(self, text: str) -> str:
        """Run to the end, which must be a good one; returns the output."""
        process = self.start(text)
        assert process.wait(DEADLINE_S) == 0, self.out(process)
        return self.out(process)

    def until(self, process: subprocess.Popen[bytes], condition: Callable[[str], object]) -> None:
        """Wait until the output of a process, which goes on, is as expected."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.out(process)):
            assert process.poll() is None, self.out(process)
            assert time.monotonic() < deadline, self.out(process)
            time.sleep(0.1)

    def end(self, process: subprocess.Popen[bytes], number: int = signal.SIGINT) -> int:
        os.killpg(process.pid, number)
        return process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    environ = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("PYSPARK_", "SPARK_", "JAVA_"))
    }  # fmt: skip
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ["PYTHONUNBUFFERED"] = "1"
    environ["RAY_ADDRESS"] = "local"  # not another one that runs here, or is remembered
    ports: list[int] = []
    while len(ports) < 3:
        ports.append(free_port(ports))
    with tempfile.TemporaryDirectory(prefix="ks-", ignore_cleanup_errors=True) as folder:
        # Commands find every source of the user: control sockets of others lie in the usual one.
        environ |= {"TMPDIR": folder, "XDG_RUNTIME_DIR": folder}
        made = Page(tmp_path_factory.mktemp("readme"), *ports, environ)
        yield made
        for process in made.running:
            if process.poll() is None:
                made.end(process, signal.SIGKILL)
        stop = ["keyshard", "broker", "stop", "--data", "broker"]
        subprocess.run(stop, cwd=made.folder, env=environ, check=True)


def rows(text: str) -> int:
    """Sum of the numbers that lines begin with."""
    return sum(map(int, re.findall(r"^(\d+)", text, re.MULTILINE)))


def make(page: Page, lines: list[str]) -> None:
    for line in lines:
        target = line.split("#")[0].split()[-1]
        planned = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert {"demo": "-m examples.demo", "test": "-m pytest"}[target] in planned


def install(page: Page, lines: list[str]) -> None:
    pip, start, produce = lines
    page.run(pip)
    assert f"clients  pulsar://127.0.0.1:{page.port}" in page.run(start)
    told = page.run(produce)
    assert f"Published {MESSAGES:,} messages with 500 keys to orders" in told


def export(page: Page, lines: list[str]) -> None:
    script = "; ".join(["set -e", *(line.removeprefix("$ ") for line in lines), "env -0"])
    told = page.run(f"$ {script}")
    page.environ.update(pair.split("=", 1) for pair in told.split("\0") if pair)
    assert Path(page.environ["JAVA_HOME"], "bin", "java").exists()


def spark(page: Page, text: str) -> None:
    query = page.start(text)
    parquet = page.folder / "orders"

    def committed() -> list[Path]:
        return [file for batch in committed_files(parquet).values() for file in batch]

    def written(_out: str) -> bool:
        return sum(pq.read_metadata(file).num_rows for file in committed()) >= MESSAGES

    page.until(query, written)
    assert pq.read_schema(committed()[0]).names == [
        "order", "__key", "__publishTime",
    ]  # fmt: skip
    page.end(query, signal.SIGTERM)


def handler(page: Page, text: str) -> None:
    handling = page.start(text)
    page.until(handling, lambda out: out.count("\n") >= MESSAGES)
    assert "k17 " in page.out(handling)


def batches(page: Page, text: str) -> None:
    reading = page.start(text)
    page.until(reading, lambda out: rows(out) == MESSAGES)
    page.end(reading)


def host(page: Page, text: str) -> None:
    assert rows(page.run(text)) == MESSAGES


def ray(page: Page, text: str) -> None:
    scoring = page.start(text)
    page.until(scoring, lambda out: len(re.findall(r"^k\d+ ", out, re.MULTILINE)) >= MESSAGES)
    page.end(scoring)
    assert (page.folder / "scores.json").exists()


def dataset(page: Page, text: str) -> None:
    assert re.search(rf"^{MESSAGES} messages since yesterday \[\{{", page.run(text), re.MULTILINE)


def memory(page: Page, text: str) -> None:
    (page.folder / "test_orders.py").write_text(text)
    assert "1 passed" in page.run("$ python -m pytest -q test_orders.py")


def look(page: Page, lines: list[str]) -> None:
    (handling,) = (one for one in page.running if one.poll() is None)
    watching: subprocess.Popen[bytes] | None = None
    told = []
    for line in lines:
        if "--watch" in line:
            watching = page.start(line)
            page.until(watching, lambda out: "per second: received 0" in out)
        else:
            told.append(page.run(line))
    for text, expected in zip(
        told,
        ["subscription", "billing", "running: 'billing' on", "lane    empty", "10 ranges to 16",
         "10 ranges to 16", "Key 'k17' is not parked.", "0 keys on the way out",
         "0 dead letters given up", "0 dead letters given up"],
        strict=True,
    ):  # fmt: skip
        assert expected in text
    assert f"completed {MESSAGES:,}" in told[2]
    assert page.end(handling) == 0, "Ctrl-C ends a handler in order"
    assert watching is not None
    assert watching.wait(DEADLINE_S) == 0
    assert page.out(watching).endswith("has stopped.\n")
    assert (page.folder / "billing.json").exists()


def judge(page: Page, lines: list[str]) -> None:
    live, history, stop = lines
    assert "10,000 rows of 10,000 messages" in page.run(live)
    assert "BROKEN" not in page.run(history)
    assert "Stopped the broker" in page.run(stop)


STEPS: list[Callable[..., None]] = [
    make, install, export, spark, handler, batches, host, ray, dataset, memory, look, judge,
]  # fmt: skip
"""What each block must do, in the order of the page."""


def test_every_block_of_the_page_is_run() -> None:
    assert len(BLOCKS) == len(STEPS)


@pytest.mark.parametrize("number", range(len(STEPS)), ids=lambda number: STEPS[number].__name__)
def test_a_block_does_what_the_page_says(number: int, page: Page) -> None:
    language, text = BLOCKS[number]
    if language == "python":
        STEPS[number](page, text)
    else:
        lines = text.splitlines()
        assert all(line.startswith("$ ") for line in lines)
        STEPS[number](page, lines)
