"""Limits that keep modules readable; lists of exceptions only shrink.

A list names each exception with its size at most. A test also fails if an exception has become
unnecessary, or too large.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("keyshard", "spark_adapter", "ray_adapter")

FILE_LINES_MAX = 500
LARGE_FILES = {
    "keyshard/broker/memory/cluster.py": 568,
    "keyshard/broker/wire/connection.py": 510,
    "keyshard/control.py": 520,
    "keyshard/core/lanes/lanes.py": 505,
    "keyshard/handlers/run.py": 535,
    "keyshard/workers/host.py": 529,
}
"""Files with more lines, and the most that each may have."""

FUNCTION_LINES_MAX = 70
"""Most lines of a function, without its docstring."""
LONG_FUNCTIONS = {
    "keyshard.observe.status.status": 83,
}
"""Longer functions, and the most lines that each may have."""

SMALL_MODULE_LINES = 90
SMALL_MODULES = {
    "keyshard.broker.memory.deduplication": "a decision, beside the locks of its importer",
    "keyshard.broker.memory.delayed": "a decision, beside the locks of its importer",
    "keyshard.broker.wire.keep_alive": "a decision that tests check without a socket",
    "keyshard.cli.config": "one command per file",
    "keyshard.cli.pause": "one command per file",
    "keyshard.cli.ui": "one command per file",
    "keyshard.coordinator.kept_client": "tests run it without batches",
    "keyshard.coordinator.topic_watches": "has its own limits and threads of the broker",
    "keyshard.observe.status_table": "loaded only in a notebook",
    "spark_adapter.stream_writer": "loads Spark's classes of streams",
}
"""Modules with fewer lines and one importer, and the reason why each is a file of its own."""


@cache
def modules() -> Mapping[str, Path]:
    """Return the files of the product by module, without generated ones and empty packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[dotted.removesuffix(".__init__")] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def lines(module: str) -> int:
    return len(modules()[module].read_text().splitlines())


def imports(module: str, *, at_run_time: bool) -> set[str]:
    """Return the modules of the product that a module imports.

    Args:
        module: The importing module.
        at_run_time: Whether only imports count that run with the module itself.
    """
    found = set()
    for node in _nodes(tree(module), skip_later=at_run_time):
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                inner = f"{node.module}.{one.name}"
                found.add(inner if inner in modules() else node.module)
        elif isinstance(node, ast.Import):
            found.update(one.name for one in node.names)
    return (found & modules().keys()) - {module}


def _nodes(node: ast.AST, *, skip_later: bool) -> Iterator[ast.AST]:
    """Yield all nodes; optionally none of functions and of blocks for type checkers."""
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        if not (skip_later and later):
            yield child
            yield from _nodes(child, skip_later=skip_later)


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function, without its docstring."""
    count = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        count -= (first.end_lineno or 0) - first.lineno + 1
    return count


def test_no_file_is_too_long() -> None:
    large = {
        str(path.relative_to(ROOT)): lines(module)
        for module, path in modules().items()
        if lines(module) > FILE_LINES_MAX
    }
    assert _unlisted(large, LARGE_FILES) == {}, "split the file by its nouns"
    assert LARGE_FILES.keys() - large.keys() == set(), "take the file off the list"


def test_no_function_is_too_long() -> None:
    long = {
        f"{module}.{node.name}": function_lines(node)
        for module in modules()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if function_lines(node) > FUNCTION_LINES_MAX
    }
    assert _unlisted(long, LONG_FUNCTIONS) == {}, "split the function"
    assert LONG_FUNCTIONS.keys() - long.keys() == set(), "take the function off the list"


def _unlisted(found: Mapping[str, int], listed: Mapping[str, int]) -> dict[str, int]:
    """Return those that are not listed, or larger than their list allows."""
    return {name: size for name, size in found.items() if size > listed.get(name, 0)}


def test_no_small_module_has_one_importer() -> None:
    """A newcomer opens one file instead of two."""
    importers = defaultdict(set)
    for module in modules():
        for imported in imports(module, at_run_time=False):
            importers[imported].add(module)
    small = {
        module
        for module, path in modules().items()
        if path.name not in ("__init__.py", "__main__.py")
        if lines(module) < SMALL_MODULE_LINES and len(importers[module]) == 1
    }
    assert small - SMALL_MODULES.keys() == set(), "merge the module into its importer"
    assert SMALL_MODULES.keys() - small == set(), "take the module off the list"


def test_no_modules_import_one_another_in_a_circle() -> None:
    left = {module: imports(module, at_run_time=True) for module in modules()}
    while ready := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in ready:
            del left[module]
    assert left == {}, "these modules import one another, or a module of the circle"


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_its_role(package: str) -> None:
    silent = [
        module
        for module, path in modules().items()
        if module.partition(".")[0] == package and path.name == "__init__.py"
        if not ast.get_docstring(tree(module))
    ]
    assert silent == [], "say the role of the package in one sentence"
