"""`PlannedParts`: run a model in eager mode, and some of its modules by plans under one common budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rematplan.ir import (
    CapturedAnew,
    InfeasibleBudget,
    ModelError,
    NotCaptured,
    RematplanError,
    UsageError,
    first_line,
    show_bytes,
)
from rematplan.module.capture_lock import LOCK
from rematplan.module.captures import Captures
from rematplan.module.forward_capture import Original
from rematplan.module.runner import Runner
from rematplan.module.shape_options import ShapeOptions
from rematplan.parts.common_budget import (
    CommonPlan,
    PartPlanner,
    common_search,
    eager_plan,
    of_part,
    share_of_parts,
)
from rematplan.parts.forward_patches import Patches
from rematplan.parts.fsdp_bytes import accumulates, fsdp_bytes
from rematplan.parts.left_tensors import attribute_tensors
from rematplan.parts.live_bytes import allocated_bytes
from rematplan.parts.rehearsal import Rehearsal, repeated_bytes
from rematplan.parts.rehearsed import EqualParts, Rehearsed, inside
from rematplan.parts.sharded_weights import check_weights, with_shards
from rematplan.plans.on_infeasible import reaction
from rematplan.plans.options import RAISE, PlanOptions
from rematplan.plans.planner import Planner
from rematplan.runtime import guards
from rematplan.runtime.capture.capture import compiled_modules
from rematplan.runtime.capture.flat_module import flattened_call, tensors_in
from rematplan.runtime.capture.hidden_tensors import hides_tensors
from rematplan.runtime.execute.compile import named_tensors, tensors_in_step
from rematplan.runtime.graph.captured_step import MODEL
from rematplan.runtime.graph.tensor_storages import plain_tensors
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.guards.snapshots import is_data

ANEW = "it had another graph in many calls, each with a capture"
"""Why a module is no part any longer."""
LEAST_SHARE = Fraction(1, 32)
"""The share of what the step holds that its parts must keep for the backward, so that they are worth plans."""
LITTLE = f"what can be planned keeps less than {LEAST_SHARE} of what the step holds"
"""Why modules are no parts if `LEAST_SHARE` is not reached."""
SMALL = 1 / 64
"""An argument of at most this share of all arguments' bytes may be larger in a call than in its rehearsal."""


class Division:
    """One division of the budget among parts, with the runners of the parts."""

    def __init__(self, model: nn.Module, plan: CommonPlan, options: PlanOptions) -> None:
        """Make a runner for each part within its share of ``plan``; equal modules share their captures."""
        self.plan = plan
        self.runners: dict[str, Runner] = {}
        """The runners, by the names of their parts."""
        calls: dict[str, dict[EqualParts, None]] = {}
        for name, group in plan.rehearsed.calls:
            calls.setdefault(name, {})[group] = None
        captures: dict[Hashable, Captures] = {}  # equal modules share theirs
        for name, groups in calls.items():
            module, first = model.get_submodule(name), next(iter(groups))
            mine = tuple(plan.parts[one] for one in groups)
            planner = PartPlanner(of_part(options), named=tensors_in_step(module), parts=mine)
            runner = self.runners[name] = Runner(name, planner, ShapeOptions())
            runner.captures = captures.setdefault((first.function, first.state), runner.captures)
            ready = (*runner.captures.ready, *(one.capture for one in groups))
            runner.captures.ready = tuple(dict.fromkeys(ready))


