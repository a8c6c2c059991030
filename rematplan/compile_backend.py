"""A backend of `torch.compile` that splits each joint graph into forward and backward according to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from rematplan.ir import InfeasibleBudget, UsageError
from rematplan.planner.core.plan import Plan
from rematplan.plans.held_by_others import Reserved
from rematplan.plans.options import PlanOptions
from rematplan.plans.step_planner import StepPlanner
from rematplan.runtime.capture.read_fx import fixed_size, read_flat_joint_graph
from rematplan.runtime.execute.fx_graphs import plan_graphs
from rematplan.runtime.graph.compat import (
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
from rematplan.runtime.problem.constraints import Name

COMPILERS = ("eager", "inductor")

KEEPING_THE_PLAN = {"layout_optimization": False}
"""Settings of Inductor that keep the peak near the plan's.

Otherwise Inductor copies inputs and outputs of convolutions to another layout, and holds both copies: a ResNet-18
took 1.23 of its budget with it, and 1.02 without.
"""


class PlanningBackend:
    """A backend of `torch.compile` that plans each graph it compiles. `backend` makes it.

    ``plans``: all plans made so far. ``compiled``: the numbers of the compilations of each frame of TorchDynamo (a
    function that it compiles), by the frame's number. Each compilation is for another size or mode.
    """

    def __init__(self, planner: StepPlanner, compiler: str) -> None:
        self.planner, self.compiler = planner, compiler
        self.plans: list[Plan] = []
        self.compiled: dict[int, set[int]] = {}

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile a graph of forward ops and return the compiled function. Its backward, if any, follows a plan.

        Symbolic sizes are fixed to their present values, so TorchDynamo compiles again for other sizes.
        """
        _fix_sizes(inputs)
        self._say_limit()
        compiled: Any
        if self.compiler == "eager":
            # Random draws are kept even if nothing reads them: later draws depend on the generator's state.
            with inductor_config.patch(fallback_random=True):
                compiled = aot_autograd(fw_compiler=boxed_nop, partition_fn=self.partition)(module, inputs)
        else:
            # A cached result would skip the partitioner, and with it the plan.
            with (
                inductor_config.patch(custom_partitioner_fn=_Partitioner(self)),
                functorch_config.patch(enable_autograd_cache=False),
            ):
                compiled = compile_fx(module, list(inputs), config_patches=KEEPING_THE_PLAN)
        return cast(Callable[..., Any], compiled)

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan a joint graph, and return the graphs of its forward and its backward.

        The arguments are those of `torch._functorch.partitioners.default_partition`.

        Raises:
            InfeasibleBudget: no plan fits, and the options say that this is raised.
        """
        del inputs
        step = read_flat_joint_graph(joint, num_fwd_outputs, f"graph {len(self.plans)}")
        # A percentage is of the peak of each graph: graphs after a break, or of other models, have different peaks.
        planner = replace(self.planner, scope=step.name)
        with unset_fake_temporarily(), disable_current_modes():
            try:
                plan = planner.planned(step)
            except InfeasibleBudget as error:
                plan = planner.instead(step, error, first=len(self._frame()) <= 1)
        graphs = plan_graphs(step, plan.schedule)
        self.plans.append(plan)
        results: Any = joint.graph.find_nodes(op="output")[0].args[0]
        sizes = _give_sizes(graphs.forward, joint)
        _fill(graphs.forward, results[:num_fwd_outputs], sizes)
        _fill(graphs.backward, results[num_fwd_outputs:], {})
        return graphs.forward, graphs.backward

    def _frame(self) -> set[int]:
        """Return the numbers of the compilations of the present frame, including this one; empty outside of
        TorchDynamo.
        """
        present = CompileContext.current_compile_id()
        if present is None or present.frame_id is None or present.frame_compile_id is None:
            return set()
        times = self.compiled.setdefault(present.frame_id, set())
        times.add(present.frame_compile_id)
        return times

    def _say_limit(self) -> None:
        """Warn when TorchDynamo compiles a frame for the last time.

        It runs further sizes and modes without compiling, hence without a plan, and does not tell the backend.
        """
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


def _give_sizes(module: fx.GraphModule, joint: fx.GraphModule) -> dict[str, fx.Node]:
    """Add the symbolic sizes among a joint graph's inputs to the inputs of its forward, and return them by name.

    The forward has these sizes as numbers and does not read the inputs, but it is called with the joint graph's
    inputs.
    """
    own = iter(module.graph.nodes)
    here, given = next(own), {}
    for node in joint.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], torch.SymInt):
            with module.graph.inserting_before(here):
                given[node.name] = module.graph.placeholder(node.name)
            given[node.name].meta["val"] = node.meta["val"]
        elif here.op == "placeholder":
            here = next(own)
    return given


def _fill(module: fx.GraphModule, results: Sequence[Any], sizes: Mapping[str, fx.Node]) -> None:
    """Put sizes and constants among the results of a joint graph into a graph's outputs, at their positions."""
    output = module.graph.find_nodes(op="output")[0]
    given = iter(output.args[0])

    def filled(result: Any) -> Any:
        if not isinstance(result, fx.Node):
            return result
        return sizes[result.name] if result.name in sizes else next(given)

    output.args = ((*map(filled, results), *given),)
    module.recompile()


