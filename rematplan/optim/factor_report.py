"""A report on each Kronecker factor: its size, the form of its inverse, its effective rank."""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.optim.layer import Layer


@dataclass(frozen=True)
class SideReport:
    """One Kronecker factor, as a row of a report.

    ``layer``: the name of the layer's weight. ``side``: ``A`` (of the inputs) or ``G`` (of the outputs' gradients).
    ``size``: the factor's number of rows. ``rank``: the number of its eigenvalues above the damping. ``kind``: the form
    of its inverse, such as ``dense`` or ``spectral``; empty if it has not been inverted yet.
    """

    layer: str
    side: str
    size: int
    rank: int
    kind: str


def rows_of(layer: Layer, damping: float) -> tuple[SideReport, ...]:
    """Return a report of each Kronecker factor of a layer whose moving average is stored in this process.

    ``damping``: λ of the layer, from which the damping of each factor follows. A report counts the eigenvalues above
    the factor's damping.
    """
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
