"""`plan_module` and `plan_stage`: plan any module, for use in any training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rematplan.ir import UsageError
from rematplan.module.plan_access import Planning, deferred_backwards, runner_of, watch_backwards
from rematplan.module.planned_module import planned_module
from rematplan.module.shape_options import DynamicShapes, ShapeOptions
from rematplan.module.size_range_proof import prove_ranges
from rematplan.module.untested_torch import check_untested_torch
from rematplan.parts.whole_or_parts import WholeOrParts
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Strategy
from rematplan.plans.held_by_others import Reserved
from rematplan.plans.options import (
    EAGER_KERNELS,
    FUSED,
    UNSPLIT,
    InFlight,
    PlanOptions,
    stated_splits,
    stated_strategy,
)
from rematplan.plans.planner import Planner
from rematplan.runtime.capture.flat_module import check_call
from rematplan.runtime.execute.compile import tensors_in_step
from rematplan.runtime.execute.compiled_plan import finish_backward
from rematplan.runtime.problem.policy import stated_policy
from rematplan.runtime.statistics.options import Kronecker

if TYPE_CHECKING:

    class PlannedModule(nn.Module):
        """A type for the result of `plan_module`, used by type checkers only.

        At run time, a planned module is an instance of a subclass of its model's class, and not of this class.
        ``plan``: the plan of the latest call. ``plans``: the plans in use. ``source``: the generated code of the
        latest plan.
        """

        plan: Plan
        plans: tuple[Plan, ...]
        source: str

        def prepare(self, *args: Any, **kwargs: Any) -> PlannedModule:
            """Make the plan for these arguments without running the model, and return the planned module itself."""


FIRST_CHECK_TOLERANCE = 1e-2
"""The largest relative error of gradients in the check of the first plan if results may differ by rounding (inverses,
splits, fused kernels). The check is made only with PyTorch versions that were not tested.

