"""ARCHITECTURE.md names every thread, pool and wait without a limit that the code has."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("keyshard", "spark_adapter", "ray_adapter")
BY_HAND = {"keyshard/threads.py", "spark_adapter/workers/executors.py"}
"""Files that start threads without ``begin``: the helper itself, and a job of Spark, whose thread
has to inherit the local properties of its parent."""
NO_THREADS = ("keyshard/testing/", "keyshard/cli/")
"""Folders of programs that are not part of a running source."""
OTHER_NAMES = {
    "keyshard-*", "keyshard-*-*", "keyshard-*-range-*", "keyshard-client-log", "keyshard-work",
    "keyshard-*-parked", "keyshard-decimal", "keyshard-spark-*", "keyshard-workers",
    "keyshard-workers-*",
}  # fmt: skip
"""Literals that name a file, a consumer, a process or a job; some of them name a thread as well."""
STARTERS = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "to_thread"}


@cache
def modules() -> dict[str, ast.Module]:
    found = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    return {path: tree for path, tree in found.items() if not path.startswith(NO_THREADS)}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.attr if isinstance(function, ast.Attribute) else ""
                yield path, function.id if isinstance(function, ast.Name) else name, node


def section() -> str:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    return text.partition("\n## Threads\n")[2].partition("\n## ")[0]


def named(node: ast.AST) -> str:
    """A literal as a pattern: ``*`` stands for what comes in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(named(one) if isinstance(one, ast.Constant) else "*" for one in node.values)
    return ""


def names_in_code() -> set[str]:
    inside = {
        id(part)
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    found = {
        named(node)
        for tree in modules().values()
        for node in ast.walk(tree)
        if id(node) not in inside
    }
    return {name for name in found if re.fullmatch(r"keyshard-[a-z*:-]+", name)}


def test_threads_start_in_one_place() -> None:
    by_hand = {path for path, name, _ in calls() if name in STARTERS | {"InheritableThread"}}
    assert by_hand == BY_HAND


def test_the_tables_name_every_thread_and_no_other() -> None:
    rows = re.findall(r"^\| (`keyshard-[^|]*) \|", section(), re.MULTILINE)
    output = {name for row in rows for name in re.findall(r"`(keyshard-[^`]+)`", row)}
    code = names_in_code()
    assert output - code == set(), "the table names threads that are not there"
    assert code - output - OTHER_NAMES == set(), "threads are missing in the table"


def test_every_thread_and_pool_has_a_limit_in_the_tables() -> None:
    for row in re.findall(r"^\| `keyshard-.*$", section(), re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert all(cells), row


def test_the_table_counts_every_wait_without_a_limit() -> None:
    waits = Counter(path for path, name, call in calls() if _has_no_limit(name, call))
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \| (.+) \|$", section(), re.MULTILINE)
    assert {path: int(count) for path, count, _ in rows} == dict(waits)


def _has_no_limit(name: str, call: ast.Call) -> bool:
    given = len(call.args) + len(call.keywords)
    if not isinstance(call.func, ast.Attribute):
        return False
    if name == "wait_for":
        return given < 2 and isinstance(call.args[0], ast.Lambda)
    return name in {"wait", "join", "acquire", "accept", "recv_bytes"} and not given
