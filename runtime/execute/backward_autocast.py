"""Which ops of a backward autocast would change. Eager mode's backward runs in the autocast state of its caller."""

from __future__ import annotations

import torch

from rematplan.ir import ModelError
from rematplan.runtime.capture.patches.autocast_cache import AUTOCAST_KEYS
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.graph.compat import OpOverload


class BackwardAutocast:
    """Refuses to run a step's backward inside of autocast if autocast would change the type of a result."""

    def __init__(self, step: CapturedStep) -> None:
        self.step = step
        self.changed: dict[torch.dtype, str | None] = {}
        """By autocast's type, the first op of the backward whose results would have another type."""

    def check(self) -> None:
        """Raise `ModelError` if autocast is enabled for the step's device (CPU or CUDA) and would change the result
        type of an op after the loss boundary."""
        device = self.step.device.type
        if not torch.is_autocast_enabled(device) or device not in AUTOCAST_KEYS:
            return
        dtype = torch.get_autocast_dtype(device)
        if dtype not in self.changed:
            with torch.no_grad(), torch.autocast(device, dtype, cache_enabled=False):
                late = (call for call in self.step.calls if call.name in self.step.after_loss)
                self.changed[dtype] = next((str(call.target) for call in late if self._changes(call)), None)
        if name := self.changed[dtype]:
            raise ModelError(
                f"{self.step.name}: its backward runs inside of torch.autocast, which would change {name} of the "
                f"backward to other types. Call backward() outside of the autocast block, as PyTorch advises"
            )

    def _changes(self, call: Call) -> bool:
        """Return whether the present autocast state gives a call's results other types than at capture. False for
        views, in-place calls and targets that are no `OpOverload`."""
        if not isinstance(call.target, OpOverload) or call.is_view or call.in_place:
            return False
        if not call.target.has_kernel_for_dispatch_key(AUTOCAST_KEYS[self.step.device.type]):
            return False
        made = call.run(lambda value: self.step.values[value].fake)
        return any(
            name and one.dtype != self.step.values[name].fake.dtype
            for name, one in zip(call.results, made, strict=False)
        )
