"""Access to the plans of a planned module: `Planning`, figures about planning, compiled plans and captured steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from rematplan.ir import ProblemError, UsageError
from rematplan.module.cached_plans import CacheEntry
from rematplan.module.forward_capture import Original
from rematplan.module.runner import Runner
from rematplan.plan_report.report import Report, report, subject_of
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.simulator import simulate
from rematplan.runtime.capture.flat_module import check_module
from rematplan.runtime.execute.compiled_plan import Deferred
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.statistics.factors import Factors, Statistics
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.recorder import Listener, Recorder, shapes


class HasRunner:
    """The base class of all planned modules. The attribute ``_rematplan`` is the module's `Runner`."""

    __slots__ = ("_rematplan",)

    _rematplan: Runner

    def _rematplan_original(self) -> Original:
        """Return the model that this planned module runs."""
        raise NotImplementedError


IN_PLACE = "_rematplan_in_place"
"""The attribute, in the ``__dict__`` of a module that is planned in place, with the object that plans it."""


def with_runner(module: nn.Module) -> HasRunner:
    """Return the planned module that ``module`` is or wraps, or what plans it in place. `UsageError` if none is inside,
    or several are and ``module`` itself is not planned."""
    if isinstance(module, HasRunner):
        return module
    check_module(module)
    parts = {
        name: part if isinstance(part, HasRunner) else vars(part)[IN_PLACE]
        for name, part in module.named_modules()
        if isinstance(part, HasRunner) or IN_PLACE in vars(part)
    }
    if not parts:
        raise UsageError(f"a {type(module).__name__} is not planned; see rematplan.plan_module")
    if len(parts) > 1 and "" not in parts:
        raise UsageError(
            f"several submodules of this {type(module).__name__} are planned: ask for one of "
            f"{', '.join(list(parts)[:4])}{', ...' * (len(parts) > 4)}"
        )
    found: HasRunner = next(iter(parts.values()))
    return found


def runner_of(planned: nn.Module) -> Runner:
    """Return the runner of a planned module."""
    return with_runner(planned)._rematplan


@dataclass(frozen=True)
class PlanningStats:
    """Figures about the plans, searches and captures of a planned module."""

    plans: int
    """The number of plans in use."""
    gaps: tuple[float | None, ...]
    """For each plan, its overhead minus its proven lower bound, as a share of the step without recomputation; None
    without a bound."""
    searching: int
    """The number of plans for which a better one is being searched."""
    seconds: float
    """The total duration of these background searches so far."""
    swaps: int
    """How often a better plan has replaced another."""
    captures: int = 0
    """The number of shapes that were captured separately."""
    open_captures: int = 0
    """The number of captures made with symbolic sizes, which may serve several shapes."""
    instances: int = 0
    """How often a shape was served by a capture with symbolic sizes."""
    carried: int = 0
    """How many of the ``instances`` needed neither a step nor a search, because a plan made at other sizes was used."""
    sources: int = 0
    """The number of compiled sources that serve all sizes."""
    dropped: int = 0
    """The number of plans that were dropped because there were more than `MAX_PLANS`."""
    reasons: tuple[str, ...] = ()
    """Why shapes were captured separately; empty if there is no reason."""


