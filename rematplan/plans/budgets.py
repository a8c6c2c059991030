"""Read budgets from text, such as ``4GiB``, ``60%``, ``50% of activations`` or ``min``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.auto.min_budget_plan import MIN_BUDGET
from rematplan.planner.strategies.store_all import no_recompute

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
"""The number of bytes of each unit. Units are in lower case."""

FEW = 2**20
"""A budget that is a number without a unit and below this many bytes may lack its unit by mistake."""

LEAN: Mapping[str, float] = {"min": MIN_BUDGET.slack, "least": 0.0}
"""Budgets that depend on the smallest peak found for a problem: by what share of it a plan's peak may exceed it."""

_NUMBER = re.compile(
    r"([0-9]{1,24}(?:\.[0-9]{1,24})?) ?(% of activations|%|[a-z]*)", re.IGNORECASE | re.ASCII
)
FORMS: Mapping[str, str] = {
    "bytes": "4GiB, 512MB, a whole number of bytes",
    "share": "60% (of the no-recompute peak)",
    "activations": "50% of activations (inputs and gradients stay whole)",
    "min": "min (within 1 % of the smallest found, as cheap as possible)",
    "least": "least (the smallest found itself)",
}
"""How to write each kind of budget, for messages."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget that was read from text. Its number of bytes may depend on the planning problem."""

    text: str
    """The budget as the user wrote it."""
    kind: str
    """How the bytes follow.

    - ``bytes``: a number of them.
    - ``share``: a share of the peak without recomputation.
    - ``activations``: the bytes of inputs and outputs, plus a share of the rest of that peak.
    - ``min``: at most 1 % above the smallest peak found.
    - ``least``: the smallest peak found.
    """
    amount: Fraction
    """The number of bytes, or the share (0.6 for 60%); 0 for ``min`` and ``least``."""

    def bytes(self, base_peak: int, smallest: Callable[[], int], whole: int | None = None) -> int:
        """Return the budget in bytes, rounded down. ``base_peak``: the peak without recomputation. ``smallest`` returns
        the smallest peak found, and is called for ``min`` and ``least`` only. ``whole`` (`whole_bytes`) is needed for
        ``activations`` only."""
        if self.is_lean:
            peak = smallest()
            return peak + int(LEAN[self.kind] * peak)
        if self.kind == "activations":
            assert whole is not None, "a share of activations is asked for, and nobody says what is none"
            return whole + int(self.amount * (base_peak - whole))
        return int(self.amount * (base_peak if self.kind == "share" else 1))

    @property
    def fixed(self) -> int | None:
        """The bytes of a budget of kind ``bytes``, rounded down; None for other kinds, whose bytes depend on the
        problem."""
        return int(self.amount) if self.kind == "bytes" else None

    @property
    def is_lean(self) -> bool:
        """Whether the budget is ``min`` or ``least``, so that its bytes depend on the smallest peak found."""
        return self.kind in LEAN

    @property
    def is_percentage(self) -> bool:
        """Whether the budget is a share of the peak without recomputation, or of the activations."""
        return self.kind in ("share", "activations")

    def of(self, graph: TrainingGraph, smallest: Callable[[], int] = lambda: 0) -> int:
        """Return the budget in bytes for a planning problem. ``smallest`` returns the smallest peak found; only ``min``
        and ``least`` need it."""
        return self.bytes(no_recompute(graph).estimate.peak, smallest, whole_bytes(graph))


def whole_bytes(graph: TrainingGraph) -> int:
    """Return the bytes of a problem's inputs (parameters, buffers, batch) and outputs (gradients, new buffers),
    which every plan holds at the end."""
    return sum(graph.size[t] for t in {*graph.inputs, *graph.outputs})


def parse_budget(text: str, kinds: Collection[str] = tuple(FORMS), name: str = "budget") -> Budget:
    """Read a budget of one of ``kinds`` (keys of `FORMS`), such as ``4GiB``, ``60%``, ``50% of activations``, ``min``
    or a whole number of bytes. `UsageError` for other text; its message calls the budget ``name``."""
    budget = _parsed(text)
    if budget is not None and budget.kind in kinds:
        return budget
    *forms, last = (form for kind, form in FORMS.items() if kind in kinds)
    raise UsageError(
        f"{name} {text[:40]!r} is not {'understood' if budget is None else 'possible here'}; write "
        f"{', '.join(forms)}{' or ' if forms else ''}{last}"
    )


def _parsed(text: str) -> Budget | None:
    """Return the budget that a text states, of any kind; None if it is not understood."""
    if (word := text.strip().lower()) in LEAN:
        return Budget(text, word, Fraction(0))
    match = _NUMBER.fullmatch(text.strip())
    if match:
        number, unit = Fraction(match[1]), match[2].lower()
        if unit == "%":
            return Budget(text, "share", number / 100)
        if unit.startswith("%"):
            return Budget(text, "activations", number / 100)
        if unit in UNITS and (UNITS[unit] > 1 or number.denominator == 1):  # there is no half byte
            return Budget(text, "bytes", number * UNITS[unit])
    return None


def unit_missing(budget: Budget, graph: TrainingGraph) -> str:
    """Return a question such as ``was 4GiB meant?`` for a whole number without a unit that is positive, below 1 MiB,
    and at most the bytes of the problem's inputs; else an empty string."""
    number = budget.text.strip()
    if not (number.isdecimal() and 0 < budget.amount < FEW and budget.amount <= graph.input_bytes):
        return ""
    if budget.amount > 100:  # more than 100 cannot be a percentage
        return f"a number alone is bytes: was {number}MiB meant?"
    return f"a number alone is bytes: was {number}GiB or {number}% (of the no-recompute peak) meant?"


def parse_loss_memory(text: str) -> Budget:
    """Read a loss's memory: bytes such as ``1GiB``, or ``3x`` (three tensors of the outputs' size), which becomes a
    budget of kind ``share``. `UsageError` for other text."""
    match = _NUMBER.fullmatch(text.strip())
    if match and match[2].lower() == "x":
        return Budget(text, "share", Fraction(match[1]))
    if match and not match[2].startswith("%"):
        return parse_budget(text, ("bytes",), "loss_memory")
    raise UsageError(
        f"loss_memory {text[:40]!r} is not understood; write 1GiB, 512MB, a whole number of bytes, or 3x (three "
        f"tensors of the outputs' size, their gradients among them)"
    )
