"""The captures of a planned module, and new cache entries from them.

A plan that was made at other sizes is used if it is known to fit; otherwise the step is made, from a capture with
symbolic sizes or separately, and planned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.module.cached_plans import CacheEntry
from rematplan.module.capture_lock import LOCK
from rematplan.module.forward_capture import Tracing
from rematplan.module.plan_swaps import Running
from rematplan.module.sized_plans import SizedPlans
from rematplan.module.symbolic_forward import Found, Instance
from rematplan.module.symbolic_shapes import OpenShapes
from rematplan.module.unplanned_step import UnplannedStep
from rematplan.planner.caches.latest import remember
from rematplan.plans.planner import Planner
from rematplan.plans.refining import StepPlan
from rematplan.runtime import guards
from rematplan.runtime.capture.left_out_tangents import with_expected_tangents
from rematplan.runtime.execute.compiled_plan import CompiledPlan
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.symbols.expressions import NotSymbolic

MANY = 8
"""The number of captures of one module at which a warning is issued, and of steps for known sizes (`Captures.repeated`)
after which it is planned in parts, if that is possible."""
MANY_SIZES = 4 * MANY
"""The number of shapes, each with a separate capture, after which a part runs without a plan, if other parts can be
planned."""


@dataclass(frozen=True, eq=False)
class ReadyCapture:
    """A capture that was made before the module is planned. ``key``: of the calls that it may serve (`Tracing.key`).
    ``found``: the capture."""

    key: Hashable
    found: Found

    def serves(self, tracing: Tracing) -> bool:
        """Return whether the capture is valid for a call: the call has the same key, and everything that the traced
        forward read is unchanged."""
        return self.key == tracing.key and self.found.guard.holds(
            tracing.state, tracing.batch, tracing.assumed
        )


@dataclass
class Captures:
    """The captures of a planned module, from which it makes the entries of calls for which no plan is valid."""

    name: str
    """The model's name, for messages."""
    most: int
    """The largest number of plans, of kinds of calls whose captures are remembered, and of captures with symbolic
    sizes."""
    shapes: dict[Hashable, OpenShapes] = field(default_factory=dict)
    """The captures by everything that selects a plan except sizes; the kind of call used last comes last."""
    ready: tuple[ReadyCapture, ...] = ()
    """Captures that were made before, and serve the calls for which they are valid."""
    repeated: int = 0
    """How many steps were made for sizes that an earlier call had: a number, a value or a state was another one."""
    warned: bool = False
    """Whether `warn_of_many` has issued its warning."""
    only_fixed: str = ""
    """Why every shape is captured separately; empty if symbolic sizes are tried."""

    def copy(self, *, with_shapes: bool = True) -> Captures:
        """Return a copy for a copy of the module, with the present captures or none. Later captures of one do not
        appear in the other."""
        shapes = {key: one.copy() for key, one in self.shapes.items()} if with_shapes else {}
        return replace(self, shapes=shapes, repeated=self.repeated if with_shapes else 0)

    def entry(self, tracing: Tracing, planner: Planner, arrived: frozenset[str]) -> CacheEntry:
        """Return a new cache entry for a call: with a plan of other sizes if one is known to fit, else with a plan of
        its own. ``arrived``: positions of outputs that are known to receive gradients."""
        shapes = self._of_call(tracing)
        known = self._with_known_plan(shapes, tracing, arrived)
        if known is not None:
            return known
        return self._planned(self._captured(shapes, tracing), shapes, tracing.state, planner, arrived)

    def captured(self, tracing: Tracing) -> Found:
        """Return the captured step for a call."""
        return self._captured(self._of_call(tracing), tracing)

    @property
    def separate(self) -> int:
        """The number of shapes that were captured separately."""
        return sum(one.fixed for one in self.shapes.values())

    @property
    def goes_on(self) -> bool:
        """Whether later steps are likely to need further captures, since many did: for sizes that earlier calls had, or
        for new sizes that no capture with symbolic sizes serves."""
        return self.repeated >= MANY or self.separate >= MANY_SIZES

    def warn_of_many(self) -> None:
        """Warn if exactly `MANY` shapes have been captured separately so far. Warn only once."""
        if self.separate == MANY and not self.warned:
            self.warned = True
            warn(
                f"{self.name} was captured {MANY} times for different calls; each new number, shape or value by which "
                f"the forward decides costs another capture: pass numbers as tensors"
                + "".join(f"; {reason}" for one in self.shapes.values() for reason in one.reasons)
            )

    def _captured(self, shapes: OpenShapes, tracing: Tracing) -> Found:
        """Return the capture of a call: a ready one that serves it, else one of ``shapes`` or a new one; ``repeated``
        counts calls of known sizes. `ModelError` for a model or arguments that cannot be planned."""
        tracing.check()
        for ready in self.ready:
            if ready.serves(tracing):
                return ready.found
        sizes = tuple(t.shape for t in tracing.batch)
        met = [one.met[sizes] for one in self.shapes.values() if sizes in one.met]
        different = {sizes for one in self.shapes.values() for sizes in one.met}
        # A second graph is expected if the first call filled a dictionary. Many sizes displace each other's plans.
        self.repeated += met not in ([], [True]) and len(different) < self.most
        found = shapes.find(tracing.state, tracing.batch, tracing.symbolic, tracing.fixed)
        self._drop_oldest()
        return found

    def _drop_oldest(self) -> None:
        """Drop the captures with symbolic sizes that were not used for longest, if there are more than ``most``."""
        kinds = list(self.shapes.values())
        excess = sum(len(one.forwards) for one in kinds) - self.most
        for one in kinds:
            dropped = min(max(0, excess), len(one.forwards))
            one.forwards = one.forwards[: len(one.forwards) - dropped]
            excess -= dropped

    def _of_call(self, tracing: Tracing) -> OpenShapes:
        """Return the captures for calls that differ from this one only in sizes. New ones may displace those that
        were not used for longest."""
        key = guards.open_key(tracing.leaves, tracing.spec), tracing.state.key, tracing.assumed
        return remember(
            self.shapes, key, self.shapes.get(key) or OpenShapes(reason=self.only_fixed), self.most
        )

    def _with_known_plan(
        self, shapes: OpenShapes, tracing: Tracing, arrived: frozenset[str]
    ) -> CacheEntry | None:
        """Return an entry with a plan of other sizes, without making the step of the call's sizes; None if no plan is
        known to fit. ``arrived``: positions of outputs that are known to receive gradients."""
        for instance, guard in shapes.accepted(tracing.state, tracing.batch):
            forward, sizes = instance.forward, instance.sizes
            with suppress(NotSymbolic):
                plans = forward.plans(arrived, self.most)
                found = plans.carried(sizes, tracing.batch)
                if found is not None:
                    shapes.carry(forward)
                    unplanned = UnplannedStep(instance.step, arrived)
                    running = _running(found, plans, instance, unplanned)
                    constants = forward.constants_at(sizes)
                    return CacheEntry(
                        running, forward.outputs, constants, guard, unplanned, instance, carried=True
                    )
        return None

    def with_gradients(
        self, entry: CacheEntry, planner: Planner, held: int, names: frozenset[str]
    ) -> CacheEntry:
        """Return the entry for a call that begins with ``held`` bytes of earlier gradients of the parameters ``names``:
        with a plan of other sizes if one is known to fit, else ``entry`` if the planner keeps its plan, else with a new
        plan."""
        instance, plan = entry.instance, entry.plan
        adding = planner.adding_to_gradients(plan, held, names) if instance else None
        learn = None
        if instance is not None and adding is not None:
            plans = instance.forward.plans((entry.unplanned.arrived, names, held), self.most)
            learn = partial(plans.learn, instance.sizes, instance.batch, carrier=adding)
            with suppress(NotSymbolic):
                found = plans.carried(instance.sizes, instance.batch)
                if found is not None:
                    running = _running(found, plans, instance, entry.unplanned)
                    return replace(entry, running=running, carried=True, with_gradients={})
        made = planner.with_gradients(entry.unplanned.captured, plan, held, names)
        if made is None:
            return entry
        if learn and made.spare and made.problem:
            learn(made.step, made.problem)
        return replace(entry, running=Running.of(made), with_gradients={})

    def _planned(
        self,
        forward: Found,
        shapes: OpenShapes,
        state: guards.ModuleState,
        planner: Planner,
        arrived: frozenset[str],
    ) -> CacheEntry:
        """Plan a captured forward, and return its cache entry; `ModelError` if an output could not be captured. If
        plans may serve other sizes, the forward's problem is learned for them. ``arrived``: positions of outputs that
        are known to receive gradients."""
        captured = with_expected_tangents(forward.step, arrived)
        found = planner.plan(captured)
        outputs = [o for o in found.step.outputs if o.kind == "output"]
        if [int(o.target) for o in outputs] != list(range(forward.count)):
            raise ModelError(f"{forward.step.name}: an output could not be captured")
        unplanned, compile_, instance = UnplannedStep.of(forward.step, captured), None, forward.instance
        if instance is not None:
            unplanned = UnplannedStep(instance.step, arrived)
            if found.carries:
                plans = instance.forward.plans(arrived, self.most)
                _learn(plans, instance, found, shapes, planner, arrived)
                _learn_around(plans, instance, planner, arrived)
                compile_ = _compiler(plans, instance, unplanned)
        running = Running.of(found, compile_)
        entry = CacheEntry(running, forward.outputs, forward.constants, forward.guard, unplanned, instance)
        trained = frozenset(name for name, t in state.named.items() if t.requires_grad)
        return entry.counting(found.gradients, trained)


