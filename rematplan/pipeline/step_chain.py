"""Divide a captured step into a chain of blocks of ops, which begin where modules of the model begin."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rematplan.ir import TrainingGraph, UsageError
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.pipeline.stage_chain import Groups, StageChain, blocks_at, stage_chain
from rematplan.runtime.graph.captured_step import MODEL, Call, CapturedStep, in_model
from rematplan.runtime.graph.module_names import prefixes
from rematplan.runtime.problem.random_states import drawing_op

MOST_BLOCKS = 64
"""The most blocks. Modules begin blocks from the outermost inwards, as long as there are not more."""


@dataclass(frozen=True)
class NamedChain:
    """A captured step as a chain of blocks at which stages may begin."""

    chain: StageChain
    names: tuple[str, ...]
    """The module or op with which each block begins; empty for the first."""
    batch: frozenset[str]
    """Names of inputs that differ between micro-batches."""
    outputs: int = 0
    """Bytes of the model's outputs for one micro-batch that the loss reads."""

    def positions(self, cuts: Sequence[str]) -> tuple[int, ...]:
        """Return the position of the block that each name in ``cuts`` denotes: the name of its first module or op.
        `UsageError` for an unknown name, or another order."""
        for name in cuts:
            if name not in self.names[1:]:
                near = difflib.get_close_matches(name, self.names[1:], 3, 0.3) or list(self.names[1:4])
                raise UsageError(
                    f"{self.chain.graph.name} cannot be cut at {name!r}; similar: {', '.join(near)}"
                )
        found = tuple(map(self.names.index, cuts))
        if list(found) != sorted(set(found)):
            raise UsageError(f"the cuts {', '.join(cuts)} are not in the order in which they run")
        return found


def named_chain(
    step: CapturedStep,
    graph: TrainingGraph,
    wanted: Sequence[str] = (),
    only: Collection[str] | None = None,
    prefix: str = MODEL,
) -> NamedChain:
    """Divide a captured step into blocks that begin at modules and have the modules' names; at ops, if no module can
    begin one. ``wanted``: modules to prefer; ``only``: those allowed, None for all; ``prefix``: of the names of the
    model's modules."""
    kinds = {step.values[i.value].storage: i.kind for i in step.inputs}
    owner = {i.target: step.values[i.value].storage for i in step.inputs if i.kind == "parameter"}
    gradients = {
        step.values[o.value].storage: owner[o.target]
        for o in step.outputs
        if o.kind == "gradient" and o.target in owner
    }
    batch = frozenset(name for name, kind in kinds.items() if kind == "batch")
    labels = {storage: in_model(name).removeprefix(prefix) for name, storage in owner.items()}
    begins = _begins(step, graph, wanted, only, prefix)
    if not begins:
        chain = stage_chain(graph, MOST_BLOCKS, gradients, labels)
        first: dict[int, str] = {}
        for o, block in enumerate(chain.block):
            first.setdefault(block, graph.ops[o].name)
        return NamedChain(
            chain, ("", *(first[b] for b in range(1, len(chain)))), batch, _outputs(step, prefix)
        )
    places = sorted(begins)
    blocks = blocks_at(graph, places)
    names = ("", *(begins[at] for at in places))
    chain = stage_chain(graph, blocks, gradients, labels, _homes(step, graph, blocks, names, prefix))
    return NamedChain(chain, names, batch, _outputs(step, prefix))


def _outputs(step: CapturedStep, prefix: str) -> int:
    """Return the bytes of the model's results that forward ops outside of it read. ``prefix``: of module names."""
    made: set[str] = set()
    read: set[str] = set()
    for call in (c for c in step.calls if not c.backward):
        inside = call.module == prefix[:-1] or call.module.startswith(prefix)
        made.update(step.writes(call) if inside else ())
        read.update(() if inside else step.reads(call))
    return sum(step.storage_bytes[storage] for storage in made & read)


def _homes(
    step: CapturedStep, graph: TrainingGraph, blocks: Groups, names: Sequence[str], prefix: str
) -> dict[int, int]:
    """Return, by position of a backward op, the block of its forward op: the one with its sequence number. Backward ops
    without a number are left out. ``names``: of the blocks; ``prefix``: of modules' names."""
    block_of = {graph.ops[o].name: block for block, ops in enumerate(blocks) for o in ops}
    home: dict[int | None, int] = {}
    before, views = 0, list[Call]()
    for call in step.calls:
        if call.name not in block_of:
            views += [] if call.backward else [call]
            continue
        at = block_of[call.name]
        for view in views:  # a view is no op of the problem: its module says whether it begins the next block
            begins = names[at] in prefixes(view.module.removeprefix(prefix))
            home.setdefault(view.sequence, at if begins else before)
        home.setdefault(call.sequence, at)
        before, views = at, []
    numbers = {
        o: step.call[n].sequence for o in indexed(graph).backward if (n := graph.ops[o].name) in step.call
    }
    return {o: home[number] for o, number in numbers.items() if number is not None and number in home}


def _begins(
    step: CapturedStep, graph: TrainingGraph, wanted: Sequence[str], only: Collection[str] | None, prefix: str
) -> dict[int, str]:
    """Return, by position of its first op, the name of each module at which a block begins: the outermost modules,
    fewer than `MOST_BLOCKS`, and those of ``wanted``. Modules that other ops interrupt, or that begin the step, begin
    none. ``only``: modules that are allowed, None for all. ``prefix``: of the names of the model's modules."""
    ix = indexed(graph)
    forward = [o for o, is_forward in enumerate(ix.forward) if is_forward]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    count: Counter[str] = Counter()
    for at, o in enumerate(forward):
        module = step.call[drawing_op(graph.ops[o].name)].module
        for name in prefixes(module.removeprefix(prefix) if module.startswith(prefix) else ""):
            first.setdefault(name, at)
            last[name] = at
            count[name] += 1
    # Not modules that are interrupted by other ops, or that begin the step.
    whole = [name for name in first if first[name] and last[name] - first[name] + 1 == count[name]]
    whole = [name for name in whole if only is None or name in only]
    whole.sort(key=lambda name: (name not in wanted, name.count("."), first[name]))
    found: dict[int, str] = {}
    depth: dict[int, int] = {}
    for name in whole:
        depth.setdefault(first[name], -1 if name in wanted else name.count("."))
        found.setdefault(first[name], name)
    # From the outermost inwards, as deep as there are few enough.
    most = max((d for d in range(9) if sum(x <= d for x in depth.values()) < MOST_BLOCKS), default=0)
    chosen = {forward[at]: name for at, name in found.items() if depth[at] <= most}
    return chosen if len(chosen) < MOST_BLOCKS else _narrowest(graph, chosen, wanted)


def _narrowest(graph: TrainingGraph, begins: Mapping[int, str], wanted: Sequence[str]) -> dict[int, str]:
    """Return fewer than `MOST_BLOCKS` places, where the forward sends the fewest bytes, and those of ``wanted``."""
    places = sorted(begins)
    sends = dict(zip(places, stage_chain(graph, blocks_at(graph, places)).sends[1:], strict=False))
    size = math.ceil(len(places) / (MOST_BLOCKS - 1))
    groups = (places[at : at + size] for at in range(0, len(places), size))
    chosen = {min(group, key=sends.__getitem__) for group in groups}
    return {at: name for at, name in begins.items() if at in chosen or name in wanted}
