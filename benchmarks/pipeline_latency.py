"""Utilisation of pipelines over slow links, in the simulator."""

from __future__ import annotations

from pathlib import Path

from pictures import picture

from rematplan.pipeline.schedules import schedule_named
from rematplan.planner.pipeline.timeline import Link, StageTimes, replay
from rematplan.report.plot import COLOURS, MARKERS


def latency(_quick: bool, folder: Path | None) -> None:
    """Simulate 1F1B and the dataflow schedule over links of rising latency, and print their utilisation.

    ``folder``: where a picture is saved; None: nowhere.
    """
    ranks, microbatches, times = 8, 256, [StageTimes(1, 2)] * 8
    hops = [k / 20 for k in range(0, 31)]
    used: dict[str, list[float]] = {"1f1b": [], "dataflow": []}
    for hop in hops:
        for name, row in used.items():
            row.append(
                1 - replay(schedule_named(name, ranks, microbatches, hop=hop), times, Link(3 * hop)).bubble
            )
    # The ideal for any order of actions: P − 1 forwards and hops precede the last rank's work of M units, and P − 1
    # backwards and hops follow. With 1F1B the first rank has work for P micro-batches while one travels and returns.
    ideal = [microbatches / (microbatches + (ranks - 1) * (1 + 2 * hop)) for hop in hops]
    plain = [ranks / (ranks + 2 * (ranks - 1) * hop) for hop in hops]
    bounds = {"bound of 1F1B": [min(pair) for pair in zip(ideal, plain, strict=True)], "ideal": ideal}
    for at in (0, 2, 10, 20):
        print(
            f"link {hops[at]:.1f}: " + ", ".join(f"{n} {row[at]:.3f}" for n, row in (used | bounds).items())
        )
    if folder:
        figure, axes = picture(
            "time of a message ÷ time of a stage", "utilisation, 8 stages, 256 micro-batches"
        )
        for k, (name, row) in enumerate(used.items()):
            axes.plot(hops, row, color=COLOURS[k], marker=MARKERS[k], markevery=5, label=name)
        for name, row in bounds.items():
            axes.plot(
                hops, row, color="black", linestyle=":" if name == "ideal" else "--", linewidth=1, label=name
            )
        axes.legend()
        figure.savefig(folder / "dataflow-latency.png", dpi=130)
