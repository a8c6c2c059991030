"""How wrong what inverses bring back has become since the plan was made, followed while a step runs.

Scales change in training, and with them the errors of a chain of inverses: through 24 scales that fall from 0.9 to 0.5
they are a million times as large. A plan's anchors stand where the scales at planning wanted them. So every inverse
passes on, from what it reads to what it gives, the relative error that was predicted and the one that its scales make
of it now; where these are too far apart the step ends with a clear line, not with wrong gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rematplan.ir import ModelError

GROWN, WRONG, HOPELESS = 10.0, 100.0, 0.1
"""An error may be this many times the predicted one; or this many times the default limit of its type, u^(2/3), but not
above a tenth."""

_rows: dict[int, tuple[weakref.ref[Tensor], float, float]] = {}
"""By the address of a storage that an inverse made: it, its predicted error, and its error now."""


def passed_on(reads: Sequence[Tensor], made: Tensor, gain: float, noise: float, drift: float) -> None:
    """Note the errors of what an inverse has made.

    ``gain``, ``noise``: as planned (`planner.inversion_error`). ``drift``: by how much its scales have made the gain
    larger since.

    Raises:
        ModelError: they have made the error too large.
    """
    if not (made.is_floating_point() or made.is_complex()):
        return  # whole numbers are only moved
    rows = [_rows.get(t.untyped_storage().data_ptr()) for t in reads]
    alive = [row for row in rows if row is not None and row[0]() is not None]
    planned = gain * max((row[1] for row in alive), default=0.0) + noise
    now = drift * (gain * max((row[2] for row in alive), default=0.0) + noise)
    usual = (torch.finfo(made.dtype).eps / 2) ** (2 / 3)
    if now > max(GROWN * planned, min(WRONG * usual, HOPELESS)):
        raise ModelError(
            f"scales by which the plan divides have changed since it was made: what it brings back would be wrong by "
            f"{now:.1e}, not by {planned:.1e}; plan again, or without inverses"
        )
    address = made.untyped_storage().data_ptr()
    if address and now:
        _rows[address] = weakref.ref(made, partial(_forget, address)), planned, now


def _forget(address: int, gone: weakref.ref[Tensor]) -> None:
    row = _rows.get(address)
    if row is not None and row[0] is gone:
        del _rows[address]
