"""The statistics of a planned module as a source."""

from __future__ import annotations

from torch import nn

from rematplan.ir import UsageError
from rematplan.optim.source import Source


def source_of(model: nn.Module) -> Source:
    """The source that a planned module is.

    Raises:
        UsageError: the module is not planned with statistics.
    """
    raise UsageError(f"a {type(model).__name__} gives no Kronecker statistics: name what does, source=…")
