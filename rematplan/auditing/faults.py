"""Group what differs between two runs of a step into faults, each with its known cause."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from rematplan.auditing.first_difference import (
    CAUSES,
    ON_HOST,
    OWN_GENERATOR,
    ROUNDING,
    FirstDifference,
    cause_of,
    chooses_others,
    draws_on_the_host,
    first_difference,
    left_to_stop_early,
)
from rematplan.auditing.python_state import GENERATOR_STATE
from rematplan.auditing.recomputations import FUNCTION, REENTRANT, Region, Watched
from rematplan.auditing.step_runs import Results
from rematplan.ir import first_line
from rematplan.module.verification import Difference, tensor_differences
from rematplan.runtime.guards.attributes import is_record

FIRINGS = "firings gradient hook"
FLAG_WORDS = ("full", "selective", "block", "uniform", "all")
"""Texts that an attribute with a name like `FLAG` may have instead of True."""
FLAG = re.compile(
    r"_*(?:(?:is|use|with|do|enable)_)?(?:grad(?:ient)?_|act(?:ivation)?_)?"
    r"(?:checkpoint(?:ing)?|ckpt|cp|remat|recompute)(?:_enabled)?",
    re.IGNORECASE,
)
"""Names of attributes that switch checkpointing on."""


@dataclass(frozen=True)
class Fault:
    """A way in which a step with its own checkpointing differs from the plain step."""

    cause: str
    """What is wrong."""
    module: str
    """The module in which it begins; empty if it is unknown or the model itself."""
    op: str
    """The first op whose recomputation differs; empty if no op explains the fault."""
    error: float
    """The largest relative difference of a result; infinite if it is no number."""
    op_error: float
    """The relative difference of the op's result; 0 if there is no op."""
    results: tuple[str, ...]
    """The results that differ, such as ``gradient fc.weight``."""
    advice: str
    """What to change."""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        other = (
            " gives another type or shape"
            if math.isinf(self.op_error)
            else f" differs by {self.op_error:.1e}"
        )
        size = other if self.op_error else ""
        return f"{self.cause}{where}" + (f": {self.op}{size}" if self.op else "")


@dataclass(frozen=True)
class StepDifferences:
    """What differs after one step: tensors with the sizes of their errors, and other results with both values."""

    tensors: tuple[Difference, ...]
    others: Mapping[str, tuple[object, object]]

    @property
    def names(self) -> tuple[str, ...]:
        """The results that differ."""
        return (*(d.name for d in self.tensors), *self.others)


