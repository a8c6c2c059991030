"""Recording of everything on which a forward depends, while it is traced."""

from __future__ import annotations

import importlib._bootstrap
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rematplan.runtime.graph.generator_states import states_restored
from rematplan.runtime.guards.attributes import Reads, reads_of
from rematplan.runtime.guards.containers import add, added, content, unchanged_content
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder
from rematplan.runtime.guards.globals import GlobalReads
from rematplan.runtime.guards.guard import Guard
from rematplan.runtime.guards.python_state import PythonState
from rematplan.runtime.guards.read_numbers import NUMBERS, check_none_left
from rematplan.runtime.guards.snapshots import parts_of
from rematplan.runtime.guards.state_changes import Changes


@dataclass(frozen=True)
class Record:
    """What a forward depends on, as recorded while it is traced."""

    reads: Reads
    """The attributes of modules, and of objects in them, that it reads."""
    global_reads: GlobalReads
    """The values outside of the modules to which its code refers."""
    values: ValueGuardRecorder
    """The decisions that depend on values of inputs and buffers."""
    state: PythonState
    """The Python state before the forward, and how its last run uses it."""

    @property
    def generators(self) -> Collection[Any]:
        """The random number generators, such as those of NumPy and Python, to which the code of the forward refers."""
        return self.global_reads.generators.values()

    @property
    def names(self) -> Collection[str]:
        """All names that the code of the forward mentions, and ``default_generator`` if a variable that it reads has
        PyTorch's default generator."""
        return self.global_reads.names

    def guard(self, model: str, changes: Changes) -> Guard:
        """Return the check that all on which the traced graph depends is unchanged; nothing can be recorded afterwards.
        Warn of values outside of the modules that the forward of ``model`` changed and a planned call would not. Raises
        `ModelError` if the forward left a number of a tensor where no planned call stores it."""
        self.state.counted.clear()
        check_none_left()
        found = (
            *self.reads.found_in_places(*changes.of_holders()),
            *self.global_reads.found_in_places(model, *changes.of_shelves()),
        )
        return Guard(found, self.reads.shared(), self.values.guard(), changes.conditions)


@contextmanager
def recording(
    model: nn.Module,
    leaves: Sequence[Any],
    buffers: Mapping[str, torch.Tensor],
    batch: Sequence[torch.Tensor],
    assumed: tuple[bool, ...],
) -> Iterator[Record]:
    """Record what the forward of ``model`` depends on while the block traces it. The block gets the `Record`, which is
    complete after the trace; at its end the Python state is restored. Raises `ModelError` if the forward names an
    iterator. ``assumed``: known outcomes of the forward's first tests for infinite or NaN values."""
    NUMBERS.clear()
    modules = list(model.modules())
    global_reads = GlobalReads(modules, leaves)
    with reads_of(modules) as reads:
        state = PythonState(reads, global_reads)
        state.check_iterators(watched=True)
        values = ValueGuardRecorder(buffers, batch, assumed)
        try:
            with imports_kept(state.contents):
                yield Record(reads, global_reads, values, state)
        except BaseException:
            values.forget()
            raise
        finally:
            state.restore()


@contextmanager
def python_state_restored(model: nn.Module, leaves: Sequence[Any]) -> Iterator[None]:
    """Restore the Python state and the generators of a model after a block that runs its forward. Raises `ModelError`
    before the block if the forward names an iterator, which cannot be restored."""
    modules = list(model.modules())
    global_reads = GlobalReads(modules, leaves)
    state = PythonState(Reads(modules), global_reads)
    state.check_iterators(watched=False)
    values = [value for namespace in state.namespaces for value in namespace.before.values()]
    found = (v for value in (*values, *leaves) for v in parts_of(value) if isinstance(v, torch.Generator))
    with states_restored((*global_reads.generators.values(), *found)):
        try:
            yield
        finally:
            state.restore()


@contextmanager
def imports_kept(contents: Mapping[int, tuple[Any, Any]]) -> Iterator[None]:
    """Add to earlier contents of containers, inside the block, what imports in this thread add to the containers. A
    module is imported once, so what it registered would be missing in the next run. ``contents``: by id, containers
    with copies of their content, which this changes."""
    thread, importing, own = get_ident(), False, _of_bootstrap("_find_and_load")

    def loaded(name: str, *further: Any) -> Any:
        """Import a module. Unless it is known, imported by another one or in another thread, add to ``contents`` what
        containers gain meanwhile."""
        nonlocal importing
        if importing or name in sys.modules or get_ident() != thread:
            return own(name, *further)
        before = [(container, was, content(container)) for container, was in contents.values()]
        importing = True
        try:
            return own(name, *further)
        finally:
            importing = False
            for container, was, then in before:
                if was is not None and not unchanged_content(container, then):
                    add(was, added(container, then) or ())

    with patch.object(importlib._bootstrap, "_find_and_load", loaded):
        yield


def _of_bootstrap(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib._bootstrap, name)
    return found
