"""A fused kernel: one region of a step, lowered by Inductor, checked and measured before its first use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime.costs.measure import peak_above_entry, unprofiled
from rematplan.runtime.costs.synthetic_arguments import SyntheticArguments
from rematplan.runtime.fuse.inductor import Compiled, begin
from rematplan.runtime.fuse.open_sizes import Layout, RegionSizes, SizeSymbols
from rematplan.runtime.fuse.regions import Region
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, substitute
from rematplan.runtime.graph.compat import FakeTensor, pytree
from rematplan.runtime.graph.kernel_of import kernel_of
from rematplan.runtime.graph.storage_slices import has_strides
from rematplan.runtime.graph.tracked_sizes import SizeValues, TrackedSize, shape_of, stride_of

WORSE = 4.0
"""The distance of a kernel's results to those in float64 may be this many times that of the eager ops."""
ROUNDINGS = 4
"""The distance of the eager ops counts as this many roundings at least: they sum in a tree, a kernel may not."""
FLIPPED = 1e-3
"""The share of the integers and truth values of a result that may differ from those of the eager ops."""


class CannotFuse(ModelError):
    """A region cannot be one kernel."""


class RegionOps:
    """The ops of a region as a function of the region's inputs.

    ``step``: the captured step. ``region``: the region.
    """

    def __init__(self, step: CapturedStep, region: Region) -> None:
        self.region = region
        self.inputs = [step.values[v].fake for v in region.inputs]
        self.outputs = [step.values[v].fake for v in region.outputs]
        used = {n.at: n for n in self._numbers() if isinstance(n, TrackedSize)}.values()
        self.sizes = RegionSizes(step.open_sizes, used) if step.open_sizes and used else None
        """The sizes of the batch that a kernel takes; None if the region has none."""
        made = (r for call in region.calls for r in call.made)
        self.types = {v: step.values[v].fake.dtype for v in (*region.inputs, *made)}

    @property
    def key(self) -> str:
        """A hash of all that the compiled kernel depends on."""
        number = {v: f"%{at}" for at, v in enumerate(self.region.inputs)}
        size = self.sizes.text if self.sizes else int
        texts = [f"{torch.get_num_threads()} threads", *(_layout(t, size) for t in self.inputs)]
        for call in self.region.calls:
            given = substitute((call.args, dict(call.kwargs)), number.get)
            texts.append(f"{call.target} {_each(given, partial(_untracked, size))}")
            number |= {r: f"%{len(texts)}.{at}" for at, r in enumerate(call.results) if r}
        texts += [number[v] for v in self.region.outputs]
        texts += (_layout(t, size) for t in self.outputs)
        texts += [f"compiled at {tuple(map(int, self.sizes.given))}"] if self.sizes else []
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()

    def _numbers(self) -> Iterator[Any]:
        """Yield the numbers among the layouts and arguments of the region."""
        for t in self.inputs:
            yield from (*shape_of(t), *stride_of(t))
        for call in self.region.calls:
            yield from pytree.tree_leaves((call.args, dict(call.kwargs)))
        for t in self.outputs:
            yield from (*shape_of(t), *stride_of(t))

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the ops one after the other, each by its eager kernel."""
        return self._run(args, lambda call, given: _results(call, given))

    def in_float64(self, args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the ops with float64 in place of every real floating-point type, and return the region's outputs."""
        return self._run(
            [t.double() if t.is_floating_point() else t for t in args],
            lambda call, given: _results(call, _each(given, _in_float64)),
        )

    def in_widest(self, size: Callable[[int], Any], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run each op whose operands have several real types in the widest of them, and give its results the types of
        the step. Norms of such operands compute so, but what Inductor makes of them would round in between.

        ``size``: gives what stands for a tracked size.
        """

        def widened(call: Call, given: Any) -> Sequence[torch.Tensor]:
            types = {t for v in call.operands if (t := self.types[v]).is_floating_point}
            if len(types) > 1:
                given = _each(given, partial(_as_real, reduce(torch.promote_types, types)))
            found = _results(call, given)
            return [t.to(self.types[r]) if r else t for r, t in zip(call.results, found, strict=True)]

        return self._run(args, widened, size)

    def check(self, args: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
        """Check that ``found``, a kernel's results for ``args``, is as near to the results in float64 as the eager ops'
        are.

        Raises:
            CannotFuse: it is not.
        """
        exact = self.in_float64(args)
        eager = self(*args)
        for name, a, b, c in zip(self.region.outputs, found, eager, exact, strict=True):
            _check_result(name, a, b, c)

    def _run(
        self,
        args: Sequence[torch.Tensor],
        run: Callable[[Call, Any], Sequence[torch.Tensor]],
        size: Callable[[int], Any] = int,
    ) -> tuple[torch.Tensor, ...]:
        """Return the region's outputs. ``run`` returns the results of a call with given arguments. ``size``: returns
        what stands for a tracked size in these."""
        known = dict(zip(self.region.inputs, args, strict=True))
        del args
        for call, gone in zip(self.region.calls, self._read_last, strict=True):
            given = substitute((call.args, dict(call.kwargs)), known.__getitem__)
            given = _each(given, partial(_untracked, size))
            found = run(call, given)
            known |= {r: t for r, t in zip(call.results, found, strict=True) if r}
            del given, found
            for value in gone:
                del known[value]
        return tuple(known[v] for v in self.region.outputs)

    @cached_property
    def _read_last(self) -> tuple[tuple[str, ...], ...]:
        """For each call, the values that no later call reads."""
        last = {r: at for at, c in enumerate(self.region.calls) for r in c.operands}
        gone: list[list[str]] = [[] for _ in self.region.calls]
        for value, at in last.items():
            if value not in self.region.outputs:
                gone[at].append(value)
        return tuple(map(tuple, gone))


@dataclass
class OnRealNumbers:
    """What the check of a kernel on the numbers of a training step found."""

    checked: bool = False
    error: str = ""
    """Why the kernel must not be used; empty if it may be."""


@dataclass(eq=False)
class OpenKernel:
    """What a kernel of open sizes knows about sizes other than those for which it was compiled."""

    holds: Callable[..., bool] = field(repr=False)
    """Whether it may be used at these sizes."""
    layouts: Callable[..., tuple[Layout, ...]] = field(repr=False)
    """The layouts of its operands at these sizes."""
    tried: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    """By sizes at which it was tried: the bytes of its workspace, and those of the check."""


@dataclass(frozen=True)
class FusedKernel:
    """A compiled region. Called with its open sizes and the region's inputs; returns its output, or a tuple of its
    outputs."""

    key: str
    """What is equal for regions of equal ops, arguments and layouts, in any process."""
    ops: RegionOps = field(repr=False, compare=False)
    compiled: Compiled = field(repr=False, compare=False)
    workspace: int = field(compare=False)
    """The bytes that are allocated only while it runs, at the sizes of ``ops``."""
    check_bytes: int = field(default=0, compare=False)
    """The bytes that a check of its results takes (`RegionOps.check`)."""
    real: OnRealNumbers = field(default_factory=OnRealNumbers, repr=False, compare=False)
    open: OpenKernel | None = field(default=None, repr=False, compare=False)
    """At which sizes the kernel may be used; None if it has no open sizes."""

    namespace = "fused"

    @property
    def sizes(self) -> tuple[TrackedSize, ...]:
        """The sizes that it takes before the tensors."""
        return self.ops.sizes.given if self.open and self.ops.sizes else ()

    def serves(self, sizes: SizeValues) -> bool:
        """Return whether it may be used where the expressions of the step have these values."""
        here = [sizes[size.at] for size in self.sizes]
        return not self.real.error and (self.open is None or self.open.holds(*here))

    def at(self, step: CapturedStep, region: Region) -> FusedKernel:
        """Return this kernel for an equal region, perhaps of a step with other sizes, at which it is tried now unless
        it was before. `CannotFuse` if it fails, or a tensor has another layout than the sizes state."""
        ops = RegionOps(step, region)
        if self.open is None or ops.sizes is None:
            return self
        values = tuple(map(int, ops.sizes.given))
        if values not in self.open.tried:
            if self.open.layouts(*values) != tuple((tuple(t.shape), t.stride()) for t in ops.inputs):
                raise CannotFuse("a tensor has another layout than its open sizes state")
            try:
                with torch.random.fork_rng(devices=[]):
                    self.open.tried[values] = unprofiled(lambda: _tried(step, region, ops, self.compiled))
            except RuntimeError as error:
                raise CannotFuse(str(error).partition("\n")[0]) from error
        workspace, needed = self.open.tried[values]
        return replace(self, ops=ops, workspace=workspace, check_bytes=needed)

    @property
    def source_name(self) -> str:
        """Its name in generated code."""
        return f"fused_{self.key[:10]}"

    @property
    def __name__(self) -> str:
        return self.source_name  # fx names a node's target by it

    def __str__(self) -> str:
        return f"fused_{self.key}"

    @cached_property
    def _op(self) -> Callable[..., Any]:
        """Return the function behind calls: it takes the open sizes, then the inputs, and copies inputs whose strides
        are not the compiled ones. It returns a single output itself, several as a sequence."""
        run, several = self.compiled, len(self.sizes)
        fixed = tuple((tuple(t.shape), t.stride()) for t in self.ops.inputs)
        layouts: Callable[..., tuple[Layout, ...]] = self.open.layouts if self.open else lambda: fixed

        def laid_out(args: Sequence[Any]) -> list[Any]:
            # A library may return other strides than its fake tensors, and compiled code does not look at them.
            sizes, tensors = args[:several], args[several:]
            pairs = zip(tensors, layouts(*sizes), strict=True)
            return [*sizes, *(a if a.stride() == s else _with_strides(a, s) for a, (_, s) in pairs)]

        if len(self.ops.outputs) == 1:
            return lambda *args: run(laid_out(args))[0]
        return lambda *args: run(laid_out(args))

    def __call__(self, *args: Any) -> Any:
        """Run the kernel; on fake tensors, the region's ops."""
        return self.in_eager_mode(*args) if isinstance(args[-1], FakeTensor) else self._op(*args)

    def in_eager_mode(self, *args: Any) -> Any:
        """Run the region's ops."""
        found = self.ops(*args[len(self.sizes) :])
        return found[0] if len(found) == 1 else found

    def __deepcopy__(self, memo: object) -> FusedKernel:
        return self


def _with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor with these strides: itself or, if it has others where they matter, a copy."""
    if has_strides(tensor, strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def begin_kernel(step: CapturedStep, region: Region, ops: RegionOps) -> Callable[[], FusedKernel]:
    """Begin to compile a region, and return a function that waits for the kernel and checks it on synthetic numbers.
    That function raises `CannotFuse` for wrong strides or rounding; both raise Inductor's exceptions."""
    with torch.random.fork_rng(devices=[]):
        symbols = SizeSymbols(ops.sizes)
        end = begin(partial(ops.in_widest, symbols.of), ops.inputs, symbols)

    def made() -> FusedKernel:
        with torch.random.fork_rng(devices=[]):
            run = end()
            tried = unprofiled(lambda: _tried(step, region, ops, run))
            return FusedKernel(ops.key, ops, run, *tried, open=_opened(ops, symbols, tried))

    return made


def _opened(ops: RegionOps, symbols: SizeSymbols, tried: tuple[int, int]) -> OpenKernel | None:
    """Return at which sizes a kernel may be used; None if it has no open ones."""
    if ops.sizes is None:
        return None
    return OpenKernel(symbols.holds(), ops.sizes.layouts(ops.inputs), {symbols.values: tried})


def _tried(step: CapturedStep, region: Region, ops: RegionOps, run: Compiled) -> tuple[int, int]:
    """Run a kernel on synthetic numbers, and check its results; `CannotFuse` if they fail. Return the bytes of its
    workspace, and those that the check takes."""
    arguments = SyntheticArguments(step)
    call = Call("", ops, tuple(map(Ref, region.inputs)), {}, ())
    sizes = tuple(map(int, ops.sizes.given)) if ops.sizes else ()
    with torch.no_grad(), torch.autocast(step.device.type, enabled=False):
        args, _ = arguments.of(call)
        run([*sizes, *args])  # loads libraries
        peak, found = peak_above_entry(lambda: run([*sizes, *args]), step.device)
        _check_layouts(args, found, ops.outputs)
        needed, _ = peak_above_entry(lambda: ops.check(args, found), step.device)
    own = sum(allocated(t.untyped_storage().nbytes(), t.device) for t in found)
    return max(0, peak - own), needed


def _check_layouts(
    args: Sequence[torch.Tensor], found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    """Raise `CannotFuse` if a result shares memory, or its shape, type, device or strides differ from the expected
    ones, or its storage is larger."""
    storages = {t.untyped_storage()._cdata for t in (*args, *found)}
    if len(storages) < len({t.untyped_storage()._cdata for t in args}) + len(found):
        raise CannotFuse("two results share memory, or a result and an operand do")
    for made, like in zip(found, expected, strict=True):
        if (made.shape, made.dtype, made.device) != (like.shape, like.dtype, like.device):
            raise CannotFuse(f"a result has shape {tuple(made.shape)} and type {made.dtype}")
        if (
            made.stride() != like.stride()
            or made.untyped_storage().nbytes() > like.untyped_storage().nbytes()
        ):
            raise CannotFuse(f"a result has strides {made.stride()} instead of {like.stride()}")


def _check_result(name: str, found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Raise `CannotFuse` if floating-point numbers are much further from the ``exact`` ones than eager mode's; other
    types, if more than the share `FLIPPED` differ from ``eager``."""
    if not found.is_floating_point():
        wrong = float((found != eager).double().mean())
        if wrong > FLIPPED:
            raise CannotFuse(f"{name}: {wrong:.2g} of the numbers differ from those of the eager ops")
        return
    own, theirs = _distance(found, exact), _distance(eager, exact)
    rounding = min(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)
    if not own <= WORSE * max(theirs, ROUNDINGS * rounding):
        raise CannotFuse(f"{name} is {own:.2g} from its value in float64, that of the eager ops {theirs:.2g}")


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the L2 norm of the difference to ``exact``, relative to the norm of ``exact``; infinite if only one of the
    two has NaN somewhere. Equal infinite numbers do not count."""
    # What is infinite in float64 too, such as masked scores, must not hide the rest.
    same = (found == exact) | (found.isnan() & exact.isnan())
    difference = (found.double() - exact.double()).masked_fill_(same, 0.0).nan_to_num_(torch.inf)
    return float(difference.norm()) / max(float(exact.nan_to_num(0.0, 0.0, 0.0).norm()), 1e-300)


def _layout(t: torch.Tensor, size: Callable[[int], object]) -> str:
    return f"{t.dtype}{[*map(size, shape_of(t))]}{[*map(size, stride_of(t))]} on {t.device}"


def _results(call: Call, given: Any) -> Sequence[torch.Tensor]:
    """Return the results of a call with these arguments, by its eager kernel."""
    positional, named = given
    found = kernel_of(call.target)(*positional, **named)
    return (found,) if call.single else found


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with each leaf changed."""
    if isinstance(value, (tuple, list)):
        return type(value)(_each(one, change) for one in value)
    if isinstance(value, Mapping):
        return {k: _each(one, change) for k, one in value.items()}
    return change(value)


def _untracked(size: Callable[[int], Any], leaf: Any) -> Any:
    """Return what stands for a tracked size, such as a plain integer; another leaf as it is."""
    return size(leaf) if isinstance(leaf, TrackedSize) else leaf


def _in_float64(leaf: Any) -> Any:
    """Return float64 in place of any other real type."""
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


def _as_real(kind: torch.dtype, leaf: Any) -> Any:
    """Return a tensor of real numbers in the type ``kind``."""
    return leaf.to(kind) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
