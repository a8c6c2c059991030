"""In-place reuse: a pointwise call writes into an operand that nothing reads again, and ``slice_scatter`` writes its
part.

The bits are equal and one tensor fewer is live. Plans of whole steps stay within budget without it; a pipeline
stage's promised peak counts on it (`reused_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from rematplan.planner.core.schedule import Free, Schedule
from rematplan.runtime.capture.buffer_slices import PARTS
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value
from rematplan.runtime.graph.compat import OpOverload
from rematplan.runtime.graph.in_place_calls import COMMUTES, fills, layout
from rematplan.runtime.graph.tangent_layouts import RESHAPE
from rematplan.runtime.problem.loss_boundary import split_at_loss

ATEN = torch.ops.aten

FRESH = frozenset(
    {
        ATEN.mm.default,
        ATEN.bmm.default,
        ATEN.addmm.default,
        ATEN.baddbmm.default,
        ATEN.convolution.default,
        ATEN.convolution_backward.default,
        ATEN.native_batch_norm.default,
        ATEN._native_batch_norm_legit_functional.default,
        ATEN.native_batch_norm_backward.default,
        ATEN.native_layer_norm.default,
        ATEN.native_layer_norm_backward.default,
        ATEN.native_group_norm.default,
        ATEN.native_group_norm_backward.default,
        ATEN.max_pool2d_with_indices_backward.default,
        ATEN.embedding.default,
        ATEN.embedding_dense_backward.default,
        ATEN.cat.default,
        ATEN.slice_backward.default,
        ATEN.select_backward.default,
        ATEN._softmax.default,
        ATEN._softmax_backward_data.default,
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
        ATEN.empty.memory_format,
        ATEN.empty_like.default,
        ATEN.full.default,
        ATEN.full_like.default,
        ATEN.new_empty.default,
        ATEN.new_zeros.default,
        ATEN.ones.default,
        ATEN.zeros.default,
        ATEN.zeros_like.default,
        ATEN.slice_scatter.default,
        ATEN.select_scatter.default,
        ATEN.diagonal_scatter.default,
    }
)
"""Ops, in addition to the pointwise ones, whose results are known never to share memory with an argument. Results of
other ops are never overwritten: a kernel may return an argument against its schema."""

IN_PLACE = {ATEN.mul.Scalar: ATEN.mul_.Tensor}
"""The in-place ops to use where an op's usual in-place variant computes other bits: ``mul_.Scalar`` rounds its number
to the tensor's type if that has 16 bits."""


@dataclass(frozen=True)
class Written:
    """Writes a part of a tensor, and returns the tensor. ``part``: the op that returns the part as a view."""

    part: OpOverload

    @property
    def source_name(self) -> str:
        """The function's name in generated code."""
        return f"write_{self.part._opname}"

    def __call__(self, tensor: torch.Tensor, content: torch.Tensor, *where: Any) -> torch.Tensor:
        """Write ``content`` into the part of ``tensor`` that the op returns for the arguments ``where``."""
        self.part(tensor, *where).copy_(content)
        return tensor


SCATTERS = {op: Written(part) for op, part in PARTS.items()}
"""Ops that return a tensor in which a part is replaced, and the functions that replace the part in the tensor."""

BUFFERED = frozenset({ATEN.mvlgamma.default})
"""Ops whose in-place variant computes into a new tensor first, so that it needs no less memory."""


Operands: TypeAlias = Mapping[str, tuple[Value, ...]]
"""By the name of a call, the operands that it may overwrite if a schedule frees them directly afterwards. Calls that
may overwrite none are left out."""


def overwriting_calls(step: CapturedStep, schedule: Schedule) -> dict[int, Call]:
    """Return, by position in the schedule, the in-place variant of each call that may overwrite, with the same bits, an
    operand that the schedule frees directly afterwards."""
    found = _overwritten(overwritable_operands(step), schedule)
    return {at: _overwriting(step.call[run], value.name) for at, (run, value) in found.items()}


def overwritable_operands(step: CapturedStep) -> Operands:
    """Return the operands that each call may overwrite: no inputs or outputs of the step, and no tensors whose memory
    another tensor may share."""
    ends = [*(i.value for i in step.inputs), *(o.value for o in step.outputs)]
    kept = {step.values[value].storage for value in ends}
    kept |= {s for c in step.priced_calls if not _fresh(c) for s in step.writes(c)}
    kept |= {s for c in step.priced_calls if c.target is RESHAPE for s in step.reads(c)}
    of = {
        name: tuple(value for value in _overwritable(step, call) if value.storage not in kept)
        for name, call in step.call.items()
        if _may_overwrite(call)
    }
    return {name: values for name, values in of.items() if values}


def reused_bytes(
    step: CapturedStep, operands: Operands, schedule: Schedule, backward: bool
) -> tuple[int, ...]:
    """Return, by position, the bytes that a schedule counts but a compiled plan does not need, because results are in
    overwritten operands. ``backward``: whether the backward half reuses, too."""
    own, reused = split_at_loss(step, schedule), [0] * len(schedule)
    for start, end, value in _reuses(operands, own.schedule):
        if backward or start < own.boundary:
            for at in range(own.positions[start], own.positions[end]):
                reused[at] += step.storage_bytes[value.storage]
    return tuple(reused)


