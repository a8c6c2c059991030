"""`FsdpBytes`: the bytes that FSDP2 needs around the parts of a model whose weights it shards.

In a forward, a layer's weights are gathered into a buffer and copied out of it, while the buffer of the layer before
still exists. In a backward, the next layer's buffer exists, too, and the one from which the gradients of the layer
before are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from rematplan.parts.sharded_weights import (
    gathered_type,
    groups_of,
    modules_with_states,
    outermost_groups,
    places,
)
from rematplan.runtime.graph.allocator_rounding import allocated


@dataclass(frozen=True)
class FsdpBytes:
    """Bytes on this rank in addition to its shards of the weights; all are 0 if nothing is sharded."""

    always: int = 0
    """The bytes of weights that stay gathered from forward to backward, and of whole gradients of earlier steps."""
    forward: int = 0
    """Further bytes before the forward's end."""
    backward: int = 0
    """Further bytes between the backwards of parts."""
    running: int = 0
    """Further bytes during the backward of a part, the whole gradients of its layer included."""
    ending: int = 0
    """Further bytes after the backwards of all parts."""
    own: Mapping[str, int] = field(default_factory=dict)
    """By name of a part, the bytes of its gradients that ``running`` includes."""
    left: Mapping[str, int] = field(default_factory=dict)
    """By name of a part, the bytes of gradients that remain after its layer's backward."""


def accumulates(model: nn.Module) -> bool:
    """Return whether FSDP2 keeps whole gradients of a model after a step, as after
    ``set_requires_gradient_sync(False)``, or has some of earlier steps."""
    return any(map(_accumulates, groups_of(model)))


def _accumulates(group: Any) -> bool:
    if not (group.reduce_grads and group.all_reduce_grads) or group._partial_reduce_output is not None:
        return True
    gathered = (getattr(weight, "_unsharded_param", None) for weight in group.fsdp_params)
    # Before PyTorch 2.15 gradients of another type are summed in the second place.
    return any(one is not None and one.grad is not None for one in gathered) or any(
        weight.unsharded_accumulated_grad is not None for weight in group.fsdp_params
    )


NOTHING = FsdpBytes()
"""Nothing is sharded."""


