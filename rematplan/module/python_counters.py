"""Refuse a forward that changes a number in an attribute in each call and computes with the number. A plan would always
compute with the number of the captured call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.capture.flat_module import FlatModel
from rematplan.runtime.graph.captured_step import CapturedStep


def check_counters(
    name: str,
    model: nn.Module,
    flat: FlatModel,
    step: CapturedStep,
    again: Callable[[], tuple[FlatModel, CapturedStep]],
) -> None:
    """Refuse a forward that changes a number in an attribute of a module, if its graph would be another one with the
    changed number.

    A number that is not used in a computation, such as a counter for a log or a size that is stored for the next call,
    does not change the graph and is allowed.

    Args:
        name: the model's name, for the message.
        model: the model.
        flat: the model's forward as a function of tensors, after its trace; it has the numbers that the forward
            changed.
        step: the traced step.
        again: a function that traces the forward once more, with the changed numbers, and returns both results.

    Raises:
        ModelError: the graph would change. The message names the attributes.
    """
    if not flat.counted:
        return
    with _counted_on(model, flat.counted), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first trace has issued them already
        other, later = again()
    if _same(step, later) and repr(flat.constants) == repr(other.constants):
        return
    paths = [path for path, _ in model.named_modules()]
    names = [f"{paths[at]}.{key}".lstrip(".") for at, numbers in flat.counted.items() for key in numbers]
    raise ModelError(
        f"{name}: its forward changes {', '.join(names)} and computes with it, so each call has another graph; make it "
        f"a buffer (register_buffer), or change it outside the forward"
    )


@contextmanager
def _counted_on(model: nn.Module, counted: dict[int, dict[str, Any]]) -> Iterator[None]:
    """Run the body of the ``with`` statement with changed numbers in attributes of the model's modules. Restore the
    former numbers afterwards.

    ``counted``: the changed numbers, by the module's position in ``model.modules()`` and the attribute's name.
    """
    attributes = [vars(module) for module in model.modules()]
    before = {at: {name: attributes[at][name] for name in numbers} for at, numbers in counted.items()}
    try:
        for at, numbers in counted.items():
            attributes[at].update(numbers)
        yield
    finally:
        for at, numbers in before.items():
            attributes[at].update(numbers)


def _same(a: CapturedStep, b: CapturedStep) -> bool:
    """Return whether two steps make the same calls, with the same names of values, and have equal constants."""
    calls = [[(c.target, c.args, c.kwargs, c.results) for c in step.calls] for step in (a, b)]
    return (
        calls[0] == calls[1]
        and a.constants.keys() == b.constants.keys()
        and all(torch.equal(a.constants[name], b.constants[name]) for name in a.constants)
    )
