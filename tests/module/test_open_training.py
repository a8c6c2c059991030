"""Training over several shapes follows eager mode bit by bit within the budget: accumulation, branches by length,
draws; what a trace takes from a size in silence refuses other sizes."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_bits import equal_after, planned_and_plain
from torch import Tensor, nn
from torch.nn import functional as F

import rematplan
from rematplan.ir import ModelError
from rematplan.runtime.capture.joint_trace import TraceRequest, trace_joint_graph
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.guards.decisions_by_values import ValueGuardRecorder
from rematplan.runtime.symbols.expressions import NotSymbolic
from rematplan.runtime.symbols.symbolic_batch import BatchSymbols
from rematplan.runtime.symbols.symbolic_step import OpenStep

CPU, WIDTH = torch.device("cpu"), 16
MEASURED = {"costs": "profile", "loss_memory": "4x"}


class Encoder(nn.Module):
    """Attention with dropout; a short sequence takes another activation."""

    def __init__(self, layers: int = 2, long: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.long = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), long

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same shape, for x (batch, length, width)."""
        for layer in self.layers:
            y = layer(x)
            y = y.tanh() if x.shape[1] >= self.long else y.relu()
            scores = (y @ y.mT / 4).softmax(-1)
            x = x + F.dropout(scores, 0.2, self.training) @ y
        return x


def sequences(b: int, t: int) -> Tensor:
    return torch.randn(b, t, WIDTH, generator=torch.Generator().manual_seed(b * 100 + t))


def backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    y.pow(2).mean().backward()
    return [y.detach()]


def peak(model: nn.Module, x: Tensor) -> int:
    """The bytes of a step, with parameters, their earlier gradients and the batch."""
    held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), x]
    return sum(t.nbytes for t in held) + peak_above_entry(lambda: backward(model, x), CPU)[0]


SHAPES = ((6, 40), (3, 17), (2, 40), (WIDTH, WIDTH), (4, 4), (2, 2), (1, 9), (3, 1), (6, 33))


def test_gradients_of_different_lengths_accumulate_within_the_budget() -> None:
    largest = sequences(*SHAPES[0])
    planned, plain = planned_and_plain(Encoder(), largest, budget="75%", reserved=["gradients"], **MEASURED)
    budget = planned.plan.budget
    for at, sizes in enumerate(SHAPES):
        if at % 3 == 0:
            for model in (planned, plain):
                model.zero_grad(set_to_none=True)
        x = sequences(*sizes)
        equal_after(lambda model, x=x: backward(model, x), planned, plain)
    for sizes in SHAPES:  # now all parameters have gradients
        assert peak(planned, sequences(*sizes)) <= budget
    stats = rematplan.planning(planned).stats()
    assert (stats.captures, stats.open_captures, stats.reasons) == (3, 3, ())  # two more for sizes of 1


def test_the_peak_is_within_the_budget_at_each_shape() -> None:
    planned, plain = planned_and_plain(Encoder(), sequences(*SHAPES[0]), budget="70%", **MEASURED)
    budget = planned.plan.budget
    for sizes in SHAPES:
        for model in (planned, plain):
            model.zero_grad(set_to_none=True)
        x = sequences(*sizes)
        equal_after(lambda model, x=x: backward(model, x), planned, plain)
        for model in (planned, plain):
            model.zero_grad(set_to_none=True)
        assert peak(planned, x) <= budget
        assert planned.plan.budget == budget


def test_each_side_of_a_branch_by_length_has_one_capture() -> None:
    planned, plain = planned_and_plain(Encoder(long=12), sequences(4, 20), budget="80%")
    for sizes in ((4, 20), (3, 8), (2, 12), (5, 11), (2, 30), (4, 3)):
        x = sequences(*sizes)
        equal_after(lambda model, x=x: backward(model, x), planned, plain)
    stats = rematplan.planning(planned).stats()
    assert (stats.captures, stats.open_captures, stats.reasons) == (2, 2, ())


