"""Trace a module on a batch as one joint graph of ATen calls, forward and backward, with fixed or with symbolic
sizes.

PyTorch traces (`aot_export_joint_with_descriptors`); `read_fx` converts the graph into a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import get_ident
from traceback import walk_tb
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rematplan.ir import ModelError
from rematplan.runtime.capture.patches.checkpoint import without_checkpoints
from rematplan.runtime.capture.patches.eager_kernels import native_kernels
from rematplan.runtime.capture.patches.fake_layouts import TrueLayouts
from rematplan.runtime.capture.patches.in_place_layouts import InPlaceLayouts
from rematplan.runtime.capture.patches.recorded_writes import written_tensors_recorded
from rematplan.runtime.capture.patches.saved_tensors import no_saved_tensors_hooks
from rematplan.runtime.capture.patches.size_arithmetic import sizes_computed_once
from rematplan.runtime.capture.patches.size_text import no_size_as_text
from rematplan.runtime.capture.patches.size_types import sizes_have_plain_types
from rematplan.runtime.capture.patches.sum_numbers import sums_of_gradients_numbered
from rematplan.runtime.capture.patches.tangent_strides import tangents_strided_as_outputs
from rematplan.runtime.capture.patches.trace_costs import only_what_is_read
from rematplan.runtime.capture.read_fx import read_joint_graph
from rematplan.runtime.capture.restore_state import check_no_sizes_kept, same_attributes
from rematplan.runtime.capture.unrepeatable_draws import no_host_draws, no_seeding
from rematplan.runtime.capture.untied_module import UntiedModule
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.graph.code_line import code_line
from rematplan.runtime.graph.compat import (
    COMPILING_FLAG,
    TracingContext,
    aot_export_joint_with_descriptors,
    functorch_config,
    inductor_config,
    tracing,
)
from rematplan.runtime.graph.module_names import MODULE
from rematplan.runtime.graph.quiet_logs import quiet
from rematplan.runtime.guards.assertions import VALUES_DECIDE, SpeculatedAssertions
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder
from rematplan.runtime.guards.finite_tests import FiniteTests
from rematplan.runtime.guards.tensor_reads import undecided
from rematplan.runtime.symbols.expressions import ExpressionTable, NotSymbolic
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols

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
_BY_ADDRESS = (
    "it calls a kernel with the address of a tensor (data_ptr); make it an op of PyTorch (torch.library.custom_op), or "
    "use the layer without it"
)
_VARYING = "it makes nested tensors, whose sizes are not fixed; plan the submodules that do not"
_TOO_LARGE = (
    "its capture makes a tensor of real memory, to see which strides its kernels give it, and this machine has not so "
    "much; state smaller sizes"
)
_BACKWARD_IN_BACKWARD = (
    "a backward of it calls backward(), which adds to .grad by itself; let it return the gradients "
    "(torch.autograd.grad)"
)
_MEMORY = "it frees or changes the memory of a tensor (storage().resize_), which a plan does by itself"
IN_OTHER_WORDS = {
    "Unexpected fake buffer": _LEFT_BEHIND,
    "in tensor_tracker": _LEFT_BEHIND,
    "HigherOrderOperator": _HIGHER_ORDER,
    "dynamo-optimized": _COMPILED,
    "Cannot access data pointer": _BY_ADDRESS,
    "shape_env must not be None": _VARYING,
    "can't allocate memory": _TOO_LARGE,
    "backprop through mirrored meta": _BACKWARD_IN_BACKWARD,
    "resize_() on an invalid python storage": _MEMORY,
}
"""The meaning of the tracer's errors. The keys are parts of the errors' texts."""

OF_OPEN_SIZES = {
    "unhashable type: non-nested SymInt": "it looks up a size in a dictionary or a set",
    "numel() on tensor with symbolic": "it calls an op that PyTorch cannot trace with open sizes, such as nn.LSTM",
    "of type SymInt": "it computes with a size in NumPy",
}
"""The meaning of the tracer's errors where sizes are symbols. The keys are parts of the errors' texts."""


@dataclass(frozen=True)
class Traced:
    """A captured step directly after tracing, to be completed by `read_fx.finished`."""

    step: CapturedStep
    """The step."""
    table: ExpressionTable | None
    """The expressions of symbolic sizes; None if all sizes are fixed."""


@dataclass(frozen=True)
class TraceRequest:
    """The arguments of a trace of ``module(*batch)`` with its backward."""

    module: nn.Module
    batch: Sequence[torch.Tensor]
    name: str
    """The module's name, for the step and for messages."""
    root: nn.Module
    """For each call, the submodule that made it is recorded by its name within this one."""
    decisions: ValueGuardRecorder | None = None
    """Records the decisions that depend on values of inputs or buffers; None forbids them."""
    symbols: BatchSymbols | None = None
    """Creates symbols for the batch's sizes; None traces with fixed sizes."""
    check: Callable[[], None] = lambda: None
    """Is called after the backward, before attributes are restored."""


