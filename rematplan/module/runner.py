"""The course of a planned module's call: find or make a valid plan, execute it, and exchange it for a better one
between steps."""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rematplan.ir import ModelError, NoGradients
from rematplan.module.budget_warnings import BudgetWarnings
from rematplan.module.bypass_warnings import BypassWarnings
from rematplan.module.cached_plans import CachedPlans, CacheEntry
from rematplan.module.capture_lock import LOCK
from rematplan.module.captures import Captures, ReadyCapture
from rematplan.module.existing_gradients import existing_gradients, gradient_storage
from rematplan.module.forward_capture import Original, Tracing
from rematplan.module.shape_options import ShapeOptions
from rematplan.module.unplanned_step import UnplannedStep
from rematplan.plans.planner import Planner
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
from rematplan.runtime.capture.patches.fake_layouts import distrust
from rematplan.runtime.capture.patches.saved_tensors import check_saved_tensors_hooks
from rematplan.runtime.execute.compiled_plan import Deferred
from rematplan.runtime.execute.first_run import OtherNumbers, OtherResults
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import FakeTensor, FunctionalTensor, get_tracing_state, pytree
from rematplan.runtime.graph.tensor_storages import plain_tensors
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.statistics.insert import with_statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import Recorder

YOUNG = 1
"""The oldest generation of objects that Python's garbage collector searches after a capture; a search of all takes
long."""


