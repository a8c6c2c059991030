"""Random numbers that a forward draws outside of PyTorch: once it is traced, they are constants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rematplan.ir import ModelError


@contextmanager
def no_host_draws(name: str) -> Iterator[None]:
    """A block that leaves the generators of Python and NumPy as they were.

    Raises:
        ModelError: it drew from one; the message begins with ``name``.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
        who = "Python's random" if random.getstate() != python else None
        if str(np.random.get_state()) != str(numpy):
            who = "numpy.random"
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    if who:
        raise ModelError(
            f"{name}: its forward draws from {who}, which a fixed graph cannot do again; draw with torch"
        )
