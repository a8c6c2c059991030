"""Watch a step: which ops run in each checkpointed region in the forward, and which when it is recomputed."""

from __future__ import annotations

import ctypes
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rematplan.auditing.python_state import title
from rematplan.runtime.capture.patches.autograd_functions import Kind, watched_functions
from rematplan.runtime.capture.patches.checkpoint import watched_checkpoints
from rematplan.runtime.capture.patches.saved_tensors import Hook, hooks_replaced
from rematplan.runtime.graph.compat import TorchDispatchMode, current_graph_task, pytree
from rematplan.runtime.graph.generator_states import NUMPY, PYTHON, states_of

SAMPLE = 4096
"""The number of elements of a result that are kept, for the size of an error."""
LEFT_OUT = ("detach", "alias", "empty", "new_empty", "lift", "_unsafe_view", "_reshape_alias")
"""How the names of ops begin that compute nothing, in addition to views; a recomputation may have more or fewer."""
REENTRANT, FUNCTION = "reentrant", "function"

Value = tuple[torch.dtype, tuple[int, ...], int]
"""Type, shape and checksum of a tensor."""
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


@dataclass
class OpRun:
    """One run of an op in a checkpointed region, recorded so that forward and recomputation can be compared."""

    op: str
    module: str
    autocast: Autocast
    """The autocast state: for each type of device whether it is enabled, and its type."""
    read: tuple[Value, ...]
    """The tensors that the op reads."""
    numbers: str
    """The arguments that are no tensors."""
    draws: str
    """``global`` or ``own``: the random number generator that the op uses; or an empty string."""
    values: tuple[Value, ...] = ()
    """The results; empty if the op failed."""
    sample: torch.Tensor | None = None
    """Some elements of the first result; None if that has no data."""


@dataclass
class Region:
    """A part of a step that may be recomputed: a function under `torch.utils.checkpoint`, or a
    `torch.autograd.Function`."""

    kind: str
    """``reentrant`` or ``non-reentrant``, or ``function``."""
    name: str
    """The name of the `torch.autograd.Function`, or the kind."""
    module: str
    """The module that called the function."""
    inputs_train: bool = True
    """Whether an argument requires a gradient."""
    nested_train: bool = False
    """Whether a tensor inside of a container among the arguments requires a gradient."""
    function: Kind | None = None
    """The `torch.autograd.Function`; None for a checkpoint."""
    first: list[OpRun] = field(default_factory=list)
    """The ops of the forward."""
    again: list[OpRun] = field(default_factory=list)
    """The ops of the first recomputation."""
    host_states: list[bytes] = field(default_factory=list)
    """States of NumPy's and Python's random generators: before and after the forward, then before the recomputation."""
    times: int = 0
    """How often it ran, the forward included."""


@dataclass
class Watched:
    """What was seen in a step."""

    regions: list[Region] = field(default_factory=list)
    saved_tensors_hooks: list[str] = field(default_factory=list)
    """The names of hooks that pack saved tensors, except those of checkpoints."""
    recomputed: int = 0
    """The number of ops that ran in recomputations."""
    compiled: bool = False
    """Whether `torch.compile` compiled a part of the step; it was watched in eager mode."""
    draws: bool = False
    """Whether the step draws random numbers."""

    @property
    def recomputing(self) -> list[Region]:
        """The regions that were recomputed."""
        return [region for region in self.regions if region.again]

    @property
    def checkpointed(self) -> bool:
        """Whether something was recomputed or packed."""
        return bool(self.recomputed or self.saved_tensors_hooks)

    @property
    def autocast_differs(self) -> bool:
        """Whether the recomputation of a region has another autocast state than its forward."""
        states = [
            ({run.autocast for run in r.first}, {run.autocast for run in r.again}) for r in self.recomputing
        ]
        return any(not again <= first for first, again in states)


