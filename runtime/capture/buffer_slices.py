"""Count a buffer once that is written slice by slice and read only where it was written last, as in eager mode.

A functional trace turns each write into a scatter, which copies the whole buffer. If nothing reads the rest of the
copy, a new buffer is enough, of which only the slice is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref
from rematplan.runtime.graph.compat import OpOverload
from rematplan.runtime.graph.storage_slices import is_dense
from rematplan.runtime.graph.tracked_sizes import shape_of, stride_of

ATEN = torch.ops.aten
PARTS: Mapping[Any, OpOverload] = {
    ATEN.slice_scatter.default: ATEN.slice.Tensor,
    ATEN.select_scatter.default: ATEN.select.int,
    ATEN.diagonal_scatter.default: ATEN.diagonal.default,
}
"""By op that replaces a part of a tensor, the op that returns the part as a view."""


@dataclass(frozen=True)
class NewBuffer:
    """Returns a new buffer in which one part is written, and the rest is not. ``part``: the op that returns the part as
    a view."""

    part: OpOverload

    @property
    def source_name(self) -> str:
        """The function's name in generated code."""
        return f"new_buffer_with_{self.part._opname}"

    def __str__(self) -> str:
        return f"{self.part}.new_buffer"

    def __call__(
        self, content: torch.Tensor, shape: Any, stride: Any, dtype: torch.dtype, *where: Any
    ) -> torch.Tensor:
        """Return a buffer with this shape, these strides and this type. ``content`` is copied into the part that `part`
        returns for the arguments ``where``; the rest is not written."""
        buffer = torch.empty_strided(shape, stride, dtype=dtype, device=content.device)
        self.part(buffer, *where).copy_(content)
        return buffer


def with_new_buffers(step: CapturedStep) -> CapturedStep:
    """Return the step with a `NewBuffer` for each dense scatter that is no output and of whose result calls read only
    the part that the scatter wrote. A later such scatter may also write into the result."""
    if not any(call.target in PARTS for call in step.calls):
        return step
    outputs = {o.value for o in step.outputs}
    new: dict[str, Call] = {}
    for call in reversed(step.calls):
        where = _where(step, call)
        if where is None or call.results[0] in outputs:
            continue
        fake = step.values[str(call.results[0])].fake
        # Or it is a buffer in which such a scatter writes next.
        if is_dense(fake) and all(
            _reads_part(step, call, reader, new) for reader in step.readers.get(str(call.results[0]), ())
        ):
            layout = list(shape_of(fake)), list(stride_of(fake)), fake.dtype
            target = NewBuffer(PARTS[call.target])
            new[call.name] = replace(call, target=target, args=(call.args[1], *layout, *where), kwargs={})
    return replace(step, calls=tuple(new.get(call.name, call) for call in step.calls)) if new else step


def _reads_part(step: CapturedStep, scatter: Call, reader: Call, new: Mapping[str, Call]) -> bool:
    """Return whether a call reads only the part of a scatter's result that the scatter wrote, or is a scatter in
    ``new`` that writes into the result."""
    buffer = Ref(str(scatter.results[0]))
    if reader.name in new:
        return reader.operands.count(buffer.value) == 1 and reader.args[0] == buffer
    part = PARTS[scatter.target]
    return reader.target is part and _range(step, buffer, part, reader.args[1:], reader.kwargs) == _range(
        step, buffer, part, scatter.args[2:], scatter.kwargs
    )


def _where(step: CapturedStep, call: Call) -> tuple[Any, ...] | None:
    """Return the arguments that say which part a scatter writes. None for other calls, for calls with keywords, and if
    the types or devices of buffer and part differ."""
    if call.target not in PARTS or call.kwargs or not all(isinstance(arg, Ref) for arg in call.args[:2]):
        return None
    names = call.args[0].value, call.args[1].value, str(call.results[0])
    base, content, result = (step.values[name] for name in names)
    alike = base.fake.dtype == content.fake.dtype == result.fake.dtype
    return tuple(call.args[2:]) if alike and base.fake.device == content.fake.device else None


def _range(
    step: CapturedStep, buffer: Ref, part: OpOverload, where: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return which part of a buffer ``where`` and ``kwargs``, the arguments of ``part``, say: its dimension and
    indices, or a diagonal's numbers. All ways to write the same part give the same numbers."""
    own = part._schema.arguments[1:]
    given: dict[str, Any] = {a.name: a.default_value for a in own if a.has_default_value()}
    given |= dict(zip((a.name for a in own), where, strict=False)) | dict(kwargs)
    shape = step.values[buffer.value].fake.shape
    for name in given:
        if name.startswith("dim"):
            given[name] %= len(shape)
    if "index" in given:
        given["index"] %= shape[given["dim"]]
    if "start" in given:
        ends = slice(given.pop("start"), given.pop("end"), given.pop("step")).indices(shape[given["dim"]])
        return given["dim"], *ends
    return tuple(int(given[a.name]) for a in own)
