"""The additional backwards that the Kronecker factors of a step need, and the number of terms of its loss."""

from __future__ import annotations

import torch

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import CapturedStep, Ref, Value
from rematplan.runtime.statistics.fisher_output_gradients import Draws, OutputGradient
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.second_backward import SecondBackward, call_of

MOST_COLUMNS = 64
"""The largest number of backwards for ``type-2``, which needs one for each class."""


def samples_of(step: CapturedStep) -> int:
    """Return the size of the first dimension of the module's first input tensor, or 0 if there is none."""
    first = next((i for i in step.inputs if i.kind == "batch"), None)
    shape = step.values[first.value].fake.shape if first else ()
    return shape[0] if shape else 0


def terms_of(step: CapturedStep, options: Kronecker) -> int:
    """Return how many samples, tokens or pixels the loss averages or sums over: ``options.terms`` if given, the batch's
    size if the output has one element, else the output's elements per class. Raises `ModelError` if the output does not
    exist, or has several elements but no dimension of classes."""
    if options.terms is not None:
        return options.terms
    fake = step.values[_output(step, options, needed=False)].fake
    if fake.numel() == 1:
        # The output is a loss: count the samples of the batch.
        return max(1, samples_of(step))
    return fake.numel() // max(1, fake.shape[options.class_dim])


def further_backwards(step: CapturedStep, options: Kronecker, draws: Draws) -> list[SecondBackward]:
    """Return the backwards in addition to that of the user's loss: one for ``mc``, one for each class for ``type-2``,
    none for ``empirical``. Raises `ModelError` if the output of ``options`` cannot begin such a backward, or if
    ``type-2`` would need more than `MOST_COLUMNS`."""
    if options.fisher == "empirical":
        return []
    output, target = _output(step, options, needed=True), str(options.output)
    fake = step.values[output].fake
    size = fake.shape[options.class_dim]
    tangent = next((i.value for i in step.inputs if (i.kind, i.target) == ("tangent", target)), None)
    if tangent is None:
        raise ModelError(f"output {target} of {step.name} depends on no trained parameter")
    if size == 1 and options.likelihood == "categorical":
        raise ModelError(
            f"output {target} of {step.name} has one class, so labels carry no information; see likelihood="
        )
    if options.fisher == "type-2":
        _check_columns(step, fake, size)
    found = []
    for column in range(size) if options.fisher == "type-2" else range(1):
        name, suffix = f"output_gradient_{column}", f"_{options.fisher.replace('-', '')}{column}"
        gradient = OutputGradient(
            f"{options.fisher} {options.likelihood}",
            options.class_dim % fake.dim(),
            column,
            1 / size if options.loss_reduction == "mean" else 1.0,
            draws,
        )
        begin, cotangent = call_of(name, gradient, (Ref(output),), name), torch.empty_like(fake)
        found.append(SecondBackward(step, tangent, begin, Value(name, name, name, cotangent), suffix))
    return found


def _check_columns(step: CapturedStep, fake: torch.Tensor, size: int) -> None:
    if size > MOST_COLUMNS:
        raise ModelError(
            f"fisher='type-2' needs a backward for each of {size} classes; the limit is {MOST_COLUMNS}; use 'mc'"
        )
    if fake.numel() // size != max(1, samples_of(step)):
        raise ModelError("fisher='type-2' needs an output with one loss term per sample; use fisher='mc'")


def _output(step: CapturedStep, options: Kronecker, needed: bool) -> str:
    """Return the name of the value from which the loss is computed; `ModelError` if it does not exist or lacks the
    dimension of classes. If ``needed`` is false, an output of one element needs no such dimension."""
    target = str(options.output)
    found = next((o.value for o in step.outputs if (o.kind, o.target) == ("output", target)), None)
    if found is None:
        raise ModelError(f"{step.name} has no output {target}; state output= for the statistics")
    fake = step.values[found].fake
    classes = -fake.dim() <= options.class_dim < fake.dim()
    if (needed or fake.numel() > 1) and not classes:
        raise ModelError(
            f"output {target} of {step.name} has the shape {list(fake.shape)}, without a dimension of classes "
            f"(class_dim={options.class_dim}); fisher={options.fisher!r} needs the output from which a loss "
            f"outside the model is computed: state output=, or use fisher='empirical'"
        )
    return found
