"""A pass that adds statistics to a captured step: ops that sum the outer products of a layer's inputs, and of the
gradients of its outputs.

Each op is placed directly before the call that computes the weight's gradient, which reads the same inputs. So no input
is needed longer, and none is recomputed, because of statistics. The ops run once, and their results stay resident until
the step ends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, StepOutput, Value, refs
from rematplan.runtime.statistics.fisher_output_gradients import Draws
from rematplan.runtime.statistics.further_backwards import further_backwards, samples_of, terms_of
from rematplan.runtime.statistics.gram import Gram, sum_type
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.reading import Patches
from rematplan.runtime.statistics.second_backward import (
    SecondBackward,
    call_of,
    with_calls,
    without_results,
)
from rematplan.runtime.statistics.weights import Block, Use, Weight, Weights

Places: TypeAlias = Literal["each", "mean", "sum"]


@dataclass(frozen=True, slots=True)
class Sums:
    """The two sums for a block of a weight's rows that have the same inputs: Σ a aᵀ over inputs and Σ g gᵀ over
    gradients. Both are outputs of the captured step.

    ``a``, ``g``: the targets (names) of these outputs. ``d_in``, ``d_out``: how many numbers an input and a gradient
    have. ``ones``: whether a one is appended to each input, for a bias. ``rows``: the number of inputs summed in ``a``.
    ``count``: into how many groups of the weight's matrix the block is divided; all of them have the same inputs.
    ``diagonal``: two truth values, for ``a`` and for ``g``: whether only the diagonal is computed.
    """

    a: str
    g: str
    d_in: int
    ones: bool
    d_out: int
    rows: int
    count: int
    diagonal: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight of a captured step for which statistics (Kronecker factors) are computed, and the outputs that contain
    them.

    ``name``: the weight's name. ``bias``: the name of the bias of the weight's layer; None if it has none. ``groups``,
    ``split``, ``order``: how the weight becomes a matrix, as in `Factors`. ``sums``: the two sums of each block of the
    weight's rows. There is one block, unless blocks have different inputs. ``of_loss``: as in `Factors`.
    """

    name: str
    bias: str | None
    groups: int
    split: tuple[int, ...]
    order: tuple[int, ...]
    sums: tuple[Sums, ...]
    of_loss: bool


@dataclass(frozen=True)
class StatisticsStep:
    """A captured step that also computes statistics (Kronecker factors).

    ``step``: the step; the sums are its outputs of kind ``statistic``. ``layers``: the weights that have statistics.
    ``skipped``: by the name of each trained parameter without statistics, the reason. ``terms``: the number of terms
    (samples or tokens, for example) of the loss.
    """

    step: CapturedStep
    layers: tuple[Layer, ...]
    skipped: dict[str, str]
    terms: int


def with_statistics(step: CapturedStep, options: Kronecker, draws: Draws) -> StatisticsStep:
    """Return a captured step with further ops, which compute the Kronecker factors of all weights for which that is
    possible.

    Args:
        step: the captured step.
        options: which statistics are computed, and how.
        draws: the random numbers for drawing labels.

    Raises:
        ModelError: the output from which the loss is computed does not fit the options, or no weight can have
            statistics.
    """
    return _Pass(step, options, draws).run()