class Planning:
    """Access to the plans of a planned module, and to the statistics that its steps compute.

    Planned modules also have the attributes `plan`, `plans`, `source`, `report` and `prepare` of this class, unless
    their model uses these names itself.

    Raises:
        UsageError: the module is not planned. `plan`, `source` and `report` also raise it if there is no plan yet, or
            the model is planned in parts; methods for statistics, if the module was planned without them.
    """

    def __init__(self, planned: nn.Module) -> None:
        self._module, self._planned = planned, with_runner(planned)
        if recorder := self._planned._rematplan.recorder:
            recorder.watch_shards(planned.parameters())

    @property
    def plan(self) -> Plan:
        """The plan of the most recent call (before any call: the plan made last). Its status is ``refining`` while a
        better plan is being searched for."""
        return _last(self._planned).running.shown

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans in use. There is one for each combination of argument shapes and types, modes and module state that
        was planned. Further ones are for steps with statistics, and for steps during which gradients of earlier steps
        exist. Plans that were dropped or replaced are not among them."""
        return tuple(entry.plan for entry in self._entries())

    @property
    def source(self) -> str:
        """The Python source generated from `plan`: the functions that execute the forward and the backward."""
        return _last(self._planned).compiled.halves.source

    def report(self, path: str | Path | None = None) -> Report:
        """Return a page about `plan`, which a notebook shows: memory over the step, the trade-off, what is recomputed
        by module, and what bounds the peak. It needs plotly: ``pip install 'rematplan[report]'``.

        ``path``: a file to write the page to; None for none.

        Raises:
            UsageError: there is no plan yet, the model is planned in parts, plotly is not installed, or the plan is for
                several forwards before a backward.
        """
        entry, planner = _last(self._planned), self._planned._rematplan.planner
        step, plan = entry.compiled.step, entry.running.shown
        graph = planner.problem(step)
        try:
            shown = replace(plan, estimate=simulate(graph, plan.schedule))
        except ProblemError as error:
            raise UsageError(f"{step.name}: there is no page about this plan: {error}") from None
        page = report(subject_of(graph, shown, (*step.calls, *step.inverses)))
        if path is not None:
            page.save(path)
        return page

    def wait(self, seconds: float | None = None) -> Planning:
        """Wait until all background searches for better plans have ended. The plans that they found are used from the
        next training step on.

        ``seconds``: the longest time to wait; None for no limit.
        """
        end = None if seconds is None else time.monotonic() + seconds
        for entry in self._entries():
            if entry.running.refinement is not None:
                entry.running.refinement.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self

    def stats(self) -> PlanningStats:
        """Return figures about the plans in use, background searches and captures."""
        entries, runners = self._entries(), self._planned._rematplan.runners
        captures = {id(one.captures): one.captures for one in runners}.values()
        shapes = [shape for one in captures for shape in one.shapes.values()]
        later = [r for entry in entries if (r := entry.running.refinement) is not None]
        return PlanningStats(
            plans=len(entries),
            gaps=tuple(entry.running.shown.gap for entry in entries),
            searching=sum(r.working for r in later),
            seconds=sum(r.seconds for r in later),
            swaps=sum(entry.running.swaps for entry in entries),
            captures=sum(one.separate for one in captures),
            open_captures=sum(one.opened for one in shapes),
            instances=sum(one.served for one in shapes),
            carried=sum(one.carried for one in shapes),
            sources=sum(one.sources for one in shapes),
            dropped=sum(one.plans.recent.dropped for one in runners),
            reasons=tuple(dict.fromkeys(reason for one in shapes for reason in one.reasons)),
        )

    def _entries(self) -> list[CacheEntry]:
        return [entry for one in self._planned._rematplan.runners for entry in one.plans.all()]

    def statistics(self) -> Statistics:
        """Return the Kronecker-factored statistics of the present training step: the sum over its backwards so far.
        They are available until the next training step's first forward. A training step that computes no statistics
        has no factors."""
        return self._recorder.statistics()

    def statistics_layers(self) -> dict[str, Factors]:
        """Return the Kronecker factors that the plans in use compute, by the name of the layer's weight, as tensors
        on the device ``meta`` (shapes and types only). Empty if no step with statistics was planned yet."""
        assert self._recorder
        plain = self._planned._rematplan.plans.plain()
        measured = (entry.measured for entry in plain if entry.measured)
        found = (shapes(other.statistics) for other in measured if other.statistics)
        return {name: factors for one in found for name, factors in one.items()}

    def take_statistics(self, wanted: bool | None = True) -> None:
        """End the present training step, and decide whether the following training steps compute statistics. (A step
        of an optimizer over the module's parameters ends the training step, too.)

        ``wanted``: True for all following training steps, False for none, None for every n-th (``Kronecker.every``).
        """
        self._recorder.take(wanted)

    def listen_to_statistics(self, listener: Listener) -> None:
        """Register a method that receives the Kronecker factors of layers during each backward, as soon as they are
        complete. A method that was registered before is replaced.

        ``listener``: a bound method that takes a dictionary from weight names to factors (it may be empty) and the
        number of the training step. Its object is referenced weakly. See `Recorder.listen`.
        """
        self._recorder.listen(listener)

    @property
    def statistics_options(self) -> Kronecker:
        """The options with which the module's statistics were planned."""
        return self._recorder.options

    @property
    def statistics_state(self) -> tuple[int, int]:
        """A pair: the number of the present training step, and how many times labels have been drawn so far. To resume
        training with exactly the same statistics, save this pair and assign it later."""
        return self._recorder.step, self._recorder.draws.count

    @statistics_state.setter
    def statistics_state(self, state: tuple[int, int]) -> None:
        self._recorder.step, self._recorder.draws.count = state

    @property
    def _recorder(self) -> Recorder:
        found = self._planned._rematplan.recorder
        if found is None:
            name = self._planned._rematplan.name
            raise UsageError(
                f"{name} was planned without statistics; see plan_module(statistics=Kronecker())"
            )
        return found

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Make the plan for a call with these arguments, without running the model, and return the planned module. If
        there is a plan for such a call, keep it."""
        self._planned._rematplan.prepare(self._planned._rematplan_original(), args, kwargs)
        return self._module


def deferred_backwards(planned: nn.Module) -> Deferred:
    """Return the list of a planned module's forwards whose backward has not computed its weight gradients yet."""
    return Planning(planned)._planned._rematplan.deferred


def watch_backwards(planned: nn.Module) -> None:
    """Watch backwards from now on: warn once if one gives gradients to a planned module's parameters before any planned
    module is called."""
    runner_of(planned).bypasses.watch(planned.parameters())


def _last(planned: HasRunner) -> CacheEntry:
    """Return the entry of the latest call or prepared plan. `UsageError` if there is none, or the model is planned in
    parts."""
    runner, *others = planned._rematplan.runners
    if others:
        raise UsageError(
            f"the model is planned in parts ({runner.name}, ...); planning(model).plans has their plans"
        )
    if runner.last is None:
        raise UsageError(
            f"{runner.name} has no plan yet; call it, or prepare a plan: planned.prepare(*arguments)"
        )
    return runner.last


def captured_step(planned: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedStep:
    """Return the captured step of a planned module for these arguments, before planning."""
    found = Planning(planned)._planned
    return found._rematplan.captured(found._rematplan_original(), args, kwargs)
