"""The step with the channels of its images innermost in memory, as libraries compute convolutions fastest.

Convolutions read images in that layout. Ops that take any layout pass it on; all others, and the step's outputs, get
copies in the captured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from rematplan.runtime.capture.patches.fake_layouts import TrueLayouts
from rematplan.runtime.fuse.fusible_ops import packet
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, Value, single_call
from rematplan.runtime.graph.in_place_calls import as_run
from rematplan.runtime.graph.pointwise_ops import is_pointwise
from rematplan.runtime.graph.storage_slices import has_strides, is_plain

ATEN = torch.ops.aten
IMAGES = MappingProxyType(
    {
        ATEN.convolution: (0,),
        ATEN.convolution_backward: (0, 1),
        ATEN.native_group_norm: (0,),
        ATEN.native_group_norm_backward: (0, 1),
    }
)
"""Ops whose images must all be contiguous or all channels-last, and the images' positions among the arguments."""
GROUP_NORMS = frozenset({ATEN.native_group_norm, ATEN.native_group_norm_backward})
FEW = 300
"""The number of calls for each convolution from which on a step has too few of them."""
HEAVY = 8
"""A convolution of more than a pixel with more weights than this, as a multiple of its images' numbers, is faster on a
CPU in the captured layout, and has half of the workspace."""
GROUPS = MappingProxyType({ATEN.convolution: 8, ATEN.convolution_backward: 9})
"""The position of the number of groups among the arguments of a convolution."""
FOLLOWING = frozenset(
    {
        ATEN._native_batch_norm_legit_functional,
        ATEN._native_batch_norm_legit_no_training,
        ATEN.native_batch_norm_backward,
        ATEN.max_pool2d_with_indices,
        ATEN.max_pool2d_with_indices_backward,
        ATEN.avg_pool2d,
        ATEN.avg_pool2d_backward,
        ATEN._adaptive_avg_pool2d,
        ATEN._adaptive_avg_pool2d_backward,
        ATEN.upsample_nearest2d,
        ATEN.upsample_nearest2d_backward,
        ATEN.upsample_bilinear2d,
        ATEN.upsample_bilinear2d_backward,
        ATEN.constant_pad_nd,
        ATEN.reflection_pad2d,
        ATEN.reflection_pad2d_backward,
        ATEN.pixel_shuffle,
        ATEN.pixel_unshuffle,
        ATEN.cat,
        ATEN.stack,
        ATEN.sum,
        ATEN.mean,
        ATEN.amax,
        ATEN.amin,
        ATEN.var,
        ATEN.var_mean,
        ATEN._softmax,
        ATEN._softmax_backward_data,
        ATEN._log_softmax,
        ATEN._log_softmax_backward_data,
        ATEN._to_copy,
        ATEN.clone,
        ATEN.slice,
        ATEN.select,
        ATEN.split,
        ATEN.split_with_sizes,
        ATEN.slice_backward,
        ATEN.expand,
        ATEN.permute,
        ATEN.transpose,
        ATEN.t,
        ATEN.squeeze,
        ATEN.unsqueeze,
        ATEN.view,
        ATEN._unsafe_view,
        ATEN.detach,
        ATEN.alias,
        ATEN.mm,
        ATEN.addmm,
        ATEN.bmm,
        ATEN.native_layer_norm,
        ATEN.native_layer_norm_backward,
    }
)
"""Ops that compute the same numbers for operands of any layout, in addition to the pointwise ones."""


def in_channels_last(step: CapturedStep) -> CapturedStep:
    """Return the step with images in channels-last layout; the same step if convolutions would not gain from it, its
    fake tensors may have other strides than real ones, or a layout that something depends on cannot be restored."""
    modes = (getattr(v.fake, "fake_mode", None) for v in step.values.values())
    mode = next((one for one in modes if isinstance(one, TrueLayouts)), None)
    if mode is None or not _gains(step):
        return step
    try:
        return _InChannelsLast(step, mode).step()
    except _CannotRestore:
        return step


class _CannotRestore(Exception):
    """Something needs the captured layout of a value that has another one, and no copy has that layout."""


def _gains(step: CapturedStep) -> bool:
    """Return whether convolutions of the step are faster in this layout, by the rules of Inductor
    (``decide_layout_opt``)."""
    weights = [(_weight(step, c), c.args[GROUPS[packet(c)]]) for c in step.calls if _convolves(step, c)]
    if step.device.type == "cpu":
        return bool(weights) and torch.backends.mkldnn.is_available()
    if len(step.calls) >= FEW * len(weights):
        return False
    # Groups of several channels are slower, and so are convolutions that halve the channels, or have few of them.
    slow = any(
        (groups > 1 and w.shape[1] > 1) or (2 * w.shape[0] <= w.shape[1] and w.shape[2] > 1)
        for w, groups in weights
    )
    return not slow and any(max(w.shape[:2]) > 64 for w, _ in weights)


def _convolves(step: CapturedStep, call: Call) -> bool:
    """Return whether a call is a convolution of images, or the backward of one, that may gain from this layout."""
    if packet(call) not in GROUPS or _weight(step, call).ndim != 4:
        return False
    if step.device.type != "cpu" or _weight(step, call).shape[2:].numel() == 1:
        return True
    images = [r.value for r in call.args[: len(IMAGES[packet(call)])]]
    images += [] if call.backward else call.results[:1]
    largest = max(step.values[name].fake.numel() for name in images)
    return _weight(step, call).numel() <= HEAVY * largest


def _weight(step: CapturedStep, call: Call) -> torch.Tensor:
    return step.values[call.args[len(IMAGES[packet(call)])].value].fake


