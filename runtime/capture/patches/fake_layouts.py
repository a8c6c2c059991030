"""Fake tensors with the strides, types and storages of the kernels' real results.

PyTorch's fakes may have other strides for permuted arguments, by which a tracer chooses views. Some return one
tensor twice where kernels return two, which PyTorch's cache of fakes forgets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.types import Number
from torch.utils.weak import WeakTensorKeyDictionary

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import CapturedStep, substitute
from rematplan.runtime.graph.compat import (
    FakeTensorMode,
    FunctionalTensor,
    OpOverload,
    TorchDispatchMode,
    TorchDispatchModeKey,
    disable_current_modes,
    from_functional_tensor,
    functionalize_commit_update,
    functionalize_replace,
    functionalize_sync,
    get_dispatch_mode,
    pytree,
)
from rematplan.runtime.graph.storage_slices import is_plain
from rematplan.runtime.symbols.expressions import NotSymbolic
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols, is_dense

ATEN = torch.ops.aten
_NAMES = (
    "_batch_norm_no_update",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_log_softmax_backward_data",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_softmax_backward_data",
    "batch_norm_backward",
    "channel_shuffle",
    "copysign.Tensor",
    "div.Tensor_mode",
    "elu_backward",
    "floor_divide",
    "glu_backward",
    "hardsigmoid_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "huber_loss_backward",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "logit_backward",
    "max_unpool2d",
    "max_unpool3d",
    "mse_loss_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
    "native_dropout_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "pow.Scalar",
    "reflection_pad2d_backward",
    "replication_pad2d_backward",
    "roll",
    "rrelu_with_noise_backward",
    "smooth_l1_loss_backward",
    "softplus_backward",
    "special_xlog1py",
    "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_linear1d_backward",
    "upsample_trilinear3d_backward",
    "xlogy.Tensor",
)


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(ATEN, packet), overload or "default")


UNSURE = frozenset(map(_op, _NAMES))
"""Ops whose fakes were found to have other strides than the kernel's results, if an argument is not
contiguous."""
NORMS = frozenset(
    _op(name) for name in (*_NAMES, "native_group_norm", "native_group_norm_backward") if "norm" in name
)
"""Ops whose fakes on a CPU have other types than the kernel's results, if the input has another type than the
weight, as under autocast: the kernel keeps the mean and the deviation in the weight's type."""
REFUSED = frozenset(map(_op, ("_ctc_loss", "_grouped_mm", *(f"upsample_nearest{n}d" for n in (1, 2, 3)))))
"""Ops whose fakes refuse types that the kernels accept, or do not know shapes that follow from given
numbers."""
_OF_ONES = (
    "_log_softmax",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "_unsafe_view",
    "binary_cross_entropy_backward",
    "diag_embed",
    "empty_like",
    "fill.Scalar",
    "flip",
    "full_like",
    "glu",
    "im2col",
    "index_add",
    "index_copy",
    "linalg_vector_norm",
    "max_pool3d_with_indices_backward",
    "mish_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "ones_like",
    "renorm",
    "rot90",
    "soft_margin_loss_backward",
    "sort",
    "tril",
    "triu",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest2d",
    "upsample_trilinear3d",
    "zeros_like",
)
UNSURE_OF_ONES = frozenset(map(_op, _OF_ONES))
"""Further ops whose fakes were found to have other strides where a size of 1 makes several strides true, if an argument
does not have those of a new tensor. The same is true for all pointwise ops."""


def _cropped(args: Sequence[Any]) -> Any:
    """Return what `aten::constant_pad_nd` returns if it adds nothing: a clone, which keeps the order of the dimensions
    in memory; None if it adds something. Its fake for symbolic sizes is always contiguous."""
    x, pads = args[0], args[1]
    if any(pad > 0 for pad in pads):
        return None
    for at in range(0, len(pads), 2):
        dim = x.dim() - 1 - at // 2
        x = x.narrow(dim, -pads[at], x.shape[dim] + pads[at] + pads[at + 1])
    return x.clone()


