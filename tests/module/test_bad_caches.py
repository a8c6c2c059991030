"""A cache that is damaged, read-only, full or written by two processes costs one line of the log: training goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_scripts
from torch import nn

import rematplan
from rematplan.ir.cache_folder import cache_folder, read_cached

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, apart from the machine code of the planner's loops."""
    (tmp_path / "rematplan").mkdir()
    (tmp_path / "rematplan" / "kernels").symlink_to(cache_folder() / "kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rematplan"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def trained(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged of the cache while a module is planned and does a step, whose gradients are eager mode's."""
    caplog.clear()
    plain = network()
    with caplog.at_level("INFO", "rematplan"):
        model = rematplan.plan_module(
            network(),
            (X,),
            budget="90% of activations",
            refine=False,
            strategy=rematplan.Auto(time_limit=0.1),
        )
        model(X).square().mean().backward()
    plain(X).square().mean().backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert model.plan.peak <= model.plan.budget
    said = [r.getMessage() for r in caplog.records if r.name == "rematplan"]
    return [line for line in said if "costs" not in line]


def test_a_good_cache_is_not_mentioned(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert trained(caplog) == []
    assert trained(caplog) == []
    assert len(list(folder.rglob("*.json"))) == 2


def test_a_full_disk(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rematplan.ir.files.os.replace", full)
    said = trained(caplog)
    assert sorted(said) == [
        f"{where} cannot be written, so nothing is kept there for later processes: No space left on device"
        for where in (folder, folder / "plans")
    ]
    assert trained(caplog) == []  # it was said
    assert not list(folder.rglob("*.json*"))


def test_a_read_only_home(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path.mkdir

    def read_only(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.is_relative_to(tmp_path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        made(self, *args, **kwargs)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("rematplan.runtime.costs.profile._AGREE", float("inf"))
    monkeypatch.setattr(Path, "mkdir", read_only)
    said = trained(caplog)
    assert len(said) == 2
    assert all(
        line.endswith(
            " cannot be written, so nothing is kept there for later processes: Read-only file system"
        )
        for line in said
    )


def test_a_folder_that_may_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", forbidden)
        assert read_cached(tmp_path / "costs.json") is None


@pytest.mark.parametrize("kind", ["profile-*.json", "plans/*.json"])
@pytest.mark.parametrize("text", ["{", '{"plans": [[1]], "x": 3}'])
def test_a_damaged_file(folder: Path, caplog: pytest.LogCaptureFixture, kind: str, text: str) -> None:
    trained(caplog)
    (file,) = folder.glob(kind)
    file.write_text(text)
    (line,) = trained(caplog)
    assert line.startswith(f"{file} is damaged")
    assert "\n" not in line
    assert file.read_text() != text  # it was replaced
    assert trained(caplog) == []


def test_two_processes_write_one_file_at_once(folder: Path, tmp_path: Path) -> None:
    writer = Path(__file__).parent / "cache_writer.py"
    both = run_scripts([[writer, str(rank), tmp_path] for rank in range(2)], tmp_path)
    assert [one.status for one in both] == [0, 0], both
    (file,) = (folder / "plans").iterdir()
    assert file.suffix == ".json"