class Runner:
    """Executes the calls of one planned module: captures, plans and compiles its training steps, and keeps the results.
    ``ready``: a capture of the first call, if it was made before."""

    def __init__(
        self,
        name: str,
        planner: Planner,
        asked: ShapeOptions,
        statistics: Kronecker | None = None,
        ready: ReadyCapture | None = None,
    ) -> None:
        """Make a runner without plans. ``name``: the model's, for messages; ``statistics``: what its steps may also
        compute, None for nothing."""
        self.name, self.planner, self.asked = name, planner, asked
        self.recorder = Recorder(statistics) if statistics else None
        self.plans = CachedPlans(asked.max_plans)
        self.captures = Captures(name, asked.max_plans, ready=() if ready is None else (ready,))
        self.last: CacheEntry | None = None
        self.arrived: frozenset[str] = frozenset()
        """The positions of outputs whose tangents arrived although their step had left them out."""
        self.warnings = BudgetWarnings(name)
        self.bypasses = BypassWarnings(name)
        self.untrained: deque[Hashable] = deque(maxlen=asked.max_plans)
        """The latest kinds of calls of which no output depends on a trainable parameter."""
        self.prepared: tuple[Hashable, list[torch.Size]] | None = None
        """Key and shapes of the first call for which a plan was made without running it; None once a step ran."""
        self.deferred: Deferred = []
        """The backwards whose weight gradients are not computed yet, in their order, whatever plan they follow."""
        self.tree: guards.ModuleTree | None = None
        self.distrusted: frozenset[Any] = frozenset()
        """Ops that gave other results than planned, before the step was captured anew."""
        self.version: tuple[str, int | None] = ("", None)
        """A trained parameter's name and its version at the last call. An optimizer's step changes the version."""

    def twin(self, *, with_plans: bool = True) -> Runner:
        """Return a runner for a copy of the module, with the present plans and captures or none. Later plans are not
        shared."""
        twin = copy.copy(self)
        twin.planner = replace(self.planner, fixed={**self.planner.fixed})
        twin.tree, twin.deferred = None, []
        twin.bypasses, twin.untrained = BypassWarnings(self.name), self.untrained.copy()
        twin.warnings = replace(self.warnings, told={*self.warnings.told})
        if not with_plans:
            twin.untrained.clear()
        twin.recorder = Recorder(self.recorder.options) if self.recorder else None
        twin.plans = self.plans.copy() if with_plans else CachedPlans(self.asked.max_plans)
        twin.captures = self.captures.copy(with_shapes=with_plans)
        if not twin.plans:
            twin.prepared = twin.last = None
        return twin

    @property
    def runners(self) -> Sequence[Runner]:
        """The runners that have the plans: several if the model is planned in parts."""
        return (self,)

    def __call__(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model and return its outputs, whose backward follows a plan; a step without a valid plan is captured
        and planned. Calls without gradients, and calls that another tracer traces, run without a plan
        (`state_if_planned`)."""
        if not torch.is_grad_enabled():
            return original.plain(args, kwargs)
        leaves, spec = flattened_call(args, kwargs)
        state = self.state_if_planned(original, leaves, spec)
        if state is None:
            return self._unplanned(original, args, kwargs)
        check_saved_tensors_hooks(self.name)
        self.bypasses.begin_planned_call()
        call = Tracing(self.name, original, leaves, spec, state, packed=self.may_pack)
        if self.prepared is not None:
            self._begin_training(call)
        measures = False
        if self.recorder:
            measures = self._takes_statistics(self.recorder, self._entry(call), state)
        while True:
            try:
                entry, flat = self._executed(call, measures)
                break
            except NoGradients:
                return self.run_untrained(original, args, kwargs)
            except OtherResults as other:
                self._distrust(other)
            except guards.OtherOutcome as other:
                call = replace(call, assumed=other.outcomes)
        if call.assumed:
            with LOCK.alone():
                self.plans.put_first(entry)
        places: dict[type, Any] = {ResultTensor: flat, ArgumentLeaf: leaves, ModuleTensor: state.named}
        found = [places[type(c)][c.at] if type(c) in places else c for c in entry.constants]
        results, given, left = pytree.tree_unflatten(found, entry.outputs)
        if given:
            guards.store(given, state.attributes)
        if left is not None:
            refill((args, kwargs), left)
        return results

    def state_if_planned(
        self, original: Original, leaves: list[Any], spec: pytree.TreeSpec
    ) -> guards.ModuleState | None:
        """Return the model's state; None if the call runs without a plan: another tracer traces it, no tensor requires
        a gradient, or earlier calls of its kind had no output with one. `ModelError` inside of modes that plans do not
        support."""
        if get_tracing_state() or any(isinstance(leaf, torch.fx.Proxy) for leaf in leaves):
            return None  # torch.jit or torch.fx traces
        state = self._state(original)
        wanting = (t for t in (*state.named.values(), *tensors_in(leaves)) if t.requires_grad)
        if type(next(wanting, None)) in _NOT_TO_PLAN:
            return None
        if self.untrained and (guards.open_key(leaves, spec), state.key) in self.untrained:
            return None
        guards.check_modes(self.name)
        return state

    def run_untrained(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of which no output depends on a trainable parameter, as of a frozen generator. This and all later
        calls of its kind run without a plan."""
        leaves, spec = flattened_call(args, kwargs)
        self.untrained.append((guards.open_key(leaves, spec), self._state(original).key))
        return self._unplanned(original, args, kwargs)

    def _unplanned(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model as it is; warn if a kind of call that was taken for untrained trains after all."""
        call = partial(original.plain, args, kwargs)
        what = f"a call of {self.name}"
        return self.bypasses.run_and_warn(original.model, what, call) if self.untrained else call()

    def _executed(self, call: Tracing, measures: bool) -> tuple[CacheEntry, tuple[torch.Tensor, ...]]:
        """Run the forward of a call's plan, which is made now if none is valid, with statistics if ``measures``. Return
        the plan's entry and the forward's tensors; `OtherResults` if ops gave other results than planned."""
        entry = self._entry(call)
        if measures and self.recorder:
            entry = self._measured(entry, self.recorder)
        entry = self._with_gradients(entry, call)
        failed = entry.compiled.first_runs.failed
        if failed and not failed.ops <= self.distrusted:
            raise failed
        if entry.running.refinement is not None:
            self._exchange(entry, call.state)
        bounded = self.planner.bounds_one_call
        if held := sum(w.compiled.held_bytes for w in self.plans.all()):
            self.warnings.pending(entry.plan, held, of_part=not bounded)
        sink = self.recorder.sink(entry.statistics) if self.recorder else None
        flat = entry.compiled(
            call.state.named,
            call.tensors,
            lambda arrived: self._with_tangents(entry, arrived).compiled,
            sink,
            self.deferred,
            lambda held: self.warnings.retained(entry.plan, held, of_part=not bounded),
        )
        return entry, flat

    def _distrust(self, found: OtherResults) -> None:
        """Drop all plans and captures after ops gave other results than planned. After other strides, later captures
        run these ops on real tensors; after a second failure, sizes are fixed. `ModelError` if they fail after that."""
        again = found.ops <= self.distrusted
        if again and self.captures.only_fixed:
            raise ModelError(
                f"{self.name}: {found.text}; a plan depends on strides that are known before it runs: plan the "
                f"submodules that do not call this op"
            )
        with LOCK.alone():
            self.distrusted |= found.ops
            if not isinstance(found, OtherNumbers):
                distrust(found.ops)
            self._drop_plans()
            self.captures = replace(self.captures, only_fixed=found.text if again else "", ready=())

    def _drop_plans(self) -> None:
        """Drop all plans, and the captures for sizes that calls had."""
        self.plans = CachedPlans(self.asked.max_plans)
        self.captures = self.captures.copy(with_shapes=False)

    def _exchange(self, entry: CacheEntry, state: guards.ModuleState) -> None:
        """At a new training step, replace the entry's plan by a better one that was found, unless a backward is
        pending."""
        new_step = self._is_new_step(entry, state)
        if new_step and entry.running.improved and not any(w.compiled.pending for w in self.plans.all()):
            with LOCK.alone():
                if entry.running.improved:
                    entry.swap_plan()

    def _is_new_step(self, entry: CacheEntry, state: guards.ModuleState) -> bool:
        """Return whether a training step begins: the first trained parameter has no gradient, or its version is not
        `version`, which is replaced."""
        name, before = next(iter(entry.targets), ""), self.version
        trained = state.named.get(name)
        self.version = name, None if trained is None else trained._version
        return trained is None or trained.grad is None or (before[0] == name and before != self.version)

    def _begin_training(self, call: Tracing) -> None:
        """If a prepared call of the same shapes but of other types, modes or layouts fixed a percentage, drop the plans
        and let it refer to this step. In any case `prepared` is None afterwards."""
        prepared, self.prepared = self.prepared, None
        planner = self.planner.of_training()
        # A step of other shapes does not count: its batch may be a small one.
        if planner is None or prepared is None or prepared[1] != _shapes(call):
            return
        if prepared[0] != call.key:
            with LOCK.alone():
                self.planner = planner
                self._drop_plans()
                self.captures = replace(self.captures, ready=())

    def prepare(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for these arguments, unless there is one, without running the model. With statistics, make the
        plan of their step, too."""
        with LOCK.alone(), torch.inference_mode(False), torch.enable_grad():
            first = not self.plans
            entry = self.find(original, args, kwargs)
            if first:
                self._note_prepared(original, args, kwargs)
            if self.recorder:
                self._measured(entry, self.recorder)

    def _note_prepared(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._tracing(original, args, kwargs)
        self.prepared = call.key, _shapes(call)

    def captured(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedStep:
        """Return the captured step for these arguments, as it is planned without statistics."""
        with LOCK.alone(), torch.inference_mode(False), torch.enable_grad():
            found = self.captures.captured(self._tracing(original, args, kwargs))
            return with_expected_tangents(found.step, self.arrived)

    def _takes_statistics(self, recorder: Recorder, entry: CacheEntry, state: guards.ModuleState) -> bool:
        parameters = [t for t in state.named.values() if t.requires_grad]
        accumulating = any(gradient_storage(state.named.get(name)) is not None for name in entry.targets)
        return recorder.forward(parameters, accumulating)

    def _measured(self, entry: CacheEntry, recorder: Recorder) -> CacheEntry:
        """Return the entry for the forward of ``entry`` whose step also computes statistics, planned if there is none.
        It becomes `last`."""
        if entry.measured is None:
            with LOCK.alone():
                if entry.measured is None:
                    found = with_statistics(entry.unplanned.whole, recorder.options, recorder.draws)
                    captured = with_expected_tangents(found.step, self.arrived)
                    first = not any(w.measured for w in self.plans.plain())
                    made = self.planner.plan(captured, first=first)
                    unplanned = UnplannedStep.of(entry.unplanned.whole, captured)
                    entry.measured = entry.planned_again(made, unplanned, statistics=found)
        self.last = entry.measured
        return entry.measured

    def find(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CacheEntry:
        """Return the valid entry for these arguments; if there is none, capture, plan and compile the step."""
        return self._entry(self._tracing(original, args, kwargs))

    def _tracing(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracing:
        state = self._state(original)
        return Tracing(self.name, original, *flattened_call(args, kwargs), state, packed=self.may_pack)

    @property
    def may_pack(self) -> bool:
        """Whether a forward that calls RNNs with packed sequences is captured: if ``dynamic_shapes`` is False, so that
        there is one capture."""
        return not self.asked.dynamic

    def _state(self, original: Original) -> guards.ModuleState:
        """Return the model's state now. The tree of its modules is made anew if modules have changed."""
        module = original.model
        with LOCK.shared():
            state = self.tree.state(module) if self.tree else None
            if state is None:
                self.tree = guards.ModuleTree(module)
                state = self.tree.state(module)
        assert state is not None
        return state

    def _entry(self, call: Tracing) -> CacheEntry:
        """Return the valid cache entry for a call, captured and planned now if there is none; it becomes `last`.
        `UsageError` for a model with parametrizations in a block that caches them."""
        call.state.check_parametrizations(self.name)
        with LOCK.shared():
            found = self.plans.valid(call)
        if found is None:
            with LOCK.alone():  # another thread may have made it meanwhile
                found = self.plans.valid(call)
                if found is None:
                    found = self._new(call)
            gc.collect(YOUNG)  # a capture leaves cycles of objects that hold the inputs of this call
        self.plans.use(call.key)
        if found.compiled.like.left_out & self.arrived:
            found = self._with_tangents(found)
        self.last = found
        return found

    def _with_gradients(self, entry: CacheEntry, call: Tracing) -> CacheEntry:
        """Return ``entry`` if no gradients of earlier steps exist. Else return the entry whose plan fits with them,
        planned if there is none, and let it be `last`."""
        first = call.state.named.get(next(iter(entry.targets), ""))
        summed = self.recorder.summed_bytes.values() if self.recorder else ()
        held = existing_gradients(first, call.state.named, call.tensors, summed)
        if held is None:
            return entry
        with LOCK.shared():
            found = entry.fitting(held.bytes, held.names)
        if found is None:
            with LOCK.alone():
                found = self._planned_with_gradients(entry, held.bytes, held.names)
                entry.with_gradients[held.names, held.bytes] = found
        self.last = found
        return found

    def _planned_with_gradients(self, entry: CacheEntry, held: int, names: frozenset[str]) -> CacheEntry:
        if entry.carried and entry.plan.budget is not None and entry.plan.peak + held <= entry.plan.budget:
            return entry
        targets = frozenset(target for name, target in entry.targets.items() if name in names)
        return self.captures.with_gradients(entry, self.planner, held, targets)

    def _with_tangents(self, entry: CacheEntry, arrived: frozenset[str] = frozenset()) -> CacheEntry:
        """Return an entry whose backward also takes the gradients of the outputs ``arrived``, planned if needed. Later
        calls use it, and a warning names the outputs that are new."""
        if entry.statistics and self.recorder:
            plain = replace(entry, statistics=None, measured=None)
            return self._measured(self._with_tangents(plain, arrived), self.recorder)
        with LOCK.alone():
            self._warn_of_arrived(arrived - self.arrived)
            self.arrived |= arrived
            for known in self.plans.of_forward(entry):
                if not known.compiled.like.left_out & self.arrived:
                    return known
            captured = with_expected_tangents(entry.unplanned.whole, self.arrived)
            made = self.planner.plan(captured)
            found = entry.planned_again(made, UnplannedStep.of(entry.unplanned.whole, captured))
            self.plans.replace(found)
        return found

    def _warn_of_arrived(self, arrived: frozenset[str]) -> None:
        if arrived:
            warn(
                f"{self.name}: a gradient arrived for output {', '.join(sorted(arrived, key=int))}, and the plan did "
                f"not expect that: this backward runs the forward again and may exceed the budget; later plans expect "
                f"the gradient"
            )

    def _new(self, tracing: Tracing) -> CacheEntry:
        """Return a new entry for a call, and add it to ``plans``. `UsageError` for sizes outside of the stated ranges;
        `ModelError` for a second kind of call if ``dynamic_shapes`` is False."""
        self.asked.check(tracing.model, *pytree.tree_unflatten(tracing.leaves, tracing.spec))
        if self.plans and not self.asked.dynamic:
            raise ModelError(
                f"{self.name} was planned for other shapes, types, modes, attributes or decisions, with "
                f"dynamic_shapes=False; plan it again without that"
            )
        entry = self.captures.entry(tracing, self.planner, self.arrived)
        self.plans.add(tracing.key, entry)
        self.captures.warn_of_many()
        return entry


def _shapes(call: Tracing) -> list[torch.Size]:
    return [t.shape for t in plain_tensors(call.tensors)]


_NOT_TO_PLAN = (type(None), FakeTensor, FunctionalTensor)
"""A call is not planned if its first tensor that requires a gradient has one of these types. NoneType means that there
is no such tensor; the others mean that a tracer is running."""
