"""The memory of optimizers: bytes of their state, and bytes that their step allocates temporarily.

An optimizer allocates its state in its first step. Before that step, the bytes are computed by `KINDS`, a table with
one row for each class of optimizers, or for other classes by a step of a copy (`optimizer_trial`). The step of
PyTorch's optimizers has one of three forms: a loop over the parameters (``for-loop``), kernels for lists of tensors
(``foreach``, the default on accelerators), or one kernel for all arithmetic (``fused``), which makes no copies.

The numbers of temporary copies were measured at the peak of a step, with PyTorch 2.13 and bitsandbytes 0.50, for
parameters in float32 and bfloat16. tests/runtime/costs/test_optimizer_bytes.py measures them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from rematplan.ir import UsageError
from rematplan.runtime.costs.optimizer_trial import Like, state_by_trial
from rematplan.runtime.graph.allocator_rounding import allocated

Group: TypeAlias = Mapping[str, Any]
"""One of an optimizer's ``param_groups``: options by name."""
Sizes: TypeAlias = Callable[[torch.Tensor, Group], Sequence[int]]
"""A function of a parameter and its group that returns the bytes of each state tensor of the parameter."""

QUANTISED_BLOCK = 256
"""The number of elements that share a scale in 8-bit state."""
QUANTISED_MAP = 256 * 4
"""Bytes of the lookup table for the codes of 8-bit state."""
SCALARS = 64
"""Bytes of scalars that every step allocates: learning rates, bias corrections."""
UNKNOWN_COPIES = 3.0
"""Assumed temporary memory of an unknown optimizer's step, in copies of a group's parameters: as many as Adadelta with
weight decay needs."""


@dataclass(frozen=True)
class OptimizerKind:
    """The memory of optimizers of one class: bytes of the state, and temporary bytes of the step in each of its forms.

    The step is a loop over the parameters, or calls kernels for lists of tensors (``foreach``), or calls one fused
    kernel, which needs no temporary memory. In the fields, *group* is one of the optimizer's ``param_groups``: a dict
    of options.

    - ``state``: a function of a parameter and its group. It returns the bytes of each state tensor of the parameter.
    - ``loop``: a function of a parameter and its group. It returns the temporary bytes of the loop for that parameter.
    - ``foreach``: a function of a group. It returns the temporary bytes of the foreach form, divided by the bytes of
      all parameters of the group.
    - ``scalars``: the number of float32 scalars in the state of each parameter. They are on the parameter's device if
      the option ``capturable`` or ``fused`` is set, else on the CPU.
    - ``kernels``: whether the class has fused kernels on accelerators that it always uses there.
    - ``foreach_extra``: further temporary bytes of the foreach form, as two factors: of the bytes of the largest
      parameter, and of the bytes of all state tensors.
    """

    state: Sizes
    loop: Callable[[torch.Tensor, Group], float]
    foreach: Callable[[Group], float] = lambda _: 0.0
    scalars: int = 1
    kernels: bool = False
    foreach_extra: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class OptimizerMemory:
    """The memory of an optimizer on one device.

    ``tensors``: the tensors of the state that exists already. ``to_come``: bytes of state that the optimizer's first
    step will allocate. ``transient``: temporary bytes at the peak of a step, in addition to parameters, gradients and
    state.
    """

    tensors: tuple[torch.Tensor, ...]
    to_come: int
    transient: int


