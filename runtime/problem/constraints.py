"""Translate a user's constraints on recomputation, which name modules and ops, into names of ops of the planning
problem."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from rematplan.ir import UsageError
from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs

EFFECTS = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "statistics"})
"""Namespaces of ops with side effects (statistics draw random numbers and accumulate in place). They never
run again, whatever the user asks."""

Name = str | Callable[..., Any]
"""A module's qualified name; an op's name such as ``aten.addmm`` or ``mylib::kernel``; or the op itself."""


def ops_that_run_once(
    step: CapturedStep, keep: Iterable[Name] = (), never_rerun: Iterable[Name] = ()
) -> tuple[str, ...]:
    """Return the names of the ops that a plan may run only once, in the step's order and without views. The result of
    such an op stays resident until its last reader has run.

    Args:
        step: the captured step.
        keep: modules or ops whose results are kept. For a module, these are the results of its forward ops that are
            outputs of the step or are read by forward ops outside the module. For an op, these are the results of all
            its calls.
        never_rerun: modules or ops that never run again: all ops of a module, or all calls of an op.

    Returns:
        The names. Ops with side effects, collectives among them, are always included.

    Raises:
        UsageError: neither a module nor an op of the step has one of the names. The message suggests similar ones.
    """
    once = {c.name for c in step.calls if _namespace(c) in EFFECTS}
    for name in keep:
        inside = _inside(step, name)
        once |= _boundary(step, inside) if inside else _named(step, name)
    for name in never_rerun:
        once |= _inside(step, name) or _named(step, name)
    return tuple(c.name for c in step.calls if c.name in once and not c.is_view)


def _inside(step: CapturedStep, name: Name) -> set[str]:
    """Return the names of the step's calls that run in the module ``name`` or in a module inside it; empty if ``name``
    is not a module of the step."""
    return {c.name for c in step.calls if c.module and (c.module == name or c.module.startswith(f"{name}."))}


def _named(step: CapturedStep, name: Name) -> set[str]:
    """Return the names of the step's calls of the op ``name``. A name without an overload, like ``aten.add``, means all
    overloads.

    Raises:
        UsageError: the step has no call of that op. The message suggests similar names of ops and modules.
    """
    wanted = _dotted(name)
    found = {c.name for c in step.calls if wanted in (_dotted(c.target), _packet(c))}
    if not found:
        known = {*(c.module for c in step.calls if c.module), *(_packet(c) for c in step.calls)}
        near = difflib.get_close_matches(wanted, sorted(known), 3, 0.3) or sorted(known)[:3]
        raise UsageError(f"{wanted} is neither a module nor an op of {step.name}; similar: {', '.join(near)}")
    return found


def _boundary(step: CapturedStep, calls: set[str]) -> set[str]:
    """Return the names of those forward calls among ``calls`` whose results are outputs of the step or are read by
    forward calls that are not among ``calls``."""
    read = {
        step.values[r.value].storage
        for c in step.calls
        if c.name not in calls and not c.backward and not c.is_view
        for r in refs((c.args, c.kwargs))
    }
    read |= {step.values[o.value].storage for o in step.outputs}
    forward = (c for c in step.calls if c.name in calls and not c.backward)
    return {c.name for c in forward if not read.isdisjoint(step.writes(c))}


def _dotted(target: Name) -> str:
    return str(target).replace("::", ".").removeprefix("torch.ops.")


def _packet(call: Call) -> str:
    """Return the name of a call's op without the overload, like ``aten.add``."""
    return ".".join(_dotted(call.target).split(".")[:2])


def _namespace(call: Call) -> str:
    return _dotted(call.target).split(".")[0]
