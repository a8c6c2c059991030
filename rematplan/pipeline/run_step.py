"""Run one step of a planned pipeline in several processes, measure each rank, and compare it with a single
process.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from rematplan.ir import UsageError
from rematplan.models import ZOO, build, example_inputs
from rematplan.pipeline.planned_pipeline import plan_pipeline
from rematplan.planner.pipeline.planned_pipeline import PlannedPipeline
from rematplan.runtime.capture.with_loss import WithLoss, with_loss
from rematplan.runtime.costs.measure import peak_above_entry

SEED = 0


@dataclass(frozen=True)
class RankReport:
    """The measurements of a rank.

    ``promised``, ``measured``: peaks in bytes, parameters and buffers included. ``extra``: microseconds of
    recomputation for a micro-batch. ``losses``: on the rank of the last stage. ``compared``: the number of compared
    tensors. ``different``: the names of those that are not bit-equal to a single process.
    """

    promised: int
    measured: int
    extra: float
    losses: tuple[float, ...] = ()
    compared: int = 0
    different: tuple[str, ...] = ()


def run_on_all_ranks(plan: PlannedPipeline, *, verify: bool, time_limit: float) -> list[RankReport]:
    """Join the other processes that torchrun started, run one step, and return the reports of all ranks.

    Cuts, schedule and budget are those of ``plan``. Each rank captures its stages and plans them within the budget.

    Args:
        plan: the pipeline.
        verify: whether to compare with a single process.
        time_limit: seconds of search for each rank.

    Raises:
        UsageError: the model is not a network of the zoo.
        InfeasibleBudget: this rank's stages do not fit.
    """
    name = str(plan.model.get("model"))
    if name not in ZOO:
        raise UsageError(
            f"{name}: pipeline-step runs only networks of the zoo; use rematplan.plan_pipeline for other models"
        )
    distributed.init_process_group("gloo")
    try:
        rank = int(os.environ["RANK"])
        report = _run(plan, name, rank, verify, time_limit)
        gathered: list[Any] = [None] * plan.schedule.ranks
        distributed.all_gather_object(gathered, report)
        return gathered
    finally:
        distributed.destroy_process_group()


def _run(plan: PlannedPipeline, name: str, rank: int, verify: bool, time_limit: float) -> RankReport:
    order = plan.schedule
    module, inputs, target = _model(plan, name)
    pipe = plan_pipeline(
        module.model,
        inputs,
        stages=order.stages,
        microbatches=order.microbatches,
        schedule=order.name,
        budget=plan.budget,
        cuts=plan.names,
        costs=str(plan.model.get("costs", "profile")),
        time_limit=time_limit,
        ranks=[rank],
    )
    plain = copy.deepcopy(module) if verify else None
    stages = pipe.stages()
    schedule = pipe.schedule(stages, module.of)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    losses: list[torch.Tensor] = []
    states = [t for s in stages for t in (*s.submod.parameters(), *s.submod.buffers())]

    def step() -> None:
        schedule.step(*(inputs if first else ()), **({"target": target, "losses": losses} if last else {}))

    peak, _ = peak_above_entry(step, torch.device("cpu"))
    found = pipe.ranks[rank]
    report = RankReport(
        found.peak, peak + sum(t.nbytes for t in states), found.extra, tuple(one.item() for one in losses)
    )
    if plain is None:
        return report
    names = {n for s in stages for n, _ in (*s.submod.named_parameters(), *s.submod.named_buffers())}
    wanted = _in_one_process(plain, inputs, target, order.microbatches)
    different = _different(_tensors(module.model), _tensors(plain.model), names)
    if losses and list(report.losses) != wanted:
        different.append("the losses")
    return RankReport(
        report.promised,
        report.measured,
        report.extra,
        report.losses,
        len(names) + len(losses),
        tuple(different),
    )


def _model(plan: PlannedPipeline, name: str) -> tuple[WithLoss, tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the network with its loss, a batch for all micro-batches, and its targets."""
    sizes: Mapping[str, int] = plan.model.get("sizes", {})
    one = sizes.get("batch") or len(example_inputs(name, **sizes)[0])
    whole = {**sizes, "batch": one * plan.schedule.microbatches}
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = build(name, **sizes)
    inputs = example_inputs(name, seed=SEED, **whole)
    module, batch = with_loss(model, inputs, plan.model.get("loss") or ZOO[name].loss, SEED)
    targets = batch[len(inputs) :]
    return module, inputs, targets[0] if targets else torch.zeros(len(inputs[0]))


def _in_one_process(
    module: WithLoss, inputs: Sequence[torch.Tensor], target: torch.Tensor, microbatches: int
) -> list[float]:
    """Run one step of plain PyTorch with the same micro-batches, and return the losses."""
    losses = []
    parts = [t.tensor_split(microbatches) for t in (*inputs, target)]
    for *some, its in zip(*parts, strict=True):
        loss = module.of(module.model(*some), its)
        loss.backward()
        losses.append(loss.item())
    for p in module.parameters():
        if p.grad is not None:
            p.grad.div_(microbatches)
    return losses


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _different(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], names: set[str]
) -> list[str]:
    """Return the names of tensors that differ, or whose gradients differ."""

    def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        return one is other if one is None or other is None else torch.equal(one, other)

    return sorted(n for n in names if not (same(ours[n], theirs[n]) and same(ours[n].grad, theirs[n].grad)))
