"""The page of the package index, and the content of the package."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from keyshard import Message
from tests.support.build_hooks import ROOT, build_hook


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return build_hook(monkeypatch, "readme_hook")


def test_the_description_has_no_link_that_leads_nowhere(hook: ModuleType) -> None:
    made = hook.ReadmeHook()
    made.root = str(ROOT)
    metadata: dict[str, Any] = {}
    made.update(metadata)
    text = metadata["readme"]["text"]
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link] == []
    assert "All options are in docs/options.md" in " ".join(text.split())
    assert text.count("```") == (ROOT / "README.md").read_text().count("```")


def test_links_of_the_readme_lead_to_files_and_headings() -> None:
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)]*)\)", text):
        path, _, heading = link.partition("#")
        assert "://" in link or (ROOT / path).exists(), link
        headings = [line.strip("# ").lower().replace(" ", "-") for line in text.splitlines()]
        assert not heading or path or heading in headings, link


def test_the_metadata_of_the_package_matches_its_content() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    held = wheel["shared-data"]
    assert all((ROOT / path).exists() for path in held)
    named = re.findall(r"\]\((?!https?:|#)([^)#]*)", (ROOT / "README.md").read_text())
    documents = {path for path in named if path.endswith(".md")}
    assert all(path in held or path.startswith("docs/") for path in documents), documents
    assert {path.removeprefix("docs/") for path in documents} >= {"options.md", "status.md"}
    assert all(held[path] == f"share/doc/keyshard/{path}" for path in held)


def test_every_extra_is_named_and_spark_and_ray_bring_the_schemas() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    pattern = r"^\[project.optional-dependencies\]\n(.*?)^\["
    (table,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    extras = dict(re.findall(r"^(\w+) = \[(.*?)\]$", table, re.MULTILINE | re.DOTALL))
    assert extras.keys() >= {"spark", "ray", "schemas", "broker", "dev"}
    readme = (ROOT / "README.md").read_text()
    assert [name for name in extras if f"| `{name}` |" not in readme] == []
    for name in ("spark", "ray"):
        assert "keyshard[schemas]" in extras[name], f"{name} reads Avro topics, too"


def test_the_handler_of_the_ray_page_takes_a_message_without_a_value() -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = (one for one in blocks if "class Score" in one)
    names: dict[str, Any] = {}
    exec(block[block.index("class Score") : block.index("with ray")], {"Message": Message}, names)  # noqa: S102
    score = names["Score"]()
    assert score(Message.for_test(b"01")) == (None, 1.0)
    assert score(Message.for_test(None)) == (None, 0)
