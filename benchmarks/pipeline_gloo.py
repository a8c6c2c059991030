"""Planned pipelines in gloo processes on one machine: measured peaks against the predicted ones, and bit-equality with
one process."""

from __future__ import annotations

import argparse
import copy
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from pipeline_memory import UntiedGPT
from torch import distributed, multiprocessing, nn

import rematplan
from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.models import build, example_inputs
from rematplan.pipeline.run_step import step_in_one_process
from rematplan.pipeline.schedules import VIRTUAL
from rematplan.pipeline.torch_stages import torch_stage
from rematplan.planner.pipeline import rank_search
from rematplan.planner.pipeline.rank_search import RankSearchLimits
from rematplan.runtime.costs.measure import peak_above_entry

RANKS = 4
SCHEDULES = ("gpipe", "1f1b", *VIRTUAL)
TIMES = (1, 2, 8)
TIGHT = 0.97
"""Of the predicted peak, what the measured peak is at least."""
SHARES = ("100%", "80%")
"""Budgets, of the largest peak of a rank without recomputation. Where no plans fit, the least budget found is used."""
FEW = RankSearchLimits(grid=3, refined=2, lowered=2, cheaper=0)
"""Limits of a search that finds some plans quickly: the table is about their peaks, not about extra time."""
FULL = rank_search.LIMITS
SHARE = 0.7
"""The budget of `zbv`, as a share of the largest peak of a rank of PyTorch's pipeline."""
STRATEGY = "approx_dp"


@dataclass(frozen=True)
class Case:
    """One row of the table: a pipeline of ``stages`` stages on ``ranks`` ranks. ``share``: its budget. ``costs``: how
    the costs and workspaces of ops are determined, as for `plan_pipeline`."""

    network: str
    schedule: str
    ranks: int
    microbatches: int
    share: str
    costs: str = "roofline"

    @property
    def stages(self) -> int:
        """The number of stages: two on each rank with the schedules in `VIRTUAL`."""
        return self.ranks * (2 if self.schedule in VIRTUAL else 1)

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of `plan_pipeline` that are the same on all ranks."""
        names = ("stages", "microbatches", "schedule", "costs")
        return {name: getattr(self, name) for name in names}


Plans: TypeAlias = Mapping[int, Mapping[str, Any]]
Task: TypeAlias = tuple[Case, int, Plans | None]
"""A case, its budget in bytes, and the plan of each stage by its number; None for PyTorch's stages without plans."""


def gpt(microbatches: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Sequence[str]]:
    """Return a GPT, a batch, its targets, and the modules at which it can be cut."""
    sizes = {"depth": 8, "width": 48, "vocabulary": 192, "tokens": 32}
    model = UntiedGPT(**sizes)
    (x,) = example_inputs("gpt12", seed=0, batch=2 * microbatches, **sizes)
    return model, x, x.roll(-1, 1), [f"blocks.{k}" for k in range(1, 8)]


def resnet(microbatches: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Sequence[str]]:
    """Return a ResNet-18 with batch norms, a batch, its targets, and the modules at which it can be cut."""
    sizes = {"width": 8, "classes": 10}
    model = build("resnet18", **sizes)
    (x,) = example_inputs("resnet18", seed=0, batch=2 * microbatches, image=32, **sizes)
    names = [f"stages.{k // 2}.{k % 2}" for k in range(1, 8)]
    return model, x, torch.arange(2 * microbatches) % 10, names


def large_gpt(microbatches: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Sequence[str]]:
    """Return a GPT whose activations are larger than its weights, a batch, its targets, and modules to cut at."""
    sizes = {"depth": 16, "width": 64, "vocabulary": 256, "tokens": 64}
    (x,) = example_inputs("gpt12", seed=0, batch=4 * microbatches, **sizes)
    return UntiedGPT(**sizes), x, x.roll(-1, 1), [f"blocks.{k}" for k in range(2, 16, 2)]


