"""Tracing of a planned module's forward for the arguments of a call, with fixed sizes or with symbolic (open) sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError, NoGradients, NotCaptured
from rematplan.module.capture_lock import LOCK
from rematplan.module.changing_state import check_state_returns
from rematplan.module.forward_warnings import warn_of_compiled_code, warn_of_hooks
from rematplan.module.function_caches import empty_traced_caches
from rematplan.module.model_errors import own_error
from rematplan.module.symbolic_forward import Found, OpenForward, open_constants
from rematplan.runtime import guards
from rematplan.runtime.capture.capture import capture, check_traceable
from rematplan.runtime.capture.flat_module import FlatModel, flattened_call, tensors_in
from rematplan.runtime.capture.hidden_tensors import (
    Withheld,
    check_dense,
    check_no_hidden_tensors,
    hides_tensors,
)
from rematplan.runtime.capture.joint_trace import TraceRequest, trace_joint_graph
from rematplan.runtime.capture.packed_sequences import no_packed_sequences
from rematplan.runtime.capture.unrepeatable_draws import check_default_generator, no_host_draws
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import pytree
from rematplan.runtime.graph.warn import warn
from rematplan.runtime.symbols.expressions import NotSymbolic, opened
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols
from rematplan.runtime.symbols.symbolic_step import OpenStep


@dataclass(frozen=True, slots=True)
class Original:
    """A model as it runs without a plan."""

    model: nn.Module
    forward: Callable[..., Any]
    """The model's own forward."""

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward without a plan; if another thread captures a model, wait for that."""
        with LOCK.shared():
            return self.forward(*args, **kwargs)


@dataclass(frozen=True)
class Tracing:
    """Traces a model's forward and backward for a call, with sizes as they are (`fixed`) or for others (`symbolic`)."""

    name: str
    """The model's name, for messages."""
    original: Original
    leaves: list[Any]
    """The leaves of the arguments."""
    spec: pytree.TreeSpec
    """The pytree structure of the arguments."""
    state: guards.ModuleState
    """The model's state when it is called."""
    assumed: tuple[bool, ...] = ()
    """The outcomes of the forward's first tests for infinite and NaN values, as far as they are known."""
    packed: bool = False
    """Whether the forward may call RNNs with packed sequences. If not, a trace of it raises `CapturedAnew`."""

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "") -> Tracing:
        """Return the tracing of a call of a model that is not planned."""
        leaves, spec = flattened_call(args, kwargs)
        state = guards.ModuleTree(model).state(model)
        assert state is not None
        original = Original(model, model.forward)
        return Tracing(name or type(model).__name__, original, leaves, spec, state, packed=True)

    @cached_property
    def key(self) -> Hashable:
        """What a plan belongs to apart from values of tensors: arguments' structure, shapes, types and modes."""
        return guards.call_key(self.leaves, self.spec), self.state.key

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return tensors_in(self.leaves)

    @property
    def model(self) -> nn.Module:
        """The model whose forward is traced."""
        return self.original.model

    @cached_property
    def batch(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order, detached from the autograd graph."""
        return [t.detach().requires_grad_(t.requires_grad) for t in self.tensors]

    def check(self) -> None:
        """Raise `ModelError` for a model or arguments that cannot be planned. Warn of hooks on submodules, which run
        only while a step is traced."""
        check_traceable(self.model)
        for name, tensor in self.state.named.items():
            if tensor.is_meta:
                raise ModelError(
                    f"{self.name}: {name} is on the meta device, without data; plan and call it where it trains"
                )
        check_dense((*self.state.named.values(), *self.tensors), f"{self.name} has, or is called with,")
        check_no_hidden_tensors(self.leaves, f"{self.name} is called with")
        warn_of_hooks(self.model, self.name)
        warn_of_compiled_code(self.model, self.name)

    def fixed(self) -> Found:
        """Trace the forward and the backward for exactly the arguments' sizes, again if a function had cached tensors
        of a trace. `NotCaptured` if that is impossible, `NoGradients` if no output has a gradient; an error that eager
        mode raises, too, as it is."""
        try:
            return self._with_clean_caches()
        except (NoGradients, NotCaptured):
            raise
        except ModelError as error:
            raise NotCaptured(str(error)) from error.__cause__

    def _with_clean_caches(self) -> Found:
        """Trace the forward and the backward. If that fails because functions have cached tensors of a trace, empty
        these caches, fill them in eager mode, trace again, and empty them."""
        try:
            return self._fixed()
        except NoGradients:
            raise
        except ModelError:
            if not empty_traced_caches():
                raise
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        # Fills the caches with tensors of eager mode.
        own_error(self.model, self.original.forward, args, kwargs)
        try:
            return self._fixed()
        finally:
            empty_traced_caches()

    def _fixed(self) -> Found:
        """Trace the forward and the backward once, and check that state which the forward changes repeats
        (`check_state_returns`). Warn of attributes that a planned forward does not set."""
        with self._recording() as record:
            args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
            with _own_errors(self.model, self.original.forward, args, kwargs):
                flat = self._flat(record)
                step = self._captured(flat, record)

        forward = self.original.forward
        check_state_returns(
            self.name, self.model, record.state, flat.found, forward, args, kwargs, self.fixed
        )
        self._warn_of_lost(flat)
        step = replace(step, attributes=flat.attributes)
        guard = record.guard(self.name, flat.found)
        return Found(step, flat.outputs, self._withheld(flat.constants), guard, flat.count)

    def _captured(self, flat: FlatModel, record: Any) -> CapturedStep:
        """Capture the step. `NoGradients` if no output has a gradient, but `ModelError` if one may have: the forward
        returns or keeps an object in which PyTorch does not see tensors."""
        try:
            check = record.state.check_backward
            return capture(flat, self.batch, self.name, self.model, record.values, check)
        except NoGradients as error:
            if any(hides_tensors(one, called_later=True) for one in flat.constants) or flat.attributes:
                raise ModelError(str(error)) from None
            raise
        finally:
            record.state.undone.clear()  # the forward may run again, to find its own errors

    def symbolic(
        self, varying: Collection[tuple[int, int]] | None = None, counts: tuple[int, ...] = ()
    ) -> OpenForward:
        """Trace the forward and backward with symbolic sizes, for all sizes of the same graph; `NotSymbolic` if that is
        impossible. ``varying``: the symbolic dimensions, as (position in ``batch``, dimension); None for all.
        ``counts``: numbers of selected elements, symbolic too."""
        symbols = BatchSymbols(varying, counts)
        with self._recording() as record:
            flat = self._flat(record)
            traced = trace_joint_graph(
                TraceRequest(flat, self.batch, self.name, self.model, record.values, symbols)
            )
        table = traced.table
        assert table
        if flat.found.moving:
            raise NotSymbolic("its forward changes Python state with which it computes")
        constants = open_constants(self._withheld(flat.constants), table)
        guard = record.guard(self.name, flat.found).mapped(
            lambda given: opened(given, lambda size: table.add(symbols.without_counts(size)))
        )
        step = OpenStep.of(traced.step, symbols, table)
        return OpenForward(step, flat.outputs, tuple(constants), flat.attributes, guard, flat.count)

    def _warn_of_lost(self, flat: FlatModel) -> None:
        if flat.lost:
            warn(f"the forward of {self.name} sets {', '.join(flat.lost)}, which a planned one does not")

    @contextmanager
    def _recording(self) -> Iterator[Any]:
        with (
            guards.recording(self.model, self.leaves, self.state.named, self.batch, self.assumed) as record,
            no_host_draws(self.name, record.generators),
            nullcontext() if self.packed else no_packed_sequences(self.name),
        ):
            check_default_generator(record.names)
            yield record

    def _flat(self, record: Any) -> FlatModel:
        return FlatModel(self.model, self.original.forward, self.leaves, self.spec, record.state)

    def _withheld(self, constants: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            Withheld(f"{self.name} returns a {type(c).__name__}")
            if hides_tensors(c, called_later=True)
            else c
            for c in constants
        )


@contextmanager
def _own_errors(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Run a block that captures a model. If it ends in a `ModelError` with a cause, and the forward also fails in eager
    mode, raise eager mode's exception."""
    try:
        yield
    except ModelError as error:
        own = own_error(model, forward, args, kwargs) if error.__cause__ else None
        if own is None:
            raise
        raise own from None
