"""Trace a module and a batch as one joint graph of ATen calls, forward and backward.

PyTorch differentiates (`aot_export_joint_with_descriptors`), and `read_fx` reads the result. The module is
not changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rematplan.ir import ModelError
from rematplan.runtime.capture.functional_call import call_with, slots
from rematplan.runtime.capture.host_random import no_host_draws, no_seeding
from rematplan.runtime.capture.indexing import MarkedIndexing
from rematplan.runtime.capture.patches.autocast_cache import casting_once
from rematplan.runtime.capture.patches.checkpoint import without_checkpoints
from rematplan.runtime.capture.patches.assertion_ops import Checks
from rematplan.runtime.capture.patches.eager_kernels import native_kernels
from rematplan.runtime.capture.patches.fake_layouts import InPlaceLayouts, TrueLayouts
from rematplan.runtime.capture.patches.tensor_data import written_data
from rematplan.runtime.capture.read_fx import MODULE, finished, read_joint_graph
from rematplan.runtime.capture.restore_state import check_no_sizes_kept, same_attributes
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.compat import (
    COMPILING_FLAG,
    OptimizedModule,
    TracingContext,
    aot_export_joint_with_descriptors,
    functorch_config,
    inductor_config,
    tracing,
)
from rematplan.runtime.graph.quiet_logs import quiet
from rematplan.runtime.guards.assertions import VALUES_DECIDE, SpeculatedAssertions
from rematplan.runtime.guards.tensor_reads import undecided
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols
from rematplan.runtime.symbols.expressions import ExpressionTable

_LEFT_BEHIND = (
    "its forward leaves tensors in plain attributes and reads them in the next call; make them buffers, or, if they "
    "never change, call it once before it is planned"
)
_HIGHER_ORDER = (
    "it calls an operator that takes functions (torch.cond, torch.while_loop), checks values in its backward, or "
    "communicates in place (call torch.distributed._functional_collectives), which a plan cannot contain; plan the "
    "submodules that do not"
)
_COMPILED = "it calls a compiled function; plan the function that was compiled, or see rematplan.backend"
_VARYING = "it makes nested tensors, whose sizes are not fixed; plan the submodules that do not"
IN_OTHER_WORDS = {
    "Unexpected fake buffer": _LEFT_BEHIND,
    "in tensor_tracker": _LEFT_BEHIND,
    "HigherOrderOperator": _HIGHER_ORDER,
    "dynamo-optimized": _COMPILED,
    "shape_env must not be None": _VARYING,
}
"""What errors of the tracer mean, by a part of their text."""


def capture(
    module: nn.Module,
    batch: Sequence[torch.Tensor],
    name: str,
    root: nn.Module | None = None,
    decisions: ValueGuardRecorder | None = None,
) -> CapturedStep:
    """Trace ``module(*batch)`` with its backward. The module must return a tensor (the loss, for example) or
    a tuple of tensors.

    No output may be a view of an input, of a parameter or of another output. The module's parameters,
    buffers, gradients, attributes and random state are left unchanged.

    Args:
        module: the module.
        batch: the inputs.
        name: its name, for the step and for messages.
        root: the submodule relative to which the modules of calls are named; None for ``module``.
        decisions: records decisions that depend on values of the inputs ``batch``. The step is then valid as
            long as their guard holds. None forbids such decisions.

    Raises:
        ModelError: no parameter is trainable and no input requires a gradient; no output depends on a trained
            parameter; the module changes an input or a parameter in place, or draws random numbers outside
            PyTorch; or PyTorch cannot trace it.
    """
    root = module if root is None else root  # not `or`: an empty module list is false
    return finished(_captured(module, batch, name, root, decisions, None).step)


def capture_open(
    module: nn.Module,
    batch: Sequence[torch.Tensor],
    name: str,
    root: nn.Module,
    decisions: ValueGuardRecorder,
    symbols: BatchSymbols,
) -> Traced:
    """Trace as `capture` does, with open sizes of the batch. Return the step as it was read, from which
    `OpenStep.of` makes an open step.

    ``symbols``: new symbols for the batch's sizes.

    Raises:
        NotSymbolic: some size must be fixed.
        ModelError: as `capture`.
    """
    decisions.now = symbols.now
    return _captured(module, batch, name, root, decisions, symbols)


@dataclass(frozen=True)
class Traced:
    """A step as it was read from a trace. ``table``: its open sizes; None if all sizes are fixed."""

    step: CapturedStep
    table: ExpressionTable | None


def _captured(
    module: nn.Module,
    batch: Sequence[torch.Tensor],
    name: str,
    root: nn.Module,
    decisions: ValueGuardRecorder | None,
    symbols: BatchSymbols | None,
) -> Traced:
    if not any(t.requires_grad for t in (*module.parameters(), *batch)):
        raise ModelError(f"{name}: no trainable parameter, so there is no training step to plan")
    try:
        with same_attributes(root, name), no_host_draws(name):
            return _traced(module, batch, name, root, decisions, symbols)
    except ModelError:
        raise
    except VALUES_DECIDE as error:
        where = getattr(error, "module", "")
        apart = [n for n in _callable_parts(root) if not f"{where}.".startswith(f"{n}.")]
        raise ModelError(
            f"{name}: its forward reads values of tensors ({error}{where and f' in {where}'}), so it has no fixed "
            f"graph; plan the submodules{_listed(apart)} that do not, or decide before the call and pass the outcome "
            f"as an argument"
        ) from error
    except Exception as error:  # any error in the user's model is reported in one line
        first = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        known = (why for what, why in IN_OTHER_WORDS.items() if what in first)
        raise ModelError(f"{name}: {next(known, f'cannot be traced: {first}')}") from error


def _callable_parts(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's trained submodules that have a forward; for module lists and
    dictionaries, those of their entries."""
    for name, part in module.named_children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from (f"{name}.{inner}" for inner in _callable_parts(part))
        elif any(p.requires_grad for p in part.parameters()):
            yield name


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" if names else ""


