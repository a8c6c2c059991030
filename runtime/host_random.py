"""Random numbers that a fixed graph cannot draw: those from outside of PyTorch, which are constants once a forward is
traced, and those after the forward has put PyTorch's own generator somewhere else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo

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


@contextmanager
def no_seeding() -> Iterator[None]:
    """A block that leaves the state of PyTorch's generator to the draws.

    Raises:
        ModelError: it seeds it, or gives it another state.
    """

    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise ModelError("the forward seeds the random numbers, which a fixed graph cannot do again")

    # Dynamo looks for these functions once in a while; what it took for them here would be wrong for good.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    with ExitStack() as stack:
        for owner in (torch, torch.random):
            for name in ("manual_seed", "seed", "set_rng_state"):
                stack.enter_context(patch.object(owner, name, refused))
        yield
