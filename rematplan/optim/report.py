"""What is known of each factor: its size, how it is inverted, its effective rank."""

from __future__ import annotations

from dataclasses import dataclass

from rematplan.optim.layer import Layer


@dataclass(frozen=True)
class SideReport:
    """A factor of the weight ``layer``: ``side`` is A (inputs) or G (outputs' gradients), of ``size`` rows.

    ``rank``: eigenvalues above the side's damping. ``kind``: the form of its inverse; empty before the first.
    """

    layer: str
    side: str
    size: int
    rank: int
    kind: str


def rows_of(layer: Layer, damping: float) -> tuple[SideReport, ...]:
    """Both factors of a layer; none before its first statistics."""
    if layer.a.total is None or layer.g.total is None:
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
    )
