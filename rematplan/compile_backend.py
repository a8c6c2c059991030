"""A backend of `torch.compile` that splits each joint graph into forward and backward as a plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from rematplan.compile_for_sizes import Shapes, SymbolicGraph, copied, parameter_shapes
from rematplan.inductor_peaks import InductorPlans, MakePlan
from rematplan.ir import InfeasibleBudget, ModelError, UsageError
from rematplan.planner.core.plan import Plan
from rematplan.planner.core.strategy import Strategy
from rematplan.plans.held_by_others import Reserved
from rematplan.plans.options import EAGER_KERNELS, UNSPLIT, PlanOptions, stated_splits, stated_strategy
from rematplan.plans.planner import Planner
from rematplan.runtime.capture.read_fx import fixed_size, read_flat_joint_graph
from rematplan.runtime.execute.fx_graphs import plan_graphs
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import (
    COMPILED_BACKWARDS_KEEP_TANGENTS,
    CompileContext,
    CustomPartitionerFn,
    aot_autograd,
    boxed_nop,
    compile_fx,
    disable_current_modes,
    dynamo_config,
    functorch_config,
    inductor_config,
    unset_fake_temporarily,
)
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.problem.policy import stated_policy
from rematplan.runtime.symbols.expressions import NotSymbolic
from rematplan.symbolic_halves import fill, give_sizes

COMPILERS = ("eager", "inductor")

KEEPING_THE_PLAN = {"layout_optimization": False, "allow_buffer_reuse": False}
"""Settings of Inductor that keep the peak near the plan's.

