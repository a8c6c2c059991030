"""The calls of a planned module: choose a plan for the call, make one if there is none, and execute it.

A plan belongs to one combination of several things. These are the arguments (shapes, types), modes (training,
autocast), the state that the forward reads, the outcomes of branches that depend on values of inputs and buffers, and
the gradients of earlier steps that still exist. The first call with a new combination makes a plan.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.planner.core.plan import Plan
from rematplan.runtime import guards
from rematplan.runtime.capture.flat_module import (
    ArgumentLeaf,
    ModuleTensor,
    ResultTensor,
    flattened_call,
    refill,
    tensors_in,
)
from rematplan.runtime.capture.left_out_tangents import with_expected_tangents
from rematplan.runtime.execute.autograd_function import CompiledPlan
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import (
    FakeTensor,
    FunctionalTensor,
    forward_mode_level,
    get_tracing_state,
    parametrizations_are_cached,
    peek_interpreter_stack,
    pytree,
)
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.module.capture_lock import CaptureLock
from rematplan.runtime.module.forward_capture import Planned, Tracing
from rematplan.runtime.module.least_recently_used import Recent
from rematplan.runtime.module.plan_swaps import Running
from rematplan.runtime.module.shape_options import ShapeOptions
from rematplan.runtime.module.sized_plans import SizedPlans
from rematplan.runtime.module.steps import Steps
from rematplan.runtime.module.symbolic_shapes import Found, Instance, OpenForward, OpenShapes
from rematplan.runtime.problem.accumulation import StepPlan
from rematplan.runtime.statistics.insert import StatisticsStep, with_statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import Recorder
from rematplan.runtime.symbols.expressions import NotSymbolic

MANY = 8
"""The number of captures of one module at which a warning is issued."""

LOCK = CaptureLock()
"""The lock of all planned modules."""


class Planner(Protocol):
    """Makes plans of captured training steps. A plan is a schedule of the step's planning problem with a loss boundary
    (the moment between forward and backward), as `loss_boundary.with_loss_boundary` makes it."""

    def __call__(self, step: CapturedStep, first: bool = False) -> StepPlan:
        """Return a plan of a step.

        Args:
            step: the captured training step.
            first: whether to treat an infeasible budget as for the first plan of a module, even if the planner has made
                plans. By default an infeasible budget raises for the first plan. For later steps, the plan with the
                smallest peak that was found is returned instead.

        Raises:
            InfeasibleBudget: no plan fits the budget, and the planner's options say to raise.
        """

    def with_gradients(
        self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]
    ) -> StepPlan | None:
        """Return a plan for a step that is executed while gradients of earlier steps exist. Return None if ``plan`` can
        still be used: because it fits the budget together with these gradients, or because the planner's options accept
        that it does not fit.

        Args:
            step: the captured step.
            plan: its plan without gradients of earlier steps.
            gradients: the bytes of the gradients of earlier steps.
            names: the parameters that have gradients of earlier steps, under the names that they have in the step.

        Raises:
            InfeasibleBudget: no plan fits the budget, and the planner's options say to raise.
        """


@dataclass(frozen=True)
class CacheEntry:
    """A compiled plan for one combination of argument shapes and types, modes (training, autocast), module state and
    outcomes of guards (checks that what the traced forward read is unchanged)."""

    running: Running
    outputs: pytree.TreeSpec
    """The pytree structure of three things: the results of the forward; the attributes that it sets (by the module's
    position, a dictionary by name); and the arguments, if it changes lists or dictionaries among them."""
    constants: tuple[Any, ...]
    """The leaves of ``outputs``. A leaf is a constant or a placeholder: `ResultTensor` for an output tensor of the
    compiled plan, `ArgumentLeaf` for a leaf of the arguments, `ModuleTensor` for a parameter or buffer of the model."""
    guard: guards.Guard
    """The check that everything that the forward read while it was traced, except its arguments, is unchanged."""
    steps: Steps
    """The captured step, without statistics and before the planner changed it."""
    carried: bool = False
    """Whether the plan was made at other sizes, so that the step of these sizes was not made."""
    statistics: StatisticsStep | None = None
    """The step with Kronecker-factored statistics; None if this entry's step computes none."""
    measured: list[CacheEntry] = field(default_factory=list, compare=False)
    """The entry for the same forward whose step also computes statistics: a list with no element or one."""
    with_gradients: dict[tuple[frozenset[str], int], CacheEntry] = field(default_factory=dict, compare=False)
    """Entries for steps during which gradients of earlier steps exist. A key is a pair: the names of the parameters
    that may have such gradients, and the largest number of bytes of such gradients with which the entry's plan fits the
    budget."""

    @property
    def plan(self) -> Plan:
        """The plan that calls follow now. A background search may replace it by a better plan between two steps."""
        return self.running.plan

    @property
    def compiled(self) -> CompiledPlan:
        """The compiled form of `plan`."""
        return self.running.compiled

    @property
    def captured(self) -> CapturedStep:
        """The step before planning, with the expected tangents."""
        return self.steps.captured

    @property
    def whole(self) -> CapturedStep:
        """The same step with the tangents of all outputs."""
        return self.steps.whole

    @cached_property
    def targets(self) -> dict[str, str]:
        """The parameters that get gradients: a dictionary from the parameter's name in the model to its name in the
        step. Code that must decide quickly whether gradients of earlier steps exist looks only at the first of these
        parameters."""
        found = (o.target for o in self.compiled.like.outputs if o.kind == "gradient")
        return {target.removeprefix("model."): target for target in found}

    def counting(self, gradients: int, names: frozenset[str]) -> CacheEntry:
        """Return this entry. If ``gradients`` is not 0, first add the entry to its dictionary `with_gradients`, because
        its plan also fits the budget while gradients of earlier steps exist.

        Args:
            gradients: the largest number of bytes of gradients of earlier steps with which the plan fits the budget.
            names: the names of the parameters that may have gradients of earlier steps.
        """
        if gradients:
            self.with_gradients[names, gradients] = self
        return self


