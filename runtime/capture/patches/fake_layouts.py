"""Fake tensors with the strides, types and storages of the kernels' real results.

PyTorch's fakes may have other strides for permuted arguments, by which a tracer chooses views. Some return one
tensor twice where kernels return two, which PyTorch's cache of fakes forgets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from rematplan.ir import ModelError
from rematplan.runtime.costs.measure import physical_memory
from rematplan.runtime.graph.captured_step import CapturedStep, substitute
from rematplan.runtime.graph.compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    disable_current_modes,
    pytree,
)
from rematplan.runtime.graph.pointwise_ops import is_pointwise
from rematplan.runtime.graph.storage_slices import is_dense, is_plain
from rematplan.runtime.symbols.expressions import NotSymbolic
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols

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


def aten_op(name: str) -> Any:
    """Return the ATen op called ``name``, such as ``pow.Scalar``; without a dot its default overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(ATEN, packet), overload or "default")


UNSURE = frozenset(map(aten_op, _NAMES))
"""Ops whose fakes were found to have other strides than the kernel's results, if an argument is not contiguous."""
NORMS = frozenset(
    aten_op(name) for name in (*_NAMES, "native_group_norm", "native_group_norm_backward") if "norm" in name
)
"""Ops whose fakes on a CPU have other types than the kernel's results, if the input has another type than the
weight, as under autocast: the kernel keeps the mean and the deviation in the weight's type."""
REFUSED = frozenset(map(aten_op, ("_ctc_loss", "_grouped_mm", *(f"upsample_nearest{n}d" for n in (1, 2, 3)))))
"""Ops whose fakes refuse types that the kernels accept, or do not know shapes that follow from given numbers."""
_OF_ONES = (
    "_log_softmax",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "_unsafe_view",
    "binary_cross_entropy_backward",
    "convolution_backward",
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
UNSURE_OF_ONES = frozenset(map(aten_op, _OF_ONES))
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
    **{
        aten_op(name): lambda args: args[0].new_empty(args[2])
        for name in _NAMES
        if name.startswith("upsample_")
    },
    aten_op("_ctc_loss_backward.Tensor"): lambda args: args[1].new_empty(args[1].shape),
    aten_op("constant_pad_nd"): _cropped,
}
"""Ops that have no fakes, or wrong ones, for symbolic sizes: by op, a function from its arguments to its result without
data; None if the fake is right."""
WHOLE_STORAGES = frozenset(
    getattr(ATEN, name).default
    for name in ("copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
)
"""Ops whose result has a storage as large as that of their first argument, and its offset there. The fake mode's cache
remembers neither."""
SURE = frozenset({ATEN.clone.default})
"""Pointwise ops whose fakes, if sizes are numbers, have the strides that the kernel's results have: the same code
chooses both."""
DISTRUSTED: set[Any] = set()
"""Further ops whose fakes were found, in this process, to have other strides than the kernel's results."""
DIVIDING = frozenset({ATEN.floor_divide.default, ATEN.div.Tensor_mode})


def distrust(ops: Collection[Any]) -> None:
    """Let later captures of this process take the strides of the results of these ops from the kernels."""
    DISTRUSTED.update(ops)


def _check_memory(arguments: Iterable[Any]) -> None:
    """Raise `ModelError` for a zero tensor without memory: PyTorch reads it while it traces, which ends the process."""
    for one in arguments:
        if isinstance(one, torch.Tensor) and not isinstance(one, FakeTensor) and one._is_zerotensor():
            raise ModelError(
                "its forward takes a derivative (torch.func.jvp, jacfwd or hessian) that is zero whatever it is given, "
                "which PyTorch cannot trace; plan the modules that take none"
            )


def is_unsure(op: Any, arguments: Any = None, *, ones: bool) -> bool:
    """Return whether an op's fakes may have other strides than the kernel's results. ``arguments``: None if they may
    be tensors that are not contiguous. ``ones``: a result has a size of 1, with an arbitrary stride."""
    known = op in UNSURE or (ones and (op in UNSURE_OF_ONES or is_pointwise(op)))
    return op in DISTRUSTED or (known and (arguments is None or not _all_plain(arguments)))


class TrueLayouts(FakeTensorMode):
    """A fake mode whose results have the kernels' strides and types, found by running doubtful ops on real tensors.
    With ``symbols``, an op runs at the traced sizes and decides the order of dimensions; `check_layouts` checks other
    sizes."""

    def __init__(self, symbols: BatchSymbols | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=symbols.shapes if symbols else None)
        self.symbols = symbols
        self._made: dict[Any, Any] = {}  # results of real runs, without data; equal layers ask again

    def from_tensor(self, tensor: torch.Tensor, **options: Any) -> FakeTensor:
        """Return a fake tensor. PyTorch makes none of a view of a sparse tensor, such as its values: it is made as one
        that is no view."""
        if tensor._is_view() and tensor._base is not None and tensor._base.layout is not torch.strided:
            with disable_current_modes():
                tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        return super().from_tensor(tensor, **options)

    def _cached_dispatch_impl(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return an op's results as fake tensors with the strides that its kernel gives them. Where fake tensors may
        differ, the op runs on real ones. Raises `NotSymbolic` if results do not follow from symbolic sizes."""
        _check_memory(args)
        try:
            result = self._shaped(func, args)
            if result is None and func in WHOLE_STORAGES:
                result = self._dispatch_impl(func, types, args, kwargs)
            elif result is None:
                result = super()._cached_dispatch_impl(func, types, args, kwargs)
            if isinstance(result, (tuple, list)) and makes_new_memory(func):
                with self:
                    result = _all_different(result)
            if self.symbols:
                self.symbols.check_lengths()
            ones = _has_ones(result)
            if ones and is_view(func) and func is not ATEN.as_strided.default:
                now = self.symbols.now if self.symbols else _as_given
                with self:
                    return _as_kernel_views(func, now((args, kwargs)), result, now)
            sure = func in SURE and func not in DISTRUSTED and not self.symbols
            surely_strided = sure or not is_unsure(func, (args, kwargs), ones=ones)
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


def makes_new_memory(func: Any) -> bool:
    """Return whether an op's schema says that no result shares memory with an argument."""
    return isinstance(func, OpOverload) and not any(r.alias_info for r in func._schema.returns)


def is_view(func: Any) -> bool:
    """Return whether an op returns a view of its first argument, or a list of views."""
    return isinstance(func, OpOverload) and func.is_view and len(func._schema.returns) == 1


def _has_ones(results: Any) -> bool:
    return any(1 in t.shape for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor))


def _as_kernel_views(func: Any, arguments: Any, results: Any, now: Callable[[Any], Any]) -> Any:
    """Return the results of an op that returns views, with the strides that they have of a real tensor. ``now``: makes
    sizes integers; in ``arguments``, they are integers already."""

    def like(fake: torch.Tensor) -> torch.Tensor:  # a view touches no memory
        return torch.empty_strided(*now((tuple(fake.shape), fake.stride())), dtype=fake.dtype)

    with disable_current_modes():
        args, kwargs = pytree.tree_map_only(torch.Tensor, like, arguments)
        real = func(*args, **kwargs)

    def view(fake: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if now(fake.stride()) == made.stride():
            return fake
        # Symbolic strides must hold for other sizes, too; the real ones are numbers.
        strides = _strides_of_ones(fake, made, now) if now is not _as_given else made.stride()
        return fake.as_strided(fake.shape, strides, fake.storage_offset())

    leaves, spec = pytree.tree_flatten(results)
    return pytree.tree_unflatten(map(view, leaves, pytree.tree_leaves(real)), spec)


def _strides_of_ones(fake: torch.Tensor, real: torch.Tensor, now: Callable[[Any], Any]) -> Sequence[Any]:
    """Return the strides of ``fake``, in which a dimension of size 1 has its stride in a contiguous tensor, or 0 as in
    an expanded number. If they are not those of ``real`` then, return the strides of ``fake`` unchanged."""
    strides = list(fake.stride())
    for dim in reversed(range(fake.ndim)):
        if real.shape[dim] == 1 and now(strides[dim]) != real.stride(dim):
            inner = fake.shape[dim + 1] * strides[dim + 1] if dim + 1 < fake.ndim else 1
            strides[dim] = inner if real.stride(dim) else 0
    return strides if now(tuple(strides)) == real.stride() else fake.stride()


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
    """Run an op on real tensors like its arguments, filled with a constant, and return its result. ``now``: makes sizes
    integers. `RuntimeError` if twice the arguments' bytes exceed this machine's memory."""
    with disable_current_modes():
        number = 1 if func in DIVIDING else 0  # avoids integer division by 0
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: real_like(t, now), (args, kwargs))
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if 2 * sum(t.nbytes for t in tensors) > physical_memory():  # if the results are as large as they are
            raise RuntimeError("can't allocate memory")
        for t in tensors:
            t.fill_(number)
        return func(*args, **kwargs)


def _described(leaf: Any, now: Callable[[Any], Any]) -> Any:
    """Return what the strides of an op's results depend on in one argument: a tensor's shape, strides, type and device,
    or another value with its type. ``now``: makes sizes integers."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    return now((tuple(leaf.shape), leaf.stride())), leaf.dtype, leaf.device


def _all_plain(arguments: Any) -> bool:
    return all(is_plain(t) for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor))


def _mixed_on_cpu(arguments: Any) -> bool:
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    return len({t.dtype for t in tensors}) > 1 and all(t.device.type == "cpu" for t in tensors)


def real_like(fake: torch.Tensor, now: Callable[[Any], Any] = _as_given) -> torch.Tensor:
    """Return an uninitialised tensor like a fake one. ``now``: makes sizes integers."""
    shape, stride = now((tuple(fake.shape), fake.stride()))
    return torch.empty_strided(shape, stride, dtype=fake.dtype, device=fake.device)


def _like_real(fake: Any, real: Any, now: Callable[[Any], Any]) -> Any:
    """Return ``fake`` if it has the strides and type of ``real`` or ``real`` is no tensor, else a new fake tensor that
    has them. `NotSymbolic` if the strides follow from no symbolic sizes."""
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
    """Return the strides of a dense tensor of a ``shape`` whose dimensions have the order in memory of ``real``'s."""
    strides, expected = [1] * real.ndim, 1
    for _, _, dim in sorted(zip(real.stride(), real.shape, range(real.ndim), strict=True)):
        strides[dim], expected = expected, expected * shape[dim]
    return tuple(strides)


def check_layouts(step: CapturedStep) -> None:
    """Raise `NotSymbolic` if strides are wrong in a step whose shapes come from a capture at other sizes, as a run of
    its doubtful ops shows. An op that refuses zeros is not checked; if its strides are doubtful without sizes of 1,
    its `RuntimeError` is raised."""
    for call in step.calls:
        fakes = [step.values[r].fake for r in call.operands]
        results = [step.values[name].fake for name in call.made]
        if not is_unsure(call.target, fakes, ones=_has_ones(results)):
            continue
        args, kwargs = substitute((call.args, dict(call.kwargs)), lambda name: step.values[name].fake)
        try:
            real = pytree.tree_leaves(_run(call.target, args, kwargs))
        except RuntimeError:  # zeros are no valid argument
            if is_unsure(call.target, ones=False):
                raise
            continue
        for name, made in zip(call.results, real, strict=False):
            fake = step.values[name].fake if name else None  # a gradient that nothing needs is None
            if fake is not None and (fake.shape, fake.stride()) != (made.shape, made.stride()):
                raise NotSymbolic(f"the results of {call.target} have other strides for other sizes")
