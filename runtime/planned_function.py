"""A compiled plan as nodes of the autograd graph, one a segment of the backward.

The forward runs whole, in the node that the outputs hang on. Its backward runs the first segment and hands what is held
to the next node, along an empty tensor that joins the two, and so on. Autograd gives a node's gradients to their
parameters before it runs the next node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rematplan.planner.lanes import Lanes
from rematplan.planner.schedule import Schedule
from rematplan.runtime.captured_step import GRADIENT_OF, CapturedStep, StepInput
from rematplan.runtime.executor import Backward, compile_halves


class CompiledPlan:
    """A plan that takes part in autograd.

    Calling it with the tensors of the module by name and the batch gives the module's tensor outputs, and writes the
    buffers' new content.
    """

    def __init__(self, step: CapturedStep, schedule: Schedule, lanes: Lanes | None = None) -> None:
        self.step, self.schedule = step, schedule
        self.halves = halves = compile_halves(step, schedule, lanes=lanes)
        self.variants: dict[frozenset[str], tuple[Backward, ...]] = {frozenset(): halves.backward}
        self.inputs = [i for i in step.inputs if i.kind != "tangent"]
        self.early = [o for o in step.outputs if o.kind in ("output", "buffer")]
        tangents = {i.target for i in step.inputs if i.kind == "tangent"}
        self.constant_outputs = [
            at for at, o in enumerate(o for o in self.early if o.kind == "output") if o.target not in tangents
        ]
        of = {(GRADIENT_OF.get(i.kind), i.target): at for at, i in enumerate(self.inputs)}
        self.wanting = [[of[o.kind, o.target] for o in segment.outputs] for segment in halves.backward]
        """For each segment the positions among the inputs of those whose gradients it gives."""

    def backward(self, missing: frozenset[str]) -> tuple[Backward, ...]:
        """The segments of the backward half for tangents (values) that are missing; compiled when first met."""
        if missing not in self.variants:
            self.variants[missing] = compile_halves(self.step, self.schedule, missing).backward
        return self.variants[missing]

    def __call__(
        self, named: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The outputs. Raises what the ops raise."""
        inputs = [self._input(i, named, batch) for i in self.inputs]
        call = _Call(self, named, inputs)
        link = torch.empty(0, device=self.step.device)
        for k in range(len(self.wanting) - 1, 0, -1):
            link = _Later.apply(call, k, link, *(inputs[at] for at in self.wanting[k]))  # type: ignore[no-untyped-call]
        first = (inputs[at] for at in self.wanting[0])
        return _First.apply(call, link, *first)  # type: ignore[no-untyped-call,no-any-return]

    def _input(
        self, i: StepInput, named: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if i.kind == "batch":
            return batch[int(i.target)]
        if i.kind == "constant":
            return self.step.constants[i.value]
        return named[i.target.removeprefix("model.")]


@dataclass
class _Call:
    """One call of a compiled plan, on its way from segment to segment."""

    plan: CompiledPlan
    named: Mapping[str, torch.Tensor]
    inputs: Sequence[torch.Tensor]
    held: list[Any] | None = None
    versions: Sequence[int] = ()
    missing: frozenset[str] = frozenset()

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the forward half; the outputs. From here on only what the plan holds is held."""
        plan, named, inputs = self.plan, self.named, self.inputs
        self.inputs = [inputs[at] for at in plan.halves.read_late]
        self.versions = [t._version for t in self.inputs]
        with _plain(plan.step):
            early, self.held = plan.halves.forward(*(t.detach() for t in inputs))
            outputs = []
            for output, value in zip(plan.early, early, strict=True):
                if output.kind == "buffer":
                    named[output.target.removeprefix("model.")].copy_(value)
                else:
                    outputs.append(value)
        return tuple(outputs)

    def backward(self, k: int, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run a segment of the backward half; the gradients that it gives."""
        name = self.plan.step.name
        held, self.held = self.held, None
        if held is None:
            raise RuntimeError(
                f"{name}: backward a second time through a planned step, whose tensors were freed on the way"
            )
        still_read = self.plan.halves.backward[k].still_read
        if any(self.inputs[at]._version != self.versions[at] for at in still_read):
            raise RuntimeError(
                f"{name}: a parameter, buffer or input was changed in place between forward and backward"
            )
        with _plain(self.plan.step):
            gradients, self.held = self.plan.backward(self.missing)[k].function(held, *tangents)
        if k == len(self.plan.wanting) - 1:
            self.held, self.inputs = None, ()
        return gradients


class _First(torch.autograd.Function):
    """The forward half, and of the backward half the first segment."""

    @staticmethod
    def forward(ctx: Any, call: _Call, link: torch.Tensor, *inputs: torch.Tensor) -> Any:
        del inputs
        ctx.call, ctx.link = call, link.device
        ctx.set_materialize_grads(False)  # what the loss does not use stays None
        results = call.forward()
        ctx.mark_non_differentiable(*(results[at] for at in call.plan.constant_outputs))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        step = ctx.call.plan.step
        wanted = [i for i in step.inputs if i.kind == "tangent"]
        ctx.call.missing = frozenset(i.value for i in wanted if gradients[int(i.target)] is None)
        if len(ctx.call.missing) == len(wanted):
            return (None,) * len(ctx.needs_input_grad)
        tangents = [_laid_out(gradients[int(i.target)], step.values[i.value].fake) for i in wanted]
        del gradients
        return None, torch.empty(0, device=ctx.link), *ctx.call.backward(0, *tangents)


class _Later(torch.autograd.Function):
    """A further segment of the backward half."""

    @staticmethod
    def forward(ctx: Any, call: _Call, k: int, link: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        del inputs
        ctx.call, ctx.k = call, k
        ctx.set_materialize_grads(False)
        return torch.empty_like(link)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, link: torch.Tensor | None) -> Any:
        if link is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, link, *ctx.call.backward(ctx.k)


@contextmanager
def _plain(step: CapturedStep) -> Iterator[None]:
    """Neither autograd nor autocast: the captured calls hold all that they would add."""
    with torch.no_grad(), torch.autocast(step.device.type, enabled=False):
        yield


def _laid_out(tangent: torch.Tensor | None, fake: torch.Tensor) -> torch.Tensor | None:
    """The tangent with the strides it was captured with; an expanded one (``y.sum().backward()``) becomes dense."""
    if tangent is None or tangent.stride() == fake.stride():
        return tangent
    return torch.empty_strided(fake.shape, fake.stride(), dtype=tangent.dtype, device=tangent.device).copy_(
        tangent
    )
