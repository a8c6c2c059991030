"""Find the first op of a recomputation whose result differs from the forward's, and its known cause."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import takewhile

import torch

from rematplan.auditing.recomputations import OpRun, Region, Value

ROUNDING = 1e-3
"""The largest relative difference of an op's result that may be a rounding error, if nothing more is known."""
GROWTH = 1e4
"""A rounding error of an op explains errors of results that are at most this many times larger."""
INTEGERS = (torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True)
class FirstDifference:
    """The first op of a region whose recomputation differs from the forward."""

    region: Region
    first: OpRun
    """The op's run in the forward."""
    again: OpRun
    """The op's run in the recomputation."""

    @property
    def error(self) -> float:
        """The relative L2 error of the op's first result."""
        return _error(self.first, self.again)

    def explains(self, error: float) -> bool:
        """Return whether the difference is large enough to explain the relative error ``error`` of a result; another
        autocast state always is."""
        same_cast = self.first.autocast == self.again.autocast
        return not (same_cast and 0 < self.error < ROUNDING and GROWTH * self.error < error)


@dataclass(frozen=True)
class Cause:
    """A known cause of a difference. ``applies``: whether a difference has this cause. ``advice``: what to change."""

    name: str
    applies: Callable[[FirstDifference], bool]
    advice: str


def draws_on_the_host(region: Region) -> bool:
    """Return whether NumPy's or Python's numbers are drawn in a region, and others when it is recomputed."""
    states = region.host_states
    return len(states) > 2 and states[0] != states[1] and states[0] != states[2]


def _draws_left_out(d: FirstDifference) -> bool:
    return _draws_before(d.region.first, d.first) > _draws_before(d.region.again, d.again)


def _draws_before(runs: Sequence[OpRun], last: OpRun) -> int:
    return sum(bool(run.draws) for run in takewhile(lambda run: run is not last, runs))


def _other_module(d: FirstDifference) -> bool:
    return bool(d.again.module) and all(run.module != d.again.module for run in d.region.first)


def _cache_extended(d: FirstDifference) -> bool:
    if not (d.first.op == d.again.op == "cat" and d.first.values and d.again.values):
        return False
    return math.prod(d.first.values[0][1]) < math.prod(d.again.values[0][1])


def _op_left_out(d: FirstDifference) -> bool:
    again = set(map(_key, d.region.again))
    missed = {value for run in d.region.first if _key(run) not in again for value in run.values}
    return bool(missed & set(d.first.read) - set(d.again.read))


def _swapped(d: FirstDifference) -> bool:
    """Return whether the recomputation reads one result of the forward, not of integers, in place of another that was
    not computed from it."""
    made = {v: run for run in d.region.first for v in run.values if not run.op.endswith("_")}
    wanted, read = set(d.first.read) - set(d.again.read), set(d.again.read) - set(d.first.read)
    sources: set[Value] = set()
    todo = list(wanted)
    while todo:
        if (value := todo.pop()) not in sources:
            sources.add(value)
            todo += made[value].read if value in made else ()
    others = (read & made.keys()) - sources
    return bool(wanted & made.keys()) and any(kind not in INTEGERS for kind, *_ in others)


def _read_changed(d: FirstDifference) -> bool:
    return any(a != b for a, b in zip(d.first.read, d.again.read, strict=False))


OWN_GENERATOR = "a random number generator of the model's own draws again"
ON_HOST = "NumPy's or Python's random numbers are drawn again"
CAUSES = (
    Cause(
        "autocast is lost in the recomputation",
        lambda d: d.first.autocast != d.again.autocast,
        "enter the forward's autocast state in the backward before running the function again, as "
        "torch.utils.checkpoint does",
    ),
    Cause(
        "random numbers are drawn again",
        lambda d: d.again.draws == "global",
        "leave out preserve_rng_state=False; a hand-made Function must save the random state and set it again",
    ),
    Cause(
        OWN_GENERATOR,
        lambda d: d.again.draws == "own",
        "torch.utils.checkpoint restores PyTorch's global generators only: draw outside of the checkpoint, and pass "
        "the numbers in",
    ),
    Cause(
        "the recomputation leaves out random numbers, as dropout does in eval mode,",
        _draws_left_out,
        "run the function again in the mode of the forward: do not call eval() in a backward",
    ),
    Cause(
        ON_HOST,
        lambda d: draws_on_the_host(d.region),
        "torch.utils.checkpoint does not restore these generators: draw with torch, or outside of the checkpoint",
    ),
    Cause(
        "the recomputation runs other modules than the forward",
        _other_module,
        "a function defined in a loop must bind the loop's variable: lambda x, block=block: block(x); layers must not "
        "be skipped by chance",
    ),
    Cause(
        "a cache, as one of keys and values, is extended again",
        _cache_extended,
        "train without the cache (Hugging Face: use_cache=False), or extend it outside of the checkpoint",
    ),
    Cause(
        "the recomputation reads one result of the forward in place of another, as swapped halves",
        _swapped,
        "an inverse must give the halves of a tensor in the order in which the forward has them",
    ),
    Cause(
        "the recomputation leaves out an op whose result the forward reads",
        _op_left_out,
        "compute in the backward what the forward computes, every op of it",
    ),
    Cause(
        "the recomputation reads another tensor than the forward",
        _read_changed,
        "do not change buffers, parameters or inputs of a checkpointed region before its backward; a hand-made "
        "Function must save what its forward reads; an inverse must be exact, with halves in their order",
    ),
    Cause(
        "the recomputation reads another number than the forward",
        lambda d: d.first.numbers != d.again.numbers,
        "pass the number into the checkpoint as an argument",
    ),
    Cause(
        "the op gives other results for equal inputs",
        lambda d: d.first.op == d.again.op and d.first.read == d.again.read,
        "make the op deterministic (torch.use_deterministic_algorithms)",
    ),
    Cause(
        "the recomputation runs other ops",
        lambda _: True,
        "the function must not decide by state that changes between the forward and the backward",
    ),
)
"""The known causes; the first that applies is reported."""


