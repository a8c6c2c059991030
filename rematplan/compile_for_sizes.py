"""A graph from TorchDynamo with symbolic sizes, compiled once for each plan that is used, not once for each size.

New sizes get a plan by the bytes and costs of the graph's size expressions, if possible one that is compiled already
(`plan_at_sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from rematplan.ir import InfeasibleBudget, ModelError, ProblemError
from rematplan.planner.caches.latest import remember
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.schedule import Schedule
from rematplan.planner.core.simulator import simulate
from rematplan.plans.first_plan import plan_at_once
from rematplan.plans.planner import Planner
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import (
    FakeTensorMode,
    TracingContext,
    detect_fake_mode,
    disable_current_modes,
    tracing,
    unset_fake_temporarily,
)
from rematplan.runtime.symbols.expressions import condition
from rematplan.runtime.symbols.symbolic_step import OpenStep
from rematplan.symbolic_halves import Halves, SymbolicJointGraph

SIZES = 1024
"""The largest number of combinations of sizes for which a compiled graph remembers its plan."""

InputSizes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The values of a graph's symbols, and the bytes of the storages of its inputs with symbolic sizes."""
Shapes: TypeAlias = tuple[torch.Size, ...]
Partition: TypeAlias = Callable[..., Halves]


class Compiler(Protocol):
    """Compiles and plans graphs for `SymbolicGraph`; `PlanningBackend` implements it."""

    plans: list[Plan]
    """Every plan for which a graph was compiled."""
    planner: Planner
    """The planner of captured steps."""

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], partition: Partition
    ) -> Callable[..., Any]:
        """Compile a graph of forward ops, and return the compiled function."""

    def scope(self, step: CapturedStep, parameters: Shapes) -> str:
        """Return a key for ``step``. Steps with equal keys share the bytes that a percentage has for the first."""

    def plan(self, planner: Planner, step: CapturedStep) -> Plan:
        """Return the plan of a graph's captured step. If none fits the budget, ``on_infeasible`` decides."""


@dataclass(frozen=True)
class _Version:
    """A graph that was compiled for one plan."""

    schedule: Schedule
    """The plan's schedule."""
    run: Callable[..., Any]
    """The compiled function."""
    holds: Callable[..., bool]
    """A function that returns whether the compiled function is valid for the values of the graph's symbolic sizes."""


