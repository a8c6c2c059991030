"""The memory of optimizers: bytes of their state, and bytes that their step allocates temporarily, by the table
`KINDS`.

Other classes make a step of a copy (`optimizer_trial`). Copies were counted with PyTorch 2.13 and bitsandbytes 0.50;
tests/runtime/costs/test_optimizer_bytes.py measures them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from rematplan.ir import UsageError
from rematplan.runtime.costs.measure import peak_above_entry, unprofiled
from rematplan.runtime.costs.optimizer_trial import Trial, try_steps
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.tensor_storages import plain_tensors

Group: TypeAlias = Mapping[str, Any]
"""One of an optimizer's ``param_groups``: options by name."""
Sizes: TypeAlias = Callable[[torch.Tensor, Group], Sequence[int]]
"""A function of a parameter and its group that returns the bytes of each state tensor of the parameter."""

QUANTISED_BLOCK = 256
"""The number of elements that share a scale in 8-bit state."""
QUANTISED_MAP = 256 * 4
"""Bytes of a lookup table for the codes of 8-bit state. All parameters share it."""
SCALARS = 64
"""Bytes of scalars that every step allocates: learning rates, bias corrections."""


@dataclass(frozen=True)
class OptimizerKind:
    """The memory of a class of optimizers: its state, and temporary bytes of its step as ``for-loop``, ``foreach`` or
    ``fused``. A *group* is one of the optimizer's ``param_groups``, a dict of options. A fused step needs no temporary
    memory."""

    state: Sizes
    """The bytes of each state tensor of a parameter, from the parameter and its group."""
    loop: Callable[[torch.Tensor, Group], float]
    """The temporary bytes of the loop for a parameter, from the parameter and its group."""
    foreach: Callable[[Group], float] = lambda _: 0.0
    """The temporary bytes of the foreach form, divided by the bytes of all parameters of the group, from the group."""
    scalars: int = 1
    """The number of float32 scalars in the state of each parameter. They are on its device if the option ``capturable``
    or ``fused`` is set, else on the CPU."""
    kernels: bool = False
    """Whether the class has fused kernels on accelerators that it always uses there."""
    shared: int = 0
    """Bytes of state that all parameters share."""
    held: int = 0
    """The number of copies of a parameter that the loop still holds while it works on the next parameter."""
    foreach_extra: tuple[float, float] = (0.0, 0.0)
    """Further temporary bytes of the foreach form, as factors of the largest parameter's bytes and of all state
    tensors' bytes."""


@dataclass(frozen=True)
class OptimizerMemory:
    """The memory of an optimizer on one device."""

    tensors: tuple[torch.Tensor, ...]
    """The tensors of the state that exists already."""
    to_come: int
    """Bytes of state that the optimizer's first step will allocate."""
    transient: int
    """Temporary bytes at the peak of a step, in addition to parameters, gradients and state."""


