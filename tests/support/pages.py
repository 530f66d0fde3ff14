"""Run the code blocks of documentation pages on a real broker.

They run with free ports, in a folder of their own.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from keyshard.testing.devbroker.process import free_port
from tests.support.deadlines import deadline, in_time
from tests.support.machine import ended_early

ROOT = Path(__file__).parents[2]
DEADLINE_S = deadline(300)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code, and the output that its page shows."""

    language: str
    text: str
    output: str
    """The next block of the page, if it is ``text``; else empty."""

    @property
    def lines(self) -> list[str]:
        """The commands of a console block."""
        lines = self.text.splitlines()
        assert all(line.startswith("$ ") for line in lines), lines
        return lines


def blocks_of(page: str) -> list[Block]:
    """The ``console`` and ``python`` blocks of a page. Blocks of other languages are not run."""
    fences = _FENCE.findall((ROOT / page).read_text())
    return [
        Block(language, text, following[1] if following[0] == "text" else "")
        for (language, text), following in zip(fences, [*fences[1:], ("", "")], strict=True)
        if language in ("console", "python")
    ]


@dataclass
class Page:
    """The folder and the names that earlier blocks left."""

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
        """Run a program that must succeed; return its output."""
        process = self.start(text)
        assert process.wait(DEADLINE_S) == 0, self.out(process)
        return self.out(process)

    def show(self, block: Block) -> None:
        """Run a block to its end. The last lines that it prints must be those that its page shows.

        ``...`` in the page stands for any text in a line.
        """
        number = len(self.running)
        if block.language == "python":
            named = re.match(r"# (\w+\.py)\n", block.text)
            file = self.folder / (named[1] if named else f"block{number}.py")
            file.write_text(self.adapted(block.text))
            script = f"exec python {file.name}"
        else:
            commands = [line.removeprefix("$ ") for line in block.lines]
            # The packages are here; test_readme.py asks whether they could be installed.
            commands = [one for one in commands if not one.startswith("pip install")]
            script = "\n".join(["set -e", *commands, "env -0 > environ"])
        result, log = self.folder / f"{number}.out", self.folder / f"{number}.err"
        with result.open("wb") as out, log.open("wb") as errors:
            process = subprocess.Popen(
                ["bash", "-c", self.adapted(script)],
                cwd=self.folder, env=self.environ, stdout=out, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        status = process.wait(DEADLINE_S)
        printed = result.read_text(errors="replace")
        assert status == 0, printed + log.read_text(errors="replace")
        expected = re.escape(block.output.strip()).replace(re.escape("..."), ".*")
        assert re.search(rf"(^|\n){expected}\s*\Z", printed), printed
        if block.language == "console":
            self.take_environ((self.folder / "environ").read_text())

    def take_environ(self, text: str) -> None:
        """Take over environment variables, as ``env -0`` prints them."""
        for pair in filter(None, text.split("\0")):
            name, _, value = pair.partition("=")
            self.environ[name] = value

    def until(self, process: subprocess.Popen[bytes], condition: Callable[[str], object]) -> None:
        """Wait until the output of a running process is as expected."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.out(process)):
            if process.poll() is not None:
                raise ended_early(self.out(process))
            in_time(deadline, self.out(process))
            time.sleep(0.1)

    def end(self, process: subprocess.Popen[bytes], number: int = signal.SIGINT) -> int:
        os.killpg(process.pid, number)
        return process.wait(DEADLINE_S)


@contextmanager
def page_runner(folder: Path) -> Iterator[Page]:
    """Blocks run in this folder. Their processes and their broker end with the context."""
    environ = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("PYSPARK_", "SPARK_", "JAVA_"))
    }  # fmt: skip
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ["PYTHONUNBUFFERED"] = "1"
    environ["RAY_ADDRESS"] = "local"  # not a Ray cluster that already runs
    ports: list[int] = []
    while len(ports) < 3:
        ports.append(free_port(ports))
    with tempfile.TemporaryDirectory(prefix="ks-", ignore_cleanup_errors=True) as sockets:
        # Commands find every source of the user: control sockets of others lie in the usual one.
        environ |= {"TMPDIR": sockets, "XDG_RUNTIME_DIR": sockets}
        port, admin_port, metrics_port = ports
        made = Page(folder, port, admin_port, metrics_port, environ)
        try:
            yield made
        finally:
            for process in made.running:
                if process.poll() is None:
                    made.end(process, signal.SIGKILL)
            stop = ["keyshard", "broker", "stop", "--data", "broker"]
            subprocess.run(stop, cwd=folder, env=environ, check=True)
