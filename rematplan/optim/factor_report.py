"""A report on each Kronecker factor: its size, the kind of its inverse, its effective rank."""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.optim.layer import Layer


@dataclass(frozen=True)
class SideReport:
    """A row of the report: one factor of the weight called ``layer``.

    ``side``: ``A`` (of the inputs) or ``G`` (of the outputs' gradients). ``size``: its number of rows. ``rank``: the
    number of eigenvalues above the damping. ``kind``: the form of its inverse; empty if it has not been inverted yet.
    """

    layer: str
    side: str
    size: int
    rank: int
    kind: str


def rows_of(layer: Layer, damping: float) -> tuple[SideReport, ...]:
    """Return the rows of the factors of a layer that this process has. ``damping``: λ of the layer."""
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
