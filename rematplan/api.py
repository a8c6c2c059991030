"""The Python API for a single step: load and capture a model, make its planning problem, plan, run and verify."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from rematplan.ir import TrainingGraph, UsageError
from rematplan.ir.onnx.graph import Graph, Value
from rematplan.ir.onnx.load import load_onnx
from rematplan.ir.onnx.training_form import Forms
from rematplan.models import ZOO, build, example_inputs
from rematplan.planner.core.inversion_error import worst_error
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.registry import strategy as named_strategy
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.budgets import plan_within
from rematplan.plans.op_costs import priced
from rematplan.plans.tradeoff import trace_curves
from rematplan.runtime.capture.capture import capture
from rematplan.runtime.capture.fake_weights import is_weightless, without_data
from rematplan.runtime.capture.with_loss import WithLoss, with_loss
from rematplan.runtime.costs.device_models import DEFAULT_DEVICE_MODEL
from rematplan.runtime.costs.measure import (
    check_fits,
    peak_above_entry,
    release_libraries,
    rounds_in_turn,
    seconds_in_turn,
)
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.execute.planned_step import PlannedStep, Verification, eager_step, untouched, verify
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.inversion.find_inverses import is_exact, with_exact_inverses, with_inverses
from rematplan.runtime.onnx.module import OnnxModule
from rematplan.runtime.onnx.ops.values import torch_dtype
from rematplan.runtime.onnx.rebatch import rebatched
from rematplan.runtime.problem.planning_problem import training_graph

__all__ = [
    "LoadedStep",
    "MeasuredPlan",
    "Sizes",
    "StepReport",
    "curves",
    "load_step",
    "measure_plans",
    "no_recompute",
    "plan",
    "problem",
    "run_step",
]

MOST_REFUSALS = 5
"""At most this many notes say why a tensor cannot be recovered by an inverse."""


@dataclass(frozen=True)
class LoadedStep:
    """A model with its loss, a batch, and the captured forward and backward of both.

    ``notes``: what the loader changed or noticed, for the user. ``inexact``: whether results may differ from plain
    autograd by rounding errors, because a plan may run inverses that round. ``without``: the same step with only the
    inverses that move numbers, if it was loaded with all inverses. ``bare``: the same step without any inverse, if it
    was loaded with all.
    """

    module: WithLoss
    batch: tuple[torch.Tensor, ...]
    step: CapturedStep
    notes: tuple[str, ...] = ()
    inexact: bool = False
    without: LoadedStep | None = None
    bare: LoadedStep | None = None

    @property
    def blind(self) -> LoadedStep | None:
        """The same step with only those inverses that do not need the values of weights (none divides by a scale).

        None unless the step was loaded with ``inverses=True``.
        """
        if self.bare is None:
            return None
        found = with_inverses(self.bare.step, {})
        return replace(self.bare, step=found.step, inexact=not all(map(is_exact, found.step.inverses)))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network of the zoo (see `rematplan.models.SIZES`). None stands for the network's default."""

    batch: int | None = None
    image: int | None = None
    width: int | None = None
    tokens: int | None = None
    depth: int | None = None
    classes: int | None = None
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements of a planned step.

    ``measured_peak``, ``eager_peak``: the measured peaks in bytes, parameters, buffers and batch included, with the
    plan and with plain autograd. ``seconds``, ``eager_seconds``: the time of one step with each. ``losses``: the loss
    of each timed step. ``verification``: the comparison with plain autograd; None if it was not asked for.
    ``one_lane_seconds``: the time of the same plan on one lane, if the plan has two; otherwise None.
    """

    plan: Plan
    measured_peak: int
    eager_peak: int
    seconds: float
    eager_seconds: float
    losses: tuple[float, ...]
    verification: Verification | None
    one_lane_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that was timed alternately with others.

    ``plan``: None stands for plain autograd. ``peak``: the measured peak in bytes, parameters, buffers and batch
    included. ``seconds``: the time of the step in each round.
    """

    plan: Plan | None
    peak: int
    seconds: tuple[float, ...]

    def overheads(self, base: MeasuredPlan) -> tuple[float, float, float]:
        """Return the minimum, median and maximum over the rounds of the extra time, as a share of ``base``'s time."""
        ratios = sorted(own / other - 1 for own, other in zip(self.seconds, base.seconds, strict=True))
        return ratios[0], statistics.median(ratios), ratios[-1]


