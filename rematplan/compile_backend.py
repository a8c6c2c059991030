"""A backend of `torch.compile` that splits the joint graph into forward and backward as a plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from rematplan.ir import InfeasibleBudget, UsageError
from rematplan.planner.core.plan import Plan
from rematplan.plans.options import PlanOptions
from rematplan.plans.reserved import Reserved
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
"""Inductor's settings: else it copies what convolutions read and give into another layout, and holds both; a ResNet-18
held 1.23 of its budget so, and 1.02 without."""


class PlanningBackend:
    """What `backend` returns: a backend that plans each graph it is given.

    ``plans``: those made so far; what is known of them starts the search for another size. ``compiled``: how often each
    of TorchDynamo's frames (a function that it compiles) came, each time for another size or mode.
    """

    def __init__(self, planner: StepPlanner, compiler: str) -> None:
        self.planner, self.compiler = planner, compiler
        self.plans: list[Plan] = []
        self.compiled: dict[int, set[int]] = {}

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile a graph of forward ops; its backward, where it has one, follows the plan.

        Sizes that the compiler left open are fixed, so that it compiles anew for others.
        """
        _fix_sizes(inputs)
        self._say_limit()
        compiled: Any
        if self.compiler == "eager":
            # Draws stay though nothing reads them: those after them depend on what they leave of the random numbers.
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
        """A joint graph in two; see `torch._functorch.partitioners.default_partition`."""
        del inputs
        step = read_flat_joint_graph(joint, num_fwd_outputs, f"graph {len(self.plans)}")
        # A graph after a break, or of another model, has a peak of its own.
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
        """The times that the present frame was compiled, this one included; none outside of TorchDynamo."""
        present = CompileContext.current_compile_id()
        if present is None or present.frame_id is None or present.frame_compile_id is None:
            return set()
        times = self.compiled.setdefault(present.frame_id, set())
        times.add(present.frame_compile_id)
        return times

    def _say_limit(self) -> None:
        """Warn where TorchDynamo compiles a frame for the last time: it says nothing of it to the backend when it runs
        a further size or mode as it stands."""
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
    """The sizes among a joint graph's inputs become inputs of its forward, which has them as numbers; by name."""
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
    """Put what is no tensor among a graph's outputs where the joint graph has it."""
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
    """A backend for `torch.compile` whose backward recomputes as a plan within ``budget`` says.

    Arguments as for `plan_module`; by default the first plan of each compiled function is what ``on_infeasible`` raises
    for. The budget holds for each graph that is compiled, so for the whole model where
    nothing breaks it in several; a percentage is of that graph's own peak, for each size anew. ``compiler``: ``eager``
    runs the planned graphs as they are; ``inductor`` hands them to Inductor, which fuses and reorders, so that the
    plan's peak and overhead are estimates there (it is kept from changing the layout of convolutions, which costs
    memory beyond the plan). Sizes are fixed in a plan, so that each new one is compiled anew, whatever ``dynamic``
    says; its search begins with the plans of earlier sizes. TorchDynamo does so for
    ``torch._dynamo.config.recompile_limit`` sizes and modes of a function (8) and then runs it as it stands, without a
    plan: a warning says when the last one is compiled.

    Errors are raised while compiling: `InfeasibleBudget` and `ModelError` reach the caller as the cause of
    PyTorch's own error.

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
