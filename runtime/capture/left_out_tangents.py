"""Remove tangents that a training loop never supplies: those of outputs from which another output, the loss, is
computed, and of weights that a forward computes and leaves in attributes.

A Hugging Face model returns ``(loss, logits)``, but the loop calls backward on the loss only. A tangent for the
logits would cost memory and ops. So would one for each weight that `torch.nn.utils.prune` multiplies by a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

import torch

from rematplan.runtime.capture.output_storages import is_whole, with_own_outputs
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Value, single_call
from rematplan.runtime.graph.losses_among_outputs import in_own_losses
from rematplan.runtime.graph.passes import with_phases, without_dead_calls
from rematplan.runtime.graph.storage_slices import is_plain
from rematplan.runtime.graph.zero_tangents import zeros_without

ZEROS = torch.ops.aten.zeros.default


def with_expected_tangents(step: CapturedStep, arrived: Set[str] = frozenset()) -> CapturedStep:
    """Return the step without tangents that a training loop never supplies: those of outputs of several elements that
    are weights in attributes, or from which the loss is computed. The result has the bits of a step in which these
    tangents are missing. A tangent stays if its output is in ``arrived``, or if a gradient, strides or a draw would
    change without it."""
    made_of = in_own_losses(step)
    shape = {o.target: step.values[o.value].fake.numel() for o in step.outputs if o.kind == "output"}
    candidates = sorted((t for t in (made_of | _weights(step)) - arrived if shape[t] > 1), key=int)
    step = replace(step, arrived=made_of & arrived)
    found = _without(step, frozenset(candidates))
    if found is not None:
        return found
    left_out, found = frozenset[str](), step
    for target in candidates:  # they cannot all be removed, so try one by one
        less = _without(step, left_out | {target})
        if less is not None:
            left_out, found = left_out | {target}, less
    return found


def _weights(step: CapturedStep) -> frozenset[str]:
    """Return the positions, as text, of outputs with a tangent that are assigned to attributes of modules and depend on
    nothing in the batch."""
    of_batch = {i.value for i in step.inputs if i.kind == "batch"}
    for call in step.calls if step.attributes else ():
        if not of_batch.isdisjoint(call.operands):
            of_batch.update(call.made)
    tangents = {i.target for i in step.inputs if i.kind == "tangent"}
    outputs = (o for o in step.outputs if o.kind == "output" and o.value not in of_batch)
    return step.attributes & tangents & {o.target for o in outputs}


def _without(step: CapturedStep, left_out: frozenset[str]) -> CapturedStep | None:
    """Return the step without the tangents of the outputs ``left_out`` (positions as text), or None if the step's bits
    would change."""
    if not left_out:
        return step
    missing = {i.value for i in step.inputs if i.kind == "tangent" and i.target in left_out}
    return _Reduced(step, missing, left_out).step


class _Reduced:
    """Computes `step`, a step without the tangents ``missing``, which count as zero. It is None if an output would be a
    zero, a draw would be removed, or layout or type of a sum or zero would differ. Calls that return only zeros are
    removed. A sum with a zero becomes its other summand; other readers of a zero get a call that creates it."""

    def __init__(self, step: CapturedStep, missing: Set[str], left_out: frozenset[str]) -> None:
        self.whole = step
        self.zeros = zeros_without(step, missing)
        self.values = dict(step.values)
        self.renamed: dict[str, str] = {}  # sum → the value that it equals
        self.storages: dict[str, str] = {}  # storage of a sum → storage of that value
        self.possible = not any(o.value in self.zeros.values for o in step.outputs)
        calls = [call for one in step.calls for call in self._call(one)] if self.possible else []
        self.step = self._finished(missing, left_out, calls) if self.possible else None

    def _call(self, call: Call) -> Iterator[Call]:
        """Yield what replaces a call: nothing if all its results are zeros or it adds a zero; else the call, after new
        zeros that it reads. A removed draw makes the step impossible (`possible`)."""
        results = call.made
        if results and self.zeros.values.issuperset(results):
            self.possible &= not call.seeded  # removing it would change later draws
        elif call.name in self.zeros.sums:
            self._equate(results[0], self.zeros.sums[call.name])
        else:
            for name in dict.fromkeys(call.operands):
                if name in self.zeros.values:
                    yield self._zeros(name, f"{name}_zeros_for_{call.name}")
            yield call.reading(lambda name: self._now(name, call))

    def _now(self, value: str, reader: Call) -> str:
        """Return what ``reader`` reads now instead of ``value``: zeros for it, a sum's other summand, or ``value``."""
        if value in self.zeros.values:
            return f"{value}_zeros_for_{reader.name}"
        return self.renamed.get(value, value)

    def _equate(self, result: str, summand: str) -> None:
        """Let a sum be the value ``summand`` from now on. Unless both fill their storages in one layout and type, the
        step is impossible (`possible`)."""
        summand = self.renamed.get(summand, summand)
        sum_, other = self.values[result], self.values[summand]
        same_layout = sum_.fake.stride() == other.fake.stride() and sum_.fake.dtype == other.fake.dtype
        self.possible &= same_layout and is_whole(sum_) and is_whole(other)
        self.renamed[result] = summand
        self.storages[sum_.storage] = self.storages.get(other.storage, other.storage)

    def _zeros(self, value: str, name: str) -> Call:
        like = self.values[value].fake
        self.possible &= is_plain(like)
        self.values[name] = Value(name, name, name, like.new_zeros(like.shape))
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        return single_call(name, ZEROS, (list(like.shape),), options, backward=True)

    def _finished(
        self, missing: Set[str], left_out: frozenset[str], calls: list[Call]
    ) -> CapturedStep | None:
        """Return the step of ``calls`` without the inputs ``missing``, or None if its bits would differ."""
        if not self.possible:
            return None
        step = replace(
            self.whole,
            inputs=tuple(i for i in self.whole.inputs if i.value not in missing),
            outputs=tuple(replace(o, value=self.renamed.get(o.value, o.value)) for o in self.whole.outputs),
            calls=tuple(calls),
            values={
                name: replace(v, storage=self.storages.get(v.storage, v.storage))
                for name, v in self.values.items()
            },
            left_out=left_out,
        )
        return without_dead_calls(with_phases(with_own_outputs(step)))
