"""A report on each Kronecker factor: its size, the form of its inverse, its effective rank."""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.optim.layer import Layer


@dataclass(frozen=True)
class SideReport:
    """One Kronecker factor, as a row of a report."""

    layer: str
    """The name of the layer's weight."""
    side: str
    """``A`` (inputs) or ``G`` (outputs' gradients)."""
    size: int
    """The number of rows."""
    rank: int
    """The number of eigenvalues above the damping."""
    kind: str
    """The form of its inverse, such as ``dense``; empty before the first inversion."""


def rows_of(layer: Layer, damping: float) -> tuple[SideReport, ...]:
    """Return a report of each factor of a layer whose average is in this process. ``damping``: λ of the layer."""
    if layer.a.total is None and layer.g.total is None:
        return ()
    return tuple(
        SideReport(
            layer.name,
            name,
            side.size,
            side.effective_rank(own),
            "" if side.inverse is None else side.inverse.kind,
        )
        for name, side, own in zip("AG", layer.sides, layer.dampings(damping), strict=True)
        if side.total is not None
    )
