"""Which process owns which factors, and what is sent if a layer has two owners."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rematplan.optim.assignment import by_factor, homes, longest_first, owners
from rematplan.optim.factor import Factor


def side(size: int) -> Factor:
    return Factor(size, (), "cholesky", torch.float32)


SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=100)
@given(SIZES, st.integers(1, 6))
def test_each_factor_has_one_owner_and_few_numbers_are_sent(sizes: list[tuple[int, int]], ranks: int) -> None:
    sides = {str(at): (side(a), side(g)) for at, (a, g) in enumerate(sizes)}
    parts = owners(sides, ranks)
    factors, home = by_factor(parts), homes(sides, parts)
    assert set(factors) == {(name, at) for name in sides for at in (0, 1)}
    assert [name for name, _ in parts] == sorted(name for name, _ in parts)
    for name, (a, g) in sides.items():
        if factors[name, 0] == factors[name, 1] == home[name]:
            assert parts[name, (0, 1)] == home[name]
            continue
        sent = (a, g)[0 if factors[name, 1] == home[name] else 1]
        assert factors[name, 0] != factors[name, 1]
        assert home[name] in (factors[name, 0], factors[name, 1])
        assert sent.size**2 <= a.size * g.size  # of the gradient


@settings(deadline=None, max_examples=100)
@given(SIZES, st.integers(1, 6))
def test_no_process_has_much_more_than_an_even_share_and_the_largest_factor(
    sizes: list[tuple[int, int]], ranks: int
) -> None:
    sides = {str(at): (side(a), side(g)) for at, (a, g) in enumerate(sizes)}
    loads = dict.fromkeys(range(ranks), 0.0)
    for (name, at), owner in by_factor(owners(sides, ranks)).items():
        loads[owner] += sides[name][at].cost
    even = sum(a.cost + g.cost for a, g in sides.values()) / ranks
    largest = max(max(a.cost, g.cost) for a, g in sides.values())
    assert max(loads.values()) <= even + max(largest / 0.9, min(even, 2 * largest))


def test_a_layer_that_takes_most_of_the_time_is_divided() -> None:
    sides = {"wide": (side(30), side(29)), "thin": (side(8), side(30)), "small": (side(4), side(4))}
    assert owners(sides, 1) == {("wide", (0, 1)): 0, ("thin", (0, 1)): 0, ("small", (0, 1)): 0}
    found = owners(sides, 4)
    assert set(found) == {("wide", (0,)), ("wide", (1,)), ("thin", (0, 1)), ("small", (0, 1))}
    assert homes(sides, found)["wide"] == found["wide", (0,)]
    whole = longest_first({name: a.cost + g.cost for name, (a, g) in sides.items()}, 4)
    assert len(set(found.values())) == 4 > len(set(whole.values()))
