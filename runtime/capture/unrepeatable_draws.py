"""Refuse forwards whose random numbers a graph cannot repeat: from Python or NumPy, or after a seed, which a trace
makes constants."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import numpy as np

from rematplan.ir import ModelError
from rematplan.runtime.graph.compat import get_torch_obj_rule_map
from rematplan.runtime.graph.generator_states import set_state_of, state_of
from rematplan.runtime.graph.host_generators import seeding_functions

SEEDING = seeding_functions()
_SEEDS = "the model seeds the random numbers, or asks for their seed, which a fixed graph cannot repeat"
_OF_SEEDS = frozenset({name for _, name in SEEDING} | {"set_state", "set_offset", "graphsafe_set_state"})
"""Methods of a generator that seed it, set its state, or return its seed."""


@contextmanager
def no_host_draws(name: str, others: Iterable[Any] = ()) -> Iterator[None]:
    """Raise `ModelError` after a block that drew from generators of Python, NumPy or ``others``, and restore their
    states. If the block raises a `ModelError`, the draws, if any, are reported instead. ``name``: of the model."""
    generators = [random, np.random, *(g for g in others if not isinstance(g, random.SystemRandom))]
    before = [state_of(generator) for generator in generators]
    who = refused = None
    try:
        yield
    except ModelError as error:  # the draws may be the cause
        refused = error
    finally:
        for generator, state in zip(generators, before, strict=True):
            if _content(state_of(generator)) != _content(state):
                who = "Python's random" if hasattr(generator, "getstate") else "numpy.random"
                set_state_of(generator, state)
    if who:
        raise ModelError(
            f"{name}: its forward draws from {who}, which a fixed graph cannot repeat; draw with torch, or draw before "
            f"the call and pass the numbers as an argument"
        )
    if refused:
        raise refused


def _content(state: Any) -> Any:
    """Return a state of `state_of` in a form that ``==`` compares. Arrays become bytes, which takes less time than
    texts; what else is no dictionary or tuple becomes a text."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: _content(value) for name, value in state.items()}
    return tuple(map(_content, state)) if isinstance(state, tuple) else repr(state)


def check_default_generator(names: Collection[str]) -> None:
    """Raise `ModelError` if ``names``, those in a forward's code, have `torch.default_generator` or PyTorch's seeding
    functions, and a method that seeds or returns a seed. Branches that are not taken count."""
    if "default_generator" in names and not _OF_SEEDS.isdisjoint(names):
        raise ModelError(_SEEDS)


@contextmanager
def no_seeding() -> Iterator[None]:
    """Raise `ModelError`, inside the block and in this thread, for calls of the `SEEDING` functions. Functions imported
    before, and methods of `torch.default_generator`, are left to `check_default_generator`."""

    thread = get_ident()  # all threads see the replaced functions

    def refusing(own: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return own(*args, **kwargs)
            raise ModelError(_SEEDS)

        return refused

    # Dynamo caches a table of these functions. Build it before they are replaced, or it would be wrong for good.
    get_torch_obj_rule_map()
    with ExitStack() as stack:
        for owner, name in SEEDING:
            stack.enter_context(patch.object(owner, name, refusing(getattr(owner, name))))
        yield