def differences(expected: Results, found: Results) -> StepDifferences:
    """Return what differs between what two steps leave behind."""
    names = dict.fromkeys((*expected.others, *found.others))
    pairs = {name: (expected.others.get(name), found.others.get(name)) for name in names}
    return StepDifferences(
        tuple(tensor_differences(expected.tensors, found.tensors)),
        {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
    )


def faults_of(
    model: nn.Module, found: StepDifferences, seen: Watched, second: bool = False
) -> Iterator[Fault]:
    """Yield the faults that explain what differs after a step. ``second``: whether it is the second of two steps, after
    a first one without faults."""
    hooks = {k: v for k, v in found.others.items() if k.startswith(FIRINGS)}
    hooked = {f"gradient {name.rpartition(' of ')[2]}" for name in hooks}
    draws = tuple(name for name in found.others if name.startswith("random state"))
    gradients = [d for d in found.tensors if d.name.startswith(("gradient ", "loss", "parameter "))]
    if gradients and not {d.name for d in gradients} <= hooked:
        generators = [k for k, pair in found.others.items() if str(pair[1]).startswith(GENERATOR_STATE)]
        yield _redrawn(gradients, generators, seen) or _gradients(gradients, draws, seen, second)
    elif draws:
        yield _fault(
            "the random state differs after the step",
            draws,
            advice="set the random state after a recomputation to what it was before it",
        )
    yield from _buffers(model, [d for d in found.tensors if d.name.startswith("buffer ")])
    attributes = [d.name for d in found.tensors if d.name.startswith("attribute ")]
    attributes += [name for name in found.others if name.startswith("attribute ")]
    if attributes:
        yield _state(attributes, found)
    for name, (expected, own) in hooks.items():
        yield _fault(
            f"a {name.removeprefix('firings ')} runs {own or 0} times instead of {expected or 0}",
            (name,),
            module=name.rpartition(" of ")[2],
            advice="a weight used in several reentrant checkpoints gets its gradient in parts, and its hooks run for "
            "each part: use_reentrant=False",
        )


def raised(error: Exception, seen: Watched) -> Fault:
    """Return the fault of a step that raises an error although the plain step does not. It names the first op that
    differs; else a region none of whose inputs requires a gradient; else the error."""
    first = _first_differences(seen, other_ops=True)
    said = f"the step raises {type(error).__name__}: {first_line(error)}"
    if not first:
        silent = [r for r in seen.regions if not r.inputs_train]
        why = (NO_GRADIENT, TRAIN_INPUTS) if silent else (said, "")
        return _fault(why[0], (said,), module=silent[0].module if silent else "", advice=why[1])
    return _of_op(first, (said,), math.inf)


def flags_without_effect(model: nn.Module, seen: Watched) -> Iterator[Fault]:
    """Yield a fault if a model in training mode has a flag for checkpointing that is set, and in the step nothing was
    recomputed or packed, and no checkpoint or own `torch.autograd.Function` ran."""
    if seen.checkpointed or seen.regions or not model.training:
        return
    named = []
    for name, module in model.named_modules():
        owners = [(name, module), *((f"{name}.{k}", v) for k, v in vars(module).items() if is_record(v))]
        for path, owner in owners:
            named += [f"{path}.{k}".lstrip(".") for k in _flags(owner)]
    if named:
        yield _fault(
            "a flag for checkpointing has no effect: nothing is recomputed",
            tuple(named),
            module=named[0].rpartition(".")[0],
            advice="something calls around the method that checks the flag, such as layer.forward instead of layer()",
        )


def _flags(owner: object) -> list[str]:
    """Return the attributes of an object that switch checkpointing on."""
    on = (True, *FLAG_WORDS)
    return [k for k, v in vars(owner).items() if FLAG.fullmatch(k) and type(v) in (bool, str) and v in on]


def note_of_flags(model: nn.Module, seen: Watched) -> list[str]:
    """Return a note for each class of which some modules with a set flag for checkpointing checkpoint something, and
    others nothing."""
    ran = {region.module for region in seen.regions}
    idle: dict[type, dict[str, bool]] = {}
    for name, module in model.named_modules():
        if _flags(module):
            works = any(place == name or place.startswith(f"{name}.") for place in ran)
            idle.setdefault(type(module), {})[name] = works
    return [
        f"a flag for checkpointing is set in {len(of)} modules of {kind.__name__}; in {', '.join(names)} "
        "nothing is recomputed"
        for kind, of in idle.items()
        if (names := [name for name, works in of.items() if not works]) and len(names) < len(of)
    ]


COMPILER = "torch.compile gives other results than eager mode"
ABOUT = 0.9
"""Differences of at least this share of the largest count as about equal: the first of them names the module."""
BACKENDS = (
    'look for code that asks torch.compiler.is_compiling(); if there is none, compile with backend="aot_eager" to see '
    "whether Inductor is the cause"
)
NO_GRADIENT = "parameters in a reentrant checkpoint get no gradient, because no input of it requires one"
TRAIN_INPUTS = (
    "use_reentrant=False, or call requires_grad_() on an input (Hugging Face: enable_input_require_grads)"
)


def _missing(names: tuple[str, ...], seen: Watched) -> Fault:
    """Return the fault that the tensors ``names`` have a gradient with or without checkpointing only, with its likely
    cause among the regions seen."""
    silent = [r for r in seen.regions if r.kind == REENTRANT and not r.inputs_train]
    if nested := [r for r in silent if r.nested_train]:
        return _fault(
            "tensors in a list or dictionary get no gradient through a reentrant checkpoint",
            names,
            module=nested[0].module,
            advice="pass each tensor as an argument of its own, or use_reentrant=False",
        )
    if silent:
        return _fault(NO_GRADIENT, names, module=_place(silent[0], names), advice=TRAIN_INPUTS)
    if own := _functions(seen):
        return _of_functions(own, names, math.inf)
    return _fault("some parameters or inputs have a gradient in one of the steps only", names)


def _place(region: Region, results: Sequence[str]) -> str:
    """Return the module of the first op of a region that is in one; without such an op, that of the first of
    ``results``."""
    ran = next((run.module for run in region.first if run.module), "")
    return ran or results[0].partition(" ")[2].rpartition(".")[0]


def _gradients(found: Sequence[Difference], draws: tuple[str, ...], seen: Watched, second: bool) -> Fault:
    """Return the fault behind differences of gradients, loss and parameters: a recomputed op that differs enough, else
    a cause seen in the step, else none known. ``draws``: the random states that differ."""
    names = (*(d.name for d in sorted(found, key=lambda d: d.relative < math.inf)), *draws)
    worst = max(found, key=lambda d: d.relative if d.relative < math.inf else -1.0)
    error, module = worst.relative, worst.name.partition(" ")[2].rpartition(".")[0]
    if first := [d for d in _first_differences(seen) if d.explains(error)]:
        return _of_op(first, names, error)
    if any(d.relative == math.inf for d in found):
        return _missing(names, seen)
    reentrant = [r for r in seen.recomputing if r.kind == REENTRANT]
    if "loss" in names:
        functions = "".join(f" ({name})" for name in _functions(seen)[:1])
        return _fault(f"the forward computes another loss{functions}", names, error=error)
    if own := _functions(seen):
        return _of_functions(own, names, error)
    if seen.saved_tensors_hooks:
        return _fault(
            f"hooks on saved tensors ({seen.saved_tensors_hooks[0]}) change what the backward reads",
            names,
            error=error,
            module=module,
            advice="return from unpack the bits that pack was given: offload without another type",
        )
    if reentrant:
        return _fault(
            "gradients are missing a part: probably a tensor leaves a reentrant checkpoint by a hook, an attribute or "
            "a list, where it has no gradient",
            names,
            error=error,
            module=module,
            advice="return the tensor from the checkpointed function, or use_reentrant=False",
        )
    when = "the second step differs" if second else "gradients differ"
    return _fault(f"{when}; no recomputed op explains it", names, error=error, module=module)


def _redrawn(found: Sequence[Difference], generators: Sequence[str], seen: Watched) -> Fault | None:
    """Return the fault of a generator that draws again, for an op that saves the numbers and does not run again. None
    if none drew, or the loss or a recomputed op differs."""
    if any(d.name == "loss" or d.relative == math.inf for d in found) or _first_differences(seen):
        return None
    on_host = [region for region in seen.recomputing if draws_on_the_host(region)]
    if not (on_host or generators):
        return None
    cause = next(c for c in CAUSES if c.name == (ON_HOST if on_host else OWN_GENERATOR))
    return Fault(
        cause.name,
        left_to_stop_early(on_host[0]) if on_host else generators[0].partition(" ")[2].rpartition(".")[0],
        "",
        max(d.relative for d in found),
        0.0,
        tuple(d.name for d in found),
        cause.advice,
    )


def _functions(seen: Watched) -> list[str]:
    """Return the names of the Functions that ran, those that recompute first."""
    own = [r for r in seen.regions if r.kind == FUNCTION]
    return list(dict.fromkeys(r.name for r in sorted(own, key=lambda r: not r.again)))


def _of_functions(names: Sequence[str], results: tuple[str, ...], error: float) -> Fault:
    which = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return _fault(
        f"the backward of {which} is not the derivative of its forward",
        results,
        error=error,
        advice="compare it with torch.autograd.gradcheck",
    )


def _first_differences(seen: Watched, other_ops: bool = False) -> list[FirstDifference]:
    found = [first_difference(region, other_ops) for region in seen.recomputing]
    return [one for one in found if one is not None]


def _of_op(found: Sequence[FirstDifference], names: tuple[str, ...], error: float) -> Fault:
    """Return the fault that an op differs first in a recomputation, with its cause. ``error``: the largest relative
    error of the tensors ``names``."""
    first = found[0]
    cause = cause_of(first)
    others = chooses_others(first.region)
    also = f"; {others} chooses others" if others and others.split()[0] != first.again.op else ""
    return Fault(
        f"{cause.name}{also}",
        first.again.module or first.region.module,
        first.again.op,
        error,
        first.error,
        names,
        cause.advice,
    )


def _buffers(model: nn.Module, found: Sequence[Difference]) -> Iterator[Fault]:
    """Yield a fault for the buffers of batch norms that differ, and one for other buffers."""
    modules = dict(model.named_modules())
    norms = {True: [], False: []}  # type: dict[bool, list[Difference]]
    for d in found:
        owner = modules.get(d.name.removeprefix("buffer ").rpartition(".")[0])
        norms[hasattr(owner, "running_mean")].append(d)
    texts = {
        True: (
            "batch norm's running statistics are updated twice",
            "freeze them in the recomputation: momentum 1 − √(1 − m), or leave the norm out of the checkpoint",
        ),
        False: (
            "a buffer is changed by the recomputation, too",
            "change buffers outside of the checkpointed function, or not while it is recomputed",
        ),
    }
    for is_norm, some in norms.items():
        if some:
            yield _fault(
                texts[is_norm][0],
                tuple(d.name for d in some),
                error=max(d.relative for d in some),
                module=some[0].name.removeprefix("buffer ").rpartition(".")[0],
                advice=texts[is_norm][1],
            )


def _state(names: Sequence[str], found: StepDifferences) -> Fault:
    """Return the fault that a recomputation changes Python state again, of which ``names`` are the places; the first
    one is shown with both values."""
    name = names[0].removeprefix("attribute ")
    values = found.others.get(names[0])
    change = f": {name} is {values[1]} instead of {values[0]}" if values else f": {name}"
    of_hook = name.startswith("hook ")
    return _fault(
        f"the recomputation changes Python state, too{change}",
        tuple(names),
        module=name.split(" of ", 1)[1].rpartition(".")[0] if of_hook else name.rpartition(".")[0],
        advice="hooks and forwards run again in the recomputation: let them return at once if "
        "torch._C._current_graph_task_id() != -1",
    )


def _fault(
    cause: str, results: tuple[str, ...], *, error: float = math.inf, module: str = "", advice: str = ""
) -> Fault:
    return Fault(cause, module, "", error, 0.0, results, advice)


def of_first_differences(seen: Watched) -> Iterator[Fault]:
    """Yield a fault if a recomputed op differs by more than rounding, or in its autocast state."""
    if found := [
        d for d in _first_differences(seen) if d.error > ROUNDING or d.first.autocast != d.again.autocast
    ]:
        yield _of_op(found, ("recomputed values",), found[0].error)


def of_compiler(found: StepDifferences, cause: str = COMPILER, advice: str = BACKENDS) -> Fault:
    """Return the fault of a step that is right in eager mode, and gives other results when it is compiled."""
    error = max((d.relative for d in found.tensors), default=math.inf)
    # Rounding decides which of about equal differences is the largest.
    worst = next((d.name for d in found.tensors if d.relative >= ABOUT * error), "")
    module = worst.partition(" ")[2].rpartition(".")[0]
    return _fault(cause, found.names, error=error, module=module, advice=advice)
