"""Build the planning problem of one pipeline stage: an interval of a chain's blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.planner.arrays.indexed import indexed
from rematplan.planner.pipeline.stage_chain import StageChain
from rematplan.planner.pipeline.stage_plan import StagePlan
from rematplan.planner.pipeline.stage_problem import StageProblem

BOUNDARY, WEIGHTS = "(boundary)", "(weight gradients)"
"""The names of two ops, and of the 0-byte tensors that they write. The first op is between a stage's forward and
backward, the second between the backward ops for the input's gradient and those for the weights' gradients."""
RECEIVE, SEND, ANSWER, RETURN = "(receive)", "(send)", "(answer)", "(return)"
"""The names of four ops of a stage that recovers its input. They receive the input, send the output, get the output
again from the next stage, and return the input with its gradient."""


@dataclass(frozen=True)
class StageSlice:
    """One pipeline stage: the blocks ``start`` to ``end`` − 1 of a chain. Its properties contain positions of tensors
    and ops in the chain's graph."""

    chain: StageChain
    start: int
    end: int

    @cached_property
    def ops(self) -> tuple[int, ...]:
        """The positions of the stage's forward and backward ops, ascending."""
        return tuple(o for o, b in enumerate(self.chain.block) if self.start <= b < self.end)

    @property
    def received(self) -> tuple[int, ...]:
        """The positions of the tensors that the previous stage sends to this stage in the forward."""
        return self.chain.sent[self.start]

    @property
    def sent(self) -> tuple[int, ...]:
        """The positions of the tensors that this stage sends to the next stage in the forward, including those that it
        received and only passes on."""
        return self.chain.sent[self.end]

    @property
    def answered(self) -> tuple[int, ...]:
        """The positions of the tensors that the next stage sends to this stage in the backward."""
        return self.chain.returned[self.end]

    @property
    def returned(self) -> tuple[int, ...]:
        """The positions of the tensors that this stage sends to the previous stage in the backward."""
        return self.chain.returned[self.start]


def late_ops(piece: StageSlice) -> frozenset[int]:
    """Return the positions of the backward ops that a stage can postpone: the tensors sent to the previous
    stage do not need them.

    Ops that read such a tensor are not postponed.
    """
    ix = indexed(piece.chain.graph)
    backward = [o for o in piece.ops if not ix.forward[o]]
    needed, early = set(piece.returned), set()
    for o in _reading(piece):
        needed.update(ix.writes[o])
    for o in reversed(backward):
        if not needed.isdisjoint(ix.writes[o]):
            early.add(o)
            needed.update(ix.reads[o])
    return frozenset(backward) - early


def _reading(piece: StageSlice) -> list[int]:
    """Return the positions of the backward ops that read a tensor that the stage sends to the previous stage."""
    ix, returned = indexed(piece.chain.graph), set(piece.returned)
    return [o for o in piece.ops if not ix.forward[o] and not returned.isdisjoint(ix.reads[o])]


def stage_problem(
    piece: StageSlice,
    template: StagePlan,
    *,
    batch: Collection[str] = (),
    split: bool = False,
    recovers: bool = False,
    hands_over: bool = False,
    frees: bool = False,
) -> StageProblem:
    """Return the planning problem of a stage for one micro-batch, while gradients of earlier ones exist. Messages are
    inputs of its own. ``batch``: inputs that differ between micro-batches. ``split``: whether W is an action.
    ``recovers``: whether stages recover their inputs. ``hands_over``: whether the next stage is on the same rank.
    ``frees``: whether sent outputs are freed before the backward."""
    return _Builder(piece, frozenset(batch), split, recovers, hands_over, frees).problem(template)