With the first, Inductor copies inputs and outputs of convolutions to another layout, and a tensor and its copy take
memory at the same time: a ResNet-18 took 1.23 times its budget, but 1.02 times its budget without it. With the second,
freed tensors are kept for reuse: a GPT of 4 layers took 1.04 times its budget, 1.03 times without it.
"""


class PlanningBackend:
    """A backend of `torch.compile` that plans the recomputation of each graph that it compiles; made by `backend`."""

    def __init__(self, planner: Planner, compiler: str, dynamic: bool = True) -> None:
        #: ``compiler``: ``eager`` or ``inductor``. ``dynamic``: whether graphs with symbolic sizes are
        #: compiled; otherwise they are refused.
        self.planner, self.compiler, self.dynamic = planner, compiler, dynamic
        #: Every plan for which a graph was compiled.
        self.plans: list[Plan] = []
        #: By TorchDynamo's number of a function (frame), the numbers of its compilations, of which each new
        #: size or mode is one.
        self.compiled: dict[int, set[int]] = {}
        #: The numbers of the frames that have a plan. A frame that was only compiled without gradients has
        #: none.
        self.frames: set[int] = set()
        #: Why graphs with symbolic sizes were compiled for fixed sizes, in order.
        self.reasons: dict[str, None] = {}

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile a graph of forward ops, for all sizes if these are symbolic, and return a function whose backward
        follows a plan.

        If ops depend on a size's value, or ops are fused or split, the sizes are fixed, and TorchDynamo compiles again
        for others. `ModelError` for symbolic sizes if the backend was made with ``dynamic_shapes=False``.
        """
        self._say_limit()
        if any(isinstance(given, torch.SymInt) for given in inputs):
            if not self.dynamic:
                raise ModelError(
                    "a call has other sizes than the compiled ones, and the backend was made with "
                    "dynamic_shapes=False; make it without, or pass dynamic=False to torch.compile too, for a plan "
                    "for each size"
                )
            try:
                if self.planner.options.rewrites:
                    raise NotSymbolic("fused kernels and splits along rows are those of one size")
                return SymbolicGraph(self, module, inputs)
            except NotSymbolic as error:
                self.reasons[str(error)] = None
        _fix_sizes(inputs)
        parameters, known = parameter_shapes(inputs), len(self.plans)

        def attempt(make_plan: MakePlan) -> Callable[..., Any]:
            del self.plans[known:]  # the plan of the last attempt
            partition = partial(self.partition, parameters=parameters, make_plan=make_plan)
            return self.compile(copied(module), inputs, partition)

        return attempt(self.plan) if self.compiler == "eager" else InductorPlans(self.plan).compiled(attempt)

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Compile a graph of forward ops, and return the compiled function. ``partition`` divides its joint graph into
        forward and backward."""
        compiled: Any
        if self.compiler == "eager":
            # Random draws are kept even if nothing reads them: later draws depend on the generator's state.
            with inductor_config.patch(fallback_random=True):
                compiled = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition)(module, inputs)
        else:
            # A cached result would skip the partitioner, and with it the plan.
            with (
                inductor_config.patch(custom_partitioner_fn=_Partitioner(partition)),
                functorch_config.patch(enable_autograd_cache=False),
            ):
                compiled = compile_fx(module, list(inputs), config_patches=KEEPING_THE_PLAN)
        return cast(Callable[..., Any], compiled)

    def partition(
        self,
        joint: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        make_plan: MakePlan,
        parameters: Shapes = (),
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a joint graph (forward and backward) by ``make_plan``, add the plan to ``plans``, and return the graphs
        of the forward and the backward. The first ``num_fwd_outputs`` results of the joint graph are the forward's."""
        del inputs
        step = read_flat_joint_graph(joint, num_fwd_outputs, f"graph {len(self.plans)}")
        planner = replace(self.planner, scope=self.scope(step, parameters))
        with unset_fake_temporarily(), disable_current_modes():
            step = planner.rewritten(step).step
            plan = make_plan(planner, step)
        graphs = plan_graphs(step, plan.schedule)
        self.plans.append(plan)
        results: Any = joint.graph.find_nodes(op="output")[0].args[0]
        fill(graphs.forward, results[:num_fwd_outputs], give_sizes(graphs.forward, joint))
        fill(graphs.backward, results[num_fwd_outputs:], {})
        return graphs.forward, graphs.backward

    def scope(self, step: CapturedStep, parameters: Shapes) -> str:
        """Return a key for the budget of a graph: a percentage is the same number of bytes for all graphs with this
        key."""
        present = CompileContext.current_compile_id()
        # Equal for graphs that differ only in the sizes of their batch; different after a graph break and for
        # other models.
        return repr((present and present.frame_id, parameters, [str(call.target) for call in step.calls]))

    def plan(self, planner: Planner, step: CapturedStep) -> Plan:
        """Return the plan of a captured step. If none fits, ``on_infeasible`` decides, by default an error for a
        function's first graph."""
        present = CompileContext.current_compile_id()
        frame = None if present is None else present.frame_id
        try:
            plan = planner.planned(step)
        except InfeasibleBudget as error:
            plan = planner.instead(step, error, first=frame not in self.frames)
        if frame is not None:
            self.frames.add(frame)
        return plan

    def _frame(self) -> set[int]:
        """Add the present compilation to ``compiled``, and return the numbers of all compilations of its function;
        empty outside of TorchDynamo."""
        present = CompileContext.current_compile_id()
        if present is None or present.frame_id is None or present.frame_compile_id is None:
            return set()
        times = self.compiled.setdefault(present.frame_id, set())
        times.add(present.frame_compile_id)
        return times

    def _say_limit(self) -> None:
        """Warn when TorchDynamo compiles a function for the last time: further sizes and modes get no plan."""
        before = sum(map(len, self.compiled.values()))
        times, limit = self._frame(), dynamo_config.recompile_limit
        if len(times) == limit and sum(map(len, self.compiled.values())) > before:
            warn(
                f"rematplan: this is plan {limit} of one compiled function, and TorchDynamo compiles a function for no "
                f"more sizes and modes than torch._dynamo.config.recompile_limit, {limit}: a further one runs WITHOUT "
                f"A PLAN, beyond any budget. Set torch._dynamo.config.recompile_limit higher, or give fewer sizes"
            )


def _fix_sizes(inputs: Sequence[Any]) -> None:
    for one in inputs:
        for size in (*one.shape, *one.stride()) if isinstance(one, torch.Tensor) else (one,):
            if isinstance(size, torch.SymInt):
                fixed_size(size)