NETWORKS: dict[str, Callable[[int], tuple[nn.Module, torch.Tensor, torch.Tensor, Sequence[str]]]] = {
    "gpt": gpt,
    "resnet": resnet,
    "large gpt": large_gpt,
}
SMALL = ("gpt", "resnet")


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of scores (…, classes)."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def network(case: Case) -> tuple[nn.Module, torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """Return the network of a case, its batch, its targets, and cuts into equal stages."""
    torch.manual_seed(0)
    model, x, y, names = NETWORKS[case.network](case.microbatches)
    return model, x, y, tuple(names[8 * k // case.stages - 1] for k in range(1, case.stages))


def planned(case: Case, limits: RankSearchLimits = FEW, **given: Any) -> rematplan.Pipeline:
    """Return the pipeline of a case within its budget, or within the least budget that refusals state."""
    model, x, y, cuts = network(case)
    given |= {"loss_fn": loss, "target": y}
    given = {"budget": case.share, "strategy": STRATEGY, "cuts": cuts} | case.asked | given
    with patch.object(rank_search, "LIMITS", limits):
        for _ in range(case.ranks):
            try:
                return rematplan.plan_pipeline(model, (x,), **given)
            except InfeasibleBudget as refused:
                given["budget"] = refused.smallest
        return rematplan.plan_pipeline(model, (x,), **given)


def run(rank: int, case: Case, budget: int, plans: Plans | None) -> dict[str, Any]:
    """Run a step of a planned pipeline as one rank, and return its peak in bytes, the predicted one, and the names of
    tensors that are not those of one process."""
    model, x, y, cuts = network(case)
    plain = copy.deepcopy(model)
    asked = case.asked | {"cuts": cuts, "strategy": STRATEGY, "ranks": [rank], "loss_fn": loss, "target": y}
    pipe = rematplan.plan_pipeline(model, (x,), budget=budget or "100%", plans=plans, **asked)
    if plans is None:
        numbers = pipe.order.stage_of_rank[rank]
        parts = {s: pipe.parts[s].stage for s in numbers}
        stages = [torch_stage(parts[s], parts[s].module, s, case.stages) for s in numbers]
    else:
        stages = pipe.stages()
    schedule = pipe.schedule(stages, loss)
    losses: list[torch.Tensor] = []
    given = (x,) if any(s.is_first for s in stages) else ()
    more = {"target": y, "losses": losses} if any(s.is_last for s in stages) else {}
    gc.collect()  # tensors of earlier cases that are freed during the step would lower its peak
    peak, _ = peak_above_entry(lambda: schedule.step(*given, **more), torch.device("cpu"))
    states = [t for s in stages for t in (*s.submod.parameters(), *s.submod.buffers())]
    wanted = step_in_one_process(
        plain.parameters(), lambda _, part, its: loss(plain(part), its), (x, y), case.microbatches
    )
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, plain))
    mine = {n for s in stages for n, _ in (*s.submod.named_parameters(), *s.submod.named_buffers())} & {*ours}
    different = [n for n in sorted(mine) if not equal(ours[n], theirs[n])]
    if losses and [one.item() for one in losses] != wanted:
        different.append("the losses")
    return {
        "peak": peak + sum(t.nbytes for t in states),
        "promise": pipe.ranks[rank].peak,
        "different": different,
        "extra": pipe.ranks[rank].extra,
    }


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors and their gradients have the same bits."""
    if one.grad is None or other.grad is None:
        return torch.equal(one, other) and one.grad is other.grad
    return torch.equal(one, other) and torch.equal(one.grad, other.grad)