class _Forwards(threading.local):
    """A count of forwards of planned modules, for each thread separately."""

    begun = 0


FORWARDS = _Forwards()


class Runner:
    """Executes the calls of one planned module: captures, plans and compiles its training steps, and keeps the results
    for later calls.

    Args:
        name: the model's name.
        planner: makes the plans.
        asked: the options for shapes: whether other shapes are planned, and how many plans are kept.
        statistics: the Kronecker-factored statistics that the steps compute; None for none.
    """

    def __init__(
        self, name: str, planner: Planner, asked: ShapeOptions, statistics: Kronecker | None = None
    ) -> None:
        self.name, self.planner, self.asked = name, planner, asked
        self.recent = Recent(asked.max_plans)
        self.recorder = Recorder(statistics) if statistics else None
        self.cache: dict[Any, list[CacheEntry]] = {}
        self.shapes: dict[Any, OpenShapes] = {}
        """The captures with open sizes, by everything that selects a plan except sizes."""
        self.last: CacheEntry
        self.said_many = False
        self.arrived: frozenset[str] = frozenset()
        """The positions of outputs whose tangents arrived although their step had left them out."""
        self.tree: guards.ModuleTree | None = None
        self.version: tuple[str, int | None] = ("", None)
        """A trained parameter's name and its version at the last call. An optimizer's step changes the
        version."""

    def twin(self, cache: dict[Any, list[CacheEntry]] | None = None) -> Runner:
        """Return a runner for a copy of the planned module. Plans that one of the two runners makes later do not appear
        in the other.

        ``cache``: the cache entries of the new runner, as in `Runner.cache`; its captures with symbolic sizes are then
        empty. If it is None, the new runner begins with the entries and captures of this one.
        """
        twin = copy.copy(self)
        twin.tree = None
        twin.recorder = Recorder(self.recorder.options) if self.recorder else None
        twin.cache = {key: list(found) for key, found in self.cache.items()} if cache is None else cache
        twin.recent = copy.deepcopy(self.recent) if cache is None else Recent(self.asked.max_plans)
        twin.shapes = {key: one.copy() for key, one in self.shapes.items()} if cache is None else {}
        if not twin.cache:
            twin.__dict__.pop("last", None)
        return twin

    def __call__(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model on these arguments and return its outputs, whose backward follows the plan. If no plan exists
        for a call of this kind, capture and plan the step first. The original model runs without a plan if gradients
        are disabled, no tensor requires a gradient, or another tracer traces the call.

        Raises:
            ModelError: the forward cannot be captured, needs another plan although ``asked.dynamic`` is false, or is
                called within a torch.func transform or forward-mode derivative.
            InfeasibleBudget: no plan fits the budget.
            UsageError: an argument has a size outside of the ranges that ``asked`` allows.
        """
        FORWARDS.begun += 1
        if not torch.is_grad_enabled():
            return planned._rematplan_plain(args, kwargs)
        leaves, spec = flattened_call(args, kwargs)
        if get_tracing_state() or any(isinstance(leaf, torch.fx.Proxy) for leaf in leaves):
            return planned._rematplan_plain(args, kwargs)  # torch.jit or torch.fx traces
        tensors = tensors_in(leaves)
        state = self._state(planned)
        wanting = (t for t in (*state.named.values(), *tensors) if t.requires_grad)
        if type(next(wanting, None)) in _NOT_TO_PLAN:
            return planned._rematplan_plain(args, kwargs)
        self._check_first_order()
        entry = self._entry(planned, leaves, spec, state)
        if self.recorder and self._takes_statistics(self.recorder, entry, state):
            entry = self._measured(entry, self.recorder)
        entry = self._with_gradients(entry, state, tensors)
        if entry.running.refinement is not None:
            self._exchange(entry, state)
        sink = self.recorder.sink(entry.statistics) if self.recorder else None
        flat = entry.compiled(
            state.named, tensors, lambda arrived: self._with_tangents(entry, arrived).compiled, sink
        )
        places: dict[type, Any] = {ResultTensor: flat, ArgumentLeaf: leaves, ModuleTensor: state.named}
        found = [places[type(c)][c.at] if type(c) in places else c for c in entry.constants]
        results, given, left = pytree.tree_unflatten(found, entry.outputs)
        for at, attributes in given.items():
            state.attributes[at].update(attributes)
        if left is not None:
            refill((args, kwargs), left)
        return results

    def _exchange(self, entry: CacheEntry, state: guards.ModuleState) -> None:
        """If a new training step begins and a search in the background has found a better plan, replace the entry's
        plan by it.

        A new step begins if the optimizer has stepped or the gradients are None. The plan is not replaced while a
        backward of this module is pending or may be repeated.
        """
        name = next(iter(entry.targets), "")
        trained, (known, version) = state.named.get(name), self.version
        new_step = trained is None or trained.grad is None or (known == name and trained._version != version)
        self.version = name, None if trained is None else trained._version
        if not (new_step and entry.running.improved) or any(w.compiled.pending for w in self.entries()):
            return
        with LOCK.alone():
            if entry.running.improved:
                found = entry.running.swap()
                # The old plan also fitted with earlier gradients; the new one may not.
                alone = [
                    key for key, w in entry.with_gradients.items() if w is entry and key[1] > found.gradients
                ]
                for key in alone:
                    del entry.with_gradients[key]

    def entries(self) -> list[CacheEntry]:
        """Return all cache entries in use, each once: entries of ordinary calls, entries that compute statistics, and
        entries for steps during which gradients of earlier steps exist."""
        plain = [entry for entries in self.cache.values() for entry in entries]
        every = [w for entry in plain for w in (entry, *entry.measured)]
        return list({id(w): w for entry in every for w in (entry, *entry.with_gradients.values())}.values())

    def prepare(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for a call with these arguments without running the model. If there is a plan for such a call,
        keep it. If the module computes statistics, do the same for the step that computes them.

        Raises:
            ModelError, InfeasibleBudget, UsageError: as `__call__`.
        """
        with LOCK.alone(), torch.inference_mode(False), torch.enable_grad():
            entry = self.find(planned, args, kwargs)
            if self.recorder:
                self._measured(entry, self.recorder)

    def step(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedStep:
        """Return the captured step for these arguments, before planning and without statistics.

        Raises:
            ModelError: the forward cannot be captured.
        """
        with LOCK.alone(), torch.inference_mode(False), torch.enable_grad():
            leaves, spec = flattened_call(args, kwargs)
            state = self._state(planned)
            return with_expected_tangents(self._found(planned, leaves, spec, state).step, self.arrived)

    def _takes_statistics(self, recorder: Recorder, entry: CacheEntry, state: guards.ModuleState) -> bool:
        parameters = [t for t in state.named.values() if t.requires_grad]
        accumulating = any(_gradient(state.named.get(name)) is not None for name in entry.targets)
        return recorder.forward(parameters, accumulating)

    def _measured(self, entry: CacheEntry, recorder: Recorder) -> CacheEntry:
        """Return the cache entry for the forward of ``entry`` whose step also computes statistics. It is planned if
        there is none.

        ``recorder``: collects the module's statistics; its options say which ones the step computes.
        """
        if not entry.measured:
            with LOCK.alone():
                if not entry.measured:
                    found = with_statistics(entry.whole, recorder.options, recorder.draws)
                    captured = with_expected_tangents(found.step, self.arrived)
                    first = not any(w.measured for entries in self.cache.values() for w in entries)
                    draws = recorder.draws.count
                    made = self.planner(captured, first=first)
                    recorder.draws.count = draws  # the measurement of costs draws labels, too
                    steps = Steps.of(entry.whole, captured)
                    measured = replace(entry, running=Running.of(made), steps=steps)
                    measured = replace(measured, statistics=found, with_gradients={}, measured=[])
                    names = next((names for names, _ in entry.with_gradients), frozenset[str]())
                    entry.measured.append(measured.counting(made.gradients, names))
        self.last = entry.measured[0]
        return self.last

    def find(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CacheEntry:
        """Return the cache entry (compiled plan) for a call with these arguments whose guard holds, that is, for which
        everything that the traced forward read is unchanged. If there is none, capture, plan and compile the step.

        Raises:
            ModelError, InfeasibleBudget, UsageError: as `__call__`.
        """
        leaves, spec = flattened_call(args, kwargs)
        return self._entry(planned, leaves, spec, self._state(planned))

    def _state(self, planned: Planned) -> guards.ModuleState:
        module = cast(nn.Module, planned)
        with LOCK.shared():
            state = self.tree.state(module) if self.tree else None
            if state is None:
                self.tree = guards.ModuleTree(module)
                state = self.tree.state(module)
        assert state is not None
        return state

    def _check_first_order(self) -> None:
        if peek_interpreter_stack() is not None or forward_mode_level() >= 0:
            raise ModelError(
                f"{self.name} is planned for the backward of a loss; use the original model with torch.func's "
                f"transforms and forward-mode derivatives"
            )

    def _entry(
        self, planned: Planned, leaves: list[Any], spec: pytree.TreeSpec, state: guards.ModuleState
    ) -> CacheEntry:
        if parametrizations_are_cached() and any(
            "parametrizations" in a["_modules"] for a in state.attributes
        ):
            raise ModelError(
                f"{self.name} is called in torch.nn.utils.parametrize.cached(), which shares tensors between calls; a "
                f"planned step computes them in each call; leave that block, or enter it inside the forward"
            )
        key, tensors = (guards.call_key(leaves, spec), state.key), tensors_in(leaves)
        with LOCK.shared():
            found = self._known(key, state, tensors)
        if found is None:
            with LOCK.alone():  # another thread may have made it meanwhile
                found = self._known(key, state, tensors) or self._new(key, planned, leaves, spec, state)
        self.recent.use(key)
        if found.compiled.like.left_out & self.arrived:
            found = self._with_tangents(found)
        self.last = found
        return found

    def _with_gradients(
        self, entry: CacheEntry, state: guards.ModuleState, tensors: Sequence[torch.Tensor]
    ) -> CacheEntry:
        """Return the cache entry whose plan fits the budget together with the gradients of earlier steps that exist
        now; ``entry`` itself if none exist. It is planned if there is none.

        The bytes that count are those of the gradients of parameters (to which new gradients are added), of the
        gradients of inputs, and of the statistics summed so far.

        Args:
            entry: the entry for the call without gradients of earlier steps.
            state: the module's present state, with its parameters.
            tensors: the tensors among the arguments.
        """
        own = state.named.get(next(iter(entry.targets), ""))
        of_inputs = [g for t in tensors if (g := _gradient(t)) is not None]
        summed = self.recorder.summed_bytes if self.recorder else {}
        if _gradient(own) is None and not of_inputs and not summed:
            return entry
        gradients = {name: g for name, t in state.named.items() if (g := _gradient(t)) is not None}
        every = (*gradients.values(), *of_inputs)
        held = sum({g._cdata: allocated(g.nbytes(), g.device) for g in every}.values()) + sum(summed.values())
        with LOCK.shared():
            found = next(
                (
                    w
                    for (n, size), w in entry.with_gradients.items()
                    if held <= size and gradients.keys() <= n
                ),
                None,
            )
        if found is None:
            with LOCK.alone():
                found = self._planned_with_gradients(entry, held, frozenset(gradients))
                entry.with_gradients[frozenset(gradients), held] = found
        self.last = found
        return found

    def _planned_with_gradients(self, entry: CacheEntry, held: int, names: frozenset[str]) -> CacheEntry:
        if entry.carried and entry.plan.budget is not None and entry.plan.peak + held <= entry.plan.budget:
            return entry
        targets = {target for name, target in entry.targets.items() if name in names}
        found = self.planner.with_gradients(entry.captured, entry.plan, held, targets)
        return entry if found is None else replace(entry, running=Running.of(found), with_gradients={})

    def _with_tangents(self, entry: CacheEntry, arrived: frozenset[str] = frozenset()) -> CacheEntry:
        """Return a cache entry for the forward of ``entry`` whose backward also takes gradients of the outputs
        ``arrived``, and of outputs for which gradients arrived in earlier backwards. It is planned if there is none,
        and later calls use it instead of ``entry``.

        ``arrived``: the positions (as text) of the outputs for which a gradient has arrived that the plan left out.
        """
        if entry.statistics and self.recorder:
            plain = replace(entry, statistics=None, measured=[])
            return self._measured(self._with_tangents(plain, arrived), self.recorder)
        with LOCK.alone():
            self._warn_of_arrived(arrived - self.arrived)
            self.arrived |= arrived
            alike = (w for entries in self.cache.values() for w in entries if w.guard is entry.guard)
            for known in alike:
                if not known.compiled.like.left_out & self.arrived:
                    return known
            captured = with_expected_tangents(entry.whole, self.arrived)
            made = self.planner(captured)
            found = replace(entry, running=Running.of(made), steps=Steps.of(entry.whole, captured))
            found = replace(found, with_gradients={}, measured=[])
            found.counting(made.gradients, next((names for names, _ in entry.with_gradients), frozenset()))
            for entries in self.cache.values():
                entries[:] = [found if w.guard is entry.guard else w for w in entries]
        return found

    def _warn_of_arrived(self, arrived: frozenset[str]) -> None:
        if arrived:
            warn(
                f"{self.name}: a gradient arrived for output {', '.join(sorted(arrived, key=int))}, from which its "
                f"loss is computed, and the plan did not expect that: this backward runs the forward again and may "
                f"exceed the budget; later plans expect the gradient"
            )

    def _known(
        self, key: Any, state: guards.ModuleState, tensors: Sequence[torch.Tensor]
    ) -> CacheEntry | None:
        return next((entry for entry in self.cache.get(key, ()) if entry.guard.holds(state, tensors)), None)

    def _new(
        self, key: Any, planned: Planned, leaves: list[Any], spec: pytree.TreeSpec, state: guards.ModuleState
    ) -> CacheEntry:
        self.asked.check(planned._rematplan_model(), *pytree.tree_unflatten(leaves, spec))
        if self.cache and not self.asked.dynamic:
            raise ModelError(
                f"{self.name} was planned for other shapes, types, modes, attributes or decisions; plan it again, or "
                f"pass dynamic=True"
            )
        entry = self._compile(planned, leaves, spec, state)
        self.cache.setdefault(key, []).append(entry)
        self.recent.use(key)
        self.recent.trim(self.cache)
        if sum(one.fixed for one in self.shapes.values()) == MANY and not self.said_many:
            self.said_many = True
            warn(
                f"{self.name} was captured {MANY} times for different calls; each new number, shape or value by which "
                f"the forward decides costs another capture: pass numbers as tensors"
                + "".join(f"; {reason}" for one in self.shapes.values() for reason in one.reasons)
            )
        return entry

    def _compile(
        self, planned: Planned, leaves: list[Any], spec: pytree.TreeSpec, state: guards.ModuleState
    ) -> CacheEntry:
        tracing, shapes = (
            Tracing(self.name, planned, leaves, spec, state),
            self._open_shapes(leaves, spec, state),
        )
        entry = self._carried(shapes, tracing.batch, state)
        if entry is None:
            tracing.check()
            found = shapes.find(state, tracing.batch, tracing.opened, tracing.fixed)
            entry = self._planned(found, shapes, state)
        return entry

    def _found(
        self, planned: Planned, leaves: list[Any], spec: pytree.TreeSpec, state: guards.ModuleState
    ) -> Found:
        tracing = Tracing(self.name, planned, leaves, spec, state)
        tracing.check()
        shapes = self._open_shapes(leaves, spec, state)
        return shapes.find(state, tracing.batch, tracing.opened, tracing.fixed)

    def _open_shapes(self, leaves: list[Any], spec: pytree.TreeSpec, state: guards.ModuleState) -> OpenShapes:
        """Return the captures with open sizes for these arguments and any others that differ only in sizes."""
        key = guards.open_key(leaves, spec), state.key
        shapes = self.shapes.pop(key, None) or OpenShapes()
        self.shapes[key] = shapes  # the latest of them
        while len(self.shapes) > self.asked.max_plans:
            del self.shapes[next(iter(self.shapes))]
        return shapes

    def _carried(
        self, shapes: OpenShapes, batch: Sequence[torch.Tensor], state: guards.ModuleState
    ) -> CacheEntry | None:
        """Return an entry with a plan of other sizes, without making the step; None if no such plan is known to fit."""
        for instance, guard in shapes.accepted(state, batch):
            forward, sizes = instance.forward, instance.sizes
            with suppress(NotSymbolic):
                found = self._plans(forward).carried(sizes, batch)
                if found is not None:
                    shapes.carry()
                    steps = Steps(instance.step, self.arrived)
                    running = Running.of(found, self._compiler(instance, steps))
                    constants = forward.constants_at(sizes)
                    return CacheEntry(running, forward.outputs, constants, guard, steps, carried=True)
        return None

    def _plans(self, forward: OpenForward) -> SizedPlans:
        return forward.plans(self.arrived, self.asked.max_plans)

    def _planned(self, forward: Found, shapes: OpenShapes, state: guards.ModuleState) -> CacheEntry:
        captured = with_expected_tangents(forward.step, self.arrived)
        found = self.planner(captured)
        outputs = [o for o in found.step.outputs if o.kind == "output"]
        if [int(o.target) for o in outputs] != list(range(forward.count)):
            raise ModelError(f"{forward.step.name}: an output could not be captured")
        steps, compile_, instance = Steps.of(forward.step, captured), None, forward.instance
        if instance is not None:
            steps = Steps(instance.step, self.arrived)
            if found.carrier is not None:
                self._learn(instance, found, shapes)
                compile_ = self._compiler(instance, steps)
        running = Running.of(found, compile_)
        entry = CacheEntry(running, forward.outputs, forward.constants, forward.guard, steps)
        wanting = frozenset(name for name, t in state.named.items() if t.requires_grad)
        return entry.counting(found.gradients, wanting)

    def _learn(self, instance: Instance, found: StepPlan, shapes: OpenShapes) -> None:
        """Remember the problem of an instance, and, if it is the first one, those of shapes that were captured
        separately."""
        plans, carrier = self._plans(instance.forward), found.carrier
        assert carrier is not None
        assert found.problem is not None
        if not plans.learned:
            for known in shapes.known_instances(instance.forward):
                other = carrier.problem_at(with_expected_tangents(known.step(), self.arrived))
                plans.learn(known.sizes, known.batch, *other, carrier)
        plans.learn(instance.sizes, instance.batch, found.step, found.problem, carrier)

    def _compiler(self, instance: Instance, steps: Steps) -> Callable[[StepPlan], CompiledPlan] | None:
        """Return a function that compiles plans of an instance once for all sizes; None if that is not possible."""
        return self._plans(instance.forward).compiler(instance.sizes, lambda: steps.captured)


def _gradient(tensor: torch.Tensor | None) -> torch.UntypedStorage | None:
    """Return the storage of a tensor's gradient. Return None if the tensor is no leaf that requires a gradient, or has
    no dense gradient."""
    if tensor is None or not (tensor.requires_grad and tensor.is_leaf):
        return None
    gradient = tensor.grad
    dense = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return gradient.untyped_storage() if gradient is not None and dense else None


_NOT_TO_PLAN = (type(None), FakeTensor, FunctionalTensor)
"""A call is not planned if its first tensor that requires a gradient has one of these types. NoneType means that there
is no such tensor; the others mean that a tracer is running."""