class _Partitioner(CustomPartitionerFn):
    def __init__(self, partition: Callable[..., Any]) -> None:
        self.partition = partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return cast(tuple[fx.GraphModule, fx.GraphModule], self.partition(gm, joint_inputs, **more))

    def uuid(self) -> Any | None:
        return "rematplan"  # Inductor's cache knows the planned graphs by their content

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # Inductor pickles its settings, this object among them, for the key of its cache.
        return str, ("rematplan",)


def backend(
    *,
    budget: str | int,
    strategy: str | Strategy = "auto",
    costs: str = "profile",
    policy: object = None,
    dynamic_shapes: bool | None = None,
    compiler: str = "eager",
    kernels: str = EAGER_KERNELS,
    split: str | Mapping[str, int] = UNSPLIT,
    loss_memory: str | int | None = None,
    reserved: Iterable[object] = (),
    on_infeasible: str | None = None,
) -> PlanningBackend:
    """Return a backend for `torch.compile` that recomputes in the backward as a plan within ``budget`` says.

    The arguments are those of `plan_module`, except ``compiler``. By default, it is an error if no plan
    fits the budget and the compiled function has no plan yet. If it has one, further graphs of this function get the
    plan with the smallest peak that was found (as with ``on_infeasible="least"``).

    The budget applies to each compiled graph, hence to the whole model only if there is no graph break. A percentage
    refers to the peak without recomputation of a graph at the sizes for which it is first compiled. The resulting
    number of bytes applies at all other sizes.

    ``compiler``: ``eager`` runs the planned graphs unchanged. ``inductor`` compiles them with Inductor, which fuses and
    reorders ops, so the plan's peak and overhead are estimates. The peak of the code is counted. A graph with fixed
    sizes is planned and compiled again, at most five times, until its code fits the budget and uses most of it. So a
    plan's own peak may exceed the budget. A warning says if no code fits. (Inductor is kept from changing the layout of
    convolutions, which would take more memory than the plan.) ``kernels="fused"`` needs the compiler ``eager``, which
    then calls fused kernels; they are those of one size, so each size is compiled, as with ``split``.

    With ``torch.compile(dynamic=True)``, and from the second size on unless ``dynamic=False``, TorchDynamo passes
    graphs with symbolic sizes to the backend. Such a graph is compiled for all sizes, and the bytes of its plan are
    computed for each new size. It is compiled again only if a size needs another plan: if no compiled plan fits the
    budget, or if a known plan has less overhead by more than 1 % of the step's time. `PlanningBackend.reasons` says why
    a graph was compiled for fixed sizes, if one was. With ``dynamic_shapes=False``, the backend refuses graphs with
    symbolic sizes.

    TorchDynamo compiles a function for at most ``torch._dynamo.config.recompile_limit`` (8) fixed sizes and modes, and
    runs further ones without a plan. A warning is given when the last one is compiled.

    While compiling, `InfeasibleBudget` and `ModelError` reach the caller as the cause of PyTorch's own error. At sizes
    that need no compilation they are raised directly.

    Raises:
        UsageError: the budget or the loss memory is malformed; a strategy, option, compiler or kind of costs is
            unknown.
    """
    asked = PlanOptions(
        budget=budget,
        refine=False,
        strategy=stated_strategy(strategy),
        costs=costs,
        policy=stated_policy(policy),
        loss_memory=loss_memory,
        reserved=Reserved.of(reserved),
        on_infeasible=on_infeasible,
        kernels=kernels,
        split=stated_splits(split),
    )
    if compiler not in COMPILERS:
        raise UsageError(f"unknown compiler {compiler!r}; known: {', '.join(COMPILERS)}")
    if compiler != "eager" and asked.fuses:
        raise UsageError(
            f"kernels='fused' cannot be combined with compiler={compiler!r}, which fuses ops itself"
        )
    if dynamic_shapes not in (None, True, False):
        raise UsageError(
            "dynamic_shapes must be None or False here; torch.compile marks sizes with torch._dynamo.mark_dynamic"
        )
    planner = Planner(asked, keeps_tangents=COMPILED_BACKWARDS_KEEP_TANGENTS, in_place=False)
    return PlanningBackend(planner, compiler, dynamic_shapes is not False)
