"""The knapsack solver against all subsets, and on instances on which it must cut off."""

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematplan.planner import knapsack
from rematplan.planner.knapsack import pack

ITEMS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=9)


@given(ITEMS, st.integers(0, 120))
def test_the_most_value_of_all_subsets(items: list[tuple[int, int]], capacity: int) -> None:
    weights, values = [w for w, _ in items], [float(v) for _, v in items]
    positions = range(len(items))
    subsets = chain.from_iterable(combinations(positions, n) for n in range(len(items) + 1))
    fitting = [s for s in subsets if sum(weights[i] for i in s) <= capacity]
    found = pack(weights, values, capacity)
    assert found.items in fitting
    assert sum(values[i] for i in found.items) == max(sum(values[i] for i in s) for s in fitting)
    assert found.gap == 0
    assert all(values[i] for i in found.items)


def test_cut_off_instances_state_their_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 10**6, 40).tolist()
    values = [w + 10**5 for w in weights]
    capacity = sum(weights) // 2
    exact = pack(weights, values, capacity)
    assert exact.gap == 0
    monkeypatch.setattr(knapsack, "MOST_PAIRS", 8)
    found = pack(weights, values, capacity)
    assert sum(weights[i] for i in found.items) <= capacity
    short = sum(values[i] for i in exact.items) - sum(values[i] for i in found.items)
    assert 0 <= short <= found.gap