@dataclass
class _Pass:
    step: CapturedStep
    options: Kronecker
    draws: Draws
    before: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    behind: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    values: dict[str, Value] = field(default_factory=dict)
    sums: dict[object, tuple[str, int]] = field(default_factory=dict)
    """The sums that exist already: by a key of what they sum (see `_key`), the value's name and the number of rows."""
    outputs: dict[str, str] = field(default_factory=dict)
    """The names (targets) of the sums as outputs of the step, by the name of their value."""

    def run(self) -> StatisticsStep:
        weights = Weights(self.step)
        terms = terms_of(self.step, self.options)
        backwards = self._backwards()
        skipped, layers = dict(weights.skipped), []
        for weight in weights.found:
            try:
                layers.append(self._layer(weight, backwards, terms))
            except _NotTaken as error:
                names = (*(weight.parts or (weight.name,)), *filter(None, (weight.bias,)))
                skipped.update(dict.fromkeys(names, str(error)))
        if not layers:
            raise ModelError(f"{self.step.name} has no weight with statistics: {_first(skipped)}")
        self._needed_only(backwards)
        step = with_calls(self.step, self.before, self.behind, self.values)
        outputs = (StepOutput("statistic", target, value) for value, target in self.outputs.items())
        step = replace(step, outputs=(*step.outputs, *outputs))
        return StatisticsStep(step, tuple(layers), skipped, terms)

    def _backwards(self) -> list[SecondBackward]:
        """Return the backwards that the statistics need in addition to that of the user's loss. Place the first call of
        each, which computes the gradient of an output, before the backward half of the step."""
        found = further_backwards(self.step, self.options, self.draws)
        first = next(c for c in self.step.calls if c.name in self.step.after_loss)
        for one in found:
            self.before[first.name].append(one.begin)
            self.values |= one.values
        return found

    def _needed_only(self, backwards: list[SecondBackward]) -> None:
        """Add to the step those calls of the additional ``backwards`` whose results the statistics need, directly or
        not. Drop the values that no added call makes."""
        needed = {ref.value for calls in self.before.values() for c in calls for ref in _refs(c)}
        for one in backwards:
            for call in reversed(self.step.calls):
                kept: list[Call] = []
                for own in reversed(one.behind.get(call.name, ())):
                    if any(r in needed for r in own.results):
                        needed.update(ref.value for ref in _refs(own))
                        kept.insert(0, without_results(own, needed))
                self.behind[call.name] += kept
        made = {
            r for calls in (*self.before.values(), *self.behind.values()) for c in calls for r in c.results
        }
        self.values = {name: value for name, value in self.values.items() if name in made}

    def _layer(self, weight: Weight, backwards: list[SecondBackward], terms: int) -> Layer:
        for block in weight.blocks:
            grams = [self._grams(use, weight.bias is not None) for use in block.uses]
            if len({(a.shape, g.shape) for a, g in grams}) > 1:
                raise _NotTaken("its uses see it as different matrices")
            gradients = [g for u in block.uses for g in _gradients(u.product.gradients, backwards) if g]
            if not gradients:
                raise _NotTaken(f"no gradient of output {self.options.output} reaches it")
        sums = [self._sums(weight, block, at, backwards, terms) for at, block in enumerate(weight.blocks)]
        of_loss = self.options.fisher == "empirical"
        return Layer(
            weight.name, weight.bias, weight.groups, weight.split, weight.order, tuple(sums), of_loss
        )

    def _sums(
        self, weight: Weight, block: Block, at: int, backwards: list[SecondBackward], terms: int
    ) -> Sums:
        a_value: str | None = None
        g_value: str | None = None
        a_key: list[object] = []
        rows = 0
        for use in block.uses:
            a_gram, g_gram = self._grams(use, weight.bias is not None)
            product = use.product
            a_key.append(self._key(product.inputs, a_gram))
            a_value, rows = self._sum(tuple(a_key), a_gram, product.inputs, a_value, rows, product.call.name)
            dtype = self.step.values[product.gradients].fake.dtype
            scale = g_gram.all_rows / max(1, g_gram.rows(dtype))
            if not backwards and self.options.loss_reduction == "mean":
                scale *= float(terms) ** 2
            g_gram = replace(g_gram, scale=scale)
            for number, value in enumerate(_gradients(product.gradients, backwards)):
                if value:
                    key = (weight.name, at, product.call.name, number)
                    g_value, _ = self._sum(key, g_gram, value, g_value, 0, product.call.name)
        assert a_value is not None
        assert g_value is not None
        a, g = self._target(a_value, f"a of {weight.name}"), self._target(g_value, f"g of {weight.name}")
        return Sums(
            a,
            g,
            a_gram.read.sizes[1],
            a_gram.ones,
            g_gram.read.sizes[1],
            rows,
            block.count,
            (a_gram.diagonal, g_gram.diagonal),
        )

    def _grams(self, use: Use, ones: bool) -> tuple[Gram, Gram]:
        """Return two ops: one sums the inputs of one use of a weight, the other the gradients of its outputs.

        ``ones``: whether a one is appended to each input, for a bias.

        Raises:
            _NotTaken: with ``approx="reduce"``, the rows of the inputs cannot be divided into the samples of the batch.
        """
        reduce = self.options.approx == "reduce"
        samples = samples_of(self.step) if reduce else 0
        product = use.product
        inner = reduce and _samples_inside(self.step, product.inputs, samples)
        inputs, gradients = product.read(use.placement.batch, samples, inner)
        if reduce and math.prod(inputs.sizes[2]) != samples:
            raise _NotTaken(f"its rows at {product.call.name} are no multiple of the {samples} samples")
        a_places: Places = "mean" if reduce else "each"
        g_places: Places = "sum" if reduce else "each"
        share = self.options.share
        most = self.options.diagonal_above
        a = Gram(inputs, a_places, share, ones, 1.0, inputs.sizes[1] + ones > most)
        return a, Gram(gradients, g_places, share, False, 1.0, gradients.sizes[1] > most)

    def _key(self, value: str, gram: Gram) -> object:
        """Return a key that is equal for two values if ``gram`` sums the same rows of both. The values may be different
        views of the same memory."""
        fake, read = self.step.values[value].fake, gram.read
        place = (self.step.values[value].storage, int(fake.storage_offset()), fake.dtype)
        if isinstance(read, Patches):
            return (*place, fake.stride(), str(gram))
        seen = read(fake)
        return (*place, tuple(seen.shape), seen.stride(), gram.size, gram.places, gram.share, gram.diagonal)

    def _target(self, value: str, name: str) -> str:
        if value not in self.outputs:
            name = f"{name} ({value})" if name in self.outputs.values() else name
            self.outputs[value] = name
        return self.outputs[value]

    def _sum(
        self, key: object, gram: Gram, value: str, previous: str | None, rows: int, product: str
    ) -> tuple[str, int]:
        """Return the name of the value of a sum, and the number of rows that it sums. Add the op that computes it,
        unless a sum with an equal key exists.

        Args:
            key: identifies what is summed.
            gram: the op.
            value: the name of the tensor whose rows are summed.
            previous: the name of an earlier sum, to which the op adds; None for none.
            rows: the number of rows of ``previous``.
            product: the name of the call before which the op is placed.
        """
        if key not in self.sums:
            fake = self.values.get(value) or self.step.values[value]
            name = f"statistic_{len(self.sums)}"
            packed = fake.fake.new_empty(gram.shape, dtype=sum_type(fake.fake.dtype))
            args = (Ref(value), *([Ref(previous)] if previous else []))
            self.before[product].append(call_of(name, gram, args, name))
            self.values[name] = Value(name, name, name, packed)
            self.sums[key] = name, rows + gram.rows(fake.fake.dtype)
        return self.sums[key]