class _InChannelsLast:
    """Makes the calls of the new step, in order, and finds the layouts of their results on fake tensors."""

    def __init__(self, step: CapturedStep, mode: TrueLayouts) -> None:
        self.captured, self.mode = step, mode
        self.values = {i.value: step.values[i.value] for i in step.inputs}
        self.calls: list[Call] = []

    def step(self) -> CapturedStep:
        """Return the new step."""
        returned = {o.value: o.value for o in self.captured.outputs}
        for call in self.captured.calls:
            self._follow(call)
            returned |= {name: self._as_captured(name, call) for name in call.made if name in returned}
        outputs = tuple(replace(o, value=returned[o.value]) for o in self.captured.outputs)
        return replace(self.captured, outputs=outputs, calls=tuple(self.calls), values=self.values)

    def _follow(self, call: Call) -> None:
        """Append a call, with copies of operands whose layouts it does not take; `_CannotRestore` if no copies have
        layouts that it takes."""
        images = [call.args[at].value for at in IMAGES.get(packet(call), ())]
        if _convolves(self.captured, call) or self._norms_changed(call, images):
            done = self._append(call, {name: self._in_channels_last(name, call) for name in images})
        elif _follows(call) and self._append(call, {}):
            return
        else:
            done = self._append(call, {name: self._as_captured(name, call) for name in call.operands})
        if not done:
            raise _CannotRestore

    def _norms_changed(self, call: Call, images: Sequence[str]) -> bool:
        """Return whether a call is a group norm of images, or the backward of one, that takes their new layout."""
        return (
            packet(call) in GROUP_NORMS
            and self.captured.device.type == "cpu"  # other kernels take contiguous images only
            and all(self.captured.values[name].fake.ndim == 4 for name in images)
            and any(map(self._is_changed, images))
        )

    def _append(self, call: Call, instead: Mapping[str, str]) -> bool:
        """Append a call in which the values of ``instead`` replace its operands of these names. Return whether its op
        can read their layouts; else nothing is appended."""
        names = {name: instead.get(name, name) for name in call.operands}
        if all(self.values[new] is self.captured.values[old] for old, new in names.items()):
            self.values |= {name: self.captured.values[name] for name in call.made}
            self.calls.append(call)
            return True
        try:
            self._run(call.reading(names.__getitem__))
        except (RuntimeError, ValueError):  # this layout has no such view
            return False
        return True

    def _run(self, call: Call) -> None:
        """Append a call. The layouts of its results follow from those of its operands; a call in
        place writes into its first operand's memory."""
        operands = [self.values[name] for name in call.operands]
        with self.mode:
            found = as_run(call).run(lambda name: self.values[name].fake)
        made = {name: fake for name, fake in zip(call.results, found, strict=True) if name}
        known = {value.fake.untyped_storage()._cdata: value.storage for value in operands}
        storages = {name: known.get(fake.untyped_storage()._cdata, name) for name, fake in made.items()}
        views = bool(made) and all(name != storage for name, storage in storages.items())
        self.values |= {n: Value(n, storages[n] if views else n, call.name, fake) for n, fake in made.items()}
        self.calls.append(replace(call, is_view=views and not call.in_place))

    def _is_changed(self, name: str) -> bool:
        """Return whether a value has another layout than at capture."""
        return _layout(self.values[name].fake) != _layout(self.captured.values[name].fake)

    def _in_channels_last(self, name: str, reader: Call) -> str:
        """Return the name of a value's copy in channels-last layout, or of the value if it has that, or has some of the
        channels of an image that has it."""
        fake = self.values[name].fake
        (_, c, h, w), strides = fake.shape, fake.stride()
        some = c > 1 and strides[1] == 1 and c <= strides[3] and strides[2] == w * strides[3]
        if (h, w) == (1, 1) or strides == (c * h * w, 1, w * c, c) or some:
            return name
        return self._added(name, ATEN.clone, (), {"memory_format": torch.channels_last}, reader)

    def _as_captured(self, name: str, reader: Call) -> str:
        """Return the name of a value's copy in the captured layout, or of the value if it has that.

        Raises:
            _CannotRestore: the captured layout is not contiguous, and the value is no view of one that can be restored.
        """
        if not self._is_changed(name):
            return name
        captured = self.captured.values[name].fake
        if is_plain(captured) and has_strides(self.values[name].fake, captured.stride()):
            return self._added(name, ATEN.as_strided, (captured.shape, captured.stride()), {}, reader)
        if is_plain(captured):
            return self._added(name, ATEN.clone, (), {"memory_format": torch.contiguous_format}, reader)
        maker = self.captured.makers.get(name)
        if maker is None or not maker.is_view or len(maker.made) > 1:
            raise _CannotRestore
        view = f"{name}.captured"
        if view not in self.values:
            instead = {operand: self._as_captured(operand, reader) for operand in maker.operands}
            again = replace(maker, name=view, results=(view,), backward=reader.backward, late=reader.late)
            if not self._append(again, instead):
                raise _CannotRestore
        return view

    def _added(
        self, name: str, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], reader: Call
    ) -> str:
        """Return the name of a value in another layout. If it is not there yet, the op ``op``, with the further
        ``args`` and ``kwargs``, makes it before ``reader``."""
        added = f"{name}.{'channels_last' if torch.channels_last in kwargs.values() else 'contiguous'}"
        if added not in self.values:
            call = single_call(
                added,
                op.default,
                (Ref(name), *args),
                kwargs,
                backward=reader.backward,
                module=reader.module,
                late=reader.late,
                sequence=reader.sequence,
            )
            self._run(call)
        return added


def _follows(call: Call) -> bool:
    """Return whether a call computes the same numbers for operands of any layout."""
    return (packet(call) in FOLLOWING or is_pointwise(call.target)) and not (call.ordered or call.in_place)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
