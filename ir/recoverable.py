"""Find the forward tensors that can be freed in the forward half and recovered by inverses in the backward
half.

S is *recoverable* if inverses and ops that do not depend on S compute it from what is live after its last
forward read. Example: y₂ = x₂ + G(y₁) leaves y₁ and y₂ live, so x₂ = y₂ − G(y₁). Of y = x + F(x) only y is
live, and F(x) needs x.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rematplan.ir.training_graph import Op, TrainingGraph

NEGLIGIBLE_RATIO = 16
"""A forward tensor at least this many times smaller than the tensor to be recovered is treated as always live."""
MOST_TENSORS_SEARCHED = 4000
"""The largest number of tensors that the search for one recovery visits."""


@dataclass(frozen=True)
class Recovery:
    """How one forward tensor is recovered after it has been freed."""

    tensor: str
    inverse: Op
    """The inverse that writes the tensor."""
    steps: tuple[Op, ...]
    """The ops and inverses to run, in a valid order from live tensors, ``inverse`` last."""
    others: tuple[Op, ...] = ()
    """Further inverses that can write the tensor, as alternatives to ``inverse``."""

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """The names of the tensors that the steps read and that none of them writes."""
        made = {t for step in self.steps for t in step.writes}
        return tuple(t for t in dict.fromkeys(t for s in self.steps for t in s.reads) if t not in made)

    @property
    def used(self) -> tuple[Op, ...]:
        """All ops and inverses that may recover the tensor: ``steps``, and the alternative inverses ``others``."""
        return (*self.steps, *self.others)


def recoveries(graph: TrainingGraph) -> dict[str, Recovery]:
    """Return, by tensor name, the recoveries of use to the backward half: of tensors that it or other recoveries read,
    or with an intermediate result that it reads. Left out are those that do not free more bytes than they keep live."""
    tables = _StepTables(graph)
    targets = dict.fromkeys(t for inverse in graph.inverses for t in inverse.writes)
    found = {t: r for t in targets if (r := tables.recover(t)) is not None}
    wanted = {t for op in graph.ops if op.phase == "backward" for t in op.reads}
    serving = _serving(found, wanted)
    while True:
        # Also keep a recovery whose intermediate steps read recovered tensors and write tensors that backward ops read.
        more = {
            t
            for t, r in found.items()
            if t not in serving
            and any(not found.keys().isdisjoint(step.reads) for step in r.steps[:-1])
            and any(not wanted.isdisjoint(step.writes) for step in r.steps[:-1])
        }
        if not more:
            break
        serving |= _serving(found, more)
    return _gainful(tables, {t: r for t, r in found.items() if t in serving}, wanted)


def _serving(found: dict[str, Recovery], wanted: Iterable[str]) -> set[str]:
    """Return the recoverable tensors among ``wanted``, and the recoverable ones that their recoveries may read, in
    turn."""
    pending, serving = list(wanted), set()
    while pending:
        tensor = pending.pop()
        if tensor in found and tensor not in serving:
            serving.add(tensor)
            pending += [t for recipe in found[tensor].used for t in recipe.reads]
    return serving


def last_forward_read(graph: TrainingGraph) -> dict[str, int]:
    """Return the position in ``graph.ops`` of the last forward op that reads each tensor, by tensor name.

    Tensors that no forward op reads are absent.
    """
    forward = ((i, op) for i, op in enumerate(graph.ops) if op.phase != "backward")
    return {t: i for i, op in forward for t in op.reads}


def _gainful(tables: _StepTables, found: dict[str, Recovery], wanted: set[str]) -> dict[str, Recovery]:
    """Return the recoveries that free more bytes than they keep live. Recoveries that need each other count as one
    group. ``wanted``: the tensors that backward ops read."""
    size, inputs = tables.graph.size, tables.inputs
    group = {t: t for t in found}

    def root(t: str) -> str:
        while group[t] != t:
            group[t] = group[group[t]]
            t = group[t]
        return t

    for t, recovery in found.items():
        for h in recovery.needed:
            if h in found:
                group[root(t)] = root(h)
    spared: dict[str, set[str]] = {}
    resident: dict[str, set[str]] = {}
    for t, recovery in found.items():
        made = {w for step in recovery.steps for w in step.writes}
        spared.setdefault(root(t), set()).update(wanted & made)
        kept = (h for h in recovery.needed if h not in inputs and h not in found)
        resident.setdefault(root(t), set()).update(
            h for h in kept if h not in wanted and h not in tables.outputs
        )
    # For example, to keep a norm's output for its equally large input gains nothing.
    good = {g for g in spared if sum(size[t] for t in spared[g]) > sum(size[t] for t in resident[g])}
    return {t: r for t, r in found.items() if root(t) in good}


class _StepTables:
    """Tables about a planning problem that all searches for recoveries read: readers, writers and ancestors."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.inputs = set(graph.inputs)
        self.outputs = set(graph.outputs)
        self.once = set(graph.never_rerun)
        self.last_read = last_forward_read(graph)
        self.makers: dict[str, list[Op]] = {}
        for inverse in graph.inverses:
            for t in inverse.writes:
                self.makers.setdefault(t, []).append(inverse)

    @cached_property
    def ancestors(self) -> list[int]:
        """For each position in ``graph.ops``, a bit mask of positions: the op's and those of all ops that it needs."""
        found: list[int] = []
        producer = self.graph.producer
        for i, op in enumerate(self.graph.ops):
            mask = 1 << i
            for t in op.reads:
                if t in producer:
                    mask |= found[producer[t]]
            found.append(mask)
        return found

    def given(self, op: int) -> bool:
        """Return whether an op reads nothing and may run only once, such as one that saves a random generator's state.
        Its results stay resident."""
        return not self.graph.ops[op].reads and self.graph.ops[op].name in self.once

    @cached_property
    def never(self) -> frozenset[str]:
        """The names of the tensors that backward ops write."""
        return frozenset(t for o in self.graph.ops if o.phase == "backward" for t in o.writes)

    def recover(self, target: str) -> Recovery | None:
        """Return how to recover a tensor; None if nothing recovers it, no forward op reads it, or a backward op writes
        it."""
        if target not in self.makers or target not in self.last_read or target in self.never:
            return None
        return _RecoverySearch(self, target).found()


