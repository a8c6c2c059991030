"""Planned pipelines in gloo processes on one machine: measured peaks against the predicted ones, and bit-equality with
one process."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pipeline_memory import UntiedGPT
from torch import distributed, multiprocessing, nn

import rematplan
from rematplan.ir import InfeasibleBudget
from rematplan.models import build, example_inputs
from rematplan.pipeline.schedules import VIRTUAL
from rematplan.runtime.costs.measure import peak_above_entry

RANKS = 4
SHARES = ("100%", "80%")
"""Budgets, of the largest peak of a rank without recomputation. Where no plans fit, the least budget found is used."""
PLANNING = {"strategy": "approx_dp", "costs": "roofline"}


@dataclass(frozen=True)
class Case:
    """One row of the table: a pipeline of ``stages`` stages on ``ranks`` ranks. ``share``: its budget."""

    network: str
    schedule: str
    ranks: int
    microbatches: int
    share: str

    @property
    def stages(self) -> int:
        """The number of stages: two on each rank with the schedules in `VIRTUAL`."""
        return self.ranks * (2 if self.schedule in VIRTUAL else 1)


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


NETWORKS: dict[str, Callable[[int], tuple[nn.Module, torch.Tensor, torch.Tensor, Sequence[str]]]] = {
    "gpt": gpt,
    "resnet": resnet,
}


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of scores (…, classes)."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def network(case: Case) -> tuple[nn.Module, torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """Return the network of a case, its batch, its targets, and cuts into equal stages."""
    torch.manual_seed(0)
    model, x, y, names = NETWORKS[case.network](case.microbatches)
    return model, x, y, tuple(names[8 * k // case.stages - 1] for k in range(1, case.stages))


def planned(case: Case, **given: Any) -> rematplan.Pipeline:
    """Return the pipeline of a case within its budget, or within the least budget that refusals state."""
    model, x, y, cuts = network(case)
    given |= {"loss_fn": loss, "target": y}
    asked = {
        "stages": case.stages,
        "microbatches": case.microbatches,
        "schedule": case.schedule,
        "cuts": cuts,
    }
    given = {"budget": case.share} | asked | PLANNING | given
    for _ in range(case.ranks):
        try:
            return rematplan.plan_pipeline(model, (x,), **given)
        except InfeasibleBudget as refused:
            given["budget"] = refused.smallest
    return rematplan.plan_pipeline(model, (x,), **given)


def run(rank: int, case: Case, group: Any, budget: int, plans: dict[int, Any]) -> dict[str, Any]:
    """Run a step of a planned pipeline as one rank, and return its peak in bytes, the predicted one, and the names of
    tensors that are not those of one process."""
    model, x, y, cuts = network(case)
    plain = copy.deepcopy(model)
    pipe = rematplan.plan_pipeline(
        model,
        (x,),
        stages=case.stages,
        microbatches=case.microbatches,
        schedule=case.schedule,
        cuts=cuts,
        budget=budget,
        plans=plans,
        ranks=[rank],
        loss_fn=loss,
        target=y,
        **PLANNING,
    )
    stages = pipe.stages(group)
    schedule = pipe.schedule(stages, loss)
    losses: list[torch.Tensor] = []
    given = (x,) if any(s.is_first for s in stages) else ()
    more = {"target": y, "losses": losses} if any(s.is_last for s in stages) else {}
    peak, _ = peak_above_entry(lambda: schedule.step(*given, **more), torch.device("cpu"))
    states = [t for s in stages for t in (*s.submod.parameters(), *s.submod.buffers())]
    wanted = in_one_process(plain, x, y, case.microbatches)
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


def in_one_process(model: nn.Module, x: torch.Tensor, y: torch.Tensor, microbatches: int) -> list[float]:
    """Run a step of plain PyTorch with the same micro-batches, and return their losses."""
    losses = []
    for part, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        one = loss(model(part), target)
        one.backward()
        losses.append(one.item())
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(microbatches)
    return losses


def worker(rank: int, rendezvous: str, ranks: int, tasks: Sequence[Any], results: Any) -> None:
    """Run all tasks as one process. Each task is a `Case`, a budget in bytes and plans by stage number."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    for case, budget, plans in tasks:
        results.put((case, rank, run(rank, case, None, budget, plans)))
        distributed.barrier()


def cases(quick: bool, ranks: int, names: Sequence[str], networks: Sequence[str]) -> Iterator[Case]:
    """Yield the rows of the table."""
    for one in networks:
        for name in names:
            for times in (1,) if quick else (1, 2, 8):
                for share in SHARES:
                    if name != "dualpipev" or times * ranks >= 2 * ranks:
                        yield Case(one, name, ranks, times * ranks, share)


def peaks(quick: bool, _folder: Path | None) -> None:
    names = ("gpipe", "1f1b", *VIRTUAL)
    table(cases(quick, RANKS, names, list(NETWORKS)), RANKS)


def table(rows: Iterator[Case], ranks: int) -> None:
    """Run cases in gloo processes, and print a line for each: the measured peak ÷ the predicted one of each rank."""
    tasks = []
    for case in rows:
        pipe = planned(case)
        tasks.append((case, pipe.budget, {s.stage: s.plan for s in pipe.stage_plans}))
    with tempfile.TemporaryDirectory() as folder:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        started = multiprocessing.spawn(
            worker, (str(Path(folder, "rendezvous")), ranks, tasks, results), ranks, join=False
        )
        for case, _budget, _plans in tasks:
            found = {}
            for _ in range(ranks):
                _case, rank, answer = results.get()
                found[rank] = answer
            ratios = [found[r]["peak"] / found[r]["promise"] for r in range(ranks)]
            different = [n for r in range(ranks) for n in found[r]["different"]]
            print(
                f"{case.network:7} {case.schedule:14} P {case.ranks} M {case.microbatches:2} {case.share:>4}: "
                f"measured ÷ predicted {' '.join(f'{r:.3f}' for r in ratios)}, "
                f"{'bit-equal' if not different else different[:3]}"
                f"{'' if max(ratios) <= 1 else '  ABOVE'}{'' if min(ratios) >= 0.97 else '  LOOSE'}",
                flush=True,
            )
        started.join()


if __name__ == "__main__":
    import sys

    _, ranks, nets, names, shares = sys.argv
    SHARES = tuple(shares.split(","))
    torch.set_num_threads(1)
    table(cases(False, int(ranks), names.split(","), nets.split(",")), int(ranks))
