"""Loads what builds the package: scripts, and hooks without the build backend that loads them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
_INTERFACES = {
    "hatchling.builders.hooks.plugin.interface": "BuildHookInterface",
    "hatchling.metadata.plugin.interface": "MetadataHookInterface",
}


def build_hook(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Return the build hook of ``packaging`` with this name, loaded without hatchling."""
    for interface, base in _INTERFACES.items():
        monkeypatch.setitem(sys.modules, interface, SimpleNamespace(**{base: object}))
    return build_script(name)


def build_script(name: str) -> ModuleType:
    """Return the script of ``packaging`` with this name, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "packaging" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