SHAPED: Mapping[Any, Callable[[Sequence[Any]], Any]] = {
    **{_op(name): lambda args: args[0].new_empty(args[2]) for name in _NAMES if name.startswith("upsample_")},
    _op("_ctc_loss_backward.Tensor"): lambda args: args[1].new_empty(args[1].shape),
    _op("constant_pad_nd"): _cropped,
}
"""Ops that have no fakes, or wrong ones, for symbolic sizes: by op, a function from its arguments to its result without
data; None if the fake is right."""
WHOLE_STORAGES = frozenset(
    getattr(ATEN, name).default
    for name in ("copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
)
"""Ops whose result has a storage as large as that of their first argument, and its offset there. The fake mode's cache
remembers neither."""
DISTRUSTED: set[Any] = set()
"""Further ops whose fakes were found, in this process, to have other strides than the kernel's results."""
DIVIDING = frozenset({ATEN.floor_divide.default, ATEN.div.Tensor_mode})


def distrust(ops: Collection[Any]) -> None:
    """Let later captures of this process take the strides of the results of these ops from the kernels."""
    DISTRUSTED.update(ops)


def is_unsure(op: Any, plain: bool = False, ones: bool = True) -> bool:
    """Return whether an op's fakes may have other strides than the kernel's results.

    ``plain``: all arguments are contiguous. ``ones``: a result has a size of 1, with an arbitrary stride.
    """
    if op in DISTRUSTED or plain:
        return op in DISTRUSTED
    return op in UNSURE or (ones and (op in UNSURE_OF_ONES or _is_pointwise(op)))


def _is_pointwise(op: Any) -> bool:
    return getattr(op, "namespace", "") == "aten" and torch.Tag.pointwise in op.tags


class TrueLayouts(FakeTensorMode):
    """A fake mode whose results have the kernels' strides and types, found by running doubtful ops on real tensors.

    With ``symbols``, an op runs at the traced sizes and decides the order of dimensions; `check_layouts` checks
    others.
    """

    def __init__(self, symbols: BatchSymbols | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=symbols.shapes if symbols else None)
        self.symbols = symbols
        self._made: dict[Any, Any] = {}  # results of real runs, without data; equal layers ask again

    def _cached_dispatch_impl(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        try:
            result = self._shaped(func, args)
            if result is None and func in WHOLE_STORAGES:
                result = self._dispatch_impl(func, types, args, kwargs)
            elif result is None:
                result = super()._cached_dispatch_impl(func, types, args, kwargs)
            if isinstance(result, (tuple, list)) and _makes_new_memory(func):
                with self:
                    result = _all_different(result)
            if self.symbols:
                self.symbols.check_lengths()
            ones = _has_ones(result)
            if ones and _is_view(func) and func is not ATEN.as_strided.default:
                if self.symbols:
                    return result
                with self:
                    return _as_kernel_views(func, args, kwargs, result)
            surely_strided = not is_unsure(func, _all_plain((args, kwargs)), ones)
            if surely_strided and not (func in NORMS and _mixed_on_cpu((args, kwargs))):
                return result
        except (RuntimeError, TypeError):
            if func not in REFUSED:
                raise
            if self.symbols:
                raise NotSymbolic(f"PyTorch does not know the shapes of the results of {func}") from None
            result = None
        now = self.symbols.now if self.symbols else _as_given
        args, kwargs = now((args, kwargs))
        try:
            real = self._run_once(func, args, kwargs, now)
        except RuntimeError:  # zeros are no valid argument
            if result is None or is_unsure(func, ones=False):
                raise
            return result
        leaves, spec = pytree.tree_flatten(real)
        fakes = [None] * len(leaves) if result is None else pytree.tree_leaves(result)
        with self:
            return pytree.tree_unflatten(
                [_like_real(f, r, now) for f, r in zip(fakes, leaves, strict=True)], spec
            )

    def _shaped(self, func: Any, args: Sequence[Any]) -> Any:
        """Return what `SHAPED` says of an op with symbolic sizes; None if it says nothing."""
        if not self.symbols or func not in SHAPED:
            return None
        with self:
            return SHAPED[func](args)

    def _run_once(self, func: Any, args: Any, kwargs: Any, now: Callable[[Any], Any]) -> Any:
        """Run an op on real tensors, once for equal arguments, and return its result without data."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (func, str(spec), *(_described(leaf, now) for leaf in leaves))
        if key not in self._made:
            real = _run(func, args, kwargs, now)
            with self:
                self._made[key] = pytree.tree_map_only(torch.Tensor, _like, real)
        return self._made[key]


def _has_ones(results: Any) -> bool:
    return any(1 in t.shape for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor))


def _as_kernel_views(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> Any:
    """Return the results of an op that returns views, with the strides that they have of a real tensor."""

    def like(fake: torch.Tensor) -> torch.Tensor:  # a view touches no memory
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)

    with disable_current_modes():
        args, kwargs = pytree.tree_map_only(torch.Tensor, like, (args, kwargs))
        real = func(*args, **kwargs)

    def view(fake: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        same = fake.stride() == made.stride()
        return fake if same else fake.as_strided(made.shape, made.stride(), fake.storage_offset())

    leaves, spec = pytree.tree_flatten(results)
    return pytree.tree_unflatten(map(view, leaves, pytree.tree_leaves(real)), spec)


def _all_different(results: Sequence[Any]) -> Sequence[Any]:
    """Return an op's results with a new tensor in place of each that is among them a second time."""
    seen: set[int] = set()

    def different(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        seen.add(id(tensor))
        return tensor

    found: Sequence[Any] = pytree.tree_map_only(torch.Tensor, different, results)
    return found


def _as_given(value: Any) -> Any:
    return value


def _run(func: Any, args: Any, kwargs: Any, now: Callable[[Any], Any] = _as_given) -> Any:
    """Run an op on real tensors like its arguments, filled with a constant, and return its result. ``now``: makes
    sizes integers."""
    with disable_current_modes():
        number = 1 if func in DIVIDING else 0  # avoids integer division by 0
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: _real(t, now).fill_(number), (args, kwargs)
        )
        return func(*args, **kwargs)


def _described(leaf: Any, now: Callable[[Any], Any]) -> Any:
    """Return what an argument's kernel chooses strides by."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    return now((tuple(leaf.shape), leaf.stride())), leaf.dtype, leaf.device


def _all_plain(arguments: Any) -> bool:
    return all(is_plain(t) for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor))


def _mixed_on_cpu(arguments: Any) -> bool:
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    return len({t.dtype for t in tensors}) > 1 and all(t.device.type == "cpu" for t in tensors)


def _real(fake: torch.Tensor, now: Callable[[Any], Any] = _as_given) -> torch.Tensor:
    shape, stride = now((tuple(fake.shape), fake.stride()))
    return torch.empty_strided(shape, stride, dtype=fake.dtype, device=fake.device)


def _like_real(fake: Any, real: Any, now: Callable[[Any], Any]) -> Any:
    """Return ``fake`` if it has the strides and type of ``real``, else a new tensor; `NotSymbolic` if strides follow
    from no sizes."""
    if not isinstance(real, torch.Tensor):
        return fake
    if fake is not None and fake.dtype == real.dtype and now(fake.stride()) == real.stride():
        return fake
    shape, stride = real.shape, real.stride()
    if now is not _as_given:
        if not is_dense(real):
            raise NotSymbolic("an op returns a tensor that is not dense")
        shape, stride = fake.shape, _dense_as(real, fake.shape)
        if now(stride) != real.stride():
            raise NotSymbolic("an op returns a tensor with arbitrary strides where its size is 1")
    return torch.empty_strided(shape, stride, dtype=real.dtype, device=real.device)


def _like(real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)


def _dense_as(real: torch.Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a dense tensor of shape ``shape`` whose dimensions have the same order in memory as those
    of ``real``."""
    strides, expected = [1] * real.ndim, 1
    for _, _, dim in sorted(zip(real.stride(), real.shape, range(real.ndim), strict=True)):
        strides[dim], expected = expected, expected * shape[dim]
    return tuple(strides)


def check_layouts(step: CapturedStep) -> None:
    """Check, by running doubtful ops, the strides in a step whose shapes come from a capture at other sizes; else
    `NotSymbolic`."""
    for call in step.calls:
        fakes = [step.values[r].fake for r in call.operands]
        results = [step.values[name].fake for name in call.made]
        if not is_unsure(call.target, _all_plain(fakes), _has_ones(results)):
            continue
        args, kwargs = substitute((call.args, dict(call.kwargs)), lambda name: step.values[name].fake)
        try:
            real = pytree.tree_leaves(_run(call.target, args, kwargs))
        except RuntimeError:  # zeros are no valid argument
            if is_unsure(call.target, ones=False):
                raise
            continue
        for name, made in zip(call.results, real, strict=False):
            fake = step.values[name].fake if name else made
            if (fake.shape, fake.stride()) != (made.shape, made.stride()):
                raise NotSymbolic(f"the results of {call.target} have other strides for other sizes")


RUN, GRAIN = 64, 2**15
"""A CPU kernel processes a contiguous row in vectors of at most ``RUN`` numbers, and the rest of the row one by one, by
other code. One thread processes a tensor of fewer than ``GRAIN`` numbers."""


@torch.library.custom_op("rematplan::laid", mutates_args=())
def _laid(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a copy of ``x`` whose strides are ``stride``."""
    return x.new_empty_strided(x.shape, stride).copy_(x)


_laid.register_fake(lambda x, stride: x.new_empty_strided(x.shape, stride))


DRAWS = frozenset(
    {
        *(ATEN.bernoulli_.float, ATEN.bernoulli_.Tensor, ATEN.cauchy_.default, ATEN.exponential_.default),
        *(ATEN.geometric_.default, ATEN.log_normal_.default, ATEN.normal_.default, ATEN.uniform_.default),
        *(ATEN.random_.default, getattr(ATEN.random_, "from"), ATEN.random_.to),
    }
)
"""Ops that overwrite a tensor with random numbers."""
UNNAMEABLE = getattr(ATEN.random_, "from")
"""An op whose overload name is a Python keyword, so that a tracer cannot write a call of it as Python source."""


@torch.library.custom_op("rematplan::drawn", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _drawn(
    like: torch.Tensor, op: str, numbers: Sequence[Number], tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return a new tensor like ``like`` with random numbers from the in-place ATen op ``op``, such as
    ``normal_.default``."""
    drawn: torch.Tensor = _op(op)(_real(like), *tensors, *numbers)
    return drawn


_drawn.register_fake(lambda like, op, numbers, tensors: _real(like))


class InPlaceLayouts(TorchDispatchMode):
    """Makes a trace keep, inside the block, the strides of tensors that are changed in place or drawn, as eager mode
    does.

    Raises `ModelError` if the forward writes into a constant, or into windows (``unfold``) that overlap or leave
    gaps.
    """

    supports_higher_order_operators = True  # they are not changed

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.windows: Any = WeakTensorKeyDictionary()  # overlapping or incomplete windows, and their views

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        written = args[0] if args and _writes_first(func) else None
        if _is_constant(written):
            raise ModelError(
                "the forward changes a tensor in place that is no input, parameter or buffer; make it a buffer"
            )
        if isinstance(written, FunctionalTensor):
            if written in self.windows:
                raise ModelError(
                    "the forward writes into windows of a tensor (unfold), which a plan cannot contain"
                )
            if func in DRAWS and not kwargs and (func is UNNAMEABLE or not is_plain(written)):
                return _draw(func, written, args[1:])
            if written.device.type == "cpu":
                _restore_strides(written)
        result = func(*args, **(kwargs or {}))
        if _makes_new_memory(func):
            result = pytree.tree_map_only(torch.Tensor, _writable, result)
        if _leaves_out(func, args) or (args and _is_view(func) and args[0] in self.windows):
            for view in pytree.tree_leaves(result):
                self.windows[view] = True
        return result


def _is_constant(tensor: Any) -> bool:
    """Return whether a tracer records a tensor as a constant, as it does with a tensor in a plain attribute of a
    module."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FunctionalTensor):
        return False
    return get_dispatch_mode(TorchDispatchModeKey.FUNCTIONAL) is not None


def _writable(made: torch.Tensor) -> torch.Tensor:
    """Return an op's result in a form that the forward may write to: a tracer refuses writes into constants."""
    return FunctionalTensor.to_functional(made) if _is_constant(made) else made


def _makes_new_memory(func: Any) -> bool:
    """Return whether an op's schema says that no result shares memory with an argument."""
    return isinstance(func, OpOverload) and not any(r.alias_info for r in func._schema.returns)


def _is_view(func: Any) -> bool:
    """Return whether an op returns a view of its first argument, or a list of views."""
    return isinstance(func, OpOverload) and func.is_view and len(func._schema.returns) == 1


def _leaves_out(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call is an ``unfold`` whose windows overlap or leave elements out."""
    if func is not ATEN.unfold.default:
        return False
    x, dim, size, step = args
    # A tracer takes what is written into the windows for the content of the whole tensor.
    return bool(size != step or x.dim() == 0 or x.shape[dim] % size)


def _draw(func: OpOverload, written: FunctionalTensor, args: Sequence[Any]) -> FunctionalTensor:
    """Overwrite a traced tensor with random numbers, in its present strides, by the in-place op ``func``, and return
    it."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    numbers = [a for a in args if not isinstance(a, torch.Tensor)]
    name = f"{func._opname}.{func._overloadname}"
    drawn = torch.ops.rematplan.drawn.default(written, name, numbers, tensors)
    functionalize_replace(written.elem, from_functional_tensor(drawn.elem))
    functionalize_commit_update(written.elem)
    functionalize_sync(written.elem)
    return written


def _restore_strides(written: FunctionalTensor) -> None:
    """Give a tensor that is about to be changed in place eager mode's strides, if the last bits may depend on them."""
    functionalize_sync(written.elem)
    now = from_functional_tensor(written.elem)
    # The tracer may have replaced the content by a new tensor of other strides.
    if now.stride() != written.stride() and not _in_whole_runs(written):
        laid = torch.ops.rematplan.laid.default(written, written.stride())
        functionalize_replace(written.elem, from_functional_tensor(laid.elem))


def _writes_first(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.is_mutable and func._opname.endswith("_")


def _in_whole_runs(tensor: torch.Tensor) -> bool:
    """Return whether elementwise kernels have the same results for a tensor and a dense copy of it."""
    # Kernels process the rest of a row after whole runs by other code, and a large tensor by several threads.
    run = tensor.shape[-1] if tensor.ndim and tensor.stride(-1) == 1 else 1
    return run % RUN == 0 and tensor.numel() < GRAIN
