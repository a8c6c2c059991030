"""Run a step of a planned pipeline in several processes, measure ranks, and compare results with one process."""

from __future__ import annotations

import copy
import gc
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from rematplan.ir import ModelError, ProblemError, ProcessEnded, UsageError
from rematplan.models.names import ZooError
from rematplan.module.verification import tensor_differences
from rematplan.pipeline.dataflow import DataflowPart
from rematplan.pipeline.frozen_stage import FrozenStage
from rematplan.pipeline.plan_pipeline import captured_pipeline
from rematplan.pipeline.rank_plans import rank_plans
from rematplan.pipeline.runnable_pipeline import CapturedPart, Pipeline
from rematplan.pipeline.schedules import stated_schedule
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.inversion_error import forward_error
from rematplan.planner.pipeline.messages import CHANNELS
from rematplan.planner.pipeline.pipeline_file import StatedPipeline
from rematplan.plans.budgets import parse_budget
from rematplan.plans.options import PlanOptions
from rematplan.runtime.capture.with_loss import WithLoss
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.pipeline.dataflow_schedule import gradient_error_of
from rematplan.runtime.pipeline.random_seeds import Seeded, seed_of
from rematplan.runtime.pipeline.stage_modules import stage_modules
from rematplan.step_loading import LoadedModel, Sizes, load_model

SEED = 0
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo")
"""What torch says, in a RuntimeError, if the connection to another process is lost."""
MODEL_FIELDS: Mapping[str, Any] = {
    "model": str,
    "sizes": dict,
    "dims": list,
    "loss": str | None,
    "bn": str | None,
    "dropout": str | None,
    "costs": str,
}
"""The fields of a file's model that are read, with their types."""
LARGEST = 2**31 - 1
"""The largest size that a file's model may have."""


@dataclass(frozen=True)
class RankReport:
    """The measurements of one rank in a pipeline step, and a comparison with plain PyTorch in one process."""

    promised: int
    """The predicted peak in bytes, parameters and buffers included."""
    measured: int
    """The measured peak in bytes, parameters and buffers included."""
    extra: float
    """Predicted microseconds of recomputation per micro-batch."""
    losses: tuple[float, ...] = ()
    """The losses of the micro-batches; empty except on the last stage's rank."""
    compared: int = 0
    """How many parameters, buffers and losses were compared; 0 without comparison."""
    different: tuple[str, ...] = ()
    """What differs by more than the predicted error, by name; ``the losses`` if these do."""
    expected: float = 0.0
    """The predicted relative error of gradients; 0 except in a dataflow."""
    error: float = 0.0
    """The largest relative error of a gradient."""
    of_forwards: float = 0.0
    """The largest relative error of a buffer or loss."""


def run_on_all_ranks(plan: StatedPipeline, *, verify: bool, time_limit: float) -> list[RankReport]:
    """Join the other processes that torchrun started, run one pipeline step, and return the reports of all ranks."""
    schedules = logging.getLogger("torch.distributed.pipelining.schedules")
    schedules.setLevel(logging.CRITICAL)  # it prints all actions of all ranks if one of them fails
    distributed.init_process_group("gloo")
    try:
        return reports_of_step(plan, int(os.environ["RANK"]), verify=verify, time_limit=time_limit)
    finally:
        distributed.destroy_process_group()


def reports_of_step(plan: StatedPipeline, rank: int, *, verify: bool, time_limit: float) -> list[RankReport]:
    """Run one pipeline step as one rank of the default process group, and return the reports of all ranks. Each rank
    plans its stages within the file's budget. `ProcessEnded` if the connection to another process is lost."""
    try:
        return _of_all_ranks(_run(plan, rank, verify, time_limit), plan.ranks)
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistError) or any(word in str(error) for word in LOST)):
            raise
        raise ProcessEnded(
            f"rank {rank}: another process of the pipeline has ended or cannot be reached; the output of that process, "
            f"or torchrun's, says why"
        ) from None


