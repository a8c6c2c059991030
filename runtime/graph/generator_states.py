"""The states of the random number generators of PyTorch, Python and NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

# Bound here, because a capture replaces the attributes of `torch`, to refuse forwards that call them.
_GET, _SET = torch.get_rng_state, torch.set_rng_state
_GET_CUDA, _SET_CUDA = torch.cuda.get_rng_state, torch.cuda.set_rng_state
PYTHON, NUMPY = "python", "numpy"
_HOMES: Mapping[str, Any] = {PYTHON: random, NUMPY: np.random}
"""The modules that have the global generators of these names."""
Generator: TypeAlias = Any
"""A random number generator: a `torch.device` for PyTorch's global one there, `PYTHON` or `NUMPY` or their module for
its global one, or a generator object of one of the three."""
States: TypeAlias = dict[Any, Any]
"""The states of global generators, by device or name."""


def save_rng(device: torch.device) -> Callable[[], Any]:
    """Return a function without arguments that returns the state of the device's default random number generator."""
    if device.type == "cuda":
        return lambda: _GET_CUDA(device)
    return _GET


def load_rng(device: torch.device) -> Callable[[Any], None]:
    """Return a function that sets the device's default random number generator to the state that it is called with."""
    if device.type == "cuda":
        return lambda state: _SET_CUDA(state, device)
    return _SET


def state_of(generator: Generator) -> Any:
    """Return the state of a generator."""
    if isinstance(generator, torch.device):
        return save_rng(generator)()
    home = _HOMES[generator] if isinstance(generator, str) else generator
    if isinstance(home, np.random.Generator):
        return home.bit_generator.state
    return home.getstate() if hasattr(home, "getstate") else home.get_state()


def set_state_of(generator: Generator, state: Any) -> None:
    """Set a generator to a state of `state_of`."""
    home = _HOMES[generator] if isinstance(generator, str) else generator
    if isinstance(home, torch.device):
        load_rng(home)(state)
    elif isinstance(home, np.random.Generator):
        home.bit_generator.state = state
    else:
        (home.setstate if hasattr(home, "setstate") else home.set_state)(state)


def states_of(generators: Iterable[torch.device | str]) -> States:
    """Return the states of global generators."""
    return {one: state_of(one) for one in generators}


def global_generators() -> tuple[torch.device | str, ...]:
    """Return all global generators: PyTorch's for the CPU and, if CUDA is initialised, for each CUDA device; Python's;
    NumPy's."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    devices = (torch.device("cpu"), *(torch.device("cuda", at) for at in range(count)))
    return (*devices, PYTHON, NUMPY)


def set_states(states: States) -> None:
    """Set global generators to these states."""
    for one, state in states.items():
        set_state_of(one, state)


@contextmanager
def states_restored(generators: Iterable[Generator]) -> Iterator[None]:
    """Restore the states of generators after the block, also if it raises. `random.SystemRandom`, which has no state,
    is left out."""
    states = [(one, state_of(one)) for one in generators if not isinstance(one, random.SystemRandom)]
    try:
        yield
    finally:
        for one, state in states:
            set_state_of(one, state)
