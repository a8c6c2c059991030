"""A block that draws from a generator of Python or NumPy is refused, and the generator's state is as before."""

import random
from typing import Any

import numpy as np
import pytest

from rematplan.ir import ModelError
from rematplan.runtime.capture.unrepeatable_draws import no_host_draws
from rematplan.runtime.graph.generator_states import state_of

KINDS = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
GENERATORS: dict[str, Any] = {
    "random": random,
    "numpy.random": np.random,
    "random.Random": random.Random(0),
    "RandomState": np.random.RandomState(0),
    **{kind.__name__: np.random.Generator(kind(0)) for kind in KINDS},
}


@pytest.mark.parametrize("count", [1, 624])
@pytest.mark.parametrize("name", GENERATORS)
def test_a_draw_is_refused_and_undone(name: str, count: int) -> None:
    generator = GENERATORS[name]
    before = repr(state_of(generator))
    with no_host_draws("net", [generator]):
        pass
    with pytest.raises(ModelError, match="net: its forward draws from"), no_host_draws("net", [generator]):
        [generator.random() for _ in range(count)]
    assert repr(state_of(generator)) == before


def test_a_normal_number_in_store_is_part_of_the_state() -> None:
    generator = np.random.RandomState(0)
    generator.standard_normal()
    with pytest.raises(ModelError, match="draws from"), no_host_draws("net", [generator]):
        generator.standard_normal()
