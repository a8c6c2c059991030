"""Every source folder is in the list of packages, and all its modules are in the wheel and in the source archive."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import rematplan

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
            for folder in (top, *(p for p in sorted(top.rglob("*")) if p.is_dir() and not p.is_symlink())):
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


def copied(source: Path) -> Path:
    """A copy of what a build needs, with the links that the tree has."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for top in {path.relative_to(ROOT).parts[0] for path in source_folders().values()}:
        shutil.copytree(ROOT / top, source / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return source


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a ``wheel`` or an ``sdist``; the one file in ``out``."""
    program = f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", source, tmp_path_factory.mktemp("wheel")))


def modules() -> set[str]:
    """The files of the package, as paths below its import name's parent."""
    return {
        f"{name.replace('.', '/')}/{file.name}"
        for name, folder in source_folders().items()
        for file in folder.glob("*.py")
    }


def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == modules() | {"rematplan/py.typed"}


def test_the_source_archive_holds_every_module(source: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        files = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert modules() <= files
    assert "LICENSE" in files


def test_links_that_arrive_as_text_files_fail_loudly(tmp_path: Path) -> None:
    """So do some programs unpack a ZIP archive of the tree, and Git where it may make no links."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    copied(source)
    for link in [path for path in (source / "rematplan").iterdir() if path.is_symlink()]:
        target = link.readlink()
        link.unlink()
        link.write_text(str(target))
    with pytest.raises(subprocess.CalledProcessError) as failure:
        build("wheel", source, out)
    assert b"package directory" in failure.value.stderr


def test_the_subpackages_are_links_to_the_folders() -> None:
    for name in ("ir", "models", "planner", "runtime"):
        assert (ROOT / "rematplan" / name).readlink() == Path("..", name)


def test_the_version_is_the_installed_one(wheel: zipfile.ZipFile) -> None:
    assert f"rematplan-{rematplan.__version__}" in str(wheel.filename)


def test_the_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "rematplan = rematplan.cli:main" in wheel.read(entry_points).decode()


def test_a_source_tree_that_is_not_installed_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert rematplan.__version__ == "unknown"
