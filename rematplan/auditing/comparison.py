"""Compare the steps of a model with its own checkpointing to those without it: faults, and notes on what is none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from rematplan.auditing.compiled import Context, compiled_anew, in_eager_mode
from rematplan.auditing.faults import (
    Fault,
    StepDifferences,
    differences,
    faults_of,
    flags_without_effect,
    note_of_flags,
    of_compiler,
    of_first_differences,
    raised,
)
from rematplan.auditing.plain_path import plain_path
from rematplan.auditing.recomputations import Watched, watched_step
from rematplan.auditing.step_runs import (
    Results,
    Step,
    in_float64,
    random_states,
    restored,
    results_of,
    rounding_of,
)
from rematplan.ir import ModelError, UsageError, first_line
from rematplan.module.verification import dense, same_bits
from rematplan.runtime.capture.patches.autograd_functions import Kind

ROUNDING = 1e-6
"""A relative difference that is larger than this in float64 is no rounding error."""
NOISE = 10.0
"""A difference counts if it is larger than that of two plain runs by this factor."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found."""

    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    differentiated: tuple[Kind, ...]
    """The Functions that ran without their own backward in plain steps."""
    unchecked: str = ""
    """The names of the Functions whose backward was compared with nothing."""
    ran: bool = True
    """Whether the steps with their own checkpointing raised no error."""


def watched(step: Step, earlier: int = 0) -> tuple[Watched, Exception | None]:
    """Run one step with its own checkpointing, in eager mode, after ``earlier`` steps. Return what was seen, and the
    error that it raised, if any. A `UsageError` is raised again unless a region's inputs train nothing."""
    with restored(step), in_eager_mode() as compiled_calls, ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
        for _ in range(earlier):
            step.run(*step.fresh())
        seen = stack.enter_context(watched_step(step.model))
        before = random_states()
        try:
            with step.wrapped():
                step.run(*step.fresh())
        except UsageError as error:
            if all(region.inputs_train for region in seen.regions):
                raise
            return seen, error
        except Exception as error:  # of any kind: that of a fault
            return seen, error
        finally:
            seen.compiled = bool(compiled_calls)
            seen.draws = random_states() != before
    return seen, None


def error_faults(step: Step, seen: Watched, error: Exception) -> Comparison:
    """Return the faults of a step that fails with its own checkpointing; `ModelError` if the step fails without it,
    too."""
    kinds = _recomputing(seen)
    try:
        _plain_results(step, kinds)
    except ModelError:
        _plain_results(step, kinds := ())
    return Comparison((*flags_without_effect(step.model, seen), raised(error, seen)), (), kinds, ran=False)


def compared(step: Step, seen: Watched, plain: Callable[..., Any] | None) -> Comparison:
    """Compare the steps of a model with those without its checkpointing, and with the implementation ``plain`` if there
    is one. ``seen``: the first step, watched."""
    kinds = _recomputing(seen)
    try:
        own = results_of(step)
    except Exception as error:  # of any kind, in the second step
        return error_faults(step, seen, error)
    expected, used = _plain_path_results(step, kinds, own)
    path = partial(plain_path, used)
    noise = [differences(*pair) for pair in zip(expected, results_of(step, path), strict=True)]
    steps = [
        _without_noise(differences(*pair), n)
        for pair, n in zip(zip(expected, own, strict=True), noise, strict=True)
    ]
    steps, rounding = _without_rounding(step, step, path, steps, seen)
    faults = [*flags_without_effect(step.model, seen)]
    notes = [*_notes_of_noise(noise[0]), *_notes_of_no_numbers(expected[0])]
    notes += note_of_flags(step.model, seen)
    for earlier, found in enumerate(steps):
        if found.names and not (earlier and faults):
            if seen.compiled:
                of_compiled, more = faults_of_compiled(step, found, expected, earlier, seen.draws)
                faults, notes = [*faults, *of_compiled], [*notes, *more]
                if of_compiled or more:
                    break
            of_step = watched(step, earlier)[0] if earlier else seen
            faults += faults_of(step.model, found, of_step, second=bool(earlier))
    own_backwards = {r.function.__name__ for r in seen.regions if r.function and r.function not in used}
    unchecked = ", ".join(sorted(own_backwards)) if plain is None else ""
    if unchecked:
        notes.append(
            f"the backward of {unchecked} is not checked: pass plain=, a function of the same arguments that computes "
            "the output from the model's parameters without it"
        )
    if used != kinds:
        faults += of_first_differences(seen) if not faults else ()
    if plain is not None:
        found, more = _against(step, plain, own)
        rounding += more
        faults += faults_of(step.model, found, seen) if not faults else ()
    notes += rounding if not faults else ()
    if not (seen.checkpointed or seen.regions or faults or seen.compiled):
        notes.append("nothing is recomputed: no checkpointing ran in this step")
    return Comparison(tuple(faults), tuple(notes), used, unchecked)