def check_traceable(module: nn.Module) -> None:
    """Refuse a module that cannot be traced as one graph.

    Raises:
        ModelError: it is compiled, scripted or sharded, or the shape of a parameter is unknown.
    """
    name = type(module).__name__
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise ModelError(f"{name} is scripted, or has a scripted submodule; plan the module before scripting")
    if any(hasattr(m, "reshard") for m in list(module.modules())[1:]) or any(
        map(_is_sharded, module.parameters())
    ):
        raise ModelError(
            f"{name} is sharded, or has a sharded submodule; plan first, then shard the planned module as one unit"
        )
    if any(isinstance(m, OptimizedModule) for m in module.modules()):
        raise ModelError(
            f"{name} is compiled, or has a compiled submodule; plan the original module, or see rematplan.backend"
        )
    if any(nn.parameter.is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise ModelError(f"{name} has parameters whose shape is not known yet; call it once before planning")


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements")


def _traced(
    module: nn.Module,
    batch: Sequence[torch.Tensor],
    name: str,
    root: nn.Module,
    decisions: ValueGuardRecorder | None,
    symbols: BatchSymbols | None,
) -> Traced:
    mode = TrueLayouts(symbols)
    with (
        ExitStack() as stack,
        warnings.catch_warnings(),
        native_kernels(symbols is not None),
        without_checkpoints(),
        quiet(),
        torch.enable_grad(),
        _annotated(root),
        # Random calls stay even if nothing reads them: later draws depend on the generator's state after them.
        inductor_config.patch(fallback_random=True),
        # A backward runs after autocast's block, not inside it.
        functorch_config.patch(backward_pass_autocast="off"),
        # Tensors that a module holds as plain attributes become constants.
        tracing(TracingContext(mode)),
        InPlaceLayouts(),
    ):
        warnings.simplefilter("ignore")
        untied = _Untied(module, symbols is not None)
        batch = symbols.begin(mode, batch) if symbols else batch

        def trace() -> Any:
            return aot_export_joint_with_descriptors(stack, untied, tuple(batch))

        try:
            with undecided() if decisions else nullcontext():
                joint = trace()
        except VALUES_DECIDE:
            untied.decisions = decisions
            with decisions or nullcontext():
                try:
                    joint = untied.assertions.traced(trace)
                except VALUES_DECIDE:
                    # Models that inspect their data for a shortcut often skip that while they are being compiled.
                    stack.enter_context(patch.object(torch.compiler, COMPILING_FLAG, True))
                    untied.assertions = SpeculatedAssertions()
                    joint = untied.assertions.traced(trace)
        if symbols:
            check_no_sizes_kept(root)
    table = symbols.table() if symbols else None
    return Traced(read_joint_graph(joint.graph_module, untied.names, untied.outputs, name, table), table)


@contextmanager
def _annotated(module: nn.Module) -> Iterator[None]:
    """Record for each traced op the innermost submodule whose forward calls it.

    An error about a decision that depends on values gets the name of the submodule that raises it, as
    attribute ``module``.
    """
    names = {id(m): name for name, m in module.named_modules()}
    open_: list[tuple[str, Any]] = []  # the names of the modules whose forwards run, and their annotations
    tracing_thread = get_ident()  # the hooks run in all threads

    def enter(module: nn.Module, _args: Any) -> None:
        if get_ident() != tracing_thread:
            return
        name = names.get(id(module))
        open_.append((name or "", nullcontext() if name is None else annotate({MODULE: name})))
        open_[-1][1].__enter__()

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        if get_ident() == tracing_thread:
            open_.pop()[1].__exit__(None, None, None)

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        with preserve_node_meta():
            try:
                yield
            except VALUES_DECIDE as error:
                error.module = open_[-1][0] if open_ else ""  # type: ignore[union-attr]
                raise
            finally:
                while open_:  # the forward raised
                    open_.pop()[1].__exit__(None, None, None)
    finally:
        before.remove()
        after.remove()


class _Untied(nn.Module):
    """A module as a function of its distinct parameters and buffers.

    The tracer would treat a tied weight as two, with a gradient each. Autograd has one gradient, and its
    order of additions must be kept.
    """

    def __init__(self, module: nn.Module, open_: bool = False) -> None:
        super().__init__()
        self.open = open_  # whether the batch has open sizes
        self.__dict__["inner"] = module  # not a submodule, which would add its parameters under other names
        self.casts_once = torch.is_autocast_cache_enabled()
        self.decisions: ValueGuardRecorder | None = None
        self.assertions = SpeculatedAssertions()
        self.outputs = 0  # the number of the module's outputs; further results are checks
        self.names: dict[str, str] = {}
        short: dict[int, str] = {}
        for at, (name, parameter) in enumerate(module.named_parameters()):
            self.register_parameter(f"p{at}", parameter)
            short[id(parameter)], self.names[f"p{at}"] = f"p{at}", name
        for at, (name, buffer) in enumerate(module.named_buffers()):
            self.register_buffer(f"b{at}", buffer)
            short[id(buffer)], self.names[f"b{at}"] = f"b{at}", name
        self.short_of = {slot: short[id(tensor)] for slot, tensor in slots(module).items()}

    def forward(self, *batch: torch.Tensor) -> Any:
        state = {slot: getattr(self, short) for slot, short in self.short_of.items()}
        if self.decisions:
            held = {self.names[short]: getattr(self, short) for short in self._buffers}
            self.decisions.begin({name.removeprefix("model."): t for name, t in held.items()}, batch)
        leaves = [*self.parameters(), *batch]
        self.assertions.begin()
        with (
            Checks(self.assertions) as checks,
            no_seeding(),
            casting_once(leaves, self.casts_once),
            MarkedIndexing() if self.open else nullcontext(),
            written_data([*leaves, *self.buffers()]),
        ):
            results = call_with(self.__dict__["inner"], state, batch)
        for slot, short in self.short_of.items():
            _renew(slot, getattr(self, short), state[slot])
        results = results if isinstance(results, tuple) else (results,)
        self.outputs = len(results)
        return *results, *checks.results


def _renew(slot: str, given: torch.Tensor, left: torch.Tensor) -> None:
    """Copy a tensor that a forward assigned to a buffer into the buffer that the forward was given."""
    if left is given:
        return
    if (left.shape, left.dtype) != (given.shape, given.dtype):
        raise ModelError(
            f"the forward assigns {slot} a tensor of another shape or type; assign one of the same shape and type"
        )
    given.copy_(left.detach())
