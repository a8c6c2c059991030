"""The cache of compiled loops is valid only for the present source."""

import errno
import os
from pathlib import Path

import pytest

from rematplan.planner.caches import numba_kernels


def test_a_cache_index_with_an_unknown_type_counts_as_empty():
    def load():
        raise AttributeError("Can't get attribute 'Renamed'")

    assert numba_kernels._readable(load, Path("index")) == {}
    assert numba_kernels._readable(lambda: {"known": 1}, Path("index")) == {"known": 1}


def test_the_digest_covers_the_kernels_of_all_rooms():
    planner = Path(numba_kernels.__file__).parents[1]
    rooms = {f.parent.name for f in planner.rglob("*.py") if "numba_kernels import" in f.read_text()}
    assert {"annealing", "blocks"} <= rooms
    assert numba_kernels._sources() == numba_kernels._sources.__wrapped__()


def increased(a: int) -> int:
    return a + 1


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A cache that holds machine code of `increased`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert numba_kernels.compiled(increased)(1) == 2
    return tmp_path


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_machine_code_is_compiled_again(cached, kind, caplog):
    (file,) = cached.rglob(f"*.{kind}")
    file.write_bytes(file.read_bytes()[:-3])
    with caplog.at_level("INFO", "rematplan"):
        assert numba_kernels.compiled(increased)(1) == 2
    (line,) = [r.getMessage() for r in caplog.records]
    assert "is damaged" in line
    loop = numba_kernels.compiled(increased)
    assert numba_kernels.are_compiled([loop])
    assert loop(1) == 2
    assert loop.stats.cache_hits


def test_a_full_disk_costs_a_compilation(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", full)
    loop = numba_kernels.compiled(increased)
    with caplog.at_level("INFO", "rematplan"):
        assert loop(1) == 2
        assert loop(1.5) == 2.5
    assert [r.getMessage() for r in caplog.records] == [
        "compiled loops cannot be kept for later processes: No space left on device"
    ]
    assert numba_kernels.are_compiled([loop])


def test_machine_code_in_a_read_only_folder_is_used(cached, monkeypatch, caplog):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", read_only)
    loop = numba_kernels.compiled(increased)
    assert numba_kernels.are_compiled([loop])
    with caplog.at_level("INFO", "rematplan"):
        assert loop(1) == 2
    assert loop.stats.cache_hits
    assert not caplog.records
    assert loop(1.5) == 2.5  # other code is compiled


def test_code_for_another_processor_does_not_count(cached, monkeypatch):
    loop = numba_kernels.compiled(increased)
    assert numba_kernels.are_compiled([loop])
    monkeypatch.setattr(type(loop.targetctx.codegen()), "magic_tuple", lambda _: ("another",))
    assert not numba_kernels.are_compiled([loop])