def _run(plan: StatedPipeline, rank: int, verify: bool, time_limit: float) -> RankReport:
    """Run the step of one rank and measure its peak. With ``verify``, compare its losses, gradients and buffers with
    those of all stages in one process."""
    order = stated_schedule(plan)
    loaded = _loaded(plan)
    module = loaded.module
    inputs, target = _whole_batch(loaded, order.microbatches)
    asked = PlanOptions(budget="min", strategy=Auto(time_limit=time_limit), costs=plan.model["costs"])
    budget = parse_budget(str(plan.budget))
    pipe = captured_pipeline(
        module.model, inputs, None, order, budget, plan.names, asked, ranks=[rank], loss=(module.of, target)
    )
    found = rank_plans(pipe, [rank], asked)[rank]
    pipe = replace(pipe, ranks={rank: found})
    plain = copy.deepcopy(module) if verify else None
    stages = pipe.stages()
    random = any(map(_is_random, pipe.parts.values()))
    if random and order.name not in CHANNELS:  # a dataflow seeds each random call itself
        _seed_forwards(pipe, rank, stages)
    schedule = pipe.schedule(stages, module.of)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    losses: list[torch.Tensor] = []
    states = [t for s in stages for t in (*s.submod.parameters(), *s.submod.buffers())]

    def step() -> None:
        schedule.step(*(inputs if first else ()), **({"target": target, "losses": losses} if last else {}))

    gc.collect()  # tensors of the capture that are freed during the step would lower its peak
    peak, _ = peak_above_entry(step, torch.device("cpu"))
    report = RankReport(
        found.peak, peak + sum(t.nbytes for t in states), found.extra, tuple(loss.item() for loss in losses)
    )
    if plain is None:
        return report
    of_stages = {n for s in stages for n, _ in (*s.submod.named_parameters(), *s.submod.named_buffers())}
    expected, expected_forward = _expected_errors(pipe, rank, stages)
    wanted = _in_one_process(plain, inputs, target, pipe, any(_of_all_ranks(random, order.ranks)))
    ours, theirs = named_tensors(module.model), named_tensors(plain.model)
    names = of_stages & ours.keys()  # a stage has the constants of its forward, too
    plainly = _results(theirs, names, wanted if losses else ())
    planned = _results(ours, names, report.losses)
    # PyTorch's stages send zeros for a tensor that the loss does not read.
    planned = {n: t for n, t in planned.items() if n in plainly or t.any()}
    differences = tensor_differences(plainly, planned)
    gradients = {d.name: d.relative for d in differences if d.name.startswith("gradient ")}
    others = {d.name: d.relative for d in differences if d.name not in gradients}
    different = {n for n, error in gradients.items() if not error <= expected}
    different |= {n for n, error in others.items() if not error <= expected_forward}
    return replace(
        report,
        compared=len(names) + len(losses),
        different=tuple(sorted(different)),
        expected=expected,
        error=max(gradients.values(), default=0.0),
        of_forwards=max(others.values(), default=0.0),
    )


def _expected_errors(pipe: Pipeline, rank: int, stages: Sequence[Any]) -> tuple[float, float]:
    """Return the predicted relative errors of gradients, and of buffers and losses; both 0 except in a dataflow."""
    part = pipe.parts[pipe.order.stage_of_rank[rank][0]]
    if not isinstance(part, DataflowPart):
        return 0.0, 0.0
    # Inverses round, and a stage's forward may round otherwise than the model.
    every = _of_all_ranks((stages[0].error, stages[0].gain, part.rounding), pipe.order.ranks)
    expected = gradient_error_of([(max(error, rounding), gain) for error, gain, rounding in every])
    return expected, forward_error(max(rounding for _, _, rounding in every))


def _of_all_ranks(own: Any, ranks: int) -> list[Any]:
    """Return the objects that all ranks pass to this function, by rank. It ends once all ranks have called it."""
    gathered: list[Any] = [None] * ranks
    distributed.all_gather_object(gathered, own)
    return gathered


def _is_random(part: CapturedPart) -> bool:
    """Return whether a stage draws random numbers. A stage without backward is not captured; its forward tells."""
    if not isinstance(part, FrozenStage):
        return any(call.seeded for call in part.step.calls)
    graph: Any = part.stage.module.graph
    return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.nodes)


def _loaded(plan: StatedPipeline) -> LoadedModel:
    """Load the model that a pipeline file names, with one micro-batch; `ProblemError` if that is impossible. The seed
    is fixed, so all processes have equal values."""
    model: dict[str, Any] = {name: plan.model.get(name) for name in MODEL_FIELDS}
    for name, kind in MODEL_FIELDS.items():
        if not isinstance(model[name], kind):
            raise ProblemError(f"the file's model has {str(model[name])[:40]!r} as {name}")
    try:
        sizes, dims = Sizes(**model["sizes"]), {str(name): size for name, size in model["dims"]}
    except (TypeError, ValueError) as error:
        raise ProblemError(f"the file's model has sizes that cannot be read: {error}") from None
    for name, size in (asdict(sizes) | dims).items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ProblemError(f"the file's model has {str(size)[:40]!r} as {name}, not a positive number")
        if size is not None and size > LARGEST:
            raise ProblemError(f"the file's model has {str(size)[:40]} as {name}, more than {LARGEST}")
    try:
        return load_model(
            model["model"],
            sizes=sizes,
            dims=dims,
            loss=model["loss"],
            seed=SEED,
            bn=model["bn"] or "as-is",
            dropout=model["dropout"] or "as-is",
        )
    except ZooError as error:
        raise ProblemError(f"the file's model has impossible sizes: {error}") from None
    except (ModelError, ProblemError, UsageError) as error:
        raise ProblemError(f"the file's model cannot be loaded: {error}") from None