It is far above rounding errors, and far below the errors of a wrong inverse or kernel.
"""


def plan_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | int | None = None,
    strategy: str | Strategy = "auto",
    costs: str = "profile",
    policy: object = None,
    dynamic_shapes: DynamicShapes = None,
    inverses: bool | float = False,
    loss_memory: str | int | None = None,
    reserved: Iterable[object] = (),
    statistics: Kronecker | None = None,
    on_infeasible: str | None = None,
    refine: bool = True,
    split: str | Mapping[str, int] = UNSPLIT,
    kernels: str = EAGER_KERNELS,
) -> PlannedModule:
    """Return a module that computes what ``model`` computes, in any training loop, with a peak within ``budget``.

    The planned module shares the model's parameters, buffers and state. The first plan is made here, for ``args`` and
    ``kwargs``, without running the model. Another shape, type or mode gets a further plan when it first occurs. So
    does another outcome of a branch on values of inputs and buffers (``if mask.all()``, ``lengths.tolist()``); every
    call evaluates such conditions again. The number of elements that ``x[mask]`` selects is a size like a length.
    ``planned.plan`` is the plan of the latest call; use `planning` if the model itself has an attribute ``plan``.

    The budget bounds everything that a forward and backward hold: parameters, buffers, inputs, outputs and their
    gradients, activations, gradients of parameters and inputs, workspaces, the loss; on CUDA also what cuBLAS keeps
    and what the allocator may count in addition to a tensor's bytes. If parameters have gradients of earlier steps
    when the module is called, and the plan together with these gradients exceeds the budget, another plan is made, or
    a warning says that no plan fits.

    A model that cannot be captured as a whole (its loss matches, its layers are dropped by chance, a router reads
    values) is planned in parts: its largest modules that can be captured. One line on standard error names them. The
    rest runs as it is, and the budget is common to all parts and the rest. To plan a kind of call, the model is run
    once, forward and backward, and its state is restored afterwards. A percentage is then of what all parts
    and the rest need without recomputation, and `planning` has the plans of the parts. If no part is worth a plan,
    and the budget is enough for the step in eager mode, the model runs in eager mode, and a warning says why.

    The logger ``rematplan`` records each plan at level INFO. While a search lasts, a line on standard error shows its
    progress, if that is a terminal.

    Args:
        model: the module to plan. It is not changed.
        args: example positional arguments, as a tuple.
        kwargs: example keyword arguments.
        budget: bytes, or text: ``8GiB``; ``60%`` of the peak without recomputation; ``50% of activations``, which
            keeps inputs, outputs and gradients whole and half of the rest of that peak; ``least``, the smallest peak
            found; or ``min``, for the cheapest plan within 1 % of it. A percentage becomes bytes here, for the
            peak of ``args`` or of the largest sizes in ``dynamic_shapes``; or at the first training step, if that has
            the same shapes but other types, modes, layouts or devices (autocast, frozen layers, channels-last). These
            bytes apply to all later plans, also of copies and pickles of the module, so ``args`` should be the largest
            batch. ``least`` and ``min`` are determined for each plan separately.
        strategy: a planning algorithm by its name, or with its options: ``Auto(time_limit=60, gap=0.01)``,
            ``Anneal(moves=100_000)``. ``auto`` combines several. ``SavedPlan(path)`` uses a plan that `save_plan` or
            ``rematplan plan -o`` wrote, without a search; its budget applies. All take
            ``two_lanes="on"``, which runs recomputation and inverses concurrently with the gradients, on two threads
            or CUDA streams, and ``"auto"``, which does so if it is predicted to save time. With ``refine`` the search
            of ``auto`` runs in another process while training runs. The search for another shape starts from the
            earlier plans, and is given a quarter of the time if one of these plans fits.
        costs: ``profile`` measures ops on the present device; ``roofline`` models them, without workspaces; the name of
            a device model, such as ``a100``; or the path of a file that ``rematplan profile`` wrote.
        policy: what must be saved, as selective checkpointing states it: a mapping from modules, their names and ops
            (``aten.addmm``, ``mylib::kernel``, ``torch.ops.aten.mm``) to `torch.utils.checkpoint.CheckpointPolicy`; a
            list of those that must be saved; or a function of ``(context, op, *args, **kwargs)``. ``MUST_SAVE`` keeps
            results from their computation to their last use: of an op, so that it never runs twice; of a module, those
            that others read; of all ops in a module with the name ``MODULE.*``. ``PREFER_SAVE`` and
            ``PREFER_RECOMPUTE`` leave the choice to the plan.
        dynamic_shapes: the sizes that calls may have. None: any; other shapes, types and modes get further plans.
            False: other shapes, types and modes are refused. Or ranges in the form of `torch.export`:
            ``{"input_ids": {1: Dim("length", min=16, max=512)}}``, where one `Dim` in several places states equal
            sizes, and ``32 * Dim("height", min=2, max=8)`` the heights 64, 96, ..., 256. Dimensions without a `Dim`
            may have any size.
            Sizes out of range are refused. Plans are made here for the largest sizes first (entries of ``args`` and
            ``kwargs`` are repeated evenly along these dimensions), then for those given, the smallest, and one between,
            or for all sizes if there are at most 12. This also makes, before training, the capture that serves all
            sizes, which would otherwise be made at the second shape.
            For every combination of sizes from 2 on it is checked here that a known plan fits; if there are more than
            12 combinations apart from the `Dim` with the most sizes, for those in which all except one are at their
            largest. Where no plan fits, ``auto`` searches for more. If some sizes remain without a plan, an error names
            them, or a warning does if ``on_infeasible`` is ``least`` or ``eager``. (Nothing is checked with a saved
            plan, splits, fused kernels, inverses, reserved gradients, several micro-batches in flight or a budget
            ``min`` or ``least``.)
        inverses: whether tensors may also be recovered by inverses (ops that compute an input from an output), even if
            these round. Gradients then equal plain autograd's within rounding errors, not bit by bit. A number is the
            largest predicted relative error of such a tensor; True is a limit that suits the tensor's type. The
            strategy ``reversible`` implies True.
        loss_memory: the peak memory of a loss outside of the model. ``3x`` is three tensors of the outputs' size (in
            float32 at least), the outputs' gradients included; cross entropy needs that. Or bytes, or text such as
            ``1GiB``, in addition to the outputs and their gradients. By default ``5x``, which is enough for almost
            every loss, or ``4x`` if ``5x`` would be more than an eighth of the peak. Scalar outputs (assumed to be
            losses) do not count as outputs here, nor do outputs from which a scalar output is computed.
        reserved: objects outside of the model whose memory the budget also bounds: optimizers (their state,
            present or future, and the temporary memory of their step), modules (parameters and buffers that the model
            does not share, such as a teacher's), objects with a method ``reserved_bytes() -> int`` (and perhaps
            ``step_bytes() -> int``, for temporary memory of the optimizer's step), and bytes (``"1GiB"`` or a number).
            ``"gradients"`` counts the gradients of earlier backwards from the start, if several are summed before the
            optimizer's step; without it, the first step that begins with gradients may need another plan.
            A percentage then refers to a peak that includes all of them. A saved plan must be loaded with the same
            kinds of reserved objects.
        statistics: options of Kronecker-factored curvature, which is summed within the step and its budget in every
            n-th training step; ``planning(planned).statistics()`` returns it. A step with statistics has a separate
            plan, which is made here too.
        on_infeasible: what a call does if no plan fits the budget. ``raise`` raises the error; ``least`` uses the
            plan of the smallest found peak; ``eager`` uses a plan that recomputes nothing. The last two warn with the
            memory they need. By default the first plan raises and later ones use ``least``, so that a larger batch
            does not end a training run. No call repeats a search that failed.
        refine: start training with a plan that is found in about two seconds, while another process, at low priority,
            searches for better ones for up to the strategy's ``time_limit``. A better plan takes effect between two
            steps: after an optimizer's step, when no backward is pending. Gradients are bit-equal under any of these
            plans. It is off with inverses, two lanes, a budget ``min`` or ``least``, a ``time_limit`` of at most 1.5
            seconds, searches that count moves, and strategies other than ``auto``.
        split: what is split along rows, so that only parts of large tensors exist at a time, such as logits or the
            hidden layer of an MLP. ``off``; ``auto``, which chooses what and into how many parts for the budget; or a
            mapping from modules to numbers of parts, such as ``{"lm_head": 8}``, where ``loss`` names the cross entropy
            with the layer before it. The loss is the same bit by bit where the device's kernels compute the same rows
            for fewer rows, which is tested with ``costs="profile"``, and so are all gradients except those of weights
            in what is split: these are sums over parts. A percentage refers to the step without splits. Each further
            shape gets a search of its own. With a saved plan, ``auto`` splits what that plan splits.
        kernels: ``eager`` for the kernels of eager mode; ``fused`` for kernels that Inductor compiles, each for several
            neighbouring ops (pointwise ops, reductions, norms), between matrix products, convolutions and other ops of
            libraries. Results then differ from eager mode's by rounding; they are the same under every plan, and in
            every run whose first two shapes are the same. A percentage refers to the peak of the fused step or, with
            ``split``, of the step with neither. The second shape gets kernels with open sizes, which serve further
            ones; with ``split``, each shape gets kernels of its own. Ops whose kernel cannot be compiled run as in
            eager mode, and a warning says so.

    Raises:
        InfeasibleBudget: the strategy finds no plan that fits. The error has the smallest peak found.
        UnfitSizes: for some sizes in ``dynamic_shapes`` no known plan fits.
        UsageError: an argument is malformed (no budget, an unknown strategy, module or op, a size that
            ``dynamic_shapes`` cannot have), or two arguments exclude each other, such as ``statistics`` and a saved
            plan.
        ProblemError: the saved plan belongs to another graph.
        ModelError: the model has no data (it is on the meta device) or was compiled in place; or it cannot be captured
            as a whole, and can be run neither in parts nor in eager mode: an option excludes parts, a module inside
            is compiled, the forward takes the next item of an iterator or returns objects that hide tensors, or one
            backward of it cannot be tried.
            An exception of the model itself for these arguments is raised unchanged (if capture fails, the model is run
            once, without gradients, to find out). With a version of PyTorch that was not tested, the first step runs on
            a copy of the model and is compared with eager mode; this error is raised if they differ.
    """
    return _planned(
        model,
        args,
        kwargs,
        statistics=statistics,
        dynamic_shapes=dynamic_shapes,
        budget=budget,
        strategy=strategy,
        costs=costs,
        policy=policy,
        inverses=inverses,
        loss_memory=loss_memory,
        reserved=reserved,
        on_infeasible=on_infeasible,
        refine=refine,
        split=split,
        kernels=kernels,
    )


def plan_stage(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    in_flight: int = 1,
    deferred: int | None = None,
    budget: str | int,
    strategy: str | Strategy = "auto",
    costs: str = "profile",
    policy: object = None,
    dynamic_shapes: DynamicShapes = None,
    loss_memory: str | int | None = None,
    reserved: Iterable[object] = (),
    on_infeasible: str | None = None,
    split: str | Mapping[str, int] = UNSPLIT,
    kernels: str = EAGER_KERNELS,
) -> PlannedModule:
    """Return a module that computes what ``model`` computes, with a peak within ``budget`` while several calls wait
    for their backward: micro-batches of a pipeline's stage, the views of a contrastive loss, real and generated
    samples.

    Args:
        model: the module to plan. It is not changed.
        args: example positional arguments, as a tuple.
        kwargs: example keyword arguments.
        in_flight: how many calls may be between the start of their forward and the end of their backward. The budget
            bounds all of them together with the parameters' gradients, which are counted once.
        deferred: the largest number of earlier micro-batches whose weight gradients are still to be computed when a
            forward or a backward begins. A backward then computes only the gradients of the inputs, and
            `finish_weights` computes those of the weights later. None: a backward computes both.
        budget: bytes or a percentage, as for `plan_module`. A budget that no plan fits raises.
        strategy, costs, policy, dynamic_shapes, loss_memory, reserved: as for `plan_module`. If ``in_flight`` is above
            1 or ``deferred`` is stated, plans have one lane, and of the options of ``auto`` the search follows
            ``time_limit``, ``moves``, ``seed`` and ``gap``. A saved plan and others of its options are refused.
        on_infeasible: as for `plan_module`, if ``in_flight`` is 1 and ``deferred`` is None; otherwise only ``raise``.
        split, kernels: as for `plan_module`.

    Raises:
        InfeasibleBudget: the strategy finds no plan that fits. The error has the smallest peak found.
        UsageError, ModelError: as `plan_module`.
    """
    return _planned(
        model,
        args,
        kwargs,
        dynamic_shapes=dynamic_shapes,
        in_flight=InFlight(in_flight, deferred),
        budget=budget,
        strategy=strategy,
        costs=costs,
        policy=policy,
        loss_memory=loss_memory,
        reserved=reserved,
        on_infeasible=on_infeasible,
        split=split,
        kernels=kernels,
    )


def _planned(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, **options: Any
) -> PlannedModule:
    check_call(model, args, kwargs)
    asked = asked_of(model, args, kwargs or {}, **options)
    planned = planned_module(model, asked.runner(model, named=tensors_in_step(model)))
    make_first_plans(planned, asked, model, args, kwargs or {})
    watch_backwards(planned)
    return planned  # type: ignore[return-value]


@dataclass(frozen=True)
class ModuleOptions:
    """The keywords of `plan_module` that a user stated for one module."""

    options: PlanOptions
    """The options that determine a plan."""
    shapes: ShapeOptions = field(default_factory=ShapeOptions)
    """Which shapes are planned."""
    statistics: Kronecker | None = None
    """The Kronecker-factored statistics that the steps compute; None for none."""

    def runner(
        self,
        model: nn.Module,
        modules: tuple[str, ...] | None = None,
        named: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> WholeOrParts:
        """Return the object that executes the model's calls. ``modules``: the names of the parts, if stated; ``named``:
        the model's parameters and buffers, as far as they are known."""
        planner = Planner(self.options, named=named)
        return WholeOrParts(type(model).__name__, planner, self.shapes, self.statistics, modules)


def asked_of(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    strategy: str | Strategy = "auto",
    policy: object = None,
    reserved: Iterable[object] = (),
    dynamic_shapes: DynamicShapes = None,
    statistics: Kronecker | None = None,
    split: object = UNSPLIT,
    **others: Any,
) -> ModuleOptions:
    """Return the keywords of `plan_module` for a model as one object; `UsageError` for unknown or malformed ones, and
    for some that exclude each other. ``args``, ``kwargs``: of a first call, to which ``dynamic_shapes`` may refer."""
    known = {one.name for one in fields(PlanOptions)}
    if unknown := sorted(others.keys() - known):
        raise UsageError(
            f"unknown option {', '.join(unknown)}; see rematplan.plan_module for those there are"
        )
    options = PlanOptions(
        strategy=stated_strategy(strategy),
        policy=stated_policy(policy, model),
        reserved=Reserved.of(reserved),
        split=stated_splits(split),
        **others,
    )
    if not isinstance(statistics, (Kronecker, NoneType)):
        raise UsageError(f"statistics is {statistics!r}; it must be None or rematplan.Kronecker(...)")
    if statistics is not None and options.saved is not None:
        raise UsageError("a saved plan cannot be used together with statistics; state a budget instead")
    shapes = ShapeOptions.of(dynamic_shapes, model, args, kwargs)
    if statistics is not None and FUSED.holds(options):
        raise UsageError(f"{FUSED.name} cannot be combined with statistics")
    return ModuleOptions(options, shapes, statistics)


def make_first_plans(
    planned: nn.Module, asked: ModuleOptions, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Make the plans for a first call, and prove the user's ranges of sizes. With a PyTorch that is not tested, also
    compare the first step with eager mode."""
    for positional, named in asked.shapes.first_calls(model, args, kwargs):
        Planning(planned).prepare(*positional, **named)
    runner = runner_of(planned)
    prove_ranges(planned, runner.planner, asked.shapes, model, args, kwargs)
    tolerance = FIRST_CHECK_TOLERANCE if asked.options.rounds else 0.0
    check_untested_torch(model, planned, tuple(args), kwargs, tolerance)


def finish_weights(planned: nn.Module) -> int:
    """Compute the weight gradients of the oldest backward that left them out, and add them to ``.grad`` of the
    parameters.

    ``planned``: a module that `plan_stage` planned with ``deferred``. Its backward computes only the gradients of
    inputs.

    Returns:
        The number of further backwards whose weight gradients are not computed yet.

    Raises:
        UsageError: the module is not planned, or no backward has weight gradients left to compute.
    """
    waiting = deferred_backwards(planned)
    if not waiting:
        raise UsageError(f"no backward of this {type(planned).__name__} waits for its weight gradients")
    finish_backward(waiting.pop(0))
    return len(waiting)


def planning(planned: nn.Module) -> Planning:
    """Return an object through which the plans and statistics of a planned module can be read.

    It has the attributes ``plan``, ``plans``, ``source`` and ``prepare`` of planned modules, even if the model
    itself uses these names. It also has methods that wait for the background search for better plans, count plans,
    and return Kronecker statistics.

    Raises:
        UsageError: the module is not planned.
    """
    return Planning(planned)
