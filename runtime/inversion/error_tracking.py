"""Error tracking of recomputed tensors while a step runs.

Scales change during training, and with them the errors of a chain of inverses: through 24 scales that fall
from 0.9 to 0.5, errors grow a million times. A plan's anchors are chosen for the scales at planning time. So
every inverse propagates, from its arguments to its result, both the relative error predicted at planning time
and the error with the present scales. If they differ too much, the step stops with an error instead of
computing wrong gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rematplan.ir import ModelError

GROWN, WRONG, HOPELESS = 10.0, 100.0, 0.1
"""Limits of the present error: this many times the predicted error; or this many times the default limit of
the type, u^(2/3) with u the unit roundoff, but at most a tenth. The larger of the two applies."""

_rows: dict[int, tuple[weakref.ref[Tensor], float, float]] = {}
"""By the address of a storage that an inverse made: a reference to the tensor, its predicted error, and its
present error."""


def passed_on(reads: Sequence[Tensor], made: Tensor, gain: float, noise: float, drift: float) -> None:
    """Record the relative errors of a tensor that an inverse has recomputed: as predicted at planning time, and with
    the present scales.

    Args:
        reads: the inverse's arguments.
        made: the recomputed tensor.
        gain: the factor by which the inverse multiplies a relative error of its arguments, as planned
            (`planner.core.inversion_error`).
        noise: the relative error that the inverse's rounding adds, as planned.
        drift: the factor by which changed scales have increased the gain since planning.

    Raises:
        ModelError: the present error is more than `GROWN` times the predicted one, and also above the limit for the
            tensor's type.
    """
    if not (made.is_floating_point() or made.is_complex()):
        return  # integers are only copied, without error
    rows = [_rows.get(t.untyped_storage().data_ptr()) for t in reads]
    alive = [row for row in rows if row is not None and row[0]() is not None]
    planned = gain * max((row[1] for row in alive), default=0.0) + noise
    now = drift * (gain * max((row[2] for row in alive), default=0.0) + noise)
    usual = (torch.finfo(made.dtype).eps / 2) ** (2 / 3)
    if now > max(GROWN * planned, min(WRONG * usual, HOPELESS)):
        raise ModelError(
            f"scales by which the plan divides have changed since it was made: recomputed tensors would have a "
            f"relative error of {now:.1e}, not {planned:.1e} as planned; plan again, or without inverses"
        )
    address = made.untyped_storage().data_ptr()
    if address and now:
        _rows[address] = weakref.ref(made, partial(_forget, address)), planned, now


def _forget(address: int, gone: weakref.ref[Tensor]) -> None:
    row = _rows.get(address)
    if row is not None and row[0] is gone:
        del _rows[address]
