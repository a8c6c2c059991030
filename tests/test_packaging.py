"""Every source folder is in the list of packages, and every module of it reaches the wheel."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
NOT_SHIPPED = {"benchmarks", "build", "demo", "dist", "docs", "examples", "tests"}
"""Top-level folders that are no part of the package."""


def source_folders() -> dict[str, Path]:
    """Package name → folder, for every folder that holds Python files and is not `NOT_SHIPPED`."""
    found = {}
    for top in sorted(ROOT.iterdir()):
        if (
            top.is_dir()
            and top.name[0] not in "._"
            and top.name not in NOT_SHIPPED
            and top.suffix != ".egg-info"
        ):
            for folder in (top, *(p for p in sorted(top.rglob("*")) if p.is_dir())):
                if any(folder.glob("*.py")):
                    parts = folder.relative_to(ROOT).parts
                    name = ".".join(parts if parts[0] == "rematplan" else ("rematplan", *parts))
                    found[name] = folder
    return found


def test_every_folder_is_a_listed_package() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(source_folders())
    for name, folder in source_folders().items():
        assert (folder / "__init__.py").is_file(), f"{name} has no __init__.py"


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), "test files must have names of their own"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for top in {path.relative_to(ROOT).parts[0] for path in source_folders().values()}:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    program = f"import setuptools.build_meta as b; b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    wanted = {
        f"{name.replace('.', '/')}/{file.name}"
        for name, folder in source_folders().items()
        for file in folder.glob("*.py")
    }
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == wanted | {"rematplan/py.typed"}


def test_the_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "rematplan = rematplan.cli:main" in wheel.read(entry_points).decode()
