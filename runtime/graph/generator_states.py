"""The states of the random number generators of PyTorch, Python and NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

# Bound here, because a capture replaces the attributes of `torch`, to refuse forwards that call them.
_GET, _SET = torch.get_rng_state, torch.set_rng_state
_GET_CUDA, _SET_CUDA = torch.cuda.get_rng_state, torch.cuda.set_rng_state
Generator: TypeAlias = "torch.device | str"
"""A global random number generator: that of a device in PyTorch, or `PYTHON` or `NUMPY`."""
PYTHON, NUMPY = "python", "numpy"
States: TypeAlias = dict[Any, Any]
"""The states of generators (`Generator`)."""


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


def states_of(generators: Iterable[Generator]) -> States:
    """Return the states of generators."""
    return {one: _state(one) for one in generators}


def all_states() -> States:
    """Return the states of all global generators: PyTorch's for the CPU and, if CUDA is initialised, for each CUDA
    device; Python's; NumPy's."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    devices = (torch.device("cpu"), *(torch.device("cuda", at) for at in range(count)))
    return states_of((*devices, PYTHON, NUMPY))


def set_states(states: States) -> None:
    """Set generators to these states."""
    for one, state in states.items():
        if one == PYTHON:
            random.setstate(state)
        elif one == NUMPY:
            np.random.set_state(state)
        else:
            load_rng(one)(state)


def _state(one: Generator) -> Any:
    if isinstance(one, torch.device):
        return save_rng(one)()
    return random.getstate() if one == PYTHON else np.random.get_state()


@contextmanager
def states_restored(generators: Iterable[Generator]) -> Iterator[None]:
    """Restore the states of generators after the block."""
    states = states_of(generators)
    try:
        yield
    finally:
        set_states(states)


def state_of(generator: Any) -> Any:
    """Return the state of a generator object of PyTorch, Python or NumPy, or of a module that has a global one."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def set_state_of(generator: Any, state: Any) -> None:
    """Set a generator object, or a module's global one, to a state of `state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if hasattr(generator, "setstate") else generator.set_state)(state)


@contextmanager
def kept_generators(generators: Iterable[Any]) -> Iterator[None]:
    """Restore the states of generator objects after the block, also if it raises. `random.SystemRandom`, which has no
    state, is left out."""
    states = [(one, state_of(one)) for one in generators if not isinstance(one, random.SystemRandom)]
    try:
        yield
    finally:
        for one, state in states:
            set_state_of(one, state)
