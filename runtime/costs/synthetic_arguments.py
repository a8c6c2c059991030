"""Synthetic arguments with which a call is measured, without running the step that it belongs to."""

from __future__ import annotations

from typing import Any, cast

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.constant_values import KnownValues
from rematplan.runtime.graph.kernel_of import kernel_of

ATEN = torch.ops.aten
BAGS = frozenset({ATEN._embedding_bag.default, ATEN._embedding_bag_forward_only.default})
"""Ops whose results determine how much memory their backward needs, so that true results are made: the backward of
bags without entries, for example, needs none."""

SPREAD = {ATEN.embedding_dense_backward.default: (1, 2), ATEN._embedding_bag_backward.default: (1, 6)}
"""Ops that need more memory the more different indices they get. For each, two positions in its arguments: of the
indices, and of the number that all indices are below."""

CHECKS = ("rematplan.check_condition.default", "rematplan.check_outcome.default")
"""Ops that raise an error unless their first argument equals their second one, or the last number in it."""


class SyntheticArguments:
    """Makes arguments on which one call of a captured step can be measured. Strides and storage sizes are as captured,
    real numbers positive, masks about half true; integers have known values, else zeros or, for `SPREAD`, many
    different indices. A tensor whose content only its own call can make, such as a library's, is made by that call."""

    def __init__(self, step: CapturedStep) -> None:
        self.step, self.known = step, KnownValues(step, {})
        generator = torch.Generator().manual_seed(0)
        # A block of numbers in (0.05, 0.95), repeated to any size. They are valid for logarithms, as divisors and as
        # probabilities.
        self.pool = torch.rand(1 << 16, generator=generator) * 0.9 + 0.05
        self.pools: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make new positional and keyword arguments for a call of the step, and return both."""
        made: dict[str, torch.Tensor] = {}

        def value_of(name: str) -> torch.Tensor:
            if name not in made:
                made[name] = self._tensor(name)
            return made[name]

        args = substitute(call.args, value_of)
        if str(call.target) in CHECKS:
            wanted = torch.as_tensor(args[1]).flatten()[-1]
            args = (torch.full_like(args[0], bool(wanted)), *args[1:])
        if call.target in SPREAD:
            args = self._spread(call, args, *SPREAD[call.target])
        if call.target is ATEN.index_put.default:
            args = (
                args[0],
                [_true_as_often(mask, args[2].shape[at:]) for at, mask in enumerate(args[1])],
                *args[2:],
            )
        return args, dict(substitute(call.kwargs, value_of))

    def _spread(self, call: Call, args: tuple[Any, ...], at: int, bound: int) -> tuple[Any, ...]:
        name = call.args[at].value
        if name in self.step.constants or self.known(name) is not None:
            return args
        different = torch.arange(args[at].numel(), device=args[at].device) % max(1, args[bound])
        return (*args[:at], different.to(args[at].dtype).view(args[at].shape), *args[at + 1 :])

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of a value's type and layout. Constants and known whole numbers are themselves. If only the
        call that computes the value can make a valid one, that call is run; all other numbers are arbitrary."""
        if name in self.step.constants:
            return self.step.constants[name]
        fake = self.step.values[name].fake
        if _is_whole(fake.dtype) and (found := self.known(name)) is not None:
            return found
        maker = self.step.call.get(self.step.values[name].call or "")
        opaque = maker is not None and (self._is_opaque(maker, fake) or maker.target in BAGS)
        if maker is not None and (opaque or self._is_seed(maker, fake)):
            # A library's backward kernel reads a tensor that only its forward kernel can make. In the trace the
            # tensor may have another size or device.
            args, kwargs = self.of(maker)
            return cast(torch.Tensor, kernel_of(maker.target)(*args, **kwargs)[maker.results.index(name)])
        # Allocate the whole storage, since some kernels copy all of it, even if the tensor is a small view.
        flat = self._flat(fake.untyped_storage().nbytes() // fake.element_size(), fake.dtype, fake.device)
        made = flat.as_strided(fake.shape, fake.stride(), fake.storage_offset())
        # Kernels without a rule for a lazy conjugate or negative compute it first, which takes memory.
        made = made.conj() if fake.is_conj() else made
        return ATEN._neg_view(made) if fake.is_neg() else made

    def _is_opaque(self, maker: Call, fake: torch.Tensor) -> bool:
        """Return whether the trace may not show a tensor's content: it is empty there, while another result of its
        call is not."""
        results = [self.step.values[r].fake for r in maker.made]
        return not fake.numel() and any(r.numel() for r in results) and not maker.is_view

    def _is_seed(self, maker: Call, fake: torch.Tensor) -> bool:
        """Return whether a tensor may be an attention op's random state: at most two integers, with other results."""
        # Some kernels return it in CPU memory, though in the trace it is on the device.
        return _is_whole(fake.dtype) and fake.numel() <= 2 and not (maker.single or maker.is_view)

    def _flat(self, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return ``n`` synthetic numbers: zeros for whole numbers, else the pool's numbers, repeated. A pool of each
        type and device is kept."""
        if _is_whole(dtype):
            return torch.zeros(n, dtype=dtype, device=device)
        if (dtype, device) not in self.pools:
            pool = self.pool > 0.5 if dtype == torch.bool else self.pool.to(dtype)
            if dtype == torch.bool:
                pool[0] = True  # an assertion may check a single element
            self.pools[dtype, device] = pool.to(device)
        pool, flat = self.pools[dtype, device], torch.empty(n, dtype=dtype, device=device)
        rest = n % len(pool)
        flat[: n - rest].view(-1, len(pool)).copy_(pool)
        flat[n - rest :].copy_(pool[:rest])
        return flat


def _true_as_often(mask: torch.Tensor | None, values: torch.Size) -> torch.Tensor | None:
    """Return a mask that is true for as many elements as the first size of ``values``, a shape; unchanged an index
    that is no mask."""
    if mask is None or mask.dtype != torch.bool or not values:
        return mask
    return (torch.arange(mask.numel(), device=mask.device) < values[0]).view(mask.shape)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
