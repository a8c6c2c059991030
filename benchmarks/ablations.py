"""Turn each part of the planner's searches off, on twelve problems, and print what it buys.

    python benchmarks/ablations.py [--only NAME ...] [--moves 200000] [--seeds 2]

Each row of `PARTS` is a part with the change that turns it off. All searches count moves, so the figures do not depend
on the machine. For each part: the mean overhead within two budgets, in points of the step's time above that of
the whole search; and the least peak found, in percent above. *Scatter* is the largest
difference between two seeds of the whole search, as the mean over the problems: what buys less cannot be told from
luck. A part that does not concern a problem changes nothing there; *touched* counts the others. With fewer moves,
searches have one round, and what concerns later rounds changes nothing. All rows take hours; ``--only`` selects some.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any
from unittest import mock

from networks import DEVICE
from random_layered import PUBLISHED, random_layered

from rematplan.api import Sizes, load_step, problem
from rematplan.ir import InfeasibleBudget, TrainingGraph
from rematplan.planner.annealing import annealing_search
from rematplan.planner.annealing.cooling_schedule import CoolingSchedule, Ordering
from rematplan.planner.auto import auto_session, smallest_peak_search
from rematplan.planner.auto.auto_session import AutoSession
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.auto.smallest_peak_search import PEAK_SEARCH, find_smallest_peak
from rematplan.planner.core.effort import Effort
from rematplan.planner.core.search_rules import SearchRules
from rematplan.planner.strategies.store_all import no_recompute

SHARES = (0.4, 0.15)
"""The budgets: this share of the way from the least peak that the whole search finds to that without recomputation."""

Off = Callable[[], Any]
"""Makes the context in which a part is off."""


def schedule(**changes: object) -> Off:
    """Return what changes fields of both cooling schedules."""

    def off() -> Any:
        stack = ExitStack()
        for name in ("WITH_PHASES", "WITHOUT_PHASES"):
            stack.enter_context(
                mock.patch.object(annealing_search, name, replace(getattr(annealing_search, name), **changes))
            )
        return stack

    return off


def patched(owner: object, name: str, value: object) -> Off:
    """Return what replaces an attribute."""
    return lambda: mock.patch.object(owner, name, value)


PARTS: Mapping[str, Off] = {
    "plan of the minimum cut": patched(AutoSession, "take_cut_plan", lambda self: False),
    "starts of block strategies": patched(auto_session, "starting_plans", lambda *a: ()),
    "nested plans if none fits": patched(auto_session, "nested_plans", lambda *a: ()),
    "eviction if none fits": patched(AutoSession, "evicted", lambda self: no_recompute(self.graph)),
    "lowering the peak if none fits": patched(AutoSession, "lower_the_peak", lambda self: None),
    "search without inverses first": patched(AutoSession, "plain_first", False),
    "sequences of the bound's programs": patched(annealing_search.Search, "_suggested", lambda self, k: ()),
    "descents between rounds": patched(annealing_search.Search, "_descends", lambda self, k: False),
    "gentle rounds": patched(CoolingSchedule, "is_gentle", lambda self, k, fits: False),
    "cooler reheated rounds": schedule(reheat=1.0),
    "rounds of Luby's lengths": patched(CoolingSchedule, "length", lambda self, k, fits: 1.0),
    "stage that looks for an order": patched(CoolingSchedule, "looks_for_order", lambda *a: False),
    "order for a looser budget": schedule(loose=1.0),
    "other variant in every fourth round": schedule(explored=10**9),
    "stage that shakes the order": schedule(shake=Ordering(0.0, (1.0, 1.0))),
    "prices set by the schedule": schedule(priced_share=0.0),
    "eviction for the least peak": patched(smallest_peak_search._Lowering, "_evict", lambda self: None),
    "descents for the least peak": patched(smallest_peak_search._Lowering, "_descend", lambda *a: None),
    "leaps for the least peak": patched(smallest_peak_search, "PEAK_SEARCH", replace(PEAK_SEARCH, leaps=())),
    "search back in time": patched(smallest_peak_search, "plan_near_least", lambda *a: None),
    "blocks for the least peak": patched(smallest_peak_search, "leanest_plans", lambda *a: ()),
}


def problems() -> Iterator[TrainingGraph]:
    """Yield networks of all kinds, one with inverses among them, and graphs without phases."""
    zoo = {
        "unet": Sizes(batch=8, image=224),
        "resnet18": Sizes(batch=32),
        "googlenet": Sizes(batch=32),
        "mobilenet_v2": Sizes(batch=32),
        "gpt12": Sizes(depth=6),
        "vit_s": Sizes(batch=32),
        "swin_t": Sizes(batch=8),
        "lstm": Sizes(tokens=8),
        "revnet38": Sizes(),
    }
    for name, sizes in zoo.items():
        loaded = load_step(name, sizes=sizes, weightless=True, inverses=name.startswith("rev"))
        yield replace(problem(loaded, DEVICE), name=name)
    for ops, seed in ((100, 0), (100, 1), (250, 0)):
        yield replace(random_layered(ops, *PUBLISHED[ops], seed), name=f"layered {ops}, {seed}")


@dataclass(frozen=True)
class Figures:
    """What a search finds: the overhead within each of `SHARES`, in percent, and the least peak in bytes."""

    overheads: tuple[float, ...]
    least: int


def budgets(graph: TrainingGraph, moves: int) -> tuple[int, ...]:
    """Return the budgets of a problem, in bytes."""
    least, peak = least_peak(graph, moves, 0), no_recompute(graph).peak
    return tuple(least + int(share * (peak - least)) for share in SHARES)


def least_peak(graph: TrainingGraph, moves: int, seed: int) -> int:
    """Return the least peak that the search finds, in bytes."""
    return find_smallest_peak(replace(graph), Effort(math.inf, moves), (), rules=SearchRules(seed)).peak


def figures(graph: TrainingGraph, within: Sequence[int], moves: int, seed: int) -> Figures:
    """Search copies of a problem, of which nothing is known, within each of the budgets ``within``."""
    found = []
    for budget in within:
        try:
            plan = Auto(moves=moves, seed=seed).plan(replace(graph), budget)
            found.append(100 * plan.estimate.overhead)
        except InfeasibleBudget:
            found.append(math.inf)
    return Figures(tuple(found), least_peak(graph, moves, seed))


def difference(one: Figures, whole: Figures) -> tuple[float, float]:
    """Return the mean difference of overheads in points, and that of the least peaks in percent. A budget that either
    search does not meet is left out: the least peak shows it."""
    pairs = zip(one.overheads, whole.overheads, strict=True)
    points = [a - b for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    return fmean(points) if points else 0.0, 100 * (one.least / whole.least - 1)


def mean_of(pairs: Sequence[tuple[float, float]]) -> str:
    """Return both means of differences as columns."""
    return "".join(f"{fmean(column):>10.3f}" for column in zip(*pairs, strict=True))


def main() -> None:
    """Search all problems with everything, then without each part, and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", default=list(PARTS), metavar="PART")
    parser.add_argument("--moves", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    graphs, seeds = list(problems()), range(args.seeds)
    within = {g.name: budgets(g, args.moves) for g in graphs}

    def searched() -> dict[tuple[str, int], Figures]:
        return {(g.name, s): figures(g, within[g.name], args.moves, s) for g in graphs for s in seeds}

    whole = searched()
    print(f"{'without':>36} {'points':>9} {'peak %':>9} {'touched':>8}")
    scatter = []
    for g in graphs:
        apart = [difference(whole[g.name, a], whole[g.name, b]) for a in seeds for b in seeds]
        scatter.append((max(one[0] for one in apart), max(one[1] for one in apart)))
    print(f"{'(scatter between seeds)':>36}{mean_of(scatter)}", flush=True)
    for name in args.only:
        with PARTS[name]():
            found = searched()
        touched = {key[0] for key, one in found.items() if one != whole[key]}
        apart = [difference(one, whole[key]) for key, one in found.items()]
        print(f"{name:>36}{mean_of(apart)} {len(touched):>8}", flush=True)


if __name__ == "__main__":
    main()