class _Kind(Enum):
    """The kinds of differences between two runs, by priority: of the earliest kind found, the first difference is
    reported."""

    SURE = auto()
    """It is the fault, whatever else differs."""
    CAST = auto()
    """Another autocast state, before any value differs."""
    EXTENDED = auto()
    """A cache is longer."""
    ROUNDING = auto()
    """Values differ by no more than rounding."""
    OTHER = auto()
    """Another op: PyTorch computes some functions in other ways without gradients."""


def cause_of(difference: FirstDifference) -> Cause:
    """Return the known cause of a difference."""
    return next(cause for cause in CAUSES if cause.applies(difference))


def first_difference(region: Region, other_ops: bool) -> FirstDifference | None:
    """Return the first op whose result or autocast state differs, one beyond rounding if possible; None if there is
    none. Ops of only one run count with ``other_ops``, if they are of other modules, or if the region draws NumPy's or
    Python's numbers again."""
    found: dict[_Kind, FirstDifference] = {}
    for first, again in _pairs(region):
        difference = FirstDifference(region, first, again)
        kind = _kind(difference)
        if kind is None or _follows(difference, found):
            continue
        if kind is _Kind.SURE:
            return difference
        found.setdefault(kind, difference)
    return next(
        (found[kind] for kind in _Kind if kind in found and (other_ops or kind is not _Kind.OTHER)), None
    )


def _kind(d: FirstDifference) -> _Kind | None:
    """Return what kind of difference there is between two runs; None if there is none."""
    same_op = _key(d.first) == _key(d.again)
    if d.first.autocast != d.again.autocast:
        return _Kind.SURE if same_op and d.first.values != d.again.values else _Kind.CAST
    if not same_op:
        return _Kind.SURE if _other_module(d) or draws_on_the_host(d.region) else _Kind.OTHER
    if d.first.values == d.again.values:
        return None
    if _cache_extended(d):
        return _Kind.EXTENDED
    return _Kind.ROUNDING if 0 < d.error < ROUNDING else _Kind.SURE


def _follows(d: FirstDifference, found: Mapping[_Kind, FirstDifference]) -> bool:
    """Return whether a difference may follow from one in ``found``: from another autocast state or, in a run of the
    same op, from an extended cache."""
    if d.first.autocast != d.again.autocast:
        return False
    if _Kind.CAST in found:
        return True
    if _Kind.EXTENDED not in found or _key(d.first) != _key(d.again):
        return False
    # Maybe nobody reads the longer cache. A draw of the same shape is a cause of its own.
    return not (d.again.draws and d.first.values[0][:2] == d.again.values[0][:2])


def left_to_stop_early(region: Region) -> str:
    """Return the module of the first op that a recomputation no longer runs, or of the last op if it runs all."""
    ran = [first for first, _ in _pairs(region)]
    at = next((i for i, run in enumerate(region.first) if ran and run is ran[-1]), -1)
    return region.first[min(at + 1, len(region.first) - 1)].module if region.first else region.module


def chooses_others(region: Region) -> str:
    """Return the name of the first op, such as a router's topk, whose integer results differ in the recomputation;
    empty if there is none."""
    found = (f for f, a in _pairs(region) if _key(f) == _key(a) and _whole(f) and f.values != a.values)
    return next((f"{f.op} in {f.module}" if f.module else f.op for f in found), "")


def _whole(run: OpRun) -> bool:
    return run.op in ("topk", "sort", "argsort", "argmax", "max", "nonzero", "multinomial") and any(
        value[0] in INTEGERS for value in run.values
    )


def _key(run: OpRun) -> tuple[str, str]:
    return run.op, run.module


def _pairs(region: Region) -> Iterator[tuple[OpRun, OpRun]]:
    """Yield pairs of a run of the forward and of the recomputation, without runs that the recomputation left out. A run
    without its like in the forward is paired with the next one there."""
    places = defaultdict[tuple[str, str], list[int]](list)
    for i, run in enumerate(region.first):
        places[_key(run)].append(i)
    at = 0
    for again in region.again:
        found = next((i for i in places.get(_key(again), ()) if i >= at), None)
        if found is None:
            if region.first:
                yield region.first[min(at, len(region.first) - 1)], again
            continue
        yield region.first[found], again
        at = found + 1


def _error(first: OpRun, again: OpRun) -> float:
    a, b = first.sample, again.sample
    if a is None or b is None or first.values[0][:2] != again.values[0][:2]:
        return math.inf
    return float((a - b).norm() / (a.norm() or 1.0))