class PlannedParts:
    """Runs the training steps of one model, whose parts are planned under one budget. ``find``: returns the modules of
    the model that may be parts, by name. ``error``: why the whole model cannot be captured, so that those parts are
    planned that can be; None if the user stated the parts."""

    def __init__(
        self,
        planner: Planner,
        find: Callable[[nn.Module], Mapping[str, nn.Module]],
        error: ModelError | None = None,
    ) -> None:
        """Begin without parts: the first call rehearses a step and makes them."""
        self.planner, self.find, self.error = planner, find, error
        self.parts: Mapping[str, nn.Module] = {}
        """The modules that may be parts, as found for the latest rehearsal."""
        self.unfit: dict[str, str] = {}
        """By the name of a module that can be captured, but is no part, why."""
        self._stay: set[str] = set()
        """The names of parts that stay parts although each call may need another capture of them."""
        self._known: dict[Hashable, list[tuple[list[tuple[int, ...]] | None, Rehearsed]]] = {}
        """The rehearsals by the structure of the arguments and the model's state, each with the arguments' sizes. None
        in place of sizes: another rehearsal is needed, since a module ran that had not run in it."""
        self._told: set[str] = set()
        """The names of the modules that have run more often than in a rehearsal. A warning tells of each once."""
        self._divisions: dict[tuple[Rehearsed, bool, bool], Division] = {}
        """By the rehearsal, whether gradients of earlier steps exist, and whether FSDP2 does not shard gradients."""
        self.last: Division | None = None
        """The division of the latest call; None before the first."""

    def of(self, planner: Planner) -> PlannedParts:
        """Return an object that runs the same parts as another planner plans them; it begins without rehearsals and
        plans."""
        return PlannedParts(planner, self.find, self.error)

    def __call__(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a training call of the model, its parts by their plans. A call of a new kind is rehearsed and planned
        first."""
        self.prepare(original, args, kwargs)
        assert self.last
        model, ran = original.model, Counter[str]()
        names = dict.fromkeys(name for name, _ in self.last.plan.rehearsed.calls)
        planned = {name: self.last.runners.get(name) for name in names}
        every = {**dict.fromkeys(self._new(self.last.plan.rehearsed)), **planned}
        modules = dict(model.named_modules())
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        patches = Patches(forwards)  # filled below, since each of its functions needs it
        forwards |= {
            part: partial(self._run, runner, name, Original(part, part.forward), ran, patches)
            for name, runner in every.items()
            if (part := modules.get(name)) is not None
        }
        with patches:
            try:
                return original.plain(args, kwargs)
            finally:
                self._learn(modules, ran)

    def _run(
        self,
        runner: Runner | None,
        name: str,
        original: Original,
        ran: Counter[str],
        patches: Patches,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a module by ``runner``, or as it is if ``runner`` is None. With gradients, count the run in ``ran``. A
        part that is refused at a call runs without a plan from then on, with a warning, unless the user stated it.
        Modules inside of it, which have a second name outside, run as they are: without their ``patches``."""
        if not torch.is_grad_enabled() or LOCK.is_mine:
            return original.forward(*args, **kwargs)
        ran[name] += 1
        if runner is not None:
            try:
                with patches.inside(original.model).away():
                    return runner(original, args, kwargs)
            except (ModelError, UsageError) as why:
                if self.error is None:  # the user stated the parts
                    raise
                assert self.last
                self.last.runners.pop(name)
                warn(f"{why}; it runs without a plan from now on, and steps may exceed the budget")
        return original.plain(args, kwargs)

    def _new(self, rehearsed: Rehearsed) -> list[str]:
        """Return the names of modules in `parts` that no warning named, and that the rehearsal neither ran nor refused.
        Those inside or around a part are left out."""
        called = {name for name, _ in rehearsed.calls}
        known = {*called, *rehearsed.refused, *self._told}
        return [name for name in self.parts if name not in known and not inside(name, called)]

    def _learn(self, modules: Mapping[str, nn.Module], ran: Counter[str]) -> None:
        """Warn of what ran more often than in the rehearsal, once for each module, expect it from now on, and drop the
        divisions of that rehearsal. ``ran``: how often each part has run."""
        assert self.last
        rehearsed = self.last.plan.rehearsed
        expected = Counter(name for name, _ in rehearsed.calls)
        more = ran - expected
        if not more:
            return
        name = next(iter(more))
        if name not in self._told:
            warn(
                f"{name} runs {ran[name]} times in a step, and {expected[name]} times in the step for which the budget "
                f"was divided: this step may exceed the budget; it is divided again for the next one"
            )
        self._told.update(more)
        groups = dict(rehearsed.calls)
        calls = [(one, groups[one]) for one in more.elements() if one in groups]
        grown = rehearsed.with_calls(calls, repeated_bytes(modules, [*expected, *more.elements()]))
        is_new = any(one not in groups for one in more)
        self._divisions = {key: one for key, one in self._divisions.items() if key[0] is not rehearsed}
        for every in self._known.values():
            every[:] = [(None if is_new else s, grown) if r is rehearsed else (s, r) for s, r in every]

    def prepare(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CommonPlan:
        """Return the plan for a call. The call is rehearsed and the budget divided, unless an earlier rehearsal serves
        it: with this structure of the arguments, these settings, and no smaller sizes of large arguments."""
        self._leave_out_anew(original, args, kwargs)
        leaves, spec = flattened_call(args, kwargs)
        state = guards.ModuleTree(original.model).state(original.model)
        assert state is not None
        sums = any(p.grad is not None for p in original.model.parameters())
        tensors = [*plain_tensors(tensors_in(leaves))]  # nested ones have no plain sizes
        # Each new number, or equal object made for one call, would be rehearsed.
        numbers = (int, float) if isinstance(self.error, CapturedAnew) else ()
        leaves = [type(leaf) if type(leaf) in numbers else _without_identity(leaf) for leaf in leaves]
        known = self._known.setdefault((guards.open_key(leaves, spec), state.key), [])
        of_sizes = (one for sizes, one in known if sizes is not None and _within(tensors, sizes))
        rehearsed = next((one for one in of_sizes if _holds(original.model, one)), None)
        if rehearsed is None:
            state.check_parametrizations(type(original.model).__name__)
            rehearsed = self._rehearsed(original, args, kwargs)
            for earlier in [one for sizes, one in known if sizes is None]:
                calls = {name for name, _ in rehearsed.calls}
                rehearsed = rehearsed.with_calls([one for one in earlier.calls if one[0] not in calls])
            known[:] = [one for one in known if one[0] is not None]
            known.append(([tuple(t.shape) for t in tensors], rehearsed))
        key = rehearsed, sums, accumulates(original.model)
        if key not in self._divisions:
            self._divisions[key] = self._divided(original.model, rehearsed, sums)
        self.last = self._divisions[key]
        if self.error is not None:  # the frames of its traceback hold the arguments of a call
            self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None
        return self.last.plan

    def _leave_out_anew(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let parts that had another graph in many calls be no parts any longer. They stay if the user stated them, or
        if the step does not fit the budget without them."""
        runners = self.last.runners.items() if self.last and self.error is not None else ()
        anew = {name for name, one in runners if one.captures.goes_on} - self._stay
        if not anew:
            return
        self._stay |= anew
        known = self.unfit, self._known, self._divisions, self.last
        self.unfit, self._known, self._divisions = {**self.unfit, **dict.fromkeys(anew, ANEW)}, {}, {}
        try:
            self.prepare(original, args, kwargs)
        except RematplanError:
            self.unfit, self._known, self._divisions, self.last = known

    def _rehearsed(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rehearsed:
        """Rehearse the model, repeatedly without the parts that turn out to be unfit, and return what was measured.
        `ModelError` if a stated part is unfit; or if no part is left, and the whole can be captured or what eager mode
        needs cannot be measured (`Rehearsed.complete`)."""
        model, unfit, rehearsal = original.model, self.unfit, None
        # Compiled code would have the forwards from before a part is planned.
        if compiled := compiled_modules(model):
            why = f"{compiled[0]} is compiled; plan the model before torch.compile"
            raise ModelError(why if self.error is None else f"{self.error}; nor in parts: {why}")
        self.parts = {name: part for name, part in self.find(model).items() if name not in unfit}
        check_weights(model, self.parts if self.error is None else ())
        try:
            while True:
                rehearsal = Rehearsal(model, self.parts, stated=self.error is None, earlier=rehearsal)
                try:
                    found = rehearsal.run(original, args, kwargs)
                except Exception:  # a placeholder has no second derivatives
                    if not rehearsal.unfit:
                        raise
                if not rehearsal.unfit:
                    if not self._hold_little(found):
                        break
                    called = (name for name, _ in found.calls)
                    rehearsal.unfit = dict.fromkeys((*called, *self.parts), LITTLE)  # none is tried again
                name, why = next(iter(rehearsal.unfit.items()))
                if self.error is None:
                    raise ModelError(f"{name}: {why}; plan the modules inside of it, or around it")
                self.parts = {name: part for name, part in self.parts.items() if name not in rehearsal.unfit}
                unfit |= rehearsal.unfit
        except Exception as other:  # any exception of the user's model, or a part that has no placeholder
            if self.error is None or isinstance(other, RematplanError):
                raise
            raise ModelError(f"{self.error}; nor in parts: {first_line(other)}") from other
        found = replace(found, refused={**unfit, **found.refused})
        if found.calls:
            return found
        if self.error is None:
            raise ModelError(
                f"a training call of {type(model).__name__} runs none of {', '.join([*self.parts][:4])} with gradients"
            )
        has_graph = not isinstance(self.error, NotCaptured) or isinstance(self.error, CapturedAnew)
        if has_graph or not found.complete:
            raise ModelError(self._without_parts(found)) from self.error
        return found

    def _hold_little(self, found: Rehearsed) -> bool:
        """Return whether the parts of a rehearsed step are not worth a plan. Those that a user stated are."""
        if self.error is None or not found.calls:
            return False
        return share_of_parts(found, self.planner.options) < LEAST_SHARE

    def _divided(self, model: nn.Module, rehearsed: Rehearsed, sums: bool) -> Division:
        """Return the division of the budget for a rehearsed step. If no plans fit, raise `InfeasibleBudget`, or take
        the smallest budget found and warn, as `reaction` says. ``sums``: whether gradients of earlier steps exist."""
        named = {f"{MODEL}{name}": t for name, t in with_shards(model, named_tensors(model)).items()}
        options, store = self.planner.options, self.planner.store
        around = fsdp_bytes(model, {name: model.get_submodule(name) for name, _ in rehearsed.calls})
        fixed = self.planner.fixed.get(self.planner.budget_key)
        search: Callable[[int | None], CommonPlan]
        if rehearsed.calls:
            search = common_search(rehearsed, options, named, fixed, accumulating=sums, around=around).plan
        else:
            search = partial(eager_plan, rehearsed, options, named, accumulating=sums, around=around)
        try:
            made = search(fixed)
        except InfeasibleBudget as error:
            error = error if rehearsed.calls else replace(error, hint=self._without_parts(rehearsed))
            is_optional = isinstance(self.error, CapturedAnew) and not self._divisions
            if is_optional or reaction(options, first=not (self._divisions or store)) == RAISE:
                raise error from None
            made = search(error.smallest)
            warn(f"{type(model).__name__}: {error}; this step needs {show_bytes(made.peak)}")
            return Division(model, made, options)
        if not (rehearsed.calls or self._divisions):
            warn(f"{self._without_parts(rehearsed)}: it runs {made.text()}")
        if options.stated_budget().is_percentage:
            self.planner.fixed.setdefault(self.planner.budget_key, made.budget)
        return Division(model, made, options)

    def _without_parts(self, rehearsed: Rehearsed) -> str:
        """Return text that says why neither the whole nor a part can be planned."""
        first: dict[str, str] = {}
        for name, text in (rehearsed.told or rehearsed.refused).items():
            first.setdefault(text, name)
        why = "; ".join(f"{name}: {text}" for text, name in [*first.items()][:2])
        return f"{self.error}; no part of it can be planned{f' ({why})' * bool(why)}"


def _without_identity(leaf: Any) -> Any:
    """Return the type of an argument in which pytrees do not find tensors. Of an object of a user's class, return the
    type and the attributes, as text, if all are plain data. Return any other argument itself."""
    if hides_tensors(leaf):
        return type(leaf)
    by_identity: Any = object.__hash__
    is_object = type(leaf).__hash__ is by_identity and type(getattr(leaf, "__dict__", None)) is dict
    if not is_object or isinstance(leaf, (nn.Module, FunctionType)) or not is_data(vars(leaf)):
        return leaf
    return type(leaf), repr(vars(leaf))


def _within(tensors: Sequence[torch.Tensor], sizes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether a rehearsal at these sizes is enough for a call: tensors have as many dimensions, and none is
    larger in a dimension, except small ones (`SMALL`)."""
    if [t.dim() for t in tensors] != [len(shape) for shape in sizes]:
        return False
    most = SMALL * sum(t.nbytes for t in tensors)
    larger = [
        t
        for t, shape in zip(tensors, sizes, strict=True)
        if any(n > m for n, m in zip(t.shape, shape, strict=True))
    ]
    return all(t.nbytes <= most for t in larger)


def _holds(model: nn.Module, rehearsed: Rehearsed) -> bool:
    """Return whether a rehearsal is enough for what earlier calls have left in attributes."""
    names = rehearsed.changing
    return not names or allocated_bytes(attribute_tensors(model, names)) <= rehearsed.changing_bytes