def trace_joint_graph(request: TraceRequest) -> Traced:
    """Trace a module with its backward as one graph, and read it as a captured step. Raises `NotSymbolic` if the sizes
    cannot be symbols, and another `ModelError` if the module cannot be traced."""
    name, root = request.name, request.root
    if not any(t.requires_grad for t in (*request.module.parameters(), *request.batch)):
        raise ModelError(f"{name}: no trainable parameter, so there is no training step to plan")
    if request.decisions and request.symbols:
        request.decisions.now, request.decisions.counts = request.symbols.now, request.symbols.counts
    try:
        with (
            same_attributes(root, name),
            no_host_draws(name),
            no_saved_tensors_hooks(name),
            only_what_is_read(),
        ):
            traced = _traced(request)
            request.check()
            return traced
    except NotSymbolic as error:
        raise _at_line(str(error), error) from error
    except ModelError:
        raise
    except VALUES_DECIDE as error:
        if refusal := getattr(error, "refusal", None):
            raise refusal from error
        where = getattr(error, "module", "")
        apart = list(_parts_without(root, type(root.get_submodule(where))))
        raise ModelError(
            f"{name}: its forward reads values of tensors ({error}{where and f' in {where}'}), so it has no fixed "
            f"graph; plan the submodules{_listed(apart)} that do not, or decide before the call and pass the outcome "
            f"as an argument"
        ) from error
    except Exception as error:  # any error in the user's model is reported in one line
        first = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        known = (why for what, why in IN_OTHER_WORDS.items() if what in first)
        if request.symbols:
            plain = (why for what, why in OF_OPEN_SIZES.items() if what in first)
            why = [*plain, *known, f"PyTorch cannot trace it with open sizes: {first}"][0]
            raise _at_line(why, error) from error
        raise ModelError(f"{name}: {next(known, f'cannot be traced: {first}')}") from error


def _at_line(why: str, error: Exception) -> NotSymbolic:
    """Return the error that sizes cannot be symbols, with the line of the model's code at which ``error`` was raised.
    ``why``: the reason."""
    line = code_line(reversed(list(walk_tb(error.__traceback__))))
    return NotSymbolic(f"{why} ({line})" if line else why)