def optimizer_memory(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerMemory:
    """Return an optimizer's memory on ``device``, for those of its parameters there that need gradients: by `KINDS`, or
    for another class by a trial of all its groups. `UsageError` if that trial fails."""
    kind = _kind_of(optimizer)
    made = {p: [t for v in of.values() for t in plain_tensors(v)] for p, of in optimizer.state.items()}
    tensors: list[torch.Tensor] = []
    to_come, transient = 0, 0
    # bitsandbytes keeps some options in `args`.
    settings = vars(optimizer.args) if hasattr(optimizer, "args") else {}
    for options in optimizer.param_groups:
        group = {**settings, **options}
        here = [p for p in group["params"] if p.requires_grad and p.device == device]
        tensors += (t for p in here for t in made.get(p, ()) if t.device == device)
        if here and kind is not None:
            new = [p for p in here if not made.get(p)]
            to_come += sum(size for p in new for size in _state_sizes(kind, _own_shard(p), group))
            if new:
                to_come += kind.shared
            transient = max(transient, _transient(kind, [*map(_own_shard, here)], group))
        elif here:
            trial = _trial(optimizer, device)  # of all groups
            exists = sum(allocated(t.nbytes, device) for of in made.values() for t in of)
            to_come, transient = max(0, trial.kept - exists), trial.transient
    return OptimizerMemory(tuple(tensors), to_come, transient + allocated(SCALARS, device))


def _own_shard(p: torch.Tensor) -> torch.Tensor:
    """Return what this process has of a parameter."""
    return next(plain_tensors(p)) if hasattr(p, "placements") else p


def _state_sizes(kind: OptimizerKind, p: torch.Tensor, group: Group) -> Iterator[int]:
    yield from (allocated(size, p.device) for size in kind.state(p, group))
    if p.device.type == "cpu" or group.get("capturable") or group.get("fused"):
        yield kind.scalars * allocated(4, p.device)


def _trial(optimizer: torch.optim.Optimizer, device: torch.device) -> Trial:
    try:
        return try_steps(optimizer, device)
    except Exception as error:  # the step of a user's class may raise any exception, which stays as the cause
        raise UsageError(
            f"reserved: the bytes of a {type(optimizer).__name__} are not known, because its step fails on tensors "
            f"without values; state its bytes instead, such as '1GiB'"
        ) from error


def _transient(kind: OptimizerKind, params: Sequence[torch.Tensor], group: Group) -> int:
    """Return the temporary bytes of an optimizer's step for one parameter group: 0 if fused, else those of the loop, or
    of ``foreach`` if that option is true. If it is None, not on a CPU, PyTorch may choose: the larger."""
    device = params[0].device
    every = sum(allocated(p.nbytes, device) for p in params)
    if group.get("fused") or (kind.kernels and device.type != "cpu"):
        return 0
    before = [0, *(kind.held * p.nbytes for p in params)]
    loop = max(allocated(int(kind.loop(p, group)) + b, device) for p, b in zip(params, before, strict=False))
    chosen = group.get("foreach", False)
    if chosen is False or (chosen is None and device.type == "cpu"):
        return loop
    one, states = kind.foreach_extra
    state = sum(sum(kind.state(p, group)) for p in params) if states else 0
    whole = kind.foreach(group) * every + one * max(p.nbytes for p in params) + states * state
    return int(whole) if chosen else max(int(whole), loop)


def _kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind | None:
    """Return the row of `KINDS` for the optimizer's class, or for a base whose ``step`` it inherits; else None."""
    kinds: tuple[Any, ...] = type(optimizer).__mro__
    for kind in kinds:
        row = KINDS.get(f"{kind.__module__}.{kind.__qualname__}")
        if row is not None:
            return row if inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step) else None
    return None


def _like(count: int, *options: str) -> Sizes:
    """Return an `OptimizerKind.state`: ``count`` tensors of the parameter's size, and one for each of ``options``
    that is set."""
    return lambda p, group: [p.nbytes] * (count + sum(bool(group.get(option)) for option in options))


def _changed(group: Group) -> bool:
    """Return whether the step copies a gradient before it uses it, to negate it or to add coupled weight decay."""
    decays = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay")
    return decays or bool(group.get("maximize"))


def _copies(count: float, *options: str) -> Callable[[torch.Tensor, Group], float]:
    """Return an `OptimizerKind.loop`: ``count`` copies of the parameter, one of a changed gradient, one for each of
    ``options`` set."""

    def size(p: torch.Tensor, group: Group) -> float:
        return p.nbytes * (count + _changed(group) + sum(bool(group.get(option)) for option in options))

    return size