class SymbolicGraph:
    """A compiled function for a graph with symbolic sizes, which serves all sizes with which TorchDynamo calls it.

    Raises `NotSymbolic` if ops depend on a size's value, and `InfeasibleBudget` as ``on_infeasible`` asks.
    """

    def __init__(self, compiler: Compiler, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Compile the graph for all sizes, with a plan for those that ``inputs`` have in the trace; without a plan if
        it has no backward."""
        self.compiler, self.module = compiler, copied(module)
        nodes = module.graph.find_nodes(op="placeholder")
        self.inputs = [_traced(node, given) for node, given in zip(nodes, inputs, strict=True)]
        self.symbols = {
            str(size.node.expr): at
            for at, size in enumerate(inputs)
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol
        }
        self.open = [at for at, given in enumerate(self.inputs) if _is_open(given)]
        self.lock = RLock()
        self.step: OpenStep | None = None
        self.versions: list[_Version] = []
        self.of_sizes: dict[InputSizes, _Version] = {}
        mode = detect_fake_mode(self.inputs)
        assert mode is not None
        self.mode: FakeTensorMode = mode
        self.plan: Plan | None = None
        self.guarded: int | None = None
        """The number of assumptions about sizes that TorchDynamo guards."""
        values = tuple(int(inputs[at].node.hint) for at in self.symbols.values())
        sizes = values, tuple(_storage_bytes(inputs[at]) for at in self.open)

        parameters = parameter_shapes(inputs)

        def split(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Halves:
            reading = SymbolicJointGraph(
                joint, num_fwd_outputs, tuple(self.symbols), f"graph {len(compiler.plans)}"
            )
            self.step = reading.opened()
            self.planner = replace(compiler.planner, scope=compiler.scope(reading.step, parameters))
            with unset_fake_temporarily(), disable_current_modes():
                self.plan = compiler.plan(self.planner, self._step_at(sizes))
            return reading.halves(self.plan.schedule)

        self.first = compiler.compile(module, inputs, split)
        if self.plan is not None:
            self._remember(sizes, self._added(self.plan, self.first, lambda *_: True))

    def __call__(self, *given: Any) -> Any:
        """Run the graph with the plan for its inputs' sizes, made or found when they occur first; none without a
        backward. `ModelError` if compiled code cannot serve them, `InfeasibleBudget` as ``on_infeasible`` asks."""
        if self.step is None:  # without a backward there is no plan
            return self.first(*given)
        sizes = (
            tuple(given[at] for at in self.symbols.values()),
            tuple(_storage_bytes(given[at]) for at in self.open),
        )
        version = self.of_sizes.get(sizes)
        if version is None:
            with self.lock:
                version = self.of_sizes.get(sizes) or self._remember(sizes, self._version(sizes))
        return version.run(*given)

    def _step_at(self, sizes: InputSizes) -> CapturedStep:
        assert self.step is not None
        values, storages = sizes
        nbytes = dict(zip(map(str, self.open), storages, strict=True))
        return self.step.at_sizes(self.step.expressions(*values), nbytes)

    def _version(self, sizes: InputSizes) -> _Version:
        """Plan the step for new sizes, and return the graph that is compiled for the plan, compiling it if there is
        none.

        Raises `ModelError` if the compiled graph is not valid for the sizes.
        """
        known = [version for version in self.versions if version.holds(*sizes[0])]
        plan = plan_at_sizes(self.planner, self._step_at(sizes), [version.schedule for version in known])
        for version in known:
            if version.schedule == plan.schedule:
                return version
        version = self._compiled_again(plan)
        if not version.holds(*sizes[0]):
            raise ModelError(
                f"{plan.problem}: compiled for another plan, the graph is not valid for the sizes "
                f"{', '.join(map(str, sizes[0]))}; compile it for each size with torch.compile(dynamic=False)"
            )
        return version

    def _compiled_again(self, plan: Plan) -> _Version:
        """Compile for another plan. What that assumes beyond TorchDynamo's fixed guards becomes `_Version.holds`."""
        shapes = self.mode.shape_env
        assert shapes is not None

        def split(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Halves:
            reading = SymbolicJointGraph(joint, num_fwd_outputs, tuple(self.symbols), plan.problem)
            return reading.halves(plan.schedule)

        frozen, shapes.frozen = shapes.frozen, False
        if self.guarded is None:
            self.guarded = len(shapes.guards)
        try:
            with tracing(TracingContext(self.mode)):
                run = self.compiler.compile(copied(self.module), self.inputs, split)
        finally:
            shapes.frozen = frozen
        assumed = [guard.expr for guard in shapes.guards[self.guarded :]]
        return self._added(plan, run, condition(assumed, tuple(self.symbols)))

    def _added(self, plan: Plan, run: Callable[..., Any], holds: Callable[..., bool]) -> _Version:
        self.compiler.plans.append(plan)
        self.versions.append(_Version(plan.schedule, run, holds))
        return self.versions[-1]

    def _remember(self, sizes: InputSizes, version: _Version) -> _Version:
        return remember(self.of_sizes, sizes, version, SIZES)


def parameter_shapes(inputs: Sequence[Any]) -> Shapes:
    """Return the shapes of the inputs that are `torch.nn.Parameter`, in order; other inputs are ignored."""
    return tuple(given.shape for given in inputs if isinstance(given, torch.nn.Parameter))


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph that shares the original's constants. It protects the original from a compiler that
    changes its graph."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.meta.pop("grapharg", None)  # refers to the inputs
    return fx.GraphModule(module, graph)


def _traced(node: fx.Node, given: Any) -> Any:
    """Return what TorchDynamo traced for an input: the placeholder's tensor without data, or the size."""
    return node.meta["example_value"] if isinstance(given, torch.Tensor) else given


def _is_open(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in given.shape)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


WORTH = 0.01
"""Another plan is compiled if its overhead is smaller by more than this share of the step's time."""
COMPILED = 8
"""Once this many plans are compiled, another one is compiled only if none of them fits."""


def plan_at_sizes(planner: Planner, step: CapturedStep, compiled: Sequence[Schedule]) -> Plan:
    """Return a plan for a step of new sizes: the cheapest of ``compiled`` that fits, unless fewer than `COMPILED` are
    given and a plan found at once is cheaper by more than `WORTH`. Without both, or for ``min`` and ``least``, search;
    if no plan fits, ``on_infeasible`` decides between an error and another plan."""
    graph = planner.problem(step)
    amount = planner.limit(graph).fixed
    if amount is not None:
        fitting = list[Plan]()
        for schedule in compiled:
            try:
                estimate = simulate(graph, schedule)
            except ProblemError:  # it repeats an op that may run only once at these sizes
                continue
            if estimate.peak <= amount:
                fitting.append(Plan(graph.name, "compiled", schedule, estimate, budget=amount))
        best = min(fitting, key=lambda plan: (plan.estimate.cost, plan.peak), default=None)
        # No more plans are compiled then.
        if best is not None and len(compiled) >= COMPILED:
            return best
        better = plan_at_once(graph, amount, planner.store)
        if best is not None and (
            better is None or best.estimate.overhead <= better.estimate.overhead + WORTH
        ):
            return best
        if better is not None:
            return better
    try:
        return planner.planned(step)
    except InfeasibleBudget as error:
        return planner.instead(step, error, first=False)