def _recomputing(seen: Watched) -> tuple[Kind, ...]:
    return tuple(dict.fromkeys(r.function for r in seen.recomputing if r.function is not None))


def _plain_results(step: Step, kinds: tuple[Kind, ...]) -> list[Results]:
    """Return the results of a step without checkpointing of these ``kinds``; `ModelError` if the user's code fails
    without it."""
    try:
        return results_of(step, partial(plain_path, kinds))
    except (UsageError, ModelError):
        raise
    except Exception as error:  # of any kind, in the user's code
        raise ModelError(
            f"{type(step.model).__name__} does not run without its checkpointing: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def _plain_path_results(
    step: Step, kinds: tuple[Kind, ...], own: Sequence[Results]
) -> tuple[list[Results], tuple[Kind, ...]]:
    """Return the results of plain steps, and the ``kinds`` that autograd differentiated in them: all, or none if that
    failed or lacked a result of ``own``."""
    if kinds:
        try:
            found = results_of(step, partial(plain_path, kinds))
        except Exception:  # of any kind: a forward that is not made to be differentiated
            found = []
        if found and own[0].tensors.keys() <= found[0].tensors.keys():
            return found, kinds
    return _plain_results(step, ()), ()


def _without_noise(found: StepDifferences, noise: StepDifferences) -> StepDifferences:
    allowed = {d.name: NOISE * d.relative for d in noise.tensors}
    tensors = tuple(d for d in found.tensors if not d.relative <= allowed.get(d.name, -1.0))
    return StepDifferences(tensors, {k: v for k, v in found.others.items() if k not in noise.others})


def _notes_of_noise(noise: StepDifferences) -> list[str]:
    if not noise.names:
        return []
    more = f" and {len(noise.names) - 1} more" if len(noise.names) > 1 else ""
    return [f"two plain runs differ: {noise.names[0]}{more}; smaller differences than theirs are not seen"]


def _without_rounding(
    step: Step, other: Step, path: Context, steps: Sequence[StepDifferences], seen: Watched | None
) -> tuple[list[StepDifferences], list[str]]:
    """Return the differences of ``steps`` without those by rounding, and a note on these; all if autocast differs in
    ``seen``. Rounding vanishes in float64 or, if that does not run, is small (`rounding_of`). ``other`` in ``path``:
    the plain steps."""
    tensors = [d for found in steps for d in found.tensors]
    if not tensors or (seen is not None and seen.autocast_differs):
        return list(steps), []
    wide = _float64_errors(step, other, path)
    kept = []
    for at, found in enumerate(steps):
        if wide is None:
            some = [d for d in found.tensors if not d.relative <= rounding_of(step)]
        else:
            some = [d for d in found.tensors if not wide[at].get(d.name, 0.0) <= ROUNDING]
        kept.append(replace(found, tensors=tuple(some)))
    left_out = [d for d in tensors if all(d not in found.tensors for found in kept)]
    if not left_out:
        return kept, []
    worst = max(left_out, key=lambda d: d.relative)
    how = "they vanish in float64" if wide is not None else "the step does not run in float64"
    return kept, [f"rounding errors, at most {worst.relative:.1e} ({worst.name}); {how}"]


def _float64_errors(step: Step, other: Step, path: Context) -> list[dict[str, float]] | None:
    """Return, for each step, tensors' relative errors in float64 between the two paths, by name. None if the model does
    not run in float64, or FSDP2 shards it."""
    if any(hasattr(p, "__tensor_flatten__") for p in step.model.parameters()):
        return None  # FSDP2 knows the types that its parameters had
    try:
        with in_float64(step) as wide:
            own = results_of(wide)
        with in_float64(other) as wide:
            plain = results_of(wide, path)
    except Exception:  # of any kind: a model with types of its own
        return None
    found = [differences(*pair) for pair in zip(plain, own, strict=True)]
    return [{d.name: d.relative for d in step_.tensors} for step_ in found]


