"""`StepProblems`: the planning problems of captured steps, with everything that a user's options add to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from rematplan.ir import TrainingGraph
from rematplan.planner.core.strategy import Progress, silent
from rematplan.planner.strategies.store_all import no_recompute
from rematplan.plans.op_costs import copies_priced, priced
from rematplan.plans.options import PlanOptions
from rematplan.plans.sized_costs import SizedCosts
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.inversion.find_inverses import with_exact_inverses, with_inverses
from rematplan.runtime.problem.earlier_gradients import adding_problem, holding
from rematplan.runtime.problem.layout_copies import NONE
from rematplan.runtime.problem.loss_boundary import with_loss_boundary, with_optimizer_step
from rematplan.runtime.problem.loss_memory import LossMemory
from rematplan.runtime.problem.policy import check_names, ops_that_run_once
from rematplan.runtime.problem.random_states import without_unused_states

RESERVED = "reserved"
"""The name of the problem's input whose size is the memory of optimizers and other objects outside of the model."""


@dataclass(frozen=True)
class StepProblems:
    """Makes the planning problems of captured steps as the options of a user say. ``options``: the user's options."""

    options: PlanOptions
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The model's parameters and buffers under the names that captured steps use. Inverses need scales' values."""
    added: frozenset[str] = frozenset()
    """Names of parameters that have gradients before the step. The step adds its gradients to them."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes that are allocated during the whole step in addition to the step's tensors, by a name for each."""
    keeps_tangents: bool = False
    """Whether the gradients of outputs stay allocated until the backward ends, instead of until their last use."""
    in_place: bool = True
    """Whether sums over parts of what is split are computed in place. Graphs for compilers have no such calls."""
    sized: SizedCosts = field(default_factory=SizedCosts, compare=False)
    """Measured costs of ops. Costs of the same steps at other sizes are interpolated from them."""

    def with_inverses(self, step: CapturedStep) -> CapturedStep:
        """Return the step with all inverses if the user allows those that round, otherwise with exact ones."""
        if self.options.inverting:
            return with_inverses(step, self.named, renormalise=True).step
        return with_exact_inverses(step)

    def problem(self, step: CapturedStep, progress: Progress = silent) -> TrainingGraph:
        """Make the planning problem of a captured step, with the loss, the ops that run once and the reserved bytes of
        the user's options. `UsageError` if the policy names no module or op of the step."""
        return self.around(step, self.with_loss(step, progress=progress)[0])

    def with_loss(
        self, step: CapturedStep, loss: LossMemory | None = None, progress: Progress = silent
    ) -> tuple[TrainingGraph, LossMemory]:
        """Make the problem of a captured step alone, with a loss and the ops that run once, and return it with the
        memory of the loss. ``loss``: None for the memory that the options state or assume."""
        graph = self.priced(step, progress)
        if self.keeps_tangents:
            graph = replace(graph, outputs=tuple(dict.fromkeys((*graph.outputs, *step.given("tangent")))))
        loss = loss or self.loss(step, graph)
        copies = NONE if loss.dense else copies_priced(step, graph, self.options.costs)
        graph = self.running_once(step, with_loss_boundary(step, graph, loss, copies))
        return without_unused_states(graph), loss

    def priced(self, step: CapturedStep, progress: Progress = silent) -> TrainingGraph:
        """Return the ops and tensors of a captured step, with the costs of the user's options."""
        error = self.options.max_inversion_error
        return priced(step, self.options.costs, progress, max_inversion_error=error, sized=self.sized)

    def running_once(self, step: CapturedStep, graph: TrainingGraph) -> TrainingGraph:
        """Return a step's problem in which random draws and what the policy says run once."""
        return replace(graph, never_rerun=graph.once(*ops_that_run_once(step, self.options.policy)))

    def around(self, step: CapturedStep, graph: TrainingGraph) -> TrainingGraph:
        """Return a step's problem with earlier gradients and the bytes of other objects; `UsageError` if the policy
        names no module or op of the step."""
        check_names(self.options.policy, (step,), step.name)
        graph = adding_problem(step, graph, self.added) if self.added else graph
        others = self.options.reserved.on(step.device, self.named)
        graph = with_optimizer_step(step, graph, others.stepping)
        return holding(graph, {**self.held, RESERVED: others.always})

    def inverting_problem(self, step: CapturedStep) -> TrainingGraph:
        """Return the planning problem of a captured step to which inverses are added."""
        return self.problem(self.with_inverses(step))

    def loss(self, step: CapturedStep, graph: TrainingGraph) -> LossMemory:
        """Return the memory of a loss outside of the model: what the user states, otherwise a default amount."""
        stated = self.options.stated_loss()
        if stated is None:
            return LossMemory.usual(step, no_recompute(graph).estimate.peak)
        if stated.kind == "share":
            return LossMemory.of_copies(step, float(stated.amount))
        return LossMemory.of_peak(step, int(stated.amount))
