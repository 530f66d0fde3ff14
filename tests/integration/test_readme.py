"""Run the blocks of the README and of the pages behind it, in their order, on a real broker.

They run with other ports, in a folder of their own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from keyshard.testing.verify.file_sink import committed_files
from tests.support.pages import DEADLINE_S, Page, blocks_of, page_runner

PAGES = ("README.md", "docs/handlers.md", "docs/ray.md", "docs/operating.md")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
MESSAGES = 20_000

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.ray]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with page_runner(tmp_path_factory.mktemp("readme")) as made:
        yield made


def rows(text: str) -> int:
    """Sum of the numbers that lines begin with."""
    return sum(map(int, re.findall(r"^(\d+)", text, re.MULTILINE)))


def install(page: Page, lines: list[str]) -> None:
    pip, start, produce, *exports = lines
    page.run(pip)
    assert f"clients  pulsar://127.0.0.1:{page.port}" in page.run(start)
    result = page.run(produce)
    assert f"Published {MESSAGES:,} messages with 500 keys to orders" in result
    export(page, exports)


def export(page: Page, lines: list[str]) -> None:
    script = "; ".join(["set -e", *(line.removeprefix("$ ") for line in lines), "env -0"])
    result = page.run(f"$ {script}")
    page.take_environ(result)
    assert Path(page.environ["JAVA_HOME"], "bin", "java").exists()


def spark(page: Page, text: str) -> None:
    assert page.run(text).endswith(f"{MESSAGES} orders\n")
    files = [file for batch in committed_files(page.folder / "orders").values() for file in batch]
    assert sum(pq.read_metadata(file).num_rows for file in files) == MESSAGES
    assert pq.read_schema(files[0]).names == ["order", "__key", "__publishTime"]


def first_handler(page: Page, text: str) -> None:
    handling = page.start(text)
    page.until(handling, lambda out: out.count("\n") >= MESSAGES)
    assert "k17 " in page.out(handling)
    assert page.end(handling) == 0, "Ctrl-C ends a handler in order"


def first_ray(page: Page, text: str) -> None:
    job = page.start(text)
    page.until(job, lambda out: len(re.findall(r"^k\d+ 100", out, re.MULTILINE)) >= MESSAGES)
    page.end(job)


def handler(page: Page, text: str) -> None:
    handling = page.start(text)
    page.until(handling, lambda out: out.count("\n") >= MESSAGES)
    assert "k17 " in page.out(handling)


def event_loop(page: Page, text: str) -> None:
    iterating = page.start(text)
    page.until(iterating, lambda out: out.count("\n") >= MESSAGES)
    page.end(iterating)


def batches(page: Page, text: str) -> None:
    reading = page.start(text)
    page.until(reading, lambda out: rows(out) == MESSAGES)
    page.end(reading)


def host(page: Page, text: str) -> None:
    assert rows(page.run(text)) == MESSAGES


def history(page: Page, text: str) -> None:
    assert page.run(text) == f"{MESSAGES} orders since yesterday\n0 orders since then\n"
    assert pq.read_metadata(page.folder / "history.parquet").num_rows == MESSAGES


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
    result = []
    for line in lines:
        if "--watch" in line:
            watching = page.start(line)
            page.until(watching, lambda out: "per second: received 0" in out)
        else:
            result.append(page.run(line))
    for text, expected in zip(
        result,
        ["subscription", "billing", "running: 'billing' on", "lane    empty",
         "No handler of 'billing' runs", "10 ranges to 16", "10 ranges to 16",
         "Since the start: 1 moved", "is paused", "receives again", "No parked key matches",
         "No parked key matches",
         "0 dead letters, 0 messages read", "A discard takes 0 dead letters",
         "0 dead letters discarded", "0 dead letters discarded"],
        strict=True,
    ):  # fmt: skip
        assert expected in text
    assert f"completed {MESSAGES:,}" in result[2]
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
    install, spark, first_handler, first_ray,  # README
    handler, event_loop, batches, host, history, memory, memory,  # docs/handlers.md
    ray, dataset,  # docs/ray.md
    look, judge,  # docs/operating.md
]  # fmt: skip
"""The step of each block, in the order of the pages."""


def test_every_block_of_the_pages_is_run() -> None:
    assert len(BLOCKS) == len(STEPS)


@pytest.mark.parametrize("number", range(len(STEPS)), ids=lambda number: STEPS[number].__name__)
def test_a_block_has_the_output_of_the_page(number: int, page: Page) -> None:
    block = BLOCKS[number]
    before = len(page.running)
    STEPS[number](page, block.text if block.language == "python" else block.lines)
    printed = "\n".join(map(page.out, page.running[before:]))
    for line in block.output.splitlines():
        assert re.search(rf"^{any_number(line)}", printed, re.MULTILINE), f"{line}\n{printed}"


def any_number(line: str) -> str:
    """A pattern for a line with other numbers, and any text for ``...``."""
    return re.sub(r"\d+", r"\\d+", re.escape(line).replace(re.escape("..."), ".*"))
