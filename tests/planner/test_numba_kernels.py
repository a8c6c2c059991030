"""Machine code that numba keeps on disk outlives changes of the source."""

from pathlib import Path

from rematplan.planner.caches import numba_kernels


def test_an_index_that_names_a_renamed_type_counts_as_empty():
    def load():
        raise AttributeError("Can't get attribute 'Renamed'")

    assert numba_kernels._readable(load) == {}
    assert numba_kernels._readable(lambda: {"known": 1}) == {"known": 1}


def test_the_digest_covers_the_kernels_of_all_rooms():
    planner = Path(numba_kernels.__file__).parents[1]
    rooms = {f.parent.name for f in planner.rglob("*.py") if "numba_kernels import" in f.read_text()}
    assert {"annealing", "blocks"} <= rooms
    assert numba_kernels._sources() == numba_kernels._sources.__wrapped__()
