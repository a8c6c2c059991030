"""A module in which each parameter and buffer has a single name, even if it is tied, so that a tracer sees it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.capture.flat_module import FlatModel
from rematplan.runtime.capture.functional_call import replaced, slots
from rematplan.runtime.capture.indexing import MarkedIndexing
from rematplan.runtime.capture.patches.assertion_ops import Checks
from rematplan.runtime.capture.patches.autocast_cache import casting_once
from rematplan.runtime.capture.patches.lists_of_tensors import lists_of_tensors_stacked
from rematplan.runtime.capture.patches.tensor_data import written_data
from rematplan.runtime.graph.captured_step import in_model
from rematplan.runtime.guards.assertions import SpeculatedAssertions
from rematplan.runtime.guards.call_key import is_cast_anew
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder
from rematplan.runtime.guards.finite_tests import FiniteTests


class UntiedModule(nn.Module):
    """A module that calls another one and has each of its parameters and buffers under a single name, even if they are
    tied. A tracer would give a tied weight two gradients, where autograd has one, summed in its order."""

    def __init__(self, module: nn.Module, open_: bool = False, counts: int = 0) -> None:
        """Take each parameter and buffer of ``module`` once, under a new name. ``open_``: whether the batch has open
        sizes. ``counts``: how many tensors after the batch only carry, as lengths, numbers of elements that the forward
        selects by values."""
        super().__init__()
        self.open = open_  # whether the batch has open sizes
        self.counts = counts  # how many tensors after the batch only carry numbers of selected elements
        self.__dict__["inner"] = module  # not a submodule, which would add its parameters under other names
        self.casts_once = torch.is_autocast_cache_enabled()
        self.decisions: ValueGuardRecorder | None = None
        self.assertions = SpeculatedAssertions()
        self.finite: FiniteTests | None = None
        self.replaced = ExitStack()  # closing it gives the inner module its own tensors back
        self.left: dict[str, torch.Tensor] = {}  # the inner module's tensors after its forward
        self.outputs = 0  # the number of the module's outputs; further results are checks
        self.names: dict[str, str] = {}
        self.cast_anew: set[str] = set()  # the parameters that autocast casts at each use
        short: dict[int, str] = {}
        for at, (name, parameter) in enumerate(module.named_parameters()):
            self._parameters[f"p{at}"] = parameter  # a plain tensor inside of `torch.func.functional_call`
            short[id(parameter)], self.names[f"p{at}"] = f"p{at}", name
            if is_cast_anew(parameter):
                self.cast_anew.add(f"p{at}")
        for at, (name, buffer) in enumerate(module.named_buffers()):
            self.register_buffer(f"b{at}", buffer)
            short[id(buffer)], self.names[f"b{at}"] = f"b{at}", name
        self.short_of = {slot: short[id(tensor)] for slot, tensor in slots(module).items()}

    def forward(self, *given: torch.Tensor) -> Any:
        """Call the inner module on the batch, with the traced tensors as its own until `replaced` is closed. Return its
        results and the assertions' empty tensors. ``given``: the batch, then `counts` tensors that only carry numbers.
        `ModelError` for hooks on parameters and buffers of another shape or type."""
        batch, carriers = given[: len(given) - self.counts], given[len(given) - self.counts :]
        inner = self.__dict__["inner"]
        buffers = {self.names[short]: getattr(self, short) for short in self._buffers}
        self.assertions.begin()
        if self.finite:
            self.finite.begin()
        if self.decisions:
            own = {in_model(name): t for name, t in buffers.items()}
            self.decisions.begin(own, batch, [carrier.shape[0] for carrier in carriers])
        # The inner module has the traced tensors until `replaced` is closed: a backward that calls the module again (an
        # ODE's adjoint) must find them in it.
        leaves = [*self.parameters(), *batch]
        self.replaced.close()
        self.replaced.enter_context(
            replaced(inner, {slot: getattr(self, short) for slot, short in self.short_of.items()})
        )
        self.replaced.enter_context(written_data([*leaves, *self.buffers()]))
        with (
            Checks(self.assertions, self.finite) as checks,
            casting_once(self._cast_once(batch), self.casts_once),
            MarkedIndexing() if self.open else nullcontext(),
            lists_of_tensors_stacked(),
        ):
            results = inner(*batch)
        # New tensors that the forward assigned to buffers are copied into these.
        left = slots(inner)
        for slot, short in self.short_of.items():
            _renew(slot, getattr(self, short), left.get(slot))
        if isinstance(inner, FlatModel):
            inner.tensors_of.redo()
        self.left = slots(inner)
        _check_no_hooks({self.names[short]: getattr(self, short) for short in self._parameters})
        results = results if isinstance(results, tuple) else (results,)
        self.outputs = len(results)
        return *results, *checks.results

    def _cast_once(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters and tensors of the batch that autocast's cache would have in eager mode."""
        inner = self.__dict__["inner"]
        anew = inner.cast_anew if isinstance(inner, FlatModel) else frozenset()
        return [
            *(t for short, t in self._parameters.items() if t is not None and short not in self.cast_anew),
            *(t for at, t in enumerate(batch) if at not in anew),
        ]

    def check_backward(self) -> None:
        """Raise `ModelError` if the backward has assigned other tensors to the inner module's buffers or parameters."""
        now = slots(self.__dict__["inner"])
        changed = [slot for slot, tensor in self.left.items() if now.get(slot) is not tensor]
        if changed:
            raise ModelError(
                f"the backward changes {in_model(changed[0])} (in a hook or an autograd.Function), which "
                f"a planned one does not"
            )


def _check_no_hooks(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise `ModelError` if a forward has registered a hook on a parameter, which would stay there in eager mode."""
    for name, parameter in parameters.items():
        if parameter._backward_hooks:
            raise ModelError(
                f"the forward registers a hook on {in_model(name)}, which stays there; register it before "
                f"the model is planned"
            )


def _renew(slot: str, buffer: torch.Tensor, assigned: torch.Tensor | None) -> None:
    """Copy a tensor that a forward assigned to a buffer into ``buffer``; `ModelError` for None, another shape or type.
    ``slot``: its name."""
    if assigned is buffer:
        return
    if assigned is None or (assigned.shape, assigned.dtype) != (buffer.shape, buffer.dtype):
        raise ModelError(
            f"the forward assigns {slot} None, or a tensor of another shape or type; assign one of the same shape and "
            f"type"
        )
    buffer.copy_(assigned.detach())
