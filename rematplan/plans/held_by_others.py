"""Memory of objects other than the model during a step: optimizers, further modules, and numbers of bytes from the
user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import nn

from rematplan.ir import UsageError
from rematplan.plans.budgets import parse_budget
from rematplan.runtime.costs.optimizer_memory import optimizer_memory
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.graph.tensor_storages import storages_in

GRADIENTS = "gradients"
"""The item of `Reserved` that stands for gradients of earlier backwards, to which a step adds its own."""


@dataclass(frozen=True)
class OtherBytes:
    """Bytes on one device that belong to objects other than the model, such as optimizers."""

    always: int = 0
    """Allocated during the whole training step."""
    stepping: int = 0
    """Allocated in addition while the optimizer's step runs."""

    @classmethod
    def said_by(cls, item: Any) -> OtherBytes:
        """Ask an object for its ``reserved_bytes()`` and ``step_bytes()``; 0 for a method that it lacks."""
        methods = ("reserved_bytes", "step_bytes")
        return cls(*(_said(item, name) if callable(getattr(item, name, None)) else 0 for name in methods))

    def reserved_bytes(self) -> int:
        """Return the bytes during the whole training step. With this method, the bytes can be an item of `Reserved`."""
        return self.always

    def step_bytes(self) -> int:
        """Return the further bytes while the optimizer's step runs."""
        return self.stepping


@dataclass(frozen=True)
class Reserved:
    """Objects whose memory the budget includes, counted each time a plan is made; `UsageError` for an unknown item."""

    items: tuple[object, ...] = ()
    """Optimizers, modules, numbers of bytes, text such as ``1GiB``, `GRADIENTS`, `Counted`, and objects with
    ``reserved_bytes()``. A method ``step_bytes()`` says the temporary bytes of a step."""

    def __post_init__(self) -> None:
        """Raise `UsageError` for an item that is malformed or does not say its bytes."""
        for item in self.items:
            if isinstance(item, (str, Integral)):
                _bytes(item)
            elif not isinstance(item, (Counted, torch.optim.Optimizer, nn.Module)) and not _says(item):
                raise UsageError(
                    f"reserved: cannot tell the bytes of a {type(item).__name__}; list optimizers, modules, numbers of "
                    f"bytes, text such as '1GiB', '{GRADIENTS}', or objects with a method reserved_bytes()"
                )

    @classmethod
    def of(cls, items: Iterable[object]) -> Reserved:
        """Return a `Reserved` of a user's list: each object once, numbers and text as often as they are listed.
        `UsageError` for text, a module or anything not iterable, and for an unknown item."""
        if isinstance(items, (str, nn.Module)) or not isinstance(items, Iterable):
            raise UsageError("reserved must be a list; write reserved=[optimizer]")
        kept: list[object] = []
        for item in items:
            if isinstance(item, (str, Integral)) or all(item is not other for other in kept):
                kept.append(item)
        return cls(tuple(kept))

    @property
    def gradients(self) -> bool:
        """Whether gradients of earlier backwards count from the start."""
        return any(isinstance(item, str) and item == GRADIENTS for item in self.items)

    def on(self, device: torch.device, model: Mapping[str, torch.Tensor]) -> OtherBytes:
        """Return the bytes of the items on a device. Storages that several items share count once, those of ``model``
        (its tensors by name) not at all. Numbers and bytes that objects state count on every device; of temporary bytes
        of several steps, the largest count."""
        tensors: list[torch.Tensor] = []
        always, stepping = 0, 0
        for item in self.items:
            if isinstance(item, Counted):
                bytes_ = item.by_device.get(str(device), OtherBytes())
                always, stepping = always + bytes_.always, max(stepping, bytes_.stepping)
            elif isinstance(item, (str, Integral)):
                always += _bytes(item)
            elif _says(item):
                said = OtherBytes.said_by(item)
                always, stepping = always + said.always, max(stepping, said.stepping)
            elif isinstance(item, torch.optim.Optimizer):
                memory = optimizer_memory(item, device)
                tensors += memory.tensors
                always, stepping = always + memory.to_come, max(stepping, memory.transient)
            elif isinstance(item, nn.Module):
                tensors += (*item.parameters(), *item.buffers())
        ours = storages_in([*model.values()])
        others = (
            allocated(storage.nbytes(), device)
            for key, storage in storages_in(tensors).items()
            if storage.device == device and key not in ours
        )
        return OtherBytes(always + sum(others), stepping)

    def __reduce__(self) -> Any:
        """Return what pickling and copying store: numbers, text, and the bytes, counted now, of optimizers, modules and
        other objects."""
        items = [OtherBytes.said_by(item) if _says(item) else item for item in self.items]
        plain = (str, Integral, Counted, OtherBytes)
        kept = tuple(i for i in items if isinstance(i, plain))
        others = Reserved(tuple(i for i in items if not isinstance(i, plain)))
        counted = Counted({str(d): others.on(d, {}) for d in others.devices()})
        return Reserved, ((*kept, counted) if others.items else kept,)

    def devices(self) -> set[torch.device]:
        """Return the devices of the parameters of the optimizers in ``items``, and of the parameters and buffers of
        the modules in ``items``."""
        optimizers = (i for i in self.items if isinstance(i, torch.optim.Optimizer))
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        parameters += [
            t for i in self.items if isinstance(i, nn.Module) for t in (*i.parameters(), *i.buffers())
        ]
        return {t.device for t in parameters}


@dataclass(frozen=True)
class Counted:
    """Bytes in place of the optimizers and modules of a pickled or copied `Reserved`."""

    by_device: Mapping[str, OtherBytes]
    """The bytes, by the device's name."""


def _says(item: object) -> bool:
    return callable(getattr(item, "reserved_bytes", None)) and not isinstance(item, type)


def _said(item: Any, name: str) -> int:
    bytes_ = getattr(item, name)()
    if not isinstance(bytes_, Integral) or int(bytes_) < 0:
        raise UsageError(
            f"reserved: {name}() of a {type(item).__name__} returned {bytes_!r}, not a whole number of bytes"
        )
    return int(bytes_)


def _bytes(stated: str | Integral) -> int:
    """Return a number or ``1GiB`` as bytes, 0 for `GRADIENTS`, which the plan counts; else `UsageError`."""
    if stated == GRADIENTS:
        return 0
    with suppress(UsageError):
        if (bytes_ := parse_budget(str(stated)).fixed) is not None:
            return bytes_
    raise UsageError(f"reserved: {stated!r} is not a number of bytes; write 1GiB, 512MB or a whole number")