class _Partitioner(CustomPartitionerFn):
    def __init__(self, backend: PlanningBackend) -> None:
        self.backend = backend

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.backend.partition(gm, joint_inputs, **more)

    def uuid(self) -> Any | None:
        return "rematplan"  # Inductor's cache knows the planned graphs by their content


def backend(
    *,
    budget: str | int,
    strategy: str = "auto",
    time_limit: float = 30.0,
    options: Mapping[str, object] | None = None,
    costs: str = "profile",
    keep: Iterable[Name] = (),
    never_rerun: Iterable[Name] = (),
    compiler: str = "eager",
    loss_memory: str | int | None = None,
    reserved: Iterable[object] = (),
    on_infeasible: str | None = None,
) -> PlanningBackend:
    """Return a backend for `torch.compile` whose backward recomputes as a plan within ``budget`` says.

    The arguments are those of `plan_module`, except ``compiler``. By default, ``on_infeasible`` raises for the first
    plan of each compiled function. The budget holds for each compiled graph, so it holds for the whole model if there
    is no graph break. A percentage is of the peak of that graph at that size.

    ``compiler``: ``eager`` runs the planned graphs unchanged. ``inductor`` compiles them with Inductor, which fuses
    and reorders ops, so the plan's peak and overhead are estimates. (Inductor is kept from changing the layout of
    convolutions, which would take memory beyond the plan.)

    A plan is for fixed sizes: each new size is compiled again, whatever ``dynamic`` says, and its search starts from
    the plans of earlier sizes. TorchDynamo compiles a function for ``torch._dynamo.config.recompile_limit`` (8) sizes
    and modes, and runs further ones without a plan; a warning says when the last one is compiled.

    Errors are raised while compiling: `InfeasibleBudget` and `ModelError` reach the caller as the cause of PyTorch's
    own error.

    Raises:
        UsageError: a malformed budget or loss memory, an unknown strategy, option, compiler or kind of costs.
    """
    asked = PlanOptions(
        budget=budget,
        refine=False,
        strategy=strategy,
        time_limit=time_limit,
        options=options or {},
        costs=costs,
        keep=tuple(keep),
        never_rerun=tuple(never_rerun),
        loss_memory=loss_memory,
        reserved=Reserved.of(reserved),
        on_infeasible=on_infeasible,
    )
    if compiler not in COMPILERS:
        raise UsageError(f"unknown compiler {compiler!r}; known: {', '.join(COMPILERS)}")
    return PlanningBackend(StepPlanner(asked), compiler)
