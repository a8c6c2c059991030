"""The folders' walls: what each may import, of rematplan and of others. The table is the architecture's."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Wall:
    """``inside``: the parts of rematplan that a folder may import. ``outside``: the third-party packages."""

    inside: tuple[str, ...]
    outside: tuple[str, ...]


WALLS = {
    "ir": Wall(("rematplan.ir",), ("numpy", "networkx", "onnx", "onnx_ir")),
    "planner": Wall(("rematplan.ir", "rematplan.planner"), ("numpy", "numba", "networkx", "ortools")),
    "runtime": Wall(
        ("rematplan.ir", "rematplan.runtime", "rematplan.planner.core"), ("ml_dtypes", "numpy", "torch")
    ),
    "models": Wall(("rematplan.models",), ("torch",)),
    "rematplan": Wall(("rematplan",), ("matplotlib", "numpy", "onnx", "rich", "torch")),
}

ONLY_IN = {
    "onnx": ("ir/onnx/*.py", "rematplan/onnx_backend.py"),
    "onnx_ir": ("ir/onnx/*.py",),
    "ortools": (
        "planner/ilp/solver.py",
        "planner/ilp/highs_process.py",
        "planner/bounds/max_flow.py",
        "planner/ilp/steps.py",
    ),
    "matplotlib": ("rematplan/plot*.py",),
}
"""Third-party packages that stay behind one or a few doors."""

FILES = sorted(p.relative_to(ROOT) for folder in WALLS for p in (ROOT / folder).rglob("*.py"))


@cache
def imported(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and full name of every import of a file, wherever it stands in it."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            # `from rematplan import ir` names a subpackage; `from rematplan.ir import Op` a thing in one.
            inner = (
                [f"{node.module}.{a.name}" for a in node.names]
                if node.module == "rematplan"
                else [node.module]
            )
            yield from ((node.lineno, str(name)) for name in inner)


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 40
    assert {f.parts[0] for f in FILES} == set(WALLS)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_stay_within_the_walls(file: Path) -> None:
    wall = WALLS[file.parts[0]]
    for line, name in imported(ROOT / file):
        if within(name, ("rematplan",)):
            assert within(name, wall.inside), f"{file}:{line} imports {name}"
        elif name.split(".")[0] not in sys.stdlib_module_names:
            assert within(name, wall.outside), f"{file}:{line} imports {name}"


@pytest.mark.parametrize("package", ONLY_IN)
def test_third_party_doors(package: str) -> None:
    for file in FILES:
        for line, name in imported(ROOT / file):
            if within(name, (package,)):
                allowed = any(fnmatch(file.as_posix(), pattern) for pattern in ONLY_IN[package])
                assert allowed, f"{file}:{line} imports {name}, which belongs in {ONLY_IN[package]}"


def test_every_package_that_is_imported_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=!~;\[ ]", text)[0].replace("-", "_") for text in project["dependencies"]}
    used = {name.split(".")[0] for file in FILES for _, name in imported(ROOT / file)}
    assert used - set(sys.stdlib_module_names) - {"rematplan"} <= declared