def worker(rank: int, rendezvous: str, ranks: int, tasks: Sequence[Task], results: Any) -> None:
    """Run all tasks as one process, and put (rank, measurements) into the queue ``results``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    for task in tasks:
        results.put((rank, run(rank, *task)))
        distributed.barrier()


def measured(tasks: Sequence[Task]) -> Iterator[tuple[Case, dict[int, dict[str, Any]]]]:
    """Run tasks, all with the same number of ranks, in gloo processes. Yield the measurements by rank of each."""
    ranks = tasks[0][0].ranks
    with tempfile.TemporaryDirectory() as folder:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        started = multiprocessing.spawn(
            worker, (str(Path(folder, "rendezvous")), ranks, tasks, results), ranks, join=False
        )
        for case, _, _ in tasks:
            yield case, dict(results.get() for _ in range(ranks))
        started.join()


def task_of(case: Case, pipe: rematplan.Pipeline) -> Task:
    """Return the task that runs a planned pipeline."""
    return case, pipe.budget, {s.stage: s.plan or {} for s in pipe.stage_plans}


def table(cases: Iterable[Case]) -> None:
    """Run cases, all with the same number of ranks, in gloo processes. Print a line for each: the measured peak ÷ the
    predicted one of each rank, and what differs from one process."""
    for case, found in measured([task_of(case, planned(case)) for case in cases]):
        ratios = [found[r]["peak"] / found[r]["promise"] for r in range(case.ranks)]
        different = [name for r in range(case.ranks) for name in found[r]["different"]]
        extra = "recomputes" if any(one["extra"] for one in found.values()) else "keeps all"
        print(
            f"{case.network:7} {case.schedule:14} P {case.ranks} M {case.microbatches:2} {case.share:>4} {extra}: "
            f"measured ÷ predicted {' '.join(f'{r:.3f}' for r in ratios)}, "
            f"{', '.join(different[:3]) if different else 'bit-equal'}"
            f"{'' if max(ratios) <= 1 else '  ABOVE'}{'' if min(ratios) >= TIGHT else '  LOOSE'}",
            flush=True,
        )


def zbv(quick: bool, _folder: Path | None) -> None:
    """Print the measured peaks of a GPT's ranks under ZBV: of PyTorch's stages, which keep everything, and of plans
    within `SHARE` of the largest of these peaks, with the extra time of the plans. ``quick``: a smaller GPT."""
    case = Case("gpt" if quick else "large gpt", "zbv", RANKS, 2 * RANKS, "")
    ((_, eager),) = measured([(case, 0, None)])
    most = max(one["peak"] for one in eager.values())
    pipe = planned(case, FULL, budget=int(SHARE * most), strategy=rematplan.Auto(time_limit=20.0))
    ((_, found),) = measured([task_of(case, pipe)])
    extra = [
        sum(one.times.extra for one in rank.stages)
        / sum(one.times.total - one.times.extra for one in rank.stages)
        for rank in pipe.ranks.values()
    ]
    for r in range(RANKS):
        print(
            f"ZBV, GPT, rank {r}: eager {show_bytes(eager[r]['peak'])}, planned {show_bytes(found[r]['peak'])} "
            f"({found[r]['peak'] / found[r]['promise']:.3f} of the promise), extra {100 * extra[r]:.1f} %, "
            f"{', '.join(found[r]['different'][:3]) or 'bit-equal'}"
        )
    print(
        f"largest peak {max(one['peak'] for one in found.values()) / most:.3f} of eager's; slowest rank's extra "
        f"{100 * max(extra):.1f} %"
    )


def cases(
    ranks: int,
    networks: Iterable[str],
    schedules: Iterable[str],
    times: Iterable[int],
    shares: Iterable[str],
    costs: str = "roofline",
) -> list[Case]:
    """Return the rows of a table. ``times``: the numbers of micro-batches ÷ ``ranks``. ``costs``: as in `Case`."""
    every = (
        Case(*row[:2], ranks, ranks * row[2], row[3], costs)
        for row in product(networks, schedules, times, shares)
    )
    # PyTorch's DualPipeV needs as many micro-batches as stages
    return [case for case in every if case.schedule != "dualpipev" or case.microbatches >= case.stages]


def peaks(quick: bool, _folder: Path | None) -> None:
    """Print the table for all networks and schedules with P, 2P and 8P micro-batches. ``quick``: fewer of them."""
    for network_name in SMALL[: 1 if quick else None]:
        table(
            cases(RANKS, [network_name], SCHEDULES[: 2 if quick else None], (1,) if quick else TIMES, SHARES)
        )


def main() -> None:
    """Print the rows that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    for name, known in (("networks", [*SMALL]), ("schedules", [*SCHEDULES]), ("shares", [*SHARES])):
        parser.add_argument(f"--{name}", nargs="+", default=known)
    parser.add_argument("--times", type=int, nargs="+", default=TIMES, help="micro-batches ÷ ranks")
    parser.add_argument("--costs", default="roofline", help="roofline or profile (measured)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table(cases(args.ranks, args.networks, args.schedules, args.times, args.shares, args.costs))


if __name__ == "__main__":
    main()