def _whole_batch(loaded: LoadedModel, microbatches: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the inputs and the target of all micro-batches, joined along the first dimension; zeros if there is no
    target. `UsageError` for an input without dimensions."""
    generator = torch.Generator().manual_seed(SEED)

    def joined(one: torch.Tensor) -> torch.Tensor:
        if not one.ndim:
            raise UsageError(f"{loaded.name} has an input without dimensions, which has no micro-batches")
        # Each further micro-batch has the first one's numbers in a random order.
        orders = [torch.randperm(one.numel(), generator=generator) for _ in range(microbatches - 1)]
        return torch.cat([one, *(one.flatten()[order].view(one.shape) for order in orders)])

    count = loaded.module.inputs
    inputs, targets = loaded.batch[:count], loaded.batch[count:]
    return tuple(map(joined, inputs)), joined(targets[0]) if targets else torch.zeros(microbatches)


def _seed_forwards(pipe: Pipeline, rank: int, stages: Sequence[Any]) -> None:
    """Seed PyTorch's generator before each forward by micro-batch and stage, so that one process draws the same."""
    for number, stage in zip(pipe.order.stage_of_rank[rank], stages, strict=True):
        forwards = (a for a in pipe.order.actions[rank] if (a.kind, a.stage) == ("F", number))
        seeds = iter([seed_of(SEED, 0, a.microbatch, number, 0) for a in forwards])
        stage.submod.register_forward_pre_hook(partial(_seed_next, seeds))


def _seed_next(seeds: Iterator[int], _module: nn.Module, _inputs: Any) -> None:
    torch.manual_seed(next(seeds))


def _in_one_process(
    module: WithLoss, inputs: Sequence[torch.Tensor], target: torch.Tensor, pipe: Pipeline, random: bool
) -> list[float]:
    """Run the step in plain PyTorch with the pipeline's micro-batches, and return their losses. If ``random``, the
    model is cut as the pipeline, so that stages draw the same numbers."""
    first = [t.tensor_split(pipe.order.microbatches)[0] for t in inputs]
    channels = pipe.order.name in CHANNELS
    # Cut as the pipeline, so that each stage draws the same random numbers.
    cut = [one.module for one in stage_modules(module.model, first, {}, pipe.cuts)] if random else []

    def loss_of(number: int, *parts: torch.Tensor) -> torch.Tensor:
        *some, its = parts
        arguments: Any = tuple(some)
        for stage, part in enumerate(cut):
            torch.manual_seed(seed_of(SEED, 0, number, stage, 0))
            with Seeded(SEED, 0, number, stage) if channels else nullcontext():
                arguments = part(*(arguments if isinstance(arguments, tuple) else (arguments,)))
        return module.of(arguments if cut else module.model(*arguments), its)

    return step_in_one_process(module.parameters(), loss_of, (*inputs, target), pipe.order.microbatches)


def _results(
    tensors: Mapping[str, torch.Tensor], names: Collection[str], losses: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Return the named parameters and buffers, the gradients, and the losses if there are any."""
    found = {f"gradient {n}": g for n in names if (g := tensors[n].grad) is not None}
    found |= {n: tensors[n].detach() for n in names}
    return found | ({"the losses": torch.tensor(losses, dtype=torch.float64)} if losses else {})


def step_in_one_process(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[..., torch.Tensor],
    batch: Sequence[torch.Tensor],
    microbatches: int,
) -> list[float]:
    """Run forward and backward of each of ``microbatches`` equal parts of ``batch``, and return the losses. ``loss_of``
    gets a part's number and tensors. At the end, the gradients of ``parameters`` are divided by ``microbatches`` in
    place."""
    losses = []
    for number, parts in enumerate(zip(*(t.tensor_split(microbatches) for t in batch), strict=True)):
        loss = loss_of(number, *parts)
        loss.backward()
        losses.append(loss.item())
    for p in parameters:
        if p.grad is not None:
            p.grad.div_(microbatches)
    return losses
