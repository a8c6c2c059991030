"""Translate a user's constraints on recomputation, which name modules and ops, into the problem's ops.

`EFFECTS` has the namespaces of ops that never run again, whatever the user asks.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from rematplan.ir import UsageError, first_line
from rematplan.runtime.graph.captured_step import Call, CapturedStep, substitute
from rematplan.runtime.graph.compat import HigherOrderOperator, OpOverload

EFFECTS = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "statistics"})
"""Namespaces of ops with side effects (statistics draw random numbers and accumulate in place). They never
run again, whatever the user asks."""

Name = str | Callable[..., Any]
"""A module's qualified name; an op's name such as ``aten.addmm`` or ``mylib::kernel``; or the op itself."""
Policy = Sequence[Name] | Callable[..., CheckpointPolicy]
"""The names of what must be saved, or a function ``(context, op, *args, **kwargs)`` of selective checkpointing."""
INSIDE = ".*"
"""The end of a module's name that stands for all ops inside of it."""


def stated_policy(stated: object, model: nn.Module | None = None) -> Policy:
    """Return a user's policy as a function, or as the names that must be saved: none for None, of a mapping those with
    `MUST_SAVE`. `UsageError` for a policy of another kind, a value outside of `FOLLOWED`, or a module outside of
    ``model``."""
    if stated is None:
        return ()
    if isinstance(stated, Mapping):
        for key, value in stated.items():
            _check(value, key)
        return tuple(
            _named_in(model, k) for k, value in stated.items() if value is CheckpointPolicy.MUST_SAVE
        )
    if isinstance(stated, (str, nn.Module)):
        raise UsageError("policy must be a mapping, a list or a function; write [name]")
    if callable(stated):
        return stated
    if not isinstance(stated, Iterable):
        raise UsageError(f"policy is {stated!r}; it must be a mapping, a list or a function")
    return tuple(_named_in(model, one) for one in stated)


def _check(value: object, what: object) -> None:
    """Raise `UsageError` if ``value`` is no `CheckpointPolicy`, or one that plans do not follow. ``what``: the op or
    module, for the message."""
    if not isinstance(value, CheckpointPolicy):
        raise UsageError(
            f"policy: {what} has {value!r}; write a value of torch.utils.checkpoint.CheckpointPolicy"
        )
    if value.name not in FOLLOWED:
        raise UsageError(
            f"policy: {what} has {value.name}; the budget decides what is recomputed, so state {', '.join(FOLLOWED)}"
        )


FOLLOWED = ("MUST_SAVE", "PREFER_SAVE", "PREFER_RECOMPUTE")
"""The values of `CheckpointPolicy` that plans follow. Those that prefer something leave the choice to the plan."""


def _named_in(model: nn.Module | None, key: object) -> Name:
    """Return an entry of a policy, a module as its name in ``model``; `UsageError` if a module is the model itself or
    outside of it."""
    if not isinstance(key, nn.Module):
        return cast(Name, key)
    known = {id(m): name for name, m in (model.named_modules() if model is not None else ())}
    name: str = known.get(id(key), "")
    if not name:
        raise UsageError(f"policy: a {type(key).__name__} is not a module of the model")
    return name


def check_names(policy: Policy, steps: Sequence[CapturedStep], model: str) -> None:
    """Check that each name of a policy is a module or an op of one of the steps of ``model``; `UsageError` if not. A
    policy that is a function is not checked."""
    for name in () if callable(policy) else policy:
        module = name.removesuffix(INSIDE) if isinstance(name, str) else name
        if any(_inside(step, module) or _calls_of(step, name) for step in steps):
            continue
        calls, wanted = [c for step in steps for c in step.calls], _dotted(name)
        known = sorted({*(c.module for c in calls if c.module), *map(_packet, calls)})
        near = difflib.get_close_matches(wanted, known, 3, 0.3) or known[:3]
        raise UsageError(f"{wanted} is neither a module nor an op of {model}; similar: {', '.join(near)}")


def ops_that_run_once(step: CapturedStep, policy: Policy = ()) -> tuple[str, ...]:
    """Return, in the step's order and without views, the ops that a plan may run only once: those with side effects,
    and those of ``policy``. A module's name means its forward ops whose results leave it, ``MODULE.*`` all its ops, an
    op all its calls; a function is asked for each forward call."""
    # Collectives are among them.
    once = {c.name for c in step.calls if _namespace(c) in EFFECTS}
    if callable(policy):
        once |= {c.name for c in step.calls if not c.backward and _asked(step, c, policy)}
    else:
        for name in policy:
            whole = isinstance(name, str) and name.endswith(INSIDE)
            inside = _inside(step, name.removesuffix(INSIDE) if isinstance(name, str) else name)
            once |= (inside if whole else _boundary(step, inside)) if inside else _calls_of(step, name)
    return tuple(c.name for c in step.calls if c.name in once and not c.is_view)


def _asked(step: CapturedStep, call: Call, policy: Callable[..., CheckpointPolicy]) -> bool:
    """Return whether a user's function says that the results of a call must be saved. It is not asked about fused
    kernels, which are no ops of PyTorch. `UsageError` if the function raises any error."""
    if not isinstance(call.target, (OpOverload, HigherOrderOperator)):
        return False
    args, kwargs = substitute((call.args, call.kwargs), lambda name: step.values[name].fake)
    try:
        answer = policy(SelectiveCheckpointContext(is_recompute=False), call.target, *args, **kwargs)
    except Exception as error:  # any error in the user's function is reported in one line
        raise UsageError(f"the policy function failed at {call.target}: {first_line(error)}") from error
    _check(answer, call.target)
    return answer is CheckpointPolicy.MUST_SAVE


def _inside(step: CapturedStep, name: Name) -> set[str]:
    """Return the step's calls that run in the module ``name`` or inside it; empty if it is no module of the step."""
    return {c.name for c in step.calls if c.module and (c.module == name or c.module.startswith(f"{name}."))}


def _calls_of(step: CapturedStep, name: Name) -> set[str]:
    """Return the step's calls of the op ``name``, of all overloads if it names none."""
    wanted = _dotted(name)
    return {c.name for c in step.calls if wanted in (_dotted(c.target), _packet(c))}


def _boundary(step: CapturedStep, calls: set[str]) -> set[str]:
    """Return the forward calls among ``calls`` whose results are outputs of the step, or are read by forward calls that
    are not in ``calls``."""
    read = {
        storage
        for c in step.calls
        if c.name not in calls and not c.backward and not c.is_view
        for storage in step.reads(c)
    }
    read |= step.returned()
    forward = (c for c in step.calls if c.name in calls and not c.backward)
    return {c.name for c in forward if not read.isdisjoint(step.writes(c))}


def _dotted(target: Name) -> str:
    return str(target).replace("::", ".").removeprefix("torch.ops.")


def _packet(call: Call) -> str:
    """Return the name of a call's op without the overload, like ``aten.add``."""
    return ".".join(_dotted(call.target).split(".")[:2])


def _namespace(call: Call) -> str:
    return _dotted(call.target).split(".")[0]