def reused_bytes_of_all(step: CapturedStep, operands: Operands, schedule: Schedule) -> tuple[int, ...]:
    """Return, by position, the bytes that a schedule counts although results are in overwritten operands. It is for
    code that runs all entries, as that of a dataflow's stage does."""
    reused = [0] * len(schedule)
    for start, end, value in _reuses(operands, schedule):
        for at in range(start, end):
            reused[at] += step.storage_bytes[value.storage]
    return tuple(reused)


def _reuses(operands: Operands, schedule: Schedule) -> Iterator[tuple[int, int, Value]]:
    """Yield for each call of a schedule that overwrites an operand: its position, the position at which the schedule
    frees the operand, and the operand."""
    for start, (_, value) in _overwritten(operands, schedule).items():
        yield start, schedule.index(Free(value.storage), start), value


def operands_to_overwrite(step: CapturedStep) -> tuple[tuple[str, ...], ...]:
    """Return, for each call with an in-place variant, its name and the operands that the variant may overwrite if
    nothing reads them again. Inputs and outputs of the step are not excluded."""
    return tuple(
        (call.name, *(value.name for value in _overwritable(step, call)))
        for call in step.calls
        if _may_overwrite(call)
    )


def _may_overwrite(call: Call) -> bool:
    plain = not (call.seeded or call.in_place) and call.single and bool(call.results[0])
    if call.target in SCATTERS:
        return plain and not call.kwargs
    return plain and _pointwise(call) and call.target not in BUFFERED


def _overwritten(operands: Operands, schedule: Schedule) -> dict[int, tuple[str, Value]]:
    """Return the name of each call of a schedule that overwrites an operand, and this operand, by position in the
    schedule."""
    found = {}
    for at, run, dying in _last_uses(schedule):
        value = next((one for one in operands.get(run, ()) if one.storage in dying), None)
        if value is not None:
            found[at] = (run, value)
    return found


def _last_uses(schedule: Schedule) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Yield each op execution of a schedule from last to first: position, op, and the storages that are freed
    directly after it."""
    dying: list[str] = []
    for at in reversed(range(len(schedule))):
        one = schedule[at]
        if isinstance(one, Free):
            dying.append(one.tensor)
        else:
            yield at, one.op, frozenset(dying)
            dying = []


def _pointwise(call: Call) -> bool:
    target = call.target
    return (
        isinstance(target, OpOverload) and target.namespace == "aten" and torch.Tag.pointwise in target.tags
    )


def _fresh(call: Call) -> bool:
    return _pointwise(call) or call.target in FRESH


def _overwritable(step: CapturedStep, call: Call) -> Iterator[Value]:
    """Yield the operands that a call's in-place variant may overwrite; none if it has no variant or the bits could
    differ. An operand fills its storage, has the result's type, shape and strides, and is read once by the call."""
    read = [step.values[r] for r in call.operands]
    result = step.values[call.results[0] or ""].fake
    sibling = _sibling(call.target)
    if (
        not sibling
        # The stride of a dimension of size 1 is arbitrary, and kernels may choose their order of summation by
        # it. In-place quotients of complex numbers have other bits.
        or (call.target not in SCATTERS and (1 in result.shape or result.is_complex()))
        or any(layout(v.fake) != layout(result) for v in read if v.fake.shape == result.shape)
    ):
        return
    # The second operand, too, if the operands commute or the variant names the operand.
    either = sibling[1] or (call.target in COMMUTES and not call.kwargs)
    for operand in call.args[: 2 if either else 1]:
        value = step.values[operand.value] if isinstance(operand, Ref) else None
        if value and fills(result, value.fake) and [v.storage for v in read].count(value.storage) == 1:
            yield value


def _overwriting(call: Call, value: str) -> Call:
    """Return the in-place variant of a call that overwrites an operand. ``value``: the operand, by its value name."""
    target, out = _sibling(call.target) or (call.target, None)
    if out:
        return replace(call, target=target, kwargs={**call.kwargs, out: Ref(value)})
    args = call.args if call.args[0] == Ref(value) else (call.args[1], call.args[0], *call.args[2:])
    return replace(call, target=target, args=args)


def _sibling(target: Any) -> tuple[Any, str | None] | None:
    """Return an op's variant that overwrites an operand, with the keyword of that operand or, if it is the first
    argument, None. Return None if the op has no variant."""
    if target in IN_PLACE or target in SCATTERS:
        return IN_PLACE.get(target) or SCATTERS[target], None
    packet, overload = target._overloadpacket, target._overloadname
    in_place = getattr(ATEN, f"{packet.__name__}_", None)
    if in_place is not None and overload in in_place.overloads():
        return getattr(in_place, overload), None
    if "grad_input" in packet.overloads():
        return packet.grad_input, "grad_input"
    return None
