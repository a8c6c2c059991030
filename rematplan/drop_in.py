"""The drop-in for any training loop: `plan_module`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rematplan.ir import UsageError
from rematplan.planner.core.plan import Plan
from rematplan.plans.options import PlanOptions
from rematplan.plans.reserved import Reserved
from rematplan.plans.step_planner import StepPlanner
from rematplan.runtime.execute.autograd_function import finish_backward
from rematplan.runtime.execute.compile import named_tensors
from rematplan.runtime.module.first_check import check_first_plan
from rematplan.runtime.module.planned_module import Planning, compiled_plan, planned_module
from rematplan.runtime.problem.constraints import Name
from rematplan.runtime.statistics.options import Kronecker

if TYPE_CHECKING:

    class PlannedModule(nn.Module):
        """What type checkers know of a planned module; at run time its class is a subclass of the model's class."""

        plan: Plan
        plans: tuple[Plan, ...]
        source: str

        def prepare(self, *args: Any, **kwargs: Any) -> PlannedModule:
            """Make the plan for these arguments without running anything; returns the module."""


FIRST_CHECK_TOLERANCE = 1e-2
"""The relative error that gradients of a plan with inverses may have when an untested PyTorch is compared with eager
mode: far above what inversion rounds, far below what a wrong recipe gives."""