class Of(nn.Module):
    """A forward as a function of the module and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.function = nn.Parameter(torch.randn(WIDTH)), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


SILENT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a root": lambda m, x: x * m.w / math.sqrt(x.shape[1]),
    "a number": lambda m, x: x * m.w * float(int(x.shape[1])),
    "a float": lambda m, x: x * m.w / float(x.shape[1]),
    "a tensor": lambda m, x: x * m.w + torch.tensor([x.shape[1]]),
    "a loop": lambda m, x: torch.stack([x[:, t] * m.w * t for t in range(x.shape[1])]),
    "a list": lambda m, x: x * m.w * torch.tensor(list(range(x.shape[1])))[:, None],
    "a table": lambda m, x: x * m.w * {9: 2.0}.get(x.shape[1], 3.0),
    "a quotient": lambda m, x: x * m.w * (1.5 if x.shape[1] / 3 > 3.1 else 0.5),
    "rounding": lambda m, x: (x * m.w)[:, : round(x.shape[1] * 0.3)],
}
UNSEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "text": lambda m, x: x * m.w * len(str(x.shape[1])),
    "text of a shape": lambda m, x: x * m.w * len(f"{tuple(x.shape)}"),
    "a type": lambda m, x: (x * m.w).tanh() if type(x.shape[1]) is int else x * m.w,
}
"""Here a trace takes something else than the size."""


@pytest.mark.parametrize("name", SILENT)
def test_a_size_that_a_trace_takes_in_silence_refuses_other_sizes(name: str) -> None:
    """A capture with open sizes either fails or holds for that size only."""
    model, batch = Of(SILENT[name]), (sequences(3, 9),)
    symbols, decisions = BatchSymbols(), ValueGuardRecorder({}, batch)
    try:
        traced = trace_joint_graph(TraceRequest(model, batch, "step", model, decisions, symbols))
        assert traced.table
        step = OpenStep.of(traced.step, symbols, traced.table)
    except (NotSymbolic, ModelError):
        pass
    else:
        assert step.guard.holds(batch)
        assert not any(step.guard.holds((sequences(3, t),)) for t in (2, 8, 10, 18))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        *((n, 8) for n in ("a float", "a list", "a quotient", "text of a shape")),
        *itertools.product(("text", "a type"), (1, 100)),
    ],
)
def test_a_model_that_takes_a_size_in_silence_follows_eager_mode(name: str, first: int) -> None:
    """Also if the capture with open sizes serves no shape that was captured before."""
    options = {"budget": "100%", "on_infeasible": "eager"}
    planned, plain = planned_and_plain(Of((SILENT | UNSEEN)[name]), sequences(3, first), **options)
    for sizes in ((3, first), (3, 9), (2, 9), (4, 10), (2, 10), (3, 12)):
        x = sequences(*sizes)
        equal_after(lambda model, x=x: (model.zero_grad(), backward(model, x))[1], planned, plain)


class LongByInstance(nn.Module):
    """Takes another activation at lengths above 50, if the length is an int."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(WIDTH))

    def long(self, n: Any) -> bool:
        """Whether n is a large int."""
        return isinstance(n, int) and n > 50

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same shape, for x (batch, length, width)."""
        return (x * self.w).tanh() if self.long(x.shape[1]) else x * self.w


class LongByType(LongByInstance):
    """Asks for the type itself."""

    def long(self, n: Any) -> bool:
        """Whether n is a large int."""
        return type(n) is int and n > 50


class LongByTypes(LongByInstance):
    """Calls a function."""

    def long(self, n: Any) -> bool:
        """Whether n is a large int."""
        return a_number(n) and n > 50


def a_number(n: Any) -> bool:
    """Whether n is a number."""
    return type(n) in (float, int)


COMPARES = ("it compares the type of a value with int, and a size may be such a value",)


@pytest.mark.parametrize(
    ("model", "captures", "reasons"),
    [(LongByInstance, (2, 2), ()), (LongByType, (5, 0), COMPARES), (LongByTypes, (5, 0), COMPARES)],
)
def test_a_branch_by_the_type_of_a_size_follows_eager_mode(
    model: type[nn.Module], captures: tuple[int, int], reasons: tuple[str, ...]
) -> None:
    """Also at sizes where the branch differs from that of all shapes that were compared."""
    options = {"budget": "100%", "on_infeasible": "eager"}
    planned, plain = planned_and_plain(model(), sequences(3, 8), **options)
    for t in (8, 9, 100, 51, 50):
        x = sequences(3, t)
        equal_after(lambda m, x=x: (m.zero_grad(), backward(m, x))[1], planned, plain)
    stats = rematplan.planning(planned).stats()
    assert ((stats.captures, stats.open_captures), stats.reasons) == (captures, reasons)