def load_step(
    model: str | Path,
    *,
    sizes: Sizes = Sizes(),
    dims: Mapping[str, int] | None = None,
    loss: str | None = None,
    seed: int = 0,
    bn: str = "as-is",
    dropout: str = "as-is",
    weightless: bool = False,
    inverses: bool = False,
    device: str = "cpu",
) -> LoadedStep:
    """Load a network of the zoo or an ONNX file, and capture its training step for a random batch.

    Weights are those of the file. Weights that the file does not contain, weights of the zoo's networks, inputs and
    targets are random, drawn from ``seed``.

    Args:
        model: the name of a network of the zoo, or the path of an ONNX file.
        sizes: sizes of a network of the zoo.
        dims: sizes of an ONNX file's symbolic dimensions, by name.
        loss: ``cross_entropy``, ``mse`` or ``output`` (the output is the loss). By default the loss that fits the
            output.
        seed: for random weights, inputs and targets. They are drawn on the CPU, so they are the same for every
            device.
        bn: ``as-is``, ``train`` or ``frozen``: the form to which an ONNX file's batch norms are changed.
        dropout: ``as-is``, ``on`` or ``off``: the form to which an ONNX file's dropouts are changed.
        weightless: capture without data. A network of any size then takes no memory, and external weights are not
            read. The step can be planned, but not run.
        inverses: find all inverses, including those that round, so that gradients may differ by rounding errors.
            Otherwise find only those that move numbers.
        device: where the step is captured, measured and run: ``cpu``, ``cuda`` or, for example, ``cuda:1``.

    Raises:
        UsageError: an unknown name; sizes for a file, or ``dims`` for a network of the zoo; a loss that does not fit
            the output; a device that this machine does not have.
        ModelError: the file cannot be read, or its training step cannot be captured.
        ZooError: sizes that the network cannot have.
    """
    forms, place = Forms(bn, dropout), _device(device)
    if isinstance(model, str) and model in ZOO:
        if forms != Forms():
            raise UsageError(f"{model}: --bn and --dropout can only be used with ONNX files")
        if dims:
            raise UsageError(
                f"{model}: --dim can only be used with ONNX files; for a network of the zoo state sizes such as --batch"
            )
        return _open(_load_zoo(model, sizes, loss, seed, weightless, place), inverses)
    path = Path(model)
    if isinstance(model, str) and path.suffix != ".onnx" and not path.exists():
        raise UsageError(f"{model!r} is neither an ONNX file nor a network of the zoo ({', '.join(ZOO)})")
    if sizes != Sizes():
        raise UsageError(
            f"{path.name}: sizes such as --batch can only be used with networks of the zoo; "
            f"state a file's dimensions with --dim"
        )
    graph = rebatched(load_onnx(path, dims or {}, forms))
    return _open(_load_file(graph, path.stem, loss, seed, weightless, place), inverses)


