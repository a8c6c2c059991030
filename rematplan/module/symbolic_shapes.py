"""The captures of a planned module with symbolic sizes, which serve all shapes of one graph; other shapes are
captured separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from rematplan.ir import ModelError
from rematplan.module.matching_names import names_of
from rematplan.module.symbolic_forward import Found, Instance, OpenForward
from rematplan.planner.caches.latest import remember
from rematplan.runtime import guards
from rematplan.runtime.symbols.expressions import NotSymbolic

MISSES = 2
"""The number of consecutive captures with symbolic sizes that served no other known shape, after which no more are
made."""
SHAPES_MET = 1024
"""The number of shapes of calls that are remembered, so that a shape which was seen before starts no symbolic
capture."""
REMEMBERED = 4
"""The number of separately captured shapes with which a new capture with symbolic sizes is compared."""
Dimensions: TypeAlias = frozenset[tuple[int, int]]
"""Pairs: the position of a tensor in a batch, and a dimension."""


def _smallest(batch: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return where a batch has sizes 0 and 1, which PyTorch treats specially, as (tensor, dimension, size)."""
    return [
        (at, dim, size) for at, t in enumerate(batch) for dim, size in enumerate(t.shape) if size in (0, 1)
    ]


@dataclass
class OpenShapes:
    """The captures for calls that differ only in sizes: with symbolic sizes if possible, otherwise one for each
    shape."""

    forwards: list[OpenForward] = field(default_factory=list)
    """The captures with symbolic sizes, the one used last first."""
    opened: int = 0
    """How many of them were made, those included that were dropped since."""
    known: list[tuple[list[torch.Tensor], Found]] = field(default_factory=list)
    """The last shapes that were captured separately: fake tensors of these shapes, and the results."""
    met: dict[tuple[torch.Size, ...], bool] = field(default_factory=dict)
    """The last shapes of calls. True: the first call of a shape filled a dictionary, so the next one is expected to
    have another graph."""
    misses: int = 0
    """How many latest captures in succession served no known shape but their own, although another one has sizes 0 and
    1 at the same places."""
    reason: str = ""
    """Why no more captures with symbolic sizes are made; empty if they are."""
    limited: str = ""
    """Why only sizes in which the batch differs from a known shape get symbols; empty if all sizes do."""
    fixed: int = 0
    """The number of shapes that were captured separately."""
    served: int = 0
    """How often a shape was served by a capture with symbolic sizes."""
    carried: int = 0
    """How many of these needed neither a step nor a search, because a plan made at other sizes was used."""
    exceptions: dict[str, None] = field(default_factory=dict)
    """The reasons, as keys, why single shapes were captured separately."""

    def copy(self) -> OpenShapes:
        """Return a copy, for a copy of the module. Captures that are later added to one of the two do not appear in the
        other."""
        return replace(
            self,
            forwards=list(self.forwards),
            known=list(self.known),
            met=dict(self.met),
            exceptions=dict(self.exceptions),
        )

    @property
    def sources(self) -> int:
        """The number of compiled sources that serve all sizes."""
        return sum(plans.sources for forward in self.forwards for plans in forward._plans.values())

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why shapes were captured separately, or with few symbolic sizes, each once."""
        limited = self.limited and f"only sizes that vary are symbolic: {self.limited}"
        return tuple(filter(None, (self.reason or limited, *self.exceptions)))

    def find(
        self,
        state: guards.ModuleState,
        batch: Sequence[torch.Tensor],
        opened: Callable[[Dimensions | None, tuple[int, ...]], OpenForward],
        fixed: Callable[[], Found],
    ) -> Found:
        """Return the captured step for a batch: from a capture with symbolic sizes that serves it, or from a new one,
        else captured separately. The first shape starts no new one, nor do shapes met before if no numbers of selected
        elements are sizes. ``opened`` and ``fixed`` make the captures."""
        shapes = tuple(t.shape for t in batch)
        before = self.limited, self.reason
        try:
            found = self._instance(state, batch)
            # The first shape has none: a capture with symbolic sizes takes longer, and training would wait
            # for it.
            if found is None and self.known and not self.reason:
                counts = self._counts(state, batch)
                if counts or shapes not in self.met:
                    found = self._opened(state, batch, lambda dims: opened(dims, counts), fixed)
        except NotSymbolic as error:
            self.exceptions[str(error)] = None
            found = None
        if found is None:
            # A forward that refuses these sizes, even fixed ones, says nothing about symbols.
            why, (self.limited, self.reason) = (self.limited, self.reason), before
            found = self._fixed(fixed)
            self.limited, self.reason = why
        remember(self.met, shapes, found.guard.fills and shapes not in self.met, SHAPES_MET)
        return found

    def accepted(
        self, state: guards.ModuleState, batch: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Instance, guards.Guard]]:
        """Yield the symbolic captures that are valid for a batch, with its sizes and their guard."""
        for forward in self.forwards:
            with suppress(NotSymbolic):
                found = forward.accepted(state, batch)
                if found is not None:
                    yield found

    def carry(self, forward: OpenForward) -> None:
        """Count a shape that ``forward`` served with a plan of other sizes, so that its step was not made."""
        self._use(forward)
        self.carried += 1

    def known_instances(self, forward: OpenForward) -> Iterator[Instance]:
        """Yield, for each separately captured shape for which ``forward`` is valid, that capture with the shape's
        sizes."""
        for batch, known in self.known:
            with suppress(NotSymbolic):
                outcomes = known.guard.decided.outcomes == forward.guard.decided.outcomes
                counts = known.guard.decided.counts
                found = forward.accepted(None, batch, counts) if outcomes else None
                if found is not None:
                    yield found[0]

    def _counts(self, state: guards.ModuleState, batch: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the numbers that the forward takes as sizes, as the latest capture that decides alike counts them;
        empty if none does."""
        found = (one.guard.decided.counted(state.named, batch) for _, one in reversed(self.known))
        return next((counts for counts in found if counts is not None), ())

    def _instance(self, state: guards.ModuleState, batch: Sequence[torch.Tensor]) -> Found | None:
        for forward in self.forwards:
            found = forward.found(state, batch)
            if found is not None:
                self._use(forward)
                return found
        return None

    def _use(self, forward: OpenForward) -> None:
        self.misses = 0
        self.served += 1
        self._put_first(forward)

    def _put_first(self, forward: OpenForward) -> None:
        others = [one for one in self.forwards if one is not forward]
        self.forwards = [forward, *others]

    def _fixed(self, fixed: Callable[[], Found]) -> Found:
        found = fixed()
        self.fixed += 1
        self._remember(found)
        return found

    def _opened(
        self,
        state: guards.ModuleState,
        batch: Sequence[torch.Tensor],
        opened: Callable[[Dimensions | None], OpenForward],
        fixed: Callable[[], Found],
    ) -> Found | None:
        """Make a capture with symbolic sizes, and return this batch's step; if that fails, a separate capture's step if
        one was made, else None. The calls of the capture must equal those of known shapes, or of a separate capture. If
        not, fewer sizes get symbols, or none any more."""
        own, differing = None, self._differing(batch)
        try:
            forward = opened(differing if self.limited else None)
            served, forward = self._compared(forward, state)
            checked = served
            if not served:
                own = self._fixed(fixed)
                checked, forward = self._compared(forward, state)
        except ModelError as error:
            if not self.limited and len(differing) < sum(t.ndim for t in batch):
                # With symbols only where the batch differs from a known shape, as in the number of samples.
                self.limited = str(error)
                return self._opened(state, batch, opened, fixed)
            self.reason = str(error)
            return own
        found = own or forward.found(state, batch)
        self.served += own is None and found is not None
        if checked:
            self.opened += 1
            self._put_first(forward)
        alike = [known for known, _ in self.known if _smallest(known) == _smallest(batch)]
        self.misses = 0 if served else self.misses + (len(alike) > 1)
        if self.misses >= MISSES:
            varying = [
                f"dimension {dim} of argument {at} ({', '.join(filter(None, [str(size), line]))})"
                for at, dim, size, line in forward.step.fixed
                if any(known[at].shape[dim] != size for known, _ in self.known)
            ]
            self.reason = ": ".join(("its graph depends on sizes", *filter(None, [", ".join(varying)])))
        return found

    def _differing(self, batch: Sequence[torch.Tensor]) -> Dimensions:
        """Return the dimensions in which a batch differs from at least one known shape."""
        return frozenset(
            (at, dim)
            for known, _ in self.known
            for at, (a, b) in enumerate(zip(known, batch, strict=True))
            for dim, (x, y) in enumerate(zip(a.shape, b.shape, strict=True))
            if x != y
        )

    def _compared(self, forward: OpenForward, state: guards.ModuleState) -> tuple[bool, OpenForward]:
        """Compare a new symbolic capture with known shapes. Return whether it serves one, and the capture, with calls
        and values named as in the last one that it serves. `NotSymbolic` if calls differ."""
        served = False
        for batch, known in self.known:
            outcomes = known.guard.decided.outcomes == forward.guard.decided.outcomes
            if not (outcomes and known.guard.holds_for(state)):
                continue
            found = forward.found(None, batch, known.guard.decided.counts)
            if found is None:
                continue
            served = True
            names = names_of(found.step, known.step)
            if names is None:
                raise NotSymbolic("with open sizes it makes other calls than with fixed ones")
            forward = replace(forward, step=forward.step.renamed(names))
        return served, forward

    def _remember(self, found: Found) -> None:
        step = found.step
        batch = {int(i.target): step.values[i.value].fake for i in step.inputs if i.kind == "batch"}
        if sorted(batch) == list(range(len(batch))):
            self.known = [*self.known, ([batch[at] for at in range(len(batch))], found)][-REMEMBERED:]
