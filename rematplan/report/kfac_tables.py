"""Tables that compare the time and memory of training with SGD and with K-FAC on several numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from rematplan.ir import show_bytes

if TYPE_CHECKING:  # help is shown without waiting for torch
    from rematplan.optim.iteration_model import Iteration

Pairs = Sequence[tuple["Iteration", "Iteration"]]
"""For each number of devices, the modelled iteration of SGD and that of K-FAC."""


def breakdown_table(title: str, pairs: Pairs) -> Table:
    """Return a table of the milliseconds of a training iteration: the total, and the time of each part (forward,
    backward, communication, ...).

    It has one row for SGD and one for K-FAC for each number of devices. ``pairs``: for each number of devices, the
    modelled iteration of SGD and that of K-FAC.
    """
    table = Table(title=f"{title}: milliseconds an iteration", box=box.SIMPLE, title_justify="left")
    table.add_column("devices", justify="right")
    table.add_column("")
    for part in ("total", *pairs[0][0].times):
        table.add_column(
            part.replace("communication", "comm.").replace("normalisation", "norms"), justify="right"
        )
    for pair in pairs:
        for name, one in zip(("SGD", "K-FAC"), pair, strict=True):
            times = (one.total, *one.times.values())
            table.add_row(str(one.ranks), name, *(_milliseconds(t) for t in times))
    return table


def memory_table(title: str, pairs: Pairs, peaks: tuple[int, int]) -> Table:
    """Return a table of the memory that SGD and K-FAC need on one device: the device with the most optimizer state.

    Each row is for one number of devices. It has the bytes of the optimizer's state, and the sum of the state and the
    step's peak.

    ``pairs``: for each number of devices, the modelled iteration of SGD and that of K-FAC. ``peaks``: the step's peak
    in bytes with SGD and with K-FAC.
    """
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("devices", "SGD state", "K-FAC state", "SGD in all", "K-FAC in all"):
        table.add_column(column, justify="right")
    for pair in pairs:
        states = [one.state for one in pair]
        whole = [state + peak for state, peak in zip(states, peaks, strict=True)]
        table.add_row(str(pair[0].ranks), *(show_bytes(n) for n in (*states, *whole)))
    return table


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f}" if microseconds else "–"