def _factors(p: torch.Tensor, itemsize: int) -> list[int]:
    """Return the bytes of Adafactor's second moment of ``p``: two averages, or a tensor below two dimensions."""
    size = p.numel() * itemsize
    return [size] if p.dim() < 2 else [size // max(1, p.shape[-1]), size // max(1, p.shape[-2])]


def _hf_adafactor(p: torch.Tensor, group: Group) -> list[int]:
    return [*_factors(p, 4), 4, *([4 * p.numel()] if group.get("beta1") is not None else [])]


def _quantised(*copies: int) -> Sizes:
    """Return an `OptimizerKind.state` for bitsandbytes: for each n in ``copies`` a tensor of n values per element, in
    32 bits, or in 8 bits with scales (`_in_8_bits`). The option ``max_unorm`` adds a float32."""

    def sizes(p: torch.Tensor, group: Group) -> list[int]:
        # A float32 for updates that are bounded by the parameter's norm.
        norm = [4] if group.get("max_unorm") else []
        if not _in_8_bits(p, group):
            return [4 * p.numel() * n for n in copies] + norm
        # A byte for each value, and a float32 scale for each block.
        blocks = -(-p.numel() // QUANTISED_BLOCK)
        return [size for n in copies for size in (n * p.numel(), 4 * n * blocks)] + norm

    return sizes


def _in_8_bits(p: torch.Tensor, group: Group) -> bool:
    """Return whether bitsandbytes stores the state of ``p`` in 8 bits: not if it is small or 32 bits are asked for."""
    return group.get("optim_bits", 8) == 8 and p.numel() >= int(group.get("min_8bit_size", 4096))


def _unquantised(in_8_bits: float, in_32_bits: float) -> Callable[[torch.Tensor, Group], float]:
    """Return an `OptimizerKind.loop` for a bitsandbytes optimizer on the CPU: so many float32 copies of a parameter,
    by the bits of its state."""

    def size(p: torch.Tensor, group: Group) -> float:
        eight = _in_8_bits(p, group)
        scales = 4 * -(-p.numel() // QUANTISED_BLOCK) * eight
        return 4 * p.numel() * ((in_8_bits if eight else in_32_bits) + (p.itemsize < 4)) + 3 * scales

    return size


def _muon(p: torch.Tensor, group: Group) -> float:
    """Return Muon's temporary bytes for ``p``: matrices of Newton-Schulz iteration, a copy for Nesterov momentum."""
    # At the peak there are five bfloat16 matrices of the parameter's size, or four and a product's workspace.
    products = _product_workspace(*sorted(p.shape)) if p.ndim == 2 and p.device.type == "cpu" else 0
    return bool(group.get("nesterov")) * p.nbytes + max(10 * p.numel(), 8 * p.numel() + products)


@lru_cache(maxsize=256)
def _product_workspace(less: int, more: int) -> int:
    """Measure the most bytes that a bfloat16 product in Newton-Schulz iteration needs on this CPU in addition to
    operands and result. The products are those of a ``less`` × ``more`` matrix and of its square."""
    # Processors with instructions for products of bfloat16 matrices pack the operands.
    x, square = (torch.zeros(less, n, dtype=torch.bfloat16) for n in (more, less))
    needed = 0
    for left, right in ((x, x.T), (square, square), (square, x)):
        call = partial(peak_above_entry, partial(torch.mm, left, right), torch.device("cpu"))
        peak, result = unprofiled(call)
        needed = max(needed, peak - result.nbytes)
    return needed


_ADAM = OptimizerKind(_like(2, "amsgrad"), _copies(2), lambda _: 1.0, held=1)
_LION = OptimizerKind(_like(1), _copies(2), scalars=0)

KINDS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        "torch.optim.sgd.SGD": OptimizerKind(
            _like(0, "momentum"), _copies(0, "nesterov"), lambda g: float(_changed(g)), scalars=0
        ),
        "torch.optim.adam.Adam": _ADAM,
        "torch.optim.adamw.AdamW": _ADAM,
        "torch.optim.nadam.NAdam": OptimizerKind(
            _like(2), _copies(3), lambda g: 1.0 + _changed(g), scalars=2
        ),
        "torch.optim.radam.RAdam": OptimizerKind(_like(2), _copies(2), lambda _: 1.0),
        "torch.optim.adamax.Adamax": OptimizerKind(_like(2), _copies(1), lambda _: 1.0),
        "torch.optim.adagrad.Adagrad": OptimizerKind(_like(1), _copies(2), lambda _: 2.0),
        "torch.optim.adadelta.Adadelta": OptimizerKind(_like(2), _copies(3), lambda g: 2.0 + _changed(g)),
        "torch.optim.rmsprop.RMSprop": OptimizerKind(
            _like(1, "momentum", "centered"), _copies(2), lambda g: 1.0 + _changed(g)
        ),
        "torch.optim.rprop.Rprop": OptimizerKind(
            _like(2), _copies(3), lambda _: 1.0, foreach_extra=(2.0, 0.0)
        ),
        "torch.optim.asgd.ASGD": OptimizerKind(
            _like(1), _copies(0, "maximize"), lambda g: 1.0 + bool(g.get("maximize")), scalars=3
        ),
        "torch.optim.Adafactor": OptimizerKind(
            lambda p, _: _factors(p, p.itemsize),
            _copies(3),
            lambda g: 1.0 + bool(g.get("maximize")),
            foreach_extra=(1.0, 6.0),
        ),
        "torch.optim.Muon": OptimizerKind(_like(1), _muon, scalars=0),
        "transformers.optimization.Adafactor": OptimizerKind(
            _hf_adafactor, lambda p, _: 4 * p.numel() * (3 if p.itemsize >= 4 else 5), scalars=0
        ),
        "lion_pytorch.lion_pytorch.Lion": _LION,
        "bitsandbytes.optim.optimizer.Optimizer1State": OptimizerKind(
            _quantised(1), _unquantised(5, 4), scalars=0, kernels=True, shared=QUANTISED_MAP
        ),
        "bitsandbytes.optim.optimizer.Optimizer2State": OptimizerKind(
            _quantised(1, 1), _unquantised(5, 3), scalars=0, kernels=True, shared=2 * QUANTISED_MAP
        ),
        "bitsandbytes.optim.ademamix.AdEMAMix": OptimizerKind(
            _quantised(2, 1), _unquantised(9.25, 4), scalars=0, kernels=True, shared=2 * QUANTISED_MAP
        ),
    }
)
"""The memory of optimizers of each known class, by the class's module and name."""