class _NotTaken(Exception):
    """Raised for a weight that cannot have statistics. The text is the reason."""


def _gradients(value: str, backwards: list[SecondBackward]) -> list[str | None]:
    """Return the names of the gradients whose rows a statistic sums.

    These are the values that the additional ``backwards`` compute in place of ``value``, a gradient in the backward of
    the user's loss. An entry is None if that value is zero. Without additional backwards, it is ``value`` alone.
    """
    if not backwards:
        return [value]
    made = [one.made[value] for one in backwards]
    return [one.name if one else None for one in made]


def _samples_inside(step: CapturedStep, value: str, samples: int) -> bool:
    """Return whether the samples of a batch are the second dimension of a tensor and not the first, as in (time, batch,
    features), judged by the sizes of these dimensions. If the tensor is a view with at most two dimensions, the shape
    of the tensor before the views decides.

    Args:
        step: the captured step.
        value: the tensor's name.
        samples: the number of samples.
    """
    while True:
        shape = step.values[value].fake.shape
        if len(shape) > 2:
            return shape[0] != samples and shape[1] == samples
        call = step.call.get(step.values[value].call or "")
        if call is None or not call.is_view or not isinstance(call.args[0], Ref):
            return False
        value = call.args[0].value


def _refs(call: Call) -> list[Ref]:
    return list(refs((call.args, call.kwargs)))


def _first(skipped: dict[str, str]) -> str:
    return next((f"of {name}, {why}" for name, why in skipped.items()), "nothing in it is trained")