def capture_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = ""
) -> tuple[ReadyCapture, CapturedStep]:
    """Return a model's capture for a call, with which its planned module can begin, and the step before planning."""
    with LOCK.alone(), torch.inference_mode(False), torch.enable_grad():
        tracing = Tracing.of(model, args, kwargs, name)
        found = Captures(tracing.name, most=1).captured(tracing)
        return ReadyCapture(tracing.key, found), with_expected_tangents(found.step)


def _learn(
    plans: SizedPlans,
    instance: Instance,
    found: StepPlan,
    shapes: OpenShapes,
    planner: Planner,
    arrived: frozenset[str],
) -> None:
    """Remember the problem of a batch for plans at other sizes. The first time, remember also those of separate
    captures that ``instance.forward`` serves."""
    assert found.problem is not None
    if not plans.learned:
        for known in shapes.known_instances(instance.forward):
            step = planner.as_planned(with_expected_tangents(known.step(), arrived))
            plans.learn(known.sizes, known.batch, step, planner.problem(step), planner)
    plans.learn(instance.sizes, instance.batch, found.step, found.problem, planner)


def _learn_around(plans: SizedPlans, instance: Instance, planner: Planner, arrived: frozenset[str]) -> None:
    """Remember also the problems for half and three halves of the numbers of elements selected by values, since plans
    are used between known sizes. Plan each, if a short search can."""
    for counts in instance.counts_around:
        with suppress(NotSymbolic, ModelError):
            other = instance.forward.found(None, instance.batch[: -len(counts)], counts)
            if other is not None and other.instance is not None:
                step = planner.as_planned(with_expected_tangents(other.step, arrived))
                problem = planner.problem(step)
                plans.learn(other.instance.sizes, other.instance.batch, step, problem, planner)
                planner.plan_ahead(problem)


def _running(found: StepPlan, plans: SizedPlans, instance: Instance, unplanned: UnplannedStep) -> Running:
    """Return a plan of other sizes in compiled form for the batch of ``instance``."""
    running = Running.of(found, _compiler(plans, instance, unplanned))
    running.compiled.first_runs.pass_all()
    return running


def _compiler(
    plans: SizedPlans, instance: Instance, unplanned: UnplannedStep
) -> Callable[[StepPlan], CompiledPlan] | None:
    """Return a function that compiles plans for the batch of ``instance``, each schedule once for all sizes; None if
    that is impossible."""
    return plans.compiler(instance.sizes, lambda: unplanned.captured)