@dataclass(frozen=True)
class _Bytes:
    """The bytes that one weight, or several that are gathered together, need at different moments."""

    gathered: int = 0
    """The weights as modules have them."""
    buffer: int = 0
    """The buffer into which the shards of all ranks are gathered, and this rank's converted shard."""
    gradients: int = 0
    """Whole gradients, as a backward returns them."""
    summed: int = 0
    """Whole gradients, as several backwards sum them."""
    reduced: int = 0
    """The buffer from which gradients are reduced."""
    reducing: int = 0
    """What the reduction needs in addition when the whole gradients are freed."""
    shard: int = 0
    """The bytes of this rank's gradients."""
    kept: int = 0
    """What remains of the gathered weights between forward and backward."""

    def __add__(self, other: _Bytes) -> _Bytes:
        return _Bytes(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


def fsdp_bytes(model: nn.Module, parts: Mapping[str, nn.Module]) -> FsdpBytes:
    """Return the bytes that FSDP2 needs around ``parts``, the planned modules by name; `NOTHING` if it shards none of
    the model's weights."""
    groups = {weight: group for group in groups_of(model) for weight in group.fsdp_params}
    if not groups:
        return NOTHING
    of_group = {group: _sum(group.fsdp_params, groups) for group in dict.fromkeys(groups.values())}
    inner = {group: one for group, one in of_group.items() if model not in group.modules}
    owners = {place: weight for weight in groups for place in places(weight)}
    of_part = {name: _weights_of(part, owners) for name, part in parts.items()}
    planned = {groups[weight] for weights, _ in of_part.values() for weight in weights}
    rest = sum((one for group, one in inner.items() if group not in planned), _Bytes())
    # A layer inside of another one needs the bytes of both.
    inside = {group: {m for module in group.modules for m in module.modules()} for group in inner}
    layers = [
        sum((one for outer, one in inner.items() if group.modules[0] in inside[outer]), _Bytes())
        for group in inner
    ]
    most = _Bytes(*(max((getattr(one, f.name) for one in layers), default=0) for f in fields(_Bytes)))
    buffers = max(getattr(group, "reduce_scatter_max_input_buffers", 1) for group in of_group)
    whole = accumulates(model)
    waiting = max(1, _ahead(model, "backward")) * most.buffer + buffers * most.reduced + rest.shard
    running = waiting + most.gathered + most.gradients
    # The gradients of the rest, and of the model's own weights, may be reduced when the backward ends.
    last = max(buffers * one.reduced + one.reducing for one in of_group.values())
    own, left = {}, {}
    for name, (weights, others) in of_part.items():
        early = _sum((one for one in weights if groups[one] in inner), groups)
        late = _sum((one for one in weights if groups[one] not in inner), groups)
        own[name] = early.gradients
        left[name] = others + (0 if whole else early.shard + late.gradients)
    outermost = outermost_groups(model)
    return FsdpBytes(
        always=sum(one.gathered if group in outermost else one.kept for group, one in of_group.items())
        + whole * sum(one.summed for one in of_group.values()),
        forward=max(most.gathered, most.buffer) + (1 + _ahead(model, "forward")) * most.buffer,
        backward=max(running, waiting + most.reducing),
        running=running,
        ending=rest.shard + rest.gradients + rest.gathered - rest.kept + last,
        own=own,
        left=left,
    )


def _weights_of(part: nn.Module, owners: Mapping[Any, Any]) -> tuple[list[Any], int]:
    """Return a module's weights that FSDP2 gathers, and the bytes of the gradients of others."""
    found = [(m, name) for m in part.modules() for name, p in m._parameters.items() if p is not None]
    others = {getattr(*place) for place in found if place not in owners}
    bytes_ = sum(allocated(p.nbytes, p.device) for p in others if p.requires_grad)
    return list(dict.fromkeys(owners[place] for place in found if place in owners)), bytes_


def _ahead(model: nn.Module, direction: str) -> int:
    """Return the most layers ahead that a user lets FSDP2 gather in a ``direction``, forward or backward."""
    return max(
        len(getattr(state, f"_states_to_{direction}_prefetch")) for _, state in modules_with_states(model)
    )


def _sum(weights: Iterable[Any], groups: Mapping[Any, Any]) -> _Bytes:
    return sum((_bytes(weight, groups[weight]) for weight in weights), _Bytes())


def _bytes(weight: Any, group: Any) -> _Bytes:
    """Return what FSDP2 allocates for one weight of a group."""
    ranks, device, own = getattr(group.mesh_info, "shard_mesh_size", 1), weight.device, weight.sharded_param
    shard, kept = int(weight.padded_sharded_param_size.numel()), gathered_type(weight)
    asked = getattr(weight, "reduce_dtype", weight.mp_policy.reduce_dtype) or own.dtype
    sums = max(asked.itemsize, kept.itemsize)
    # 100 numbers of float32 on 4 ranks, gathered and reduced in bfloat16 on a CPU: 200 bytes are gathered into a buffer
    # of 250, since a shard is converted first; gradients have 200, the buffer of their reduction 200, a shard 100.
    gathered = allocated(ranks * shard * kept.itemsize, device)
    buffer = ranks * shard * kept.itemsize + (shard * kept.itemsize if kept != own.dtype else 0)
    after = group.post_forward_mesh_info
    stays = gathered if after is None or not group.reshard_after_backward else 0
    if after is not None and after != group.mesh_info:  # ``reshard_after_forward`` is a number of ranks
        stays = max(stays, gathered // after.shard_mesh_size)
    if not own.requires_grad:
        return _Bytes(gathered, buffer, kept=stays)
    reduced, mine = ranks * shard * sums, shard * own.dtype.itemsize
    if hasattr(group.mesh_info, "replicate_process_group") and sums != own.dtype.itemsize:
        mine += shard * sums  # kept until all replicas have summed it
    return _Bytes(
        gathered,
        buffer,
        allocated(own.numel() * kept.itemsize, device),
        allocated(ranks * shard * sums, device),
        reduced,
        (reduced if device.type == "cpu" else 0) + shard * sums + mine,  # Gloo copies what it reduces
        allocated(mine, device),
        stays,
    )
