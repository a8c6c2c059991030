"""Calls of functions that write into their arguments (Triton's kernels, users' ops), as ops that return new tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.compat import FakeTensor, OpOverload, pytree
from rematplan.runtime.graph.storage_slices import has_strides

ATEN = torch.ops.aten
UNWRITTEN = frozenset(
    {
        *(ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.empty_strided.default),
        *(ATEN.new_empty.default, ATEN.new_empty_strided.default, ATEN.empty_permuted.default),
    }
)
"""Ops that return memory in which nothing is written."""
ZEROS = frozenset({ATEN.zeros.default, ATEN.zeros_like.default, ATEN.new_zeros.default})


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with its grid. ``grid``: three numbers, or a function of the kernel's arguments."""

    kernel: Any
    grid: Any
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch the kernel."""
        self.kernel[self.grid](*args, **kwargs)


@dataclass(frozen=True)
class WritingCall:
    """A call of a function that writes into tensors among its arguments."""

    function: Launch | OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    """With ``args``: its arguments, with a `Ref` to a position in place of each tensor."""
    written: tuple[int, ...]
    """The positions of the tensors that it may write into."""
    strides: tuple[tuple[int, ...], ...]
    """The strides of each tensor in the trace. The function may have got these strides as numbers."""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name if isinstance(self.function, Launch) else self.function._opname

    @property
    def grid(self) -> Any:
        """The grid of a kernel, else None."""
        return self.function.grid if isinstance(self.function, Launch) else None

    def results(
        self, tensors: Sequence[torch.Tensor], owned: frozenset[int] = frozenset()
    ) -> list[torch.Tensor]:
        """Call the function on ``tensors``; return the tensors that it returns, then those that it has written. A
        tensor is copied first if its strides differ from the trace's, or if it is written and its position is not in
        ``owned``. A kernel is not launched if a tensor is fake or meta."""
        own = [
            _copied(t, stride)
            if (at in self.written and at not in owned) or not has_strides(t, stride)
            else t
            for at, (t, stride) in enumerate(zip(tensors, self.strides, strict=True))
        ]
        # A kernel's results have the layouts of the tensors into which it writes; an op has a kernel for fakes.
        if isinstance(self.function, Launch) and any(isinstance(t, FakeTensor) or t.is_meta for t in own):
            returned = None
        else:
            args, kwargs = substitute((self.args, dict(self.kwargs)), lambda at: own[int(at)])
            returned = self.function(*args, **kwargs)
        leaves = [r for r in pytree.tree_leaves(returned) if isinstance(r, torch.Tensor)]
        return [*leaves, *(own[at] for at in self.written)]


def _copied(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


_WRITERS: list[WritingCall] = []  # a graph refers to them by position


@torch.library.custom_op("rematplan::write", mutates_args=())
def _write(writer: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _WRITERS[writer].results(tensors)


_write.register_fake(lambda writer, tensors: _WRITERS[writer].results(tensors))
WRITE: OpOverload = torch.ops.rematplan.write.default


def write(writer: WritingCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Record the call of ``writer`` in a trace. Return the tensors that its function returns, then copies of those that
    it writes; ``tensors`` are unchanged."""
    if writer not in _WRITERS:
        _WRITERS.append(writer)
    found: list[torch.Tensor] = WRITE(_WRITERS.index(writer), tensors)
    return found


@dataclass(frozen=True)
class NewTensor:
    """A tensor that a writing call itself makes, since it is new: uninitialised, or zeros if `zeros`, before the
    function writes into it."""

    at: int
    """The tensor's position among those of the `WritingCall`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    zeros: bool


@dataclass(frozen=True)
class NewContents:
    """The op of a writing call in a captured step. It returns the function's tensors, then new tensors with the
    contents that the function writes."""

    writer: WritingCall
    new: tuple[NewTensor, ...]
    """The tensors that it makes. Its arguments are the others."""

    @property
    def source_name(self) -> str:
        """The function's name in generated code."""
        return f"{self.writer.name}_written"

    def __str__(self) -> str:
        # By this text, costs are cached, so it depends on all numbers that the function gets.
        settings = repr(
            (self.new, self.writer.args, self.writer.kwargs, self.writer.strides, self.writer.grid)
        )
        return f"{self.writer.name}.written.{hashlib.sha256(settings.encode()).hexdigest()[:8]}"

    def __hash__(self) -> int:
        return hash((self.writer.name, self.new))  # arguments of kernels may have no hash

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Make the new tensors, run the function on these and on its other tensors, ``tensors``, and return what
        `WritingCall.results` does. Written tensors among ``tensors`` are copied first."""
        every = list(tensors)
        for one in self.new:
            # On fakes, the new tensor must be a fake, too.
            make = every[0].new_empty_strided if every else torch.empty_strided
            made = make(one.shape, one.stride, dtype=one.dtype, device=one.device)
            every.insert(one.at, made.zero_() if one.zeros else made)
        return self.writer.results(every, frozenset(one.at for one in self.new))


def with_written_calls(step: CapturedStep) -> CapturedStep:
    """Return the step with a `NewContents` for each call that `write` recorded."""
    if not any(call.target is WRITE for call in step.calls):
        return step
    return replace(
        step, calls=tuple(_written(step, call) if call.target is WRITE else call for call in step.calls)
    )


def _written(step: CapturedStep, call: Call) -> Call:
    """Return a call of `WRITE` as one of `NewContents`, which itself makes each written tensor that begins empty or as
    zeros. If a written tensor is a clone, the new call reads the clone's source."""
    writer, tensors = _WRITERS[call.args[0]], list(call.args[1])
    new = []
    for at in writer.written:
        maker, fake = step.makers.get(tensors[at].value), step.values[tensors[at].value].fake
        if maker is None:
            continue
        if maker.target in UNWRITTEN | ZEROS:
            layout = tuple(fake.shape), fake.stride(), fake.dtype, fake.device
            new.append(NewTensor(at, *layout, maker.target in ZEROS))
        elif maker.target is ATEN.clone.default:  # the call itself copies what it writes
            tensors[at] = maker.args[0]
    made = {one.at for one in new}
    args = tuple(tensor for at, tensor in enumerate(tensors) if at not in made)
    return replace(call, target=NewContents(writer, tuple(new)), args=args)
