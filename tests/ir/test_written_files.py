"""The mode of written files: that of the file replaced, else what the process's umask leaves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rematplan.ir.files import write_whole


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("kept", [0o600, 0o644, 0o664, 0o400])
def test_an_existing_file_keeps_its_mode(tmp_path: Path, kept: int) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(kept)
    link.symlink_to(path)
    for name in (path, link):
        write_whole(name, f"new {name.name}")
        assert (path.read_text(), mode(path)) == (f"new {name.name}", kept)
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("umask", "made"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, umask: int, made: int) -> None:
    path, before = tmp_path / "plan.json", os.umask(umask)
    try:
        write_whole(path, b"new")
    finally:
        os.umask(before)
    assert (path.read_bytes(), mode(path)) == (b"new", made)
