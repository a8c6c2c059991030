"""The calls of a planned module: which plan one takes, the making of new ones, and running them.

One plan is made for each way the module is called (shapes, types, modes, autocast), for each state that its forward
reads, for each outcome of what it decides by the values of its inputs and buffers, and beside gradients of earlier
steps, when it first meets it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.planner.core.plan import Plan
from rematplan.runtime import guards
from rematplan.runtime.capture.capture import capture, check_traceable
from rematplan.runtime.capture.flat_module import (
    FlatModel,
    Given,
    Own,
    Place,
    flattened_call,
    refill,
    tensors_in,
)
from rematplan.runtime.capture.hidden_tensors import (
    Withheld,
    check_dense,
    check_no_hidden_tensors,
    hides_tensors,
    hooked,
)
from rematplan.runtime.capture.host_random import no_host_draws
from rematplan.runtime.capture.left_out_tangents import with_expected_tangents
from rematplan.runtime.execute.autograd_function import CompiledPlan
from rematplan.runtime.graph.allocator import allocated
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
from rematplan.runtime.module.counters import check_counters
from rematplan.runtime.module.lock import CaptureLock
from rematplan.runtime.module.model_errors import own_error
from rematplan.runtime.module.running import Running
from rematplan.runtime.problem.accumulation import StepPlan
from rematplan.runtime.statistics.insert import StatisticsStep, with_statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import Recorder

MANY = 8
"""Plans of one module after which it is said that there are many."""

LOCK = CaptureLock()
"""Of all planned modules."""


class Planner(Protocol):
    """Makes plans of captured steps: schedules of their `loss_boundary.with_loss_boundary`."""

    def __call__(self, step: CapturedStep, first: bool = False) -> StepPlan:
        """The plan of a step. ``first``: whether it is the first of its kind, though others have a plan.

        Raises:
            InfeasibleBudget: there is none within the budget, and no other is to be taken.
        """

    def beside(self, step: CapturedStep, plan: Plan, gradients: int, names: Set[str]) -> StepPlan | None:
        """One for when parameters of these names have so many bytes of gradients before the step; None if its ``plan``
        serves, or is to be taken all the same.

        Raises:
            InfeasibleBudget: there is none within the budget, and no other is to be taken.
        """


class Planned(Protocol):
    """A planned module, as its runner sees it."""

    def _rematplan_model(self) -> nn.Module: ...

    def _rematplan_forward_of(self, model: nn.Module) -> Callable[..., Any]: ...

    def _rematplan_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class CacheEntry:
    """One way that the module is called, compiled."""

    running: Running
    outputs: pytree.TreeSpec
    """Of what the forward returns, of the attributes that it gives (a dictionary by module, of dictionaries), and of
    the arguments if it changes lists or dictionaries among them."""
    constants: tuple[Any, ...]
    """The flattened outputs, with a `Place` where a tensor goes, `Given` for a leaf of the arguments, and `Own` for a
    tensor of the model."""
    guard: guards.Guard
    """What the traced forward depends on besides."""
    captured: CapturedStep
    """The step before there was a plan of it."""
    whole: CapturedStep
    """The same with the tangents of all outputs."""
    statistics: StatisticsStep | None = None
    """The step with statistics, if this entry takes them."""
    measured: list[CacheEntry] = field(default_factory=list, compare=False)
    """The entry for the same forward that takes statistics, once there is one."""
    beside: dict[tuple[frozenset[str], int], CacheEntry] = field(default_factory=dict, compare=False)
    """Planned beside gradients of earlier steps, by the names of the parameters that had them and their bytes."""

    @property
    def plan(self) -> Plan:
        """The plan that calls follow now."""
        return self.running.plan

    @property
    def compiled(self) -> CompiledPlan:
        """The same, compiled."""
        return self.running.compiled

    @cached_property
    def targets(self) -> dict[str, str]:
        """The names of parameters that get gradients, and those that the step has for them. Any one stands for all:
        where it has a gradient of an earlier step, the others have theirs."""
        found = (o.target for o in self.captured.outputs if o.kind == "gradient")
        return {target.removeprefix("model."): target for target in found}

    def counting(self, gradients: int, names: frozenset[str]) -> CacheEntry:
        """The same entry, noted as its own for gradients of earlier steps, if its plan counts any.

        ``gradients``: the bytes that the plan counts; ``names``: of the parameters that may have them.
        """
        if gradients:
            self.beside[names, gradients] = self
        return self


@contextmanager
def _own_errors(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """A block that captures; where that fails as the model by itself would, it raises what the model does."""
    try:
        yield
    except ModelError as error:
        own = own_error(model, forward, args, kwargs) if error.__cause__ else None
        if own is None:
            raise
        raise own from None


class _Forwards(threading.local):
    """Counts the forwards of planned modules, in each thread by itself: what another thread runs meanwhile says
    nothing of a call in this one."""

    begun = 0


FORWARDS = _Forwards()


class Runner:
    """Plans and runs one model."""

    def __init__(
        self, name: str, planner: Planner, dynamic: bool, statistics: Kronecker | None = None
    ) -> None:
        self.name, self.planner, self.dynamic = name, planner, dynamic
        self.recorder = Recorder(statistics) if statistics else None
        self.ways: dict[Any, list[CacheEntry]] = {}
        self.last: CacheEntry
        self.brought: frozenset[str] = frozenset()
        """The positions of outputs whose tangents came though their step left them out."""
        self.walk: guards.ModuleTree | None = None
        self.version: tuple[str, int | None] = ("", None)
        """A trained parameter's name, and its version at the last call, which an optimizer's step changes."""

    def twin(self, ways: dict[Any, list[CacheEntry]] | None = None) -> Runner:
        """For a copy of the planned module, with the same plans, or those given."""
        twin = copy.copy(self)
        twin.walk = None
        twin.recorder = Recorder(self.recorder.options) if self.recorder else None
        twin.ways = {key: list(found) for key, found in self.ways.items()} if ways is None else ways
        if not twin.ways:
            twin.__dict__.pop("last", None)
        return twin

    def __call__(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs; their backward follows the plan. Without gradients the model itself runs."""
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
        way = self._way(planned, leaves, spec, state)
        if self.recorder and self._takes_statistics(self.recorder, way, state):
            way = self._measured(way, self.recorder)
        way = self._beside_gradients(way, state, tensors)
        if way.running.refinement is not None:
            self._exchange(way, state)
        sink = self.recorder.sink(way.statistics) if self.recorder else None
        flat = way.compiled(
            state.named, tensors, lambda brought: self._with_tangents(way, brought).compiled, sink
        )
        places: dict[type, Any] = {Place: flat, Given: leaves, Own: state.named}
        found = [places[type(c)][c.at] if type(c) in places else c for c in way.constants]
        results, given, left = pytree.tree_unflatten(found, way.outputs)
        for at, attributes in given.items():
            state.attributes[at].update(attributes)
        if left is not None:
            refill((args, kwargs), left)
        return results

    def _exchange(self, way: CacheEntry, state: guards.ModuleState) -> None:
        """Let the better plan that has been found take effect, where a step begins: no backward of this module is to
        come, none may be repeated, and a step of the optimizer, or gradients of None, ended the step before."""
        name = next(iter(way.targets), "")
        trained, (known, version) = state.named.get(name), self.version
        new_step = trained is None or trained.grad is None or (known == name and trained._version != version)
        self.version = name, None if trained is None else trained._version
        if not (new_step and way.running.improved) or any(w.compiled.pending for w in self.entries()):
            return
        with LOCK.alone():
            if way.running.improved:
                found = way.running.swap()
                # That the plan before served beside earlier gradients says nothing of this one.
                alone = [key for key, w in way.beside.items() if w is way and key[1] > found.gradients]
                for key in alone:
                    del way.beside[key]

    def entries(self) -> list[CacheEntry]:
        """All entries, each once."""
        plain = [way for ways in self.ways.values() for way in ways]
        every = [w for way in plain for w in (way, *way.measured)]
        return list({id(w): w for way in every for w in (way, *way.beside.values())}.values())

    def prepare(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for these arguments."""
        with LOCK.alone(), torch.inference_mode(False), torch.enable_grad():
            way = self.find(planned, args, kwargs)
            if self.recorder:
                self._measured(way, self.recorder)

    def _takes_statistics(self, recorder: Recorder, way: CacheEntry, state: guards.ModuleState) -> bool:
        parameters = [t for t in state.named.values() if t.requires_grad]
        accumulating = any(_gradient(state.named.get(name)) is not None for name in way.targets)
        return recorder.forward(parameters, accumulating)

    def _measured(self, way: CacheEntry, recorder: Recorder) -> CacheEntry:
        """The entry of the same forward that takes statistics."""
        if not way.measured:
            with LOCK.alone():
                if not way.measured:
                    found = with_statistics(way.whole, recorder.options, recorder.draws)
                    captured = with_expected_tangents(found.step, self.brought)
                    first = not any(w.measured for ways in self.ways.values() for w in ways)
                    draws = recorder.draws.count
                    made = self.planner(captured, first=first)
                    recorder.draws.count = draws  # measuring costs draws, too
                    entry = replace(way, running=Running.of(made), captured=captured)
                    entry = replace(entry, statistics=found, beside={}, measured=[])
                    names = next((names for names, _ in way.beside), frozenset[str]())
                    way.measured.append(entry.counting(made.gradients, names))
        self.last = way.measured[0]
        return self.last

    def find(self, planned: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CacheEntry:
        """What these arguments take: an entry whose guard holds, or a new one."""
        leaves, spec = flattened_call(args, kwargs)
        return self._way(planned, leaves, spec, self._state(planned))

    def _state(self, planned: Planned) -> guards.ModuleState:
        module = cast(nn.Module, planned)
        with LOCK.shared():
            state = self.walk.state(module) if self.walk else None
            if state is None:
                self.walk = guards.ModuleTree(module)
                state = self.walk.state(module)
        assert state is not None
        return state

    def _check_first_order(self) -> None:
        if peek_interpreter_stack() is not None or forward_mode_level() >= 0:
            raise ModelError(
                f"{self.name} is planned for the backward of a loss; torch.func's transforms and forward-mode "
                f"derivatives are for the model that it was made of"
            )

    def _way(
        self, planned: Planned, leaves: list[Any], spec: pytree.TreeSpec, state: guards.ModuleState
    ) -> CacheEntry:
        if parametrizations_are_cached() and any(
            "parametrizations" in a["_modules"] for a in state.attributes
        ):
            raise ModelError(
                f"{self.name} is called in torch.nn.utils.parametrize.cached(), which lets calls share what a planned "
                f"step computes in each; leave that block, or let the forward enter it"
            )
        key, tensors = (guards.call_key(leaves, spec), state.key), tensors_in(leaves)
        with LOCK.shared():
            found = self._known(key, state, tensors)
        if found is None:
            with LOCK.alone():  # where another thread may have made it by now
                found = self._known(key, state, tensors) or self._new(key, planned, leaves, spec, state)
        if found.captured.left_out & self.brought:
            found = self._with_tangents(found)
        self.last = found
        return found

    def _beside_gradients(
        self, way: CacheEntry, state: guards.ModuleState, tensors: Sequence[torch.Tensor]
    ) -> CacheEntry:
        """The way, planned for what is left of the budget beside the gradients of earlier steps, if there are any:
        those of parameters, to which new ones are added, and those of inputs."""
        own = state.named.get(next(iter(way.targets), ""))
        of_inputs = [g for t in tensors if (g := _gradient(t)) is not None]
        summed = self.recorder.held if self.recorder else {}
        if _gradient(own) is None and not of_inputs and not summed:
            return way
        gradients = {name: g for name, t in state.named.items() if (g := _gradient(t)) is not None}
        every = (*gradients.values(), *of_inputs)
        held = sum({g._cdata: allocated(g.nbytes(), g.device) for g in every}.values()) + sum(summed.values())
        with LOCK.shared():
            found = next(
                (w for (n, size), w in way.beside.items() if held <= size and gradients.keys() <= n), None
            )
        if found is None:
            with LOCK.alone():
                found = self._planned_beside(way, held, frozenset(gradients))
                way.beside[frozenset(gradients), held] = found
        self.last = found
        return found

    def _planned_beside(self, way: CacheEntry, held: int, names: frozenset[str]) -> CacheEntry:
        targets = {target for name, target in way.targets.items() if name in names}
        found = self.planner.beside(way.captured, way.plan, held, targets)
        return way if found is None else replace(way, running=Running.of(found), beside={})

    def _with_tangents(self, way: CacheEntry, brought: frozenset[str] = frozenset()) -> CacheEntry:
        """The way, planned with these tangents and those that came before; calls like it take that plan from now on.

        ``brought``: positions of outputs.
        """
        if way.statistics and self.recorder:
            plain = replace(way, statistics=None, measured=[])
            return self._measured(self._with_tangents(plain, brought), self.recorder)
        with LOCK.alone():
            self._say_brought(brought - self.brought)
            self.brought |= brought
            alike = (w for ways in self.ways.values() for w in ways if w.whole is way.whole)
            for known in alike:
                if not known.captured.left_out & self.brought:
                    return known
            captured = with_expected_tangents(way.whole, self.brought)
            made = self.planner(captured)
            found = replace(way, running=Running.of(made), captured=captured)
            found = replace(found, beside={}, measured=[])
            found.counting(made.gradients, next((names for names, _ in way.beside), frozenset()))
            for ways in self.ways.values():
                ways[:] = [found if w.whole is way.whole else w for w in ways]
        return found

    def _say_brought(self, brought: frozenset[str]) -> None:
        if brought:
            warn(
                f"{self.name}: a gradient came for output {', '.join(sorted(brought, key=int))}, which its loss is "
                f"made of, and no plan expected that: this backward runs the forward again, and may go beyond the "
                f"budget; from now on plans expect it"
            )

    def _known(
        self, key: Any, state: guards.ModuleState, tensors: Sequence[torch.Tensor]
    ) -> CacheEntry | None:
        return next((way for way in self.ways.get(key, ()) if way.guard.holds(state, tensors)), None)

    def _new(
        self, key: Any, planned: Planned, leaves: list[Any], spec: pytree.TreeSpec, state: guards.ModuleState
    ) -> CacheEntry:
        if self.ways and not self.dynamic:
            raise ModelError(
                f"{self.name} was planned for other shapes, types, modes, attributes or decisions; plan it again, or "
                f"with dynamic=True"
            )
        way = self._compile(planned, leaves, spec, state)
        self.ways.setdefault(key, []).append(way)
        if sum(map(len, self.ways.values())) == MANY:
            warn(
                f"{self.name} has been planned for {MANY} ways of calling it; a number, a shape or a value that is "
                f"decided by costs a plan each time that it is another: give numbers as tensors"
            )
        return way

    def _compile(
        self, planned: Planned, leaves: list[Any], spec: pytree.TreeSpec, state: guards.ModuleState
    ) -> CacheEntry:
        model = planned._rematplan_model()
        check_traceable(model)
        check_dense((*state.named.values(), *tensors_in(leaves)), f"{self.name} has or is given")
        check_no_hidden_tensors(leaves, f"{self.name} is given")
        self._say_hooks(hooked(model))
        batch = [t.detach().requires_grad_(t.requires_grad) for t in tensors_in(leaves)]
        with (
            guards.recording(model, leaves, state.named, batch) as record,
            no_host_draws(self.name, record.generators),
        ):
            forward = planned._rematplan_forward_of(model)
            with _own_errors(model, forward, *pytree.tree_unflatten(leaves, spec)):
                flat = FlatModel(model, forward, leaves, spec, record.reads)
                step = capture(flat, batch, self.name, model, record.values)

        def again() -> tuple[FlatModel, CapturedStep]:
            with guards.recording(model, leaves, state.named, batch) as further:
                other = FlatModel(model, forward, leaves, spec, further.reads)
                return other, capture(other, batch, self.name, model, further.values)

        check_counters(self.name, model, flat, step, again)
        step = replace(step, attributes=flat.attributes)
        constants = tuple(
            Withheld(f"{self.name} gives a {type(c).__name__}") if hides_tensors(c, called_later=True) else c
            for c in flat.constants
        )
        whole, captured = step, with_expected_tangents(step, self.brought)
        found = self.planner(captured)
        outputs = [o for o in found.step.outputs if o.kind == "output"]
        if [int(o.target) for o in outputs] != list(range(flat.count)):
            raise ModelError(f"{step.name}: an output could not be captured")
        guard = record.guard(self.name)
        entry = CacheEntry(Running.of(found), flat.outputs, constants, guard, captured, whole)
        wanting = frozenset(name for name, t in state.named.items() if t.requires_grad)
        return entry.counting(found.gradients, wanting)

    def _say_hooks(self, names: list[str]) -> None:
        if names:
            warn(
                f"{self.name} has hooks on {', '.join(names[:3])}{' and others' * (len(names) > 3)}: they run when a "
                f"step is planned; what they compute is part of the plan, what else they do is done only then"
            )


def _gradient(tensor: torch.Tensor | None) -> torch.UntypedStorage | None:
    """The storage of a tensor's gradient, if it has one that is dense."""
    if tensor is None or not (tensor.requires_grad and tensor.is_leaf):
        return None
    gradient = tensor.grad
    dense = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return gradient.untyped_storage() if gradient is not None and dense else None


_NOT_TO_PLAN = (type(None), FakeTensor, FunctionalTensor)
"""Types of the first tensor that wants a gradient where there is nothing to plan: none does, or somebody traces."""
