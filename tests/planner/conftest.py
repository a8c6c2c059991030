"""Fixtures of the planner's tests: random problems."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def problems() -> ModuleType:
    """Makers of training problems."""
    return _load("planner_problems", HERE / "problems.py")


@pytest.fixture(scope="module", autouse=True)
def few_moves_back() -> None:
    """The planner's searches are tested as they are."""
