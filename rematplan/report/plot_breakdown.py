"""A bar diagram of the time of a training iteration with SGD and with K-FAC on several numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from rematplan.optim.iteration_model import PARTS, Iteration
from rematplan.report.plot import COLOURS, save_png

BAR = 0.38
GREY = "#BBBBBB"


def save_breakdown(path: Path, title: str, pairs: Sequence[tuple[Iteration, Iteration]]) -> None:
    """Draw the time of a training iteration as stacked bars in a PNG file. A failure leaves no partial file.

    Each part of the time (forward, backward, communication, ...) has a colour. For each number of devices, the left bar
    is SGD and the right bar is K-FAC. ``pairs``: for each number of devices, the modelled iteration of SGD and that of
    K-FAC.
    """
    figure = Figure(figsize=(max(7.0, 1.0 * len(pairs) + 3), 5), layout="constrained")
    axes = figure.add_subplot()
    colours = (*COLOURS, GREY)
    for side, offset in enumerate((-BAR / 2 - 0.01, BAR / 2 + 0.01)):
        ones = [pair[side] for pair in pairs]
        places = [at + offset for at in range(len(pairs))]
        bottoms = [0.0] * len(pairs)
        for part, colour in zip(PARTS, colours, strict=True):
            heights = [one.times[part] / 1000 for one in ones]
            label = part if side else None
            axes.bar(
                places, heights, BAR, bottoms, color=colour, hatch=None if side else "///", label=label,
                edgecolor="white", linewidth=0.3,
            )  # fmt: skip
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(pairs)), [str(pair[0].ranks) for pair in pairs])
    axes.set_xlabel("devices (left, hatched: SGD; right: K-FAC)")
    axes.set_ylabel("milliseconds an iteration")
    axes.set_title(title, parse_math=False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper")
    save_png(figure, path)
