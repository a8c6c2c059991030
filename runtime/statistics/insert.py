"""A pass that adds to a captured step the ops that sum the Kronecker factors of its weights.

Each op is placed directly before the call that computes the weight's gradient. That call reads the same
inputs, so no input is needed longer because of statistics.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from rematplan.ir import ModelError
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, StepOutput, Value
from rematplan.runtime.statistics.fisher_output_gradients import Draws
from rematplan.runtime.statistics.further_backwards import further_backwards, samples_of, terms_of
from rematplan.runtime.statistics.gram import Gram, sum_type
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.reading import Patches
from rematplan.runtime.statistics.second_backward import SecondBackward, call_of, with_calls, without_results
from rematplan.runtime.statistics.weights import Block, Use, Weight, Weights

Places: TypeAlias = Literal["each", "mean", "sum"]


@dataclass(frozen=True, slots=True)
class Sums:
    """The outputs of a step with Σ a aᵀ and Σ g gᵀ for a block of a weight's rows with common inputs."""

    a: str
    """The name (target) of the output with Σ a aᵀ."""
    g: str
    """The name (target) of the output with Σ g gᵀ."""
    d_in: int
    """How many numbers an input has, without the appended one."""
    ones: bool
    """Whether a one is appended to each input, for a bias."""
    d_out: int
    """How many numbers a gradient has."""
    rows: int
    """The number of inputs summed in ``a``."""
    count: int
    """Into how many groups of the weight's matrix the block is divided; all of them have the same inputs."""
    diagonal: tuple[bool, bool]
    """For ``a`` and for ``g``: whether only the diagonal is computed."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight of a captured step whose Kronecker factors are computed, and the outputs that contain them."""

    name: str
    """The weight's name."""
    bias: str | None
    """The name of the bias of the weight's layer; None if it has none."""
    groups: int
    split: tuple[int, ...]
    order: tuple[int, ...]
    """With ``groups`` and ``split``: how the weight becomes a matrix (`Factors.matrix`)."""
    sums: tuple[Sums, ...]
    """The two sums of each block of the weight's rows. There is one block, unless blocks have different inputs."""
    of_loss: bool
    """Whether the gradients come from the backward of the user's loss (``fisher="empirical"``)."""


@dataclass(frozen=True)
class StatisticsStep:
    """A captured step that also computes Kronecker factors."""

    step: CapturedStep
    """The step; the sums are its outputs of kind ``statistic``."""
    layers: tuple[Layer, ...]
    """The weights that have statistics."""
    skipped: dict[str, str]
    """By the name of a trained parameter without statistics, the reason."""
    terms: int
    """The number of terms (samples or tokens, for example) of the loss."""


def with_statistics(step: CapturedStep, options: Kronecker, draws: Draws) -> StatisticsStep:
    """Return a captured step with further ops that compute the Kronecker factors of the weights that allow it. Raises
    `ModelError` if no weight does, or if the output of ``options`` does not fit."""
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
        """Return the step with ops and outputs for the statistics of each weight that can have them; ``skipped`` has
        the reasons of others. `ModelError` if no weight has statistics."""
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
        """Return the backwards in addition to that of the user's loss, and place the first call of each
        before the backward half of the step."""
        found = further_backwards(self.step, self.options, self.draws)
        first = next(c for c in self.step.calls if c.name in self.step.after_loss)
        for one in found:
            self.before[first.name].append(one.begin)
            self.values |= one.values
        return found

    def _needed_only(self, backwards: list[SecondBackward]) -> None:
        """Add to the step the calls of ``backwards`` that the statistics need, and drop values that no call makes."""
        needed = {name for calls in self.before.values() for c in calls for name in c.operands}
        for one in backwards:
            for call in reversed(self.step.calls):
                kept: list[Call] = []
                for own in reversed(one.behind.get(call.name, ())):
                    if not needed.isdisjoint(own.made):
                        needed.update(own.operands)
                        kept.insert(0, without_results(own, needed))
                self.behind[call.name] += kept
        made = {
            r for calls in (*self.before.values(), *self.behind.values()) for c in calls for r in c.results
        }
        self.values = {name: value for name, value in self.values.items() if name in made}

    def _layer(self, weight: Weight, backwards: list[SecondBackward], terms: int) -> Layer:
        """Add the sums of a weight to the step, and return them as a `Layer`. `_NotTaken` if its uses need different
        matrices, no gradient reaches it, or its rows cannot be divided into samples as ``approx="reduce"`` needs."""
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
        """Add the sums of a weight's block over all its uses, of inputs and of gradients, to the step, and return their
        names and sizes. ``at``: the block's position in the weight. ``terms``: the number of the loss's terms."""
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
        """Return two ops for one use of a weight: the first sums its inputs, with a one appended if ``ones``, the
        second its output gradients. Raises `_NotTaken` if samples are to be rows and the rows cannot be divided into
        samples."""
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
        """Return a key that is equal for two values if ``gram`` sums the same rows of both, also as different
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
        """Return the value of a sum and the number of rows in it. Unless ``key`` has a sum, place a new op before the
        call ``product``. If ``previous`` is given, the op adds to that sum, which has ``rows`` rows."""
        if key not in self.sums:
            fake = self.values.get(value) or self.step.values[value]
            name = f"statistic_{len(self.sums)}"
            packed = fake.fake.new_empty(gram.shape, dtype=sum_type(fake.fake.dtype))
            args = (*([Ref(previous)] if previous else []), Ref(value))
            call = call_of(name, gram, args, name)
            self.before[product].append(replace(call, in_place=previous is not None))
            self.values[name] = Value(name, self.values[previous].storage if previous else name, name, packed)
            self.sums[key] = name, rows + gram.rows(fake.fake.dtype)
        return self.sums[key]


class _NotTaken(Exception):
    """Raised for a weight that cannot have statistics. The text is the reason."""


def _gradients(value: str, backwards: list[SecondBackward]) -> list[str | None]:
    """Return the values that ``backwards`` compute in place of the gradient ``value``, None where that is
    zero; without backwards, ``value``."""
    if not backwards:
        return [value]
    made = [one.made[value] for one in backwards]
    return [one.name if one else None for one in made]


def _samples_inside(step: CapturedStep, value: str, samples: int) -> bool:
    """Return whether a tensor's second dimension, but not its first, is of size ``samples``, as in (time, batch,
    features). With at most two dimensions, the tensor of which it is a view decides; False if it is no view."""
    while True:
        shape = step.values[value].fake.shape
        if len(shape) > 2:
            return shape[0] != samples and shape[1] == samples
        call = step.call.get(step.values[value].call or "")
        if call is None or not call.is_view or not isinstance(call.args[0], Ref):
            return False
        value = call.args[0].value


def _first(skipped: dict[str, str]) -> str:
    return next((f"of {name}, {why}" for name, why in skipped.items()), "nothing in it is trained")