def optimizer_memory(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerMemory:
    """Return the memory that an optimizer needs on a device. This includes the state that its first step will
    allocate.

    Args:
        optimizer: the optimizer. Only its parameters on ``device`` that require a gradient count.
        device: the device.

    Raises:
        UsageError: the optimizer's class is not in the table `KINDS`, it has not allocated its state yet, and a step of
            a copy on parameters without memory fails.
    """
    kind = _kind_of(optimizer)
    trial = cache(lambda: _trial(optimizer))
    tensors: list[torch.Tensor] = []
    to_come, transient = 0, 0
    # bitsandbytes keeps some options in `args`.
    settings = vars(optimizer.args) if hasattr(optimizer, "args") else {}
    for at, options in enumerate(optimizer.param_groups):
        group = {**settings, **options}
        here = [p for p in group["params"] if p.requires_grad and p.device == device]
        for p in here:
            made = [t for value in optimizer.state.get(p, {}).values() for t in plain_tensors(value)]
            if made:
                tensors += (t for t in made if t.device == device)
            elif kind is None:
                to_come += sum(_tried_sizes(trial()[at, p.shape, p.dtype], p, group))
            else:
                to_come += sum(_state_sizes(kind, p, group))
        transient = max(transient, _transient(kind, here, group))
    return OptimizerMemory(tuple(tensors), to_come, transient + allocated(SCALARS, device))


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of which an object consists. A plain tensor is yielded itself. A tensor subclass that
    wraps other tensors (quantised or distributed) and a mapping are searched recursively. Other objects yield nothing.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from plain_tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from plain_tensors(one)


def _state_sizes(kind: OptimizerKind, p: torch.Tensor, group: Group) -> Iterator[int]:
    yield from (allocated(size, p.device) for size in kind.state(p, group))
    if p.device.type == "cpu" or group.get("capturable") or group.get("fused"):
        yield kind.scalars * allocated(4, p.device)


def _trial(optimizer: torch.optim.Optimizer) -> Mapping[Like, Mapping[str, Any]]:
    try:
        return state_by_trial(optimizer)
    except Exception as error:  # the step of a user's class may raise any exception, which stays as the cause
        raise UsageError(
            f"reserved: the bytes of a {type(optimizer).__name__} are not known before its first step; "
            f"state its bytes instead, such as '1GiB'"
        ) from error


def _tried_sizes(state: Mapping[str, Any], p: torch.Tensor, group: Group) -> Iterator[int]:
    scalars_here = p.device.type == "cpu" or group.get("capturable") or group.get("fused")
    for t in plain_tensors(state):
        if t.is_meta or scalars_here:
            yield allocated(t.nbytes, p.device)


def _transient(kind: OptimizerKind | None, params: Sequence[torch.Tensor], group: Group) -> int:
    """Return the temporary bytes that an optimizer's step needs for one of its parameter groups.

    Args:
        kind: the memory of the optimizer's class; None if the class is unknown. Then `UNKNOWN_COPIES` × the bytes of
            ``params`` are assumed.
        params: the parameters of the group that are on the device.
        group: the options of the group.
    """
    if not params:
        return 0
    device = params[0].device
    every = sum(allocated(p.nbytes, device) for p in params)
    if kind is None:
        return int(UNKNOWN_COPIES * every)
    if group.get("fused") or (kind.kernels and device.type != "cpu"):
        return 0
    loop = max(allocated(int(kind.loop(p, group)), device) for p in params)
    chosen = group.get("foreach", False)
    if chosen is False or (chosen is None and device.type == "cpu"):
        return loop
    one, states = kind.foreach_extra
    state = sum(sum(kind.state(p, group)) for p in params) if states else 0
    whole = kind.foreach(group) * every + one * max(p.nbytes for p in params) + states * state
    return int(whole) if chosen else max(int(whole), loop)


def _kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind | None:
    """Return the memory of an optimizer's class from the table `KINDS`. If the class itself is not in the table, the
    row of a base class applies if the class inherits its ``step``. Return None if there is no row."""
    for kind in type(optimizer).__mro__:
        row = KINDS.get(f"{kind.__module__}.{kind.__qualname__}")
        if row is not None:
            same = inspect.unwrap(type(optimizer).step) is inspect.unwrap(getattr(kind, "step"))  # noqa: B009
            return row if same else None
    return None


def _like(count: int, *options: str) -> Sizes:
    """Return a function for `OptimizerKind.state`. It returns the bytes of ``count`` state tensors of the parameter's
    size, and of one more such tensor for each option in ``options`` that is set in the group."""
    return lambda p, group: [p.nbytes] * (count + sum(bool(group.get(option)) for option in options))


def _changed(group: Group) -> bool:
    """Return whether the step copies a gradient before it uses it: to negate the gradient (``maximize``), or to add
    coupled weight decay. ``group``: the options of a parameter group."""
    decays = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay")
    return decays or bool(group.get("maximize"))


def _copies(count: float, *options: str) -> Callable[[torch.Tensor, Group], float]:
    """Return a function for `OptimizerKind.loop`. It returns the bytes of ``count`` copies of the parameter, of one
    more if the step copies the gradient (`_changed`), and of one more for each option in ``options`` that is set in
    the group."""

    def size(p: torch.Tensor, group: Group) -> float:
        return p.nbytes * (count + _changed(group) + sum(bool(group.get(option)) for option in options))

    return size


def _factors(p: torch.Tensor, itemsize: int) -> list[int]:
    """Return the bytes of the tensors in which Adafactor stores the second moment of parameter ``p``. With two or more
    dimensions there are two: the moment averaged over the last dimension, and over the last but one. Otherwise there
    is one of the size of ``p``. ``itemsize``: bytes per element of the moment."""
    size = p.numel() * itemsize
    return [size] if p.dim() < 2 else [size // max(1, p.shape[-1]), size // max(1, p.shape[-2])]


def _hf_adafactor(p: torch.Tensor, group: Group) -> list[int]:
    return [*_factors(p, 4), 4, *([4 * p.numel()] if group.get("beta1") is not None else [])]


def _quantised(states: int) -> Sizes:
    """Return a function for `OptimizerKind.state` for a bitsandbytes optimizer that has ``states`` state tensors for
    each parameter.

    Each takes one byte per element, one float32 scale per block and a lookup table. For small parameters, or if 32
    bits are requested, it is a float32 tensor.
    """

    def sizes(p: torch.Tensor, group: Group) -> list[int]:
        numel, bits = p.numel(), group.get("optim_bits", 8)
        if bits == 32 or numel < group.get("min_8bit_size", 4096):
            return [4 * numel] * states
        return [numel, 4 * -(-numel // QUANTISED_BLOCK), QUANTISED_MAP] * states

    return sizes


def _muon(p: torch.Tensor, group: Group) -> float:
    """Return the temporary bytes of Muon for parameter ``p``. Newton-Schulz iteration needs up to five bfloat16
    matrices of the parameter's size. Nesterov momentum needs one more copy of the parameter."""
    return bool(group.get("nesterov")) * p.nbytes + 10 * p.numel()


_ADAM = OptimizerKind(_like(2, "amsgrad"), _copies(3), lambda _: 1.0)
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
            _quantised(1), lambda p, _: 6 * 4 * p.numel(), scalars=1, kernels=True
        ),
        "bitsandbytes.optim.optimizer.Optimizer2State": OptimizerKind(
            _quantised(2), lambda p, _: 6 * 4 * p.numel(), scalars=1, kernels=True
        ),
        "bitsandbytes.optim.ademamix.AdEMAMix": OptimizerKind(
            _quantised(3), lambda p, _: 11 * 4 * p.numel(), scalars=1, kernels=True
        ),
    }
)
"""The memory of optimizers of each known class, by the class's module and name."""