def plan_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | int | None = None,
    strategy: str = "auto",
    time_limit: float = 30.0,
    options: Mapping[str, object] | None = None,
    costs: str = "profile",
    keep: Iterable[Name | nn.Module] = (),
    never_rerun: Iterable[Name | nn.Module] = (),
    plan: str | Path | None = None,
    dynamic: bool = True,
    inverses: bool = False,
    max_inversion_error: float | None = None,
    overlap: str | None = None,
    loss_memory: str | int | None = None,
    accumulate: bool = False,
    statistics: Kronecker | None = None,
    reserved: Iterable[object] = (),
    on_infeasible: str | None = None,
    refine: bool = True,
    gap: float = 0.001,
    deterministic: bool = False,
    verbose: bool = False,
    in_flight: int = 1,
    deferred: int | None = None,
) -> PlannedModule:
    """A module that does what ``model`` does, in any training loop, with a peak within ``budget``.

    It shares the model's parameters, buffers and state; ``planned.plan`` is the plan for the last way in which it was
    called (`planning` gives it where the model has a ``plan`` of its own). A first plan is made here, for ``args`` and
    ``kwargs``, without running the model; another shape, type or mode makes a further one when it is met, or is refused
    with ``dynamic=False``. So does another outcome of what the forward decides by the values of its inputs and buffers
    (``if mask.all()``, ``x[mask]``, ``lengths.tolist()``), which every call then computes again to compare.

    ``budget``: bytes, or text such as ``8GiB``, ``60%`` (of the peak without recomputation), ``50% of activations``
    (inputs, outputs and gradients stay whole, and the share is of what is beside them at that peak) or ``min``. A
    percentage becomes bytes here, of the peak that ``args`` give in the model's present mode and state, and these bytes
    hold for all later plans, and for copies and pickles of the module: give the largest batch that there will be.
    ``min`` is of each way by itself. The budget bounds all that a forward and backward hold: parameters, buffers,
    inputs, outputs and their gradients, activations, gradients of parameters and inputs, workspaces, the loss; on CUDA
    also what cuBLAS keeps, and what the allocator may count beyond a tensor's bytes. ``time_limit``: seconds for a
    strategy that searches; a plan for another shape begins with the earlier ones, and has a quarter of them where one
    of those fits. ``options``: further options of the strategy. ``costs``: ``profile`` measures ops on the present
    device, ``roofline`` models them, without workspaces; the path of a file of ``rematplan profile`` takes them from
    there. Where parameters have gradients of earlier steps when the module is called, and the plan does not fit beside
    them, another is made, or a warning says that there is none. ``accumulate``: the gradients of several steps are
    added up before an optimizer's step, so that the plan counts those of earlier steps from the start, a percentage is
    of a peak with them, and no plan is made in the middle of a loop.

    ``on_infeasible``: what a call does for which no plan keeps the budget: ``raise`` an error; take the ``least``, the
    leanest plan that is known; or run as ``eager`` mode does, by a plan that recomputes nothing. A warning says what
    the last two need. By default the first plan raises, and later ones take ``least``, so that a larger batch does not
    end a training run. No call searches again for what was not found.

    ``reserved``: what others hold during the step, which the budget then bounds too: optimizers (their state, made or
    to come, and what their step holds beyond it, so that a whole iteration keeps the budget), modules (parameters and
    buffers that they do not share with the model: a teacher, an average of weights), objects with a method
    ``reserved_bytes() -> int``, and bytes, such as ``"1GiB"`` or a number. A percentage is of a peak with them. A saved
    plan is loaded with the kinds of things that were reserved when it was made.

    ``in_flight``: for schedules of pipelines: so many micro-batches may be between the begin of their forward and the
    end of their backward, one after another, and the budget holds for all of them together, beside gradients that are
    added up. ``deferred``: a backward gives the gradients of the inputs alone, and leaves those of the weights to
    `finish_weights`, for up to so many micro-batches that wait for it.

    ``loss_memory``: what a loss outside of the model holds at its peak: ``3x`` is three tensors of the outputs' size
    (in float32 at least), the outputs' gradients among them, which is what cross entropy has; or bytes, or text such as
    ``1GiB``, beside the outputs and their gradients. By default ``5x``, which almost every loss does with, or ``4x``
    where that is more than an eighth of the peak, of the outputs but for scalars, which are taken for losses of the
    model's own, and those that scalars are made of.

    ``keep``: modules whose results, and ops whose results, stay from when they are made to their last use.
    ``never_rerun``: modules none of whose ops, and ops that, run a second time. Both take modules, their names, and
    names of ops such as ``aten.addmm`` or ``mylib::kernel``. ``plan``: a file that `save_plan` wrote, in place of
    planning; with it, the budget is the plan's.

    ``inverses`` (implied by the strategy ``reversible``): tensors may also be brought back by inverting what was
    computed from them, so that gradients are equal within rounding errors, not bit by bit; ``max_inversion_error``
    bounds the predicted relative error of such a tensor (by default what fits its type).

    ``overlap``: ``on``, or ``auto`` where it is predicted to pay, runs what brings tensors back beside the gradients,
    on two threads or CUDA streams, as far ahead as the budget allows; by default ``off``, or as the saved plan says.

    ``statistics``: Kronecker-factored curvature of the layers, summed within the step and its budget in every n-th
    training step; `planning` gives it (``planning(planned).statistics()``). A step with statistics has a plan of its
    own, which is made here, too.

    ``refine``: training begins with a plan that is found in about two seconds, and another process, which runs at low
    priority, searches for better ones for up to ``time_limit`` seconds. A better plan takes effect between two steps:
    after an optimizer's step, when no backward is to come. Gradients are equal to the bit under any of these plans. It
    is off with inverses, a saved plan, a second lane, the budget ``min`` and strategies other than ``auto``. ``gap``: a
    plan whose overhead is proven to be within this of the least there is (a share of the step's time) ends a search.
    ``deterministic``: the same plans at the same steps in each process, where ``costs`` are the same: the search counts
    moves instead of seconds, and nothing is refined. ``verbose``: the logger ``rematplan``, which tells of each plan,
    also prints.

    Raises:
        InfeasibleBudget: the strategy knows no plan that fits; carries the smallest peak that it can reach.
        UsageError: no budget, a malformed one or loss memory; an unknown strategy, option, kind of costs, overlap,
            module or op; statistics with a saved plan.
        ProblemError: the saved plan is another graph's.
        ModelError: the model cannot be captured. What the model raises of itself for these arguments (it is run once,
            without gradients kept, if it cannot be captured) is raised as it is.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} is no torch.nn.Module")
    if not isinstance(args, (tuple, list)):
        raise UsageError(
            f"args is a {type(args).__name__}; write what the model is called with as a tuple, (x,)"
        )
    asked = PlanOptions(
        budget=budget,
        strategy=strategy,
        time_limit=time_limit,
        options=options or {},
        costs=costs,
        keep=_names(model, keep),
        never_rerun=_names(model, never_rerun),
        plan=plan,
        inverses=inverses,
        max_inversion_error=max_inversion_error,
        overlap=overlap,
        loss_memory=loss_memory,
        accumulate=accumulate,
        reserved=Reserved.of(reserved),
        on_infeasible=on_infeasible,
        refine=refine,
        gap=gap,
        deterministic=deterministic,
        in_flight=in_flight,
        deferred=deferred,
    )
    if verbose:
        print_log()
    if statistics is not None and plan is not None:
        raise UsageError("a saved plan is of a step without statistics; state a budget for one with them")
    named = {f"model.{name}": tensor for name, tensor in named_tensors(model).items()}
    planned = planned_module(model, StepPlanner(asked, named=named), dynamic, statistics)
    Planning(planned).prepare(*args, **(kwargs or {}))
    check_first_plan(model, planned, args, kwargs or {}, FIRST_CHECK_TOLERANCE if inverses else 0.0)
    return planned  # type: ignore[return-value]


def print_log() -> None:
    """Have the logger ``rematplan`` print what it tells, unless it has a handler already."""
    log = logging.getLogger("rematplan")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def finish_weights(planned: nn.Module) -> int:
    """Make the gradients of the weights that the oldest backward of a module planned with ``deferred`` has left, and
    add them to those that the parameters have.

    Returns:
        How many backwards still have some left.

    Raises:
        UsageError: the module is not planned, or no backward has left any.
    """
    waiting = compiled_plan(planned).deferred
    if not waiting:
        raise UsageError(
            f"no backward of this {type(planned).__name__} has left gradients of weights to be made"
        )
    finish_backward(waiting.pop(0))
    return len(waiting)


def planning(planned: nn.Module) -> Planning:
    """The ``plan``, ``plans``, ``source`` and ``prepare`` of a planned module, whatever its model calls by these names.

    Raises:
        UsageError: the module is not planned.
    """
    return Planning(planned)


def _names(model: nn.Module, wanted: Iterable[Name | nn.Module]) -> tuple[Name, ...]:
    """Modules by their names."""
    if isinstance(wanted, str):
        raise UsageError(f"keep and never_rerun are lists; write [{wanted!r}]")
    known = {id(m): name for name, m in model.named_modules()}
    named = []
    for one in wanted:
        if isinstance(one, nn.Module):
            if not known.get(id(one)):
                raise UsageError(f"a {type(one).__name__} to be kept or run once is no part of the model")
            named.append(known[id(one)])
        else:
            named.append(one)
    return tuple(named)