class _RecoverySearch:
    """Searches for ops and inverses that recover the tensor ``target``.

    First it collects candidates, from ``target`` to what they read (`_wanted`). Then it runs through them from the
    resident tensors on (`found`), and keeps those that lead to ``target``.
    """

    def __init__(self, tables: _StepTables, target: str) -> None:
        self.tables, self.target = tables, target
        self.before = tables.ancestors[tables.graph.producer[target]]
        self.moment = tables.last_read[target]
        self.limit = tables.graph.size[target] // NEGLIGIBLE_RATIO

    def _is_resident(self, tensor: str) -> bool:
        """Return whether a tensor counts as resident after the target's last forward read. Inputs, states saved once
        and small tensors do, results of backward ops never, others if they are written before and needed later."""
        tables = self.tables
        if tensor in tables.inputs:
            return True
        if tensor in tables.never:
            return False
        made = tables.graph.producer[tensor]
        if tables.graph.size[tensor] <= self.limit or tables.given(made):
            return True
        # A tensor that no forward op reads is live because the backward half or an output needs it.
        last = tables.last_read.get(tensor, len(tables.graph.ops))
        return made <= self.moment and (last > self.moment or tensor in tables.outputs)

    def _recipes(self, tensor: str) -> Iterable[Op]:
        """Yield the ops and inverses that may compute ``tensor`` again after it was freed."""
        producer = self.tables.graph.producer[tensor]
        op = self.tables.graph.ops[producer]
        # The op must have run by the target's last forward read, and be independent of the target.
        if producer <= self.moment and not self.before >> producer & 1 and op.name not in self.tables.once:
            yield op
        yield from self.tables.makers.get(tensor, ())

    def _wanted(self) -> dict[str, Op]:
        """Return, by name, the ops and inverses that may take part in recovering the target, up to
        `MOST_TENSORS_SEARCHED` tensors.
        """
        recipes = {r.name: r for r in self.tables.makers[self.target]}
        pending = [t for r in recipes.values() for t in r.reads]
        seen = {self.target}
        while pending and len(seen) < MOST_TENSORS_SEARCHED:
            tensor = pending.pop()
            if tensor in seen or self._is_resident(tensor):
                continue
            seen.add(tensor)
            for recipe in self._recipes(tensor):
                if recipe.name not in recipes and self.target not in recipe.reads:
                    recipes[recipe.name] = recipe
                    pending += recipe.reads
        return recipes

    def found(self) -> Recovery | None:
        """Return a recovery by the first inverse of the target that can run, the others as alternatives; None if none
        can."""
        recipes = self._wanted()
        missing = {name: {t for t in r.reads if not self._is_resident(t)} for name, r in recipes.items()}
        waiting: dict[str, list[str]] = {}
        for name, lacks in missing.items():
            for t in lacks:
                waiting.setdefault(t, []).append(name)
        ready = [name for name, lacks in missing.items() if not lacks]
        maker: dict[str, Op] = {}
        ends: list[Op] = []
        while ready:
            recipe = recipes[ready.pop(0)]
            if self.target in recipe.writes:
                ends.append(recipe)
                continue
            for t in recipe.writes:
                if t not in maker:
                    maker[t] = recipe
                    for name in waiting.get(t, ()):
                        missing[name].discard(t)
                        if not missing[name]:
                            ready.append(name)
        if not ends:
            return None
        return Recovery(self.target, ends[0], self._steps(ends[0], maker), tuple(ends[1:]))

    def _steps(self, end: Op, maker: dict[str, Op]) -> tuple[Op, ...]:
        """Return the ops to run in a valid order, then ``end``. ``maker``: by tensor, what writes it."""
        order: dict[str, Op] = {}
        stack = [(end, False)]
        while stack:
            recipe, done = stack.pop()
            if recipe.name in order:
                continue
            if done:
                order[recipe.name] = recipe
                continue
            stack.append((recipe, True))
            stack += [(maker[t], False) for t in recipe.reads if not self._is_resident(t)]
        return tuple(order.values())