class _Builder:
    """Builds the problem of one stage; the arguments are those of `stage_problem`."""

    def __init__(
        self,
        piece: StageSlice,
        batch: frozenset[str],
        split: bool,
        recovers: bool,
        hands_over: bool,
        frees: bool,
    ) -> None:
        self.piece, self.batch = piece, batch
        self.split, self.recovers, self.hands_over, self.frees = split, recovers, hands_over, frees
        self.graph, self.ix = piece.chain.graph, indexed(piece.chain.graph)
        own = set(piece.ops)
        self.made = {t for o in own for t in self.ix.writes[o]}
        self.forward = [o for o in piece.ops if self.ix.forward[o]]
        self.backward = [o for o in piece.ops if not self.ix.forward[o]]
        self.late = late_ops(piece) if split else frozenset()

    def problem(self, template: StagePlan) -> StageProblem:
        """Return the stage's planning problem for one micro-batch, with ops for messages and for the moments between
        its halves."""
        ix, piece = self.ix, self.piece
        name = ix.tensors.__getitem__
        inputs = [name(t) for t in piece.chain.inputs_of(piece.start, piece.end)]
        received = [] if self.recovers else [name(t) for t in piece.received]
        answered = [name(t) for t in piece.answered if t not in self.made and t not in piece.received]
        messages = [*received, *answered]
        ops = (*self._receive(), *self._ops())
        written = {t for op in ops for t in op.writes}
        used = {t for op in ops for t in op.reads} | {*written, *inputs, *messages}
        marks = self._marks()
        sizes = self.graph.size | dict.fromkeys((BOUNDARY, WEIGHTS, SEND, RETURN, *marks), 0)
        known = {op.name for op in ops}
        graph = TrainingGraph(
            name=f"{self.graph.name}, blocks {piece.start} to {piece.end - 1}",
            tensors=tuple(Tensor(t, sizes[t]) for t in sizes if t in used),
            inputs=(*inputs, *messages),
            outputs=(
                *marks,
                *self._outputs(set(marks.values())),
                *(op.name for op in self._return()),
                *self._unread(ops),
            ),
            ops=ops,
            inverses=(
                *self._answer(),
                *(
                    i
                    for i in self.graph.inverses
                    if used.issuperset(i.reads) and written.issuperset(i.writes)
                ),
            ),
            ordered=self._ordered(ops),
            never_rerun=tuple(
                dict.fromkeys(
                    (
                        *(o for o in self.graph.never_rerun if o in known),
                        *self._once(),
                        *(op.name for op in ops if not marks.keys().isdisjoint(op.writes)),
                    )
                )
            ),
        )
        return StageProblem(
            graph,
            BOUNDARY,
            states=tuple(t for t in inputs if t not in self.batch),
            per_microbatch=tuple(received),
            tangents=() if self.recovers else tuple(answered),
            between=-sum(sizes[name(t)] for t in piece.sent if t not in self.made) if self.hands_over else 0,
            handed=tuple(name(t) for t in piece.sent if t in self.made) if self.hands_over else (),
            freed={name(t): self._readers(graph, name(t)) for t in piece.sent if t in self.made}
            if self.frees
            else {},
            weights=WEIGHTS if self.split else None,
            gradients=marks,
            template=template,
        )

    @staticmethod
    def _readers(graph: TrainingGraph, tensor: str) -> frozenset[str]:
        """Return the names of the ops and inverses that read a tensor, without the boundary op."""
        every = (*graph.ops, *graph.inverses)
        return frozenset(op.name for op in every if tensor in op.reads and op.name != BOUNDARY)

    def _ordered(self, ops: Iterable[Op]) -> tuple[str, ...]:
        """Return, in order, the names of the ops whose first runs keep this order."""
        # In a split backward, ops that read what the stage returns precede the second boundary, which hands
        # it over. A stage without a backward runs without a plan, in the forward's order.
        reading = [self.ix.ops[o] for o in _reading(self.piece)] if self.split else []
        frozen = () if self.backward else [self.ix.ops[o] for o in self.forward]
        names = {*self.graph.ordered, *reading, *([WEIGHTS] if reading else ()), *frozen}
        return tuple(op.name for op in ops if op.name in names)

    def _marks(self) -> dict[str, str]:
        """Return, by name of a 0-byte marker, the parameter's gradient that the same op writes, ready to be added."""
        own = (self.ix.tensors[t] for o in self.piece.ops for t in self.ix.writes[o])
        return {f"({t} added)": t for t in own if t in self.piece.chain.gradient_of}

    def _leaving(self) -> list[str]:
        """Return the names of the tensors that the stage's forward computes and that are sent to the next stage or are
        outputs of the step."""
        found = (
            t for o in self.forward for t in self.ix.writes[o] if t in self._sent or self.ix.is_output[t]
        )
        return [self.ix.tensors[t] for t in found]

    @cached_property
    def _sent(self) -> frozenset[int]:
        return frozenset(self.piece.sent)

    def _results(self) -> list[str]:
        """Return the names of the tensors that the stage's forward computes and that are outputs of the step."""
        return [self.ix.tensors[t] for o in self.forward for t in self.ix.writes[o] if self.ix.is_output[t]]

    def _receive(self) -> tuple[Op, ...]:
        received = tuple(self.ix.tensors[t] for t in self.piece.received) if self.recovers else ()
        return (Op(RECEIVE, (), received, 0.0, 0, "forward"),) if received else ()

    def _answer(self) -> tuple[Op, ...]:
        """Return the inverse that stands for the next stage's message in the backward: it writes what the
        stage sent.

        Empty if the stage sends nothing or stages do not recover inputs.
        """
        sent = tuple(self.ix.tensors[t] for t in self.piece.sent) if self.recovers else ()
        return (Op(ANSWER, (BOUNDARY,), sent, 0.0),) if sent else ()

    def _send(self) -> tuple[Op, ...]:
        sent = tuple(self.ix.tensors[t] for t in self.piece.sent) if self.recovers else ()
        return (Op(SEND, sent, (SEND,), 0.0, 0, "forward"),) if sent else ()

    def _return(self) -> tuple[Op, ...]:
        """Return the op that sends the recovered input and its gradient to the previous stage; empty if there
        is none.
        """
        received = [self.ix.tensors[t] for t in self.piece.received] if self.recovers else []
        # Both must be resident when it runs, and may be freed afterwards.
        reads = (*received, *self._returned(), BOUNDARY)
        return (Op(RETURN, reads, (RETURN,), 0.0, 0, "backward"),) if received else ()

    def _returned(self) -> list[str]:
        """Return the names of the tensors that this stage computes and sends to the previous stage in the backward."""
        return [self.ix.tensors[t] for t in self.piece.returned if t in self.made]

    def _outputs(self, gradients: set[str]) -> tuple[str, ...]:
        """Return the names of the tensors that stay to the end of the stage's backward, by position: outputs of the
        step and messages, without ``gradients``."""
        results = [self.ix.tensors[t] for t in self.made if self.ix.is_output[t]]
        # In a split backward, and if stages recover their inputs, messages are freed earlier.
        leaving = [] if self.split or self.recovers else [*self._leaving(), *self._returned()]
        order = {name: at for at, name in enumerate(self.ix.tensors)}
        found = {t for t in (*results, *leaving) if t not in gradients}
        return tuple(sorted(found, key=order.__getitem__))

    def _unread(self, ops: Sequence[Op]) -> list[str]:
        """Return the names of the boundary ops whose results no op reads. As outputs they stay in plans."""
        read = {t for op in ops for t in op.reads}
        return [op.name for op in ops if op.name in (BOUNDARY, WEIGHTS) and op.name not in read]

    def _ops(self) -> tuple[Op, ...]:
        """Return the stage's ops of the step, and those for messages. A boundary is between forward and backward, and
        another between I and W if the backward is split."""
        graph, marks = self.graph, self._marks()
        of = {t: mark for mark, t in marks.items()}
        rows = {o: graph.ops[o] for o in self.piece.ops}
        for o in self.backward:
            op = rows[o]
            rows[o] = replace(
                op,
                reads=tuple(dict.fromkeys((*op.reads, *self._token(o)))),
                writes=(*op.writes, *(of[t] for t in op.writes if t in of)),
                phase="backward",
            )
        forward = [replace(rows[o], phase="forward") for o in self.forward]
        send = self._send()
        reads = (*self._results(), *(op.name for op in send)) if self.recovers else tuple(self._leaving())
        boundary = Op(BOUNDARY, reads, (BOUNDARY,), 0.0, 0, "backward")
        forward += send
        early = [rows[o] for o in self.backward if o not in self.late]
        if not self.split:
            return (*forward, boundary, *early, *self._return())
        leave = dict.fromkeys((BOUNDARY, *self._leaving(), *self._returned()))
        done = Op(WEIGHTS, tuple(leave), (WEIGHTS,), 0.0, 0, "backward")
        return (*forward, boundary, *early, done, *(rows[o] for o in self.backward if o in self.late))

    def _token(self, o: int) -> tuple[str, ...]:
        """Return the name of a 0-byte tensor of a boundary op that backward op ``o`` must read, lest it run
        too early; empty if none.
        """
        if o in self.late:
            return (WEIGHTS,)
        # An op that reads a result of another backward op waits for it anyway.
        own = (self.ix.producer[t] for t in self.ix.reads[o] if t in self.made)
        return () if any(not self.ix.forward[p] for p in own) else (BOUNDARY,)

    def _once(self) -> list[str]:
        """Return the names of the ops that may run only once: those that make what leaves the stage, those for
        messages, the boundaries and, in a split backward, the ops of I."""
        leaving = set(self._results() if self.recovers else self._leaving())
        # In a stage without a backward these are all forward ops.
        makers = [
            self.ix.ops[o]
            for o in self.forward
            if not self.backward or leaving.intersection(self.graph.ops[o].writes)
        ]
        early = [self.ix.ops[o] for o in self.backward if o not in self.late]
        messages = [op.name for op in (*self._receive(), *self._send(), *self._return())]
        return [*makers, *messages, BOUNDARY, *((WEIGHTS, *early) if self.split else ())]
