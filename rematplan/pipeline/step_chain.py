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
from rematplan.runtime.graph.captured_step import Call, CapturedStep
from rematplan.runtime.graph.module_names import prefixes
from rematplan.runtime.problem.random_states import drawing_op

MOST_BLOCKS = 64
"""The largest number of blocks. Modules begin blocks from the outermost inwards, as long as there are not more
blocks."""
WRAPPER = "model."
"""The prefix of the names of everything inside a model that was wrapped together with a loss."""


@dataclass(frozen=True)
class NamedChain:
    """A captured step as a chain of blocks of ops. A pipeline stage may begin at each block.

    ``chain``: the blocks. ``names``: for each block, the name of the module (or op) with which it begins; empty for the
    first block. ``batch``: the names of the inputs that differ between micro-batches. ``outputs``: the bytes of the
    model's outputs for one micro-batch from which the loss is computed.
    """

    chain: StageChain
    names: tuple[str, ...]
    batch: frozenset[str]
    outputs: int = 0

    def positions(self, cuts: Sequence[str]) -> tuple[int, ...]:
        """Return the position in the chain of each block that a name in ``cuts`` denotes: the name of its first
        module or op.
        """
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
    prefix: str = WRAPPER,
) -> NamedChain:
    """Divide a captured step into a chain of blocks that begin at modules, and name each block after its module.

    If no module can begin a block, blocks begin at ops and are named after them.
    """
    kinds = {step.values[i.value].storage: i.kind for i in step.inputs}
    owner = {i.target: step.values[i.value].storage for i in step.inputs if i.kind == "parameter"}
    gradients = {
        step.values[o.value].storage: owner[o.target]
        for o in step.outputs
        if o.kind == "gradient" and o.target in owner
    }
    batch = frozenset(name for name, kind in kinds.items() if kind == "batch")
    labels = {storage: name.removeprefix(WRAPPER).removeprefix(prefix) for name, storage in owner.items()}
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
    """Return the bytes of the results of the model's forward that are read by forward ops outside of the model.

    ``prefix``: what precedes the names of the model's modules in the step.
    """
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
    """Return the block of each backward op's forward op, by the position of the backward op. The two have the same
    sequence number. A sum of gradients has the number of the forward op whose gradient it adds. Backward ops without a
    number are left out.
    """
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
    step: CapturedStep,
    graph: TrainingGraph,
    wanted: Sequence[str],
    only: Collection[str] | None,
    prefix: str,
) -> dict[int, str]:
    """Return the names of the modules at which blocks begin. The keys are positions in ``graph`` of the modules'
    first ops.

    Two kinds of modules are excluded: those between whose forward ops other ops run, and those that run first in the
    step. Of the rest, the modules in ``wanted`` are used first, then the outermost modules, then the modules inside
    them, and so on by depth. A depth is used only if there are then fewer than `MOST_BLOCKS` modules; if the outermost
    modules are more, some of them are chosen.
    """
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
    whole = [name for name in first if first[name] and last[name] - first[name] + 1 == count[name]]
    whole = [name for name in whole if only is None or name in only]
    whole.sort(key=lambda name: (name not in wanted, name.count("."), first[name]))
    found: dict[int, str] = {}
    depth: dict[int, int] = {}
    for name in whole:
        depth.setdefault(first[name], -1 if name in wanted else name.count("."))
        found.setdefault(first[name], name)
    most = max((d for d in range(9) if sum(x <= d for x in depth.values()) < MOST_BLOCKS), default=0)
    chosen = {forward[at]: name for at, name in found.items() if depth[at] <= most}
    return chosen if len(chosen) < MOST_BLOCKS else _narrowest(graph, chosen, wanted)


def _narrowest(graph: TrainingGraph, begins: Mapping[int, str], wanted: Sequence[str]) -> dict[int, str]:
    """Divide the places in ``begins`` into fewer than `MOST_BLOCKS` groups of consecutive places, and return from each
    group the place at which the forward would send the fewest bytes. Also return the places of the modules in
    ``wanted``.
    """
    places = sorted(begins)
    sends = dict(zip(places, stage_chain(graph, blocks_at(graph, places)).sends[1:], strict=False))
    size = math.ceil(len(places) / (MOST_BLOCKS - 1))
    groups = (places[at : at + size] for at in range(0, len(places), size))
    chosen = {min(group, key=sends.__getitem__) for group in groups}
    return {at: name for at, name in begins.items() if at in chosen or name in wanted}