def _against(
    step: Step, plain: Callable[..., Any], own: Sequence[Results]
) -> tuple[StepDifferences, list[str]]:
    """Compare loss and gradients with those of the implementation ``plain``. Return the differences of the first step
    that has any, and notes; `UsageError` if ``plain`` does not run or has other parameters."""
    if isinstance(plain, nn.Module):
        _check_same_parameters(step.model, plain)
    other = step.of(plain)
    try:
        expected = results_of(other)
    except (UsageError, ModelError):
        raise
    except Exception as error:  # of any kind, in the user's code
        raise UsageError(f"plain= does not run: {type(error).__name__}: {first_line(error)}") from error
    found = [_loss_and_gradients(differences(*pair)) for pair in zip(expected, own, strict=True)]
    found, notes = _without_rounding(step, other, nullcontext, found, None)
    return next((one for one in found if one.names), found[0]), notes


def _notes_of_no_numbers(plain: Results) -> list[str]:
    names = [n for n, t in plain.tensors.items() if _is_loss_or_gradient(n) and not dense(t).isfinite().all()]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"infinite or no number in a plain run: {names[0]}{more}; faults in these are not seen"]


def _is_loss_or_gradient(name: str) -> bool:
    return name.startswith(("loss", "gradient "))


def _loss_and_gradients(found: StepDifferences) -> StepDifferences:
    return StepDifferences(tuple(d for d in found.tensors if _is_loss_or_gradient(d.name)), {})


def _check_same_parameters(model: nn.Module, plain: nn.Module) -> None:
    """Raise a UsageError if the parameters of two modules differ in a name or a bit."""
    own, other = dict(model.named_parameters()), dict(plain.named_parameters())
    if own.keys() != other.keys():
        name = sorted(own.keys() ^ other.keys())[0]
        raise UsageError(
            f"plain= must have parameters of the same names as the model; only one of them has {name}"
        )
    for name, p in own.items():
        if not same_bits(p.detach(), other[name].detach()):
            raise UsageError(
                f"parameter {name} of plain= has another value: plain.load_state_dict(model.state_dict())"
            )


REDRAWN = "activation_memory_budget lets the backward draw random numbers again"
SHARE = 0.1
"""Another run explains a difference if it differs by at least this share of it; rounding differs by less."""


def faults_of_compiled(
    step: Step, found: StepDifferences, expected: Sequence[Results], at: int, draws: bool
) -> tuple[list[Fault], list[str]]:
    """Return faults and notes if the results that differ after a step are right in eager mode; else none. ``at``: the
    position of the step in ``expected``, the plain results. ``draws``: whether it draws random numbers."""

    sizes = {d.name: d.relative for d in found.tensors}

    # Whether a result that differs here also differs between ``right`` and ``own``, by a tenth of that or more.
    def as_wrong(right: Sequence[Results], own: Sequence[Results]) -> bool:
        between = differences(right[at], own[at])
        return any(not d.relative <= SHARE * sizes.get(d.name, math.inf) for d in between.tensors) or bool(
            between.others.keys() & found.others.keys()
        )

    if as_wrong(expected, results_of(step, in_eager_mode)):
        return [], []
    if not draws:
        return [of_compiler(found)], []
    with compiled_anew(without_budget=True):
        full = results_of(step)
        if as_wrong(expected, full):
            return [of_compiler(found)], []
    # Which numbers are drawn again depends on who draws them: PyTorch, as in the comparison, or Inductor.
    with compiled_anew():
        own = results_of(step, step.wrapped)
    with compiled_anew(without_budget=True):
        kept = results_of(step, step.wrapped)
    if as_wrong(kept, own):
        advice = (
            "set it to 1 for what draws, and checkpoint parts by torch.utils.checkpoint, or plan the step"
        )
        return [of_compiler(found, REDRAWN, advice)], []
    return [], [f"with torch._inductor.config.fallback_random, {REDRAWN}; without it, as here, it does not"]