def _parts_without(module: nn.Module, kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names of the largest submodules that have trainable parameters and contain no module of class ``kind``;
    entries of module lists separately."""
    for name, part in module.named_children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)) or any(type(m) is kind for m in part.modules()):
            yield from (f"{name}.{inner}" for inner in _parts_without(part, kind))
        elif any(p.requires_grad for p in part.parameters()):
            yield name


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" if names else ""


def _traced(request: TraceRequest) -> Traced:
    """Trace forward and backward under all changes of PyTorch that a capture needs, and read the traced graph."""
    decisions, symbols = request.decisions, request.symbols
    mode = TrueLayouts(symbols)
    with (
        ExitStack() as stack,
        warnings.catch_warnings(),
        native_kernels(symbols is not None),
        no_size_as_text() if symbols else nullcontext(),
        sizes_have_plain_types(request.module) if symbols else nullcontext(),
        sizes_computed_once() if symbols else nullcontext(),
        tangents_strided_as_outputs() if symbols else nullcontext(),
        without_checkpoints(),
        quiet(),
        torch.enable_grad(),
        _annotated(request.root),
        # Random calls stay even if nothing reads them: later draws depend on the generator's state after them.
        inductor_config.patch(fallback_random=True),
        # A backward runs after autocast's block, not inside it.
        functorch_config.patch(backward_pass_autocast="off"),
        # Tensors that a module holds as plain attributes become constants.
        tracing(TracingContext(mode)),
        InPlaceLayouts(),
        written_tensors_recorded(),
    ):
        warnings.simplefilter("ignore")
        stack.enter_context(sums_of_gradients_numbered())
        untied = UntiedModule(request.module, symbols is not None, len(symbols.counts) if symbols else 0)
        batch = symbols.begin(mode, request.batch) if symbols else request.batch

        def trace() -> Any:
            with no_seeding(), untied.replaced:
                traced = aot_export_joint_with_descriptors(stack, untied, tuple(batch))
                untied.check_backward()
            return traced

        joint = _deciding(trace, untied, decisions)
        if symbols:
            check_no_sizes_kept(request.root)
    table = symbols.table() if symbols else None
    step = read_joint_graph(joint.graph_module, untied.names, untied.outputs, request.name, table)
    return Traced(_of_batch(step, len(request.batch)), table)


def _of_batch(step: CapturedStep, count: int) -> CapturedStep:
    """Return a step without the inputs after the first ``count`` tensors of the batch. Its calls do not read them."""
    extra = {i.value for i in step.inputs if i.kind == "batch" and int(i.target) >= count}
    inputs = tuple(i for i in step.inputs if i.value not in extra)
    return replace(step, inputs=inputs, values={n: v for n, v in step.values.items() if n not in extra})


def _deciding(trace: Callable[[], Any], untied: UntiedModule, decisions: ValueGuardRecorder | None) -> Any:
    """Return what ``trace`` returns. If the forward reads values, trace again with ``decisions``, if given, and
    speculated assertions, then also as if PyTorch compiled. If that fails, too, raise the second trace's error.
    ``untied``: the traced module, which this changes."""
    try:
        with undecided():
            return trace()
    except VALUES_DECIDE:
        untied.decisions = decisions
        untied.finite = decisions.finite if decisions else FiniteTests()
    with decisions or undecided():
        try:
            return _with_numbers(trace, untied, decisions)
        except VALUES_DECIDE as reason:
            untied.assertions = SpeculatedAssertions()
            try:
                # Many models skip an inspection of their data then.
                with patch.object(torch.compiler, COMPILING_FLAG, True):
                    return untied.assertions.traced(trace)
            except Exception:  # a model that runs uncompiled may fail in any other way
                raise reason from None


def _with_numbers(
    trace: Callable[[], Any], untied: UntiedModule, decisions: ValueGuardRecorder | None
) -> Any:
    """Trace with speculated assertions. If code then fails after reading a number that is not known yet, trace again
    and refuse to read such numbers; other errors are raised."""
    try:
        return untied.assertions.traced(trace)
    except VALUES_DECIDE:
        raise
    except Exception:  # code that takes a number may fail in any way on one that is not known yet
        if decisions is None or not decisions.numbers:
            raise
        decisions.refuses_numbers, untied.assertions = True, SpeculatedAssertions()
        return untied.assertions.traced(trace)


@contextmanager
def _annotated(module: nn.Module) -> Iterator[None]:
    """Record, for each op traced inside the block, the innermost submodule that calls it. An error that a value is
    needed gets the name of that submodule as its attribute ``module``."""
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