def _device(name: str) -> torch.device:
    """Return the torch device called ``name``.

    Raises:
        UsageError: this machine does not have it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    there = torch.cuda.device_count() if device.type == "cuda" else int(device.type == "cpu")
    if (device.index or 0) >= there:
        raise UsageError(f"there is no device {name!r} here; write cpu, cuda or cuda:1")
    return device


def _open(loaded: LoadedStep, inverses: bool) -> LoadedStep:
    """Return the step with its inverses. Notes say why some tensors cannot be recovered by an inverse."""
    without = replace(loaded, step=with_exact_inverses(loaded.step))
    if not inverses:
        return without
    without = replace(without, bare=loaded)
    blind = is_weightless(loaded.batch)
    found = with_inverses(loaded.step, {} if blind else named_tensors(loaded.module))
    notes = list(found.refused[:MOST_REFUSALS])
    if len(found.refused) > len(notes):
        notes.append(f"{len(found.refused) - len(notes)} more are not recovered for such reasons")
    if blind:
        notes.append("without weights no scale is known, so no inverse through a scale is used")
    inexact = not all(map(is_exact, found.step.inverses))
    return replace(without, step=found.step, notes=(*loaded.notes, *notes), inexact=inexact, without=without)


def _load_file(
    graph: Graph, name: str, loss: str | None, seed: int, weightless: bool, device: torch.device
) -> LoadedStep:
    if weightless:
        module, inputs, mode = without_data(
            lambda: OnnxModule(graph, device="meta").train(),
            lambda: tuple(map(_empty_input, graph.inputs)),
            device,
        )
        with mode:
            return _captured(module, inputs, name, loss, seed, graph.notes)
    module = OnnxModule(graph, seed=seed).train().to(device)
    generator = torch.Generator().manual_seed(seed)
    inputs = tuple(_random_input(value, generator).to(device) for value in graph.inputs)
    return _captured(module, inputs, name, loss, seed, graph.notes)


def _load_zoo(
    name: str, sizes: Sizes, loss: str | None, seed: int, weightless: bool, device: torch.device
) -> LoadedStep:
    given, loss = asdict(sizes), loss or ZOO[name].loss
    if weightless:
        module, inputs, mode = without_data(
            lambda: build(name, **given), lambda: example_inputs(name, seed=seed, **given), device
        )
        with mode:
            return _captured(module, inputs, name, loss, seed, ())
    inputs = tuple(x.to(device) for x in example_inputs(name, seed=seed, **given))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = build(name, **given).to(device)
    return _captured(module, inputs, name, loss, seed, ())


def _captured(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    name: str,
    loss: str | None,
    seed: int,
    notes: tuple[str, ...],
) -> LoadedStep:
    module, batch = with_loss(model, inputs, loss, seed)
    step = capture(module, batch, name)
    parameters = sum(1 for p in module.parameters() if p.requires_grad)
    idle = parameters - sum(1 for output in step.outputs if output.kind == "gradient")
    if idle:
        why = "the loss is of one output alone, the first that depends on any"
        notes = (*notes, f"{idle} of {parameters} parameters get no gradient: {why}")
    return LoadedStep(module, batch, step, notes)


def _empty_input(value: Value) -> torch.Tensor:
    return torch.empty(value.shape or (), dtype=torch_dtype(value.dtype, f"the graph input {value.name!r}"))


def _random_input(value: Value, generator: torch.Generator) -> torch.Tensor:
    """Return a random input: normal for floating-point types, 0 or 1 for integers (valid indices anywhere), true for
    masks.
    """
    dtype = torch_dtype(value.dtype, f"the graph input {value.name!r}")
    shape = value.shape or ()
    check_fits(math.prod(shape) * dtype.itemsize, f"the graph input {value.name!r}'s numbers")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def problem(
    loaded: LoadedStep,
    costs: str = "roofline",
    device: str = DEFAULT_DEVICE_MODEL,
    progress: Progress = silent,
    max_inversion_error: float | None = None,
) -> TrainingGraph:
    """Return the planning problem of a step.

    Args:
        loaded: the step.
        costs: ``roofline`` models the costs of ops; ``profile`` measures them on the present device; otherwise the
            path of a file that ``rematplan profile`` wrote.
        device: the name of the device model for ``roofline``.
        progress: called with the fraction done and a short text.
        max_inversion_error: the largest relative error that a tensor may have after it is recovered by inverses; by
            default one that suits its type.

    Raises:
        UsageError: unknown costs or device model, or a profile file that lacks an op of the step.
    """
    return priced(loaded.step, costs, device, progress, max_inversion_error)


def plan(
    graph: TrainingGraph,
    budget: int,
    strategy: str = "auto",
    options: Mapping[str, object] | None = None,
    progress: Progress = silent,
) -> Plan:
    """Return the best plan that a strategy finds within ``budget`` bytes.

    Args:
        graph: the planning problem.
        budget: bytes that the simulated peak must not exceed.
        strategy: the name of a strategy.
        options: the strategy's options, by name.
        progress: called with the fraction done and a short text.

    Raises:
        UsageError: an unknown strategy or option.
        InfeasibleBudget: the strategy finds no plan that fits. The error has the smallest peak that it can reach.
    """
    return plan_within(named_strategy(strategy, **(options or {})), graph, budget, progress)


def curves(
    graph: TrainingGraph,
    strategies: Sequence[str],
    budgets: Sequence[int],
    progress: Progress = silent,
) -> dict[str, tuple[Plan, ...]]:
    """Return each strategy's trade-off curve: plans by rising overhead and falling peak, by the strategy's name.

    A strategy for which the problem is too large is left out. ``budgets``: bytes; used by strategies that plan for
    one budget at a time.

    Raises:
        UsageError: an unknown strategy.
    """
    chosen = {name: named_strategy(name) for name in strategies}
    return trace_curves(graph, chosen, budgets, progress)[0]


def run_step(
    loaded: LoadedStep, plan: Plan, *, steps: int = 3, check: bool = False, progress: Progress = silent
) -> StepReport:
    """Run a planned step; measure its peak, and its time alternately with plain autograd's.

    No optimizer runs, and the module's state is restored afterwards.

    Args:
        loaded: the step.
        plan: a plan of the step's problem.
        steps: the number of timed steps, whose losses are reported.
        check: also compare loss, gradients and buffers with plain autograd.
        progress: called with the fraction done and a short text.

    Raises:
        UsageError: the step was loaded without weights.
    """
    if is_weightless(loaded.batch):
        raise UsageError(f"{loaded.step.name} was loaded without weights: it can be planned, but not run")
    planned = PlannedStep(loaded.module, loaded.step, plan.schedule, plan.lanes)
    module, batch, device = loaded.module, loaded.batch, loaded.step.device
    losses: list[float] = []

    def run_planned() -> None:
        module.zero_grad(set_to_none=True)
        losses.append(float(planned(*batch)))

    def run_eager() -> None:
        module.zero_grad(set_to_none=True)
        eager_step(module, batch)

    verification = None
    if check:
        progress(0.0, "comparing with plain autograd")
        verification = verify(planned, batch, predicted=predicted_error(loaded, plan))
    held = _held_bytes(loaded)
    with untouched(module):
        progress(0.3, "measuring peaks")
        peaks = []
        for run in (run_planned, run_eager):
            module.zero_grad(set_to_none=True)
            release_libraries(device)
            peaks.append(held + peak_above_entry(run, device)[0])
        progress(0.6, "timing")
        losses.clear()
        timed: dict[str, Callable[[], None]] = {"planned": run_planned, "eager": run_eager}
        if plan.lanes:
            timed["one lane"] = _one_lane(loaded, plan)
        seconds = seconds_in_turn(timed, device, steps)
    progress(1.0, "done")
    return StepReport(
        plan,
        peaks[0],
        peaks[1],
        seconds["planned"],
        seconds["eager"],
        tuple(losses[1:]),
        verification,
        seconds.get("one lane"),
    )


def measure_plans(
    loaded: LoadedStep, plans: Sequence[Plan], *, rounds: int = 5, progress: Progress = silent
) -> tuple[MeasuredPlan, ...]:
    """Measure the peaks of plans and of plain autograd, then time all of them alternately in ``rounds`` rounds.

    Plans with two lanes run on one lane. Times may be compared within a round, since a slow spell of the machine
    affects all plans of a round alike. The module's state is restored afterwards.

    Returns:
        One `MeasuredPlan` for each plan, in order, and one for plain autograd at the end.

    Raises:
        UsageError: the step was loaded without weights.
    """
    if is_weightless(loaded.batch):
        raise UsageError(f"{loaded.step.name} was loaded without weights: it can be planned, but not run")
    module, batch, device = loaded.module, loaded.batch, loaded.step.device

    def run_eager() -> None:
        module.zero_grad(set_to_none=True)
        eager_step(module, batch)

    calls = {str(k): _one_lane(loaded, plan) for k, plan in enumerate(plans)} | {"eager": run_eager}
    held, peaks = _held_bytes(loaded), []
    with untouched(module):
        for done, call in enumerate(calls.values()):
            progress(0.5 * done / len(calls), "measuring peaks")
            module.zero_grad(set_to_none=True)
            release_libraries(device)
            peaks.append(held + peak_above_entry(call, device)[0])
        progress(0.5, "timing")
        seconds = rounds_in_turn(calls, device, rounds).values()
    rows = zip((*plans, None), peaks, seconds, strict=True)
    return tuple(MeasuredPlan(*row) for row in rows)


def _one_lane(loaded: LoadedStep, plan: Plan) -> Callable[[], None]:
    step = PlannedStep(loaded.module, loaded.step, plan.schedule)

    def run() -> None:
        loaded.module.zero_grad(set_to_none=True)
        step(*loaded.batch)

    return run


def predicted_error(loaded: LoadedStep, plan: Plan) -> float:
    """Return the largest predicted relative error of the forward tensors that the backward reads.

    Only tensors that the plan recovers by inverses have an error. The result is 0 if the step has no inverse that
    rounds. Otherwise it is at least one rounding error, even if the plan runs no inverse, because the step may sum in
    another order.
    """
    if not loaded.inexact:
        return 0.0
    free = {call.name: CallCost(0.0) for call in loaded.step.priced_calls}
    rounding = max(torch.finfo(p.dtype).eps for p in loaded.module.parameters() if p.is_floating_point()) / 2
    return max(rounding, worst_error(training_graph(loaded.step, free), plan.schedule))


def _held_bytes(loaded: LoadedStep) -> int:
    """Return the bytes that are resident before the step: parameters, buffers, batch and constants."""
    module = loaded.module
    tensors = [*module.parameters(), *module.buffers(), *loaded.batch, *loaded.step.constants.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
