"""Find the forward tensors that inverses can recover from what is still live when the forward frees them.

Let S be a forward tensor. After the last forward op that reads S, certain tensors are live, and everything later is
computed from them. S is *recoverable* if an inverse computes it from these live tensors, the inputs, and tensors of
negligible size. Anything else that the inverse reads must come from other inverses, or from ops that do not depend
on S and that S does not depend on.

Example: an additive coupling computes y₂ = x₂ + G(y₁). Afterwards y₁ and y₂ are live, so x₂ = y₂ − G(y₁) is
recoverable. The input of an ordinary residual block y = x + F(x) is not recoverable: only y is live, and F(x) needs
x.

A tensor is recovered only if the backward half needs it, directly or to recover another tensor, and only if
recovering it frees more bytes than it keeps live.

Inverses that serve no recovery are of no use to any plan. Whether a plan may run an inverse at a given place is
decided by the simulator: the tensors that it reads must be resident there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rematplan.ir.training_graph import Op, TrainingGraph

NEGLIGIBLE_RATIO = 16
"""A tensor this many times smaller than the recovered one is treated as always live."""
MOST_TENSORS_SEARCHED = 4000
"""The largest number of tensors that the search for one recovery visits."""


@dataclass(frozen=True)
class Recovery:
    """How one tensor is recovered by an inverse.

    ``tensor``: its name. ``inverse``: the op that writes it. ``steps``: all ops and inverses to run, in a valid
    order, from tensors that are still live after the last forward op that reads ``tensor``; the last step is
    ``inverse``.
    """

    tensor: str
    inverse: Op
    steps: tuple[Op, ...]
    others: tuple[Op, ...] = ()
    """Other inverses that could write the tensor."""

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """The names of the tensors that must be resident before the recovery: its steps read them, and no step
        writes them."""
        made = {t for step in self.steps for t in step.writes}
        return tuple(t for t in dict.fromkeys(t for s in self.steps for t in s.reads) if t not in made)

    @property
    def used(self) -> tuple[Op, ...]:
        """All ops and inverses that the recovery may run: its steps, and the other inverses that write the tensor."""
        return (*self.steps, *self.others)


def recoveries(graph: TrainingGraph) -> dict[str, Recovery]:
    """Return, for each tensor that is worth recovering by inverses, how to recover it, by tensor name.

    A tensor can be recovered if inverses compute it from what is still live after the last forward op that reads it.
    That is worth it if the backward half needs the tensor, directly or to recover another tensor, and if the
    recovery frees more bytes than it keeps live.
    """
    look = _Look(graph)
    targets = dict.fromkeys(t for inverse in graph.inverses for t in inverse.writes)
    found = {t: r for t in targets if (r := look.recover(t)) is not None}
    wanted = {t for op in graph.ops if op.phase == "backward" for t in op.reads}
    serving = _serving(found, wanted)
    while True:
        # Also recover tensors whose steps read recovered tensors and write something the backward half needs.
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
    return _gainful(look, {t: r for t, r in found.items() if t in serving}, wanted)


def _serving(found: dict[str, Recovery], wanted: Iterable[str]) -> set[str]:
    """Return the recoverable tensors among ``wanted``, and all recoverable tensors that these recoveries read."""
    pending, serving = list(wanted), set()
    while pending:
        tensor = pending.pop()
        if tensor in found and tensor not in serving:
            serving.add(tensor)
            pending += [t for recipe in found[tensor].used for t in recipe.reads]
    return serving


def last_forward_read(graph: TrainingGraph) -> dict[str, int]:
    """Return, for each tensor that the forward half reads, the position in ``graph.ops`` of its last reader there."""
    forward = ((i, op) for i, op in enumerate(graph.ops) if op.phase != "backward")
    return {t: i for i, op in forward for t in op.reads}


def _gainful(look: _Look, found: dict[str, Recovery], wanted: set[str]) -> dict[str, Recovery]:
    """Return the recoveries that free more bytes than they keep live.

    Keeping a norm's output instead of its input, for example, gains nothing, because both have the same size.
    Tensors that are recovered from each other are judged as one group.
    """
    size, inputs = look.graph.size, look.inputs
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
            h for h in kept if h not in wanted and h not in look.outputs
        )
    good = {g for g in spared if sum(size[t] for t in spared[g]) > sum(size[t] for t in resident[g])}
    return {t: r for t, r in found.items() if root(t) in good}


class _Look:
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
        """For each op, the ops that it depends on and itself, as a bit mask."""
        found: list[int] = []
        producer = self.graph.producer
        for i, op in enumerate(self.graph.ops):
            mask = 1 << i
            for t in op.reads:
                if t in producer:
                    mask |= found[producer[t]]
            found.append(mask)
        return found

    @cached_property
    def never(self) -> frozenset[str]:
        """The tensors that only backward ops write."""
        return frozenset(t for o in self.graph.ops if o.phase == "backward" for t in o.writes)

    def recover(self, target: str) -> Recovery | None:
        if target not in self.makers or target not in self.last_read or target in self.never:
            return None
        return _RecoverySearch(self, target).found()


class _RecoverySearch:
    """The search for the recovery of one tensor.

    First the usable ops are collected backwards from the tensor's inverses. Then everything that they can compute
    is computed forwards.
    """

    def __init__(self, look: _Look, target: str) -> None:
        self.look, self.target = look, target
        self.before = look.ancestors[look.graph.producer[target]]
        self.moment = look.last_read[target]
        self.limit = look.graph.size[target] // NEGLIGIBLE_RATIO

    def _is_resident(self, tensor: str) -> bool:
        look = self.look
        if tensor in look.inputs:
            return True
        if tensor in look.never:
            return False
        if look.graph.size[tensor] <= self.limit:
            return True
        made = look.graph.producer[tensor]
        # A tensor that no forward op reads is live because the backward half or an output needs it.
        last = look.last_read.get(tensor, len(look.graph.ops))
        return made <= self.moment and (last > self.moment or tensor in look.outputs)

    def _recipes(self, tensor: str) -> Iterable[Op]:
        """Yield the ops that could write a tensor that is not live: its own op, if it has run already and the
        target does not depend on it; and its inverses."""
        producer = self.look.graph.producer[tensor]
        op = self.look.graph.ops[producer]
        if producer <= self.moment and not self.before >> producer & 1 and op.name not in self.look.once:
            yield op
        yield from self.look.makers.get(tensor, ())

    def _wanted(self) -> dict[str, Op]:
        """Return all ops that may be useful, by name."""
        recipes = {r.name: r for r in self.look.makers[self.target]}
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
        recipes = self._wanted()
        missing = {name: {t for t in r.reads if not self._is_resident(t)} for name, r in recipes.items()}
        waiting: dict[str, list[str]] = {}
        for name, lacks in missing.items():
            for t in lacks:
                waiting.setdefault(t, []).append(name)
        ready = [name for name, lacks in missing.items() if not lacks]
        by: dict[str, Op] = {}
        ends: list[Op] = []
        while ready:
            recipe = recipes[ready.pop(0)]
            if self.target in recipe.writes:
                ends.append(recipe)
                continue
            for t in recipe.writes:
                if t not in by:
                    by[t] = recipe
                    for name in waiting.get(t, ()):
                        missing[name].discard(t)
                        if not missing[name]:
                            ready.append(name)
        if not ends:
            return None
        return Recovery(self.target, ends[0], self._steps(ends[0], by), tuple(ends[1:]))

    def _steps(self, end: Op, by: dict[str, Op]) -> tuple[Op, ...]:
        """Return the ops that ``end`` needs and ``end``, each once, in an order in which they can run."""
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
            stack += [(by[t], False) for t in recipe.reads if not self._is_resident(t)]
        return tuple(order.values())