@contextmanager
def watched_step(model: nn.Module) -> Iterator[Watched]:
    """Watch the step of a model that runs in the block. Yield what is seen, which grows while it runs."""
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.enter_context(recorder.modules())
        stack.enter_context(watched_checkpoints(recorder.checkpoint))
        stack.enter_context(hooks_replaced(recorder.saving))
        stack.enter_context(watched_functions(recorder.function))
        stack.enter_context(recorder)
        yield recorder.seen


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Watched()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.buffers = {id(buffer) for buffer in model.buffers()}
        self.thread = local()

    def saving(self, pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
        if not str(getattr(pack, "__module__", "")).startswith("torch."):
            self.seen.saved_tensors_hooks.append(title(pack))
        return pack, unpack

    # The modules that are running in this thread, each with the autocast state at its start, and the regions; innermost
    # last.
    @property
    def running(self) -> list[tuple[str, Autocast | None]]:
        return self.thread.__dict__.setdefault("modules", [])  # type: ignore[no-any-return]

    @property
    def open(self) -> list[tuple[Region, bool]]:
        return self.thread.__dict__.setdefault("regions", [])  # type: ignore[no-any-return]

    @contextmanager
    def modules(self) -> Iterator[None]:
        """In the block, note in ``running`` which modules run, each with the autocast state at its start."""

        def enter(module: nn.Module, _args: Any) -> None:
            self.running.append((self.names.get(id(module), self.module()), autocast_state()))

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if self.running:
                self.running.pop()

        handles = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def module(self) -> str:
        return self.running[-1][0] if self.running else ""

    def autocast(self) -> Autocast:
        # Inside of an op that autocast casts for, autocast is disabled: what a module saw at its start is sure.
        now, at_start = autocast_state(), self.running[-1][1] if self.running else None
        return now if at_start is None or any(on for _, on, _ in now) else at_start

    def checkpoint(self, kind: str, args: tuple[Any, ...]) -> Callable[[], Any]:
        """Add a checkpoint's region to those seen, and return what makes the context of each of its runs. ``kind``:
        reentrant or not."""
        nested = [t for a in args if not isinstance(a, torch.Tensor) for t in pytree.tree_leaves(a)]
        region = Region(
            kind,
            f"{kind} checkpoint",
            self.module(),
            inputs_train=kind != REENTRANT or any(map(_trains, args)),
            nested_train=any(map(_trains, nested)),
        )
        self.seen.regions.append(region)
        return lambda: self.run_of(region)

    def function(self, kind: Kind) -> Callable[[], Any]:
        name = kind.__qualname__.rpartition("<locals>.")[2]
        region = Region(FUNCTION, name, self.module(), function=kind)
        self.seen.regions.append(region)
        return lambda: self.run_of(region)

    @contextmanager
    def run_of(self, region: Region) -> Iterator[None]:
        """Count a run of a region, open during the block. Host states are noted around the first run and before the
        second; later runs are recomputations and begin without running modules."""
        region.times += 1
        depth, outer = len(self.running), list(self.running)
        if region.times <= 2:
            region.host_states.append(_host_states())
        if region.times > 1:
            self.running.clear()
        # A Function may enter autocast in its backward, so its state at the start says nothing.
        self.running.append((region.module, None if region.kind == FUNCTION else autocast_state()))
        self.open.append((region, region.times > 1))
        try:
            yield
        finally:
            self.open.pop()
            if region.times > 1:
                self.running[:] = outer
            else:
                del self.running[depth:]
                region.host_states.append(_host_states())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op. If it belongs to regions that are open, append an `OpRun` with its operands, draws and results to
        the lists of these."""
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2] if hasattr(func, "_schema") else str(func)
        targets, module = ([], "") if self.left_out(func, name, args) else self.targets()
        if not targets:
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        numbers = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, (bool, int, float, str))]
        run = OpRun(
            name,
            module,
            self.autocast(),
            tuple(map(_value, tensors)),
            repr(numbers),
            _draws(func, args, kwargs),
        )
        for ops in targets:
            ops.append(run)
        result = func(*args, **kwargs)
        found = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        run.values = tuple(map(_value, found))
        run.sample = _sample(found[0]) if found and _has_data(found[0]) else None
        return result

    def left_out(self, func: Any, name: str, args: tuple[Any, ...]) -> bool:
        """Return whether an op computes nothing that a gradient depends on: no value, or statistics in a buffer."""
        target = args[0] if args and name.endswith("_") else None
        of_buffer = isinstance(target, torch.Tensor) and id(target) in self.buffers
        return of_buffer or name.startswith(LEFT_OUT) or getattr(func, "is_view", False)

    def targets(self) -> tuple[list[list[OpRun]], str]:
        """Return the lists to which an op that runs now belongs, and its module, and count the op if it is
        recomputed."""
        found: list[list[OpRun]] = []
        recomputing = current_graph_task() != -1 and torch.is_grad_enabled()
        for region, again in reversed(self.open):
            if again:
                if region.kind == FUNCTION and not recomputing:
                    return found, ""
                self.seen.recomputed += 1
                return [*found, *([region.again] if region.times == 2 else [])], self.module()
            found.append(region.first)
        self.seen.recomputed += recomputing
        return found, self.module()


def autocast_state() -> Autocast:
    """Return for each type of device whether autocast is enabled, and its type."""
    kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _host_states() -> bytes:
    return pickle.dumps(states_of((NUMPY, PYTHON)))


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _has_data(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and t.device.type in ("cpu", "cuda")


def _value(t: torch.Tensor) -> Value:
    if not _has_data(t) or (t.dtype.is_complex and t.is_conj()):
        return t.dtype, tuple(t.shape), 0
    flat = t.detach().contiguous().cpu()
    # A view of NumPy's would fix the size of the storage, which FSDP2 frees by setting it to 0.
    content = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.numel() else b""
    return t.dtype, tuple(t.shape), zlib.crc32(content)


def _sample(t: torch.Tensor) -> torch.Tensor:
    flat = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].double().cpu()


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return ""
    return "own" if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())) else "global"
