"""Tracking, while a step runs, of the errors of tensors that inverses recompute.

Scales change during training: if 24 in a chain fall from 0.9 to 0.5, the last error grows a million times. A step
stops if an error differs too much from the planned one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rematplan.ir import ModelError

GROWN, WRONG, HOPELESS = 10.0, 100.0, 0.1
"""Limits of the error with the present scales. It may be at most `GROWN` times the predicted error, or at most the
limit of the tensor's type, whichever is larger. The limit of the type is `WRONG` times u^(2/3), with u the unit
roundoff, but at most `HOPELESS`."""

_rows: dict[int, tuple[weakref.ref[Tensor], float, float]] = {}
"""By the address of a storage that an inverse has recomputed: a reference to the tensor, its error predicted at
planning time, and its error with the present scales."""


def passed_on(reads: Sequence[Tensor], made: Tensor, gain: float, noise: float, drift: float) -> None:
    """Record two relative errors of a recomputed tensor: as predicted at planning time, and with the present scales,
    which multiply the inverse's errors by ``drift``. An error is ``gain`` times the largest one read, plus ``noise``.
    `ModelError` if the present one is too large; integers have no errors."""
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
