"""Find the weights of a captured step that can have Kronecker factors by the calls that compute their
gradients, not by module class.

If a parameter reaches the products through other ops (a parametrisation, a merged low-rank update), the
result of these ops is the weight: an effective weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, in_model
from rematplan.runtime.statistics.products import LAYERS, Product, matrix_size, product_of
from rematplan.runtime.statistics.trace_gradients import (
    SAME,
    NoRow,
    Placement,
    RowRange,
    Summand,
    mapped,
    summands,
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a weight, or of a range of its rows, by a layer of the forward."""

    product: Product
    """The product that computes the gradient of this use."""
    placement: Placement
    """How the weight is viewed as the matrix that the product computes."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a weight that are multiplied with the same inputs, usually all. Each block has its own factors."""

    uses: tuple[Use, ...]
    """The uses of these rows, in the order in which their products are computed."""
    count: int = 1
    """Into how many groups of the weight's matrix the block is divided; all of them have the same inputs."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that can have Kronecker factors."""

    name: str
    """A parameter's name, or that of an effective weight (`_effective_name`)."""
    blocks: tuple[Block, ...]
    """The weight's rows, divided by the inputs with which they are multiplied."""
    split: tuple[int, ...]
    order: tuple[int, ...]
    groups: int
    """With ``split`` and ``order``: how the weight becomes a matrix (`Factors.matrix`)."""
    bias: str | None = None
    """The name of the bias that the weight's layer adds; None if there is none."""
    parts: tuple[str, ...] = ()
    """The parameters from which an effective weight is computed; empty if the weight is a parameter."""


BiasKey: TypeAlias = tuple[object, ...]
"""Identifies what is summed into the gradient of a bias: the call of a convolution's backward, or a tensor by its
location in memory and the dimensions that are not summed."""


class Weights:
    """The weights of a step that can have Kronecker factors, found by the calls that compute their gradients."""

    def __init__(self, step: CapturedStep) -> None:
        """Find the weights (``found``, in the order of their gradients), effective ones included, and why other
        parameters have no statistics (``skipped``)."""
        self.step = step
        #: By the name of a trained parameter that is no such weight, the reason. Biases of found weights are
        #: left out.
        self.skipped: dict[str, str] = {}
        found: list[Weight] = []
        effective: dict[str, list[str]] = defaultdict(list)
        left: dict[str, str] = {}  # parameters that are no weights: biases, and those without statistics
        for output in step.outputs:
            if output.kind != "gradient":
                continue
            name = in_model(output.target)
            try:
                found.append(self._weight(name, output.value))
            except NoRow as error:
                left[name] = output.value
                self.skipped[name] = str(error)
                for value in self._effective(output.value, error.at):
                    effective[value].append(name)
        parameters = {in_model(o.target) for o in step.outputs if o.kind == "gradient"}
        for value, parts in effective.items():
            name = _effective_name(parts, {w.name for w in found} | parameters)
            found.append(self._weight(name, value, tuple(parts)))
            for part in parts:
                self.skipped[part] = f"it is part of the effective weight {name}, which has statistics"
        biased = self._with_biases(found, left)
        at = {call.name: position for position, call in enumerate(step.calls)}
        # : The weights, in the order in which the backward computes their gradients.
        self.found = sorted(biased, key=lambda w: min(at[u.product.call.name] for u in _uses(w)))
        for weight in self.found:
            self.skipped.pop(weight.bias or "", None)

    @cached_property
    def _without_batch(self) -> set[str]:
        """The names of the values that depend neither on the module's input tensors nor on gradients of its outputs."""
        found = {i.value for i in self.step.inputs if i.kind not in ("batch", "tangent")}
        for call in self.step.calls:
            if found.issuperset(call.operands):
                found.update(call.made)
        return found

    @cached_property
    def _layers(self) -> dict[str, list[tuple[Call, str]]]:
        """By storage, the forward's calls that multiply a tensor in it with a weight, each with the weight's value."""
        found: dict[str, list[tuple[Call, str]]] = defaultdict(list)
        constant: list[tuple[Call, str, str]] = []
        weights = set[str]()
        for call in self.step.calls:
            positions = LAYERS.get(getattr(call.target, "overloadpacket", None))
            if positions is None or call.name in self.step.after_loss:
                continue
            one, other = (call.args[at].value for at in positions)
            for inputs, weight in ((one, other), (other, one)):
                if weight not in self._without_batch:
                    continue
                if inputs in self._without_batch:
                    constant.append((call, inputs, weight))
                else:
                    found[self.step.values[inputs].storage].append((call, weight))
                    weights.add(self.step.values[weight].storage)
        # A product of two values without inputs of the module, like the zero state of a recurrent layer's
        # first step, counts if its weight multiplies such an input elsewhere.
        for call, inputs, weight in constant:
            if self.step.values[weight].storage in weights:
                found[self.step.values[inputs].storage].append((call, weight))
        return found

    def _product(self, call: Call, index: int) -> Product | None:
        """Return the product of which result ``index`` of a call is a weight's gradient. None if there is no such
        product, no layer of the forward matches it, or its operands are integers."""
        late = call.name in self.step.after_loss
        product = product_of(call, self.step) if late else None
        if product is None or index != (1 if product.weight else 0):
            return None
        layers = self._layers.get(self.step.values[product.inputs].storage, [])
        size = matrix_size(product)
        same = any(
            weight == product.weight if product.weight else self.step.values[weight].fake.numel() == size
            for _, weight in layers
        )
        floating = all(
            self.step.values[v].fake.is_floating_point() for v in (product.inputs, product.gradients)
        )
        return product if same and floating else None

    def _weight(self, name: str, value: str, parts: tuple[str, ...] = ()) -> Weight:
        """Return the weight ``name`` with the gradient ``value``; `NoRow` if it cannot have statistics.
        ``parts``: the parameters of an effective weight."""
        by_region: dict[RowRange | None, list[Use]] = defaultdict(list)
        for one in summands(self.step, value, self._product):
            by_region[one.region].append(Use(one.found, mapped(one.found, one.chain)))
        for uses in by_region.values():
            first = uses[0].placement
            like = (first.split, first.order, first.groups, first.d_out)
            if any((p.split, p.order, p.groups, p.d_out) != like for p in (u.placement for u in uses)):
                raise NoRow("its uses see it as different matrices", value)
        if None in by_region:
            if len(by_region) > 1:
                raise NoRow("it is used both whole and in parts", value)
            first = by_region[None][0].placement
            return Weight(
                name, (Block(tuple(by_region[None])),), first.split, first.order, first.groups, None, parts
            )
        return self._of_regions(name, value, {r: u for r, u in by_region.items() if r}, parts)

    def _of_regions(
        self, name: str, value: str, regions: dict[RowRange, list[Use]], parts: tuple[str, ...]
    ) -> Weight:
        """Return a weight whose ranges of rows are multiplied with different inputs, like the packed projections of an
        attention. Raises `NoRow` if the ranges overlap, leave out rows, or are viewed as different matrices."""
        rows = self.step.values[value].fake.shape[0]
        own = sorted(regions, key=lambda r: r.start)
        end = 0
        for region in own:
            if region.start != end:
                raise NoRow("its used parts overlap or have gaps between them", value)
            end += region.size
        if end != rows:
            raise NoRow("some of its rows are not used", value)
        # Ranges of 8 and of 16 rows are one and two groups of 8 rows.
        common = math.gcd(*(r.size for r in own))
        inner = [_below_rows(regions[r][0].placement, r) for r in own]
        if len(set(inner)) > 1 or inner[0] is None:
            raise NoRow("its parts are used as different matrices", value)
        split, order = inner[0]
        blocks = tuple(Block(tuple(regions[r]), r.size // common) for r in own)
        whole = (rows // common, common, *split) if common > 1 else (rows, *split)
        shift = 2 if common > 1 else 1
        lead = (0, 1) if common > 1 else (0,)
        return Weight(name, blocks, whole, (*lead, *(o + shift for o in order)), rows // common, None, parts)

    def _effective(self, gradient: str, at: str) -> Iterator[str]:
        """Yield the gradients of effective weights from which a parameter's gradient is computed, followed
        backwards from the value ``at``."""
        uses = set(self._summands(gradient))
        seen, open_ = {at}, [at]
        if at not in uses and self._is_weight(at):
            yield at
            return
        while open_:
            call = self.step.call.get(self.step.values[open_.pop()].call or "")
            for name in call.operands if call else ():
                if name in seen or self.step.values[name].call not in self.step.after_loss:
                    continue
                seen.add(name)
                if not self._is_weight(name):
                    open_.append(name)
                # A summand of the gradient is a use of the parameter itself.
                elif name not in uses:
                    yield name

    def _summands(self, gradient: str) -> Iterator[str]:
        """Yield ``gradient`` and all values that are added up to it, directly or through views and copies
        that keep all elements."""
        open_ = [gradient]
        while open_:
            yield (value := open_.pop())
            call = self.step.call.get(self.step.values[value].call or "")
            if call is None or call.name not in self.step.after_loss:
                continue
            size = self.step.values[value].fake.numel()
            if call.is_view or call.target in SAME or call.target is aten.add.Tensor:
                of = set(call.operands)
                open_ += [one for one in of if self.step.values[one].fake.numel() == size]

    def _is_weight(self, gradient: str) -> bool:
        try:
            self._weight("", gradient)
        except NoRow:
            return False
        return True

    def _with_biases(self, found: list[Weight], left: dict[str, str]) -> Iterator[Weight]:
        """Yield the weights, each with its bias if a parameter in ``left`` (gradients by name) has the same products:
        first one of the same module, then any."""
        keys: dict[str, list[tuple[RowRange | None, BiasKey]]] = {}
        for name, value in left.items():
            try:
                own: list[Summand[BiasKey]] = summands(self.step, value, self._bias_key)
                keys[name] = [(term.region, term.found) for term in own]
            except NoRow:
                continue
        bias_of: dict[str, str] = {}  # weight → bias
        for by_module in (True, False):
            for weight in found:
                for name, own_keys in keys.items():
                    same = weight.name.rpartition(".")[0] == name.rpartition(".")[0]
                    free = weight.name not in bias_of and name not in bias_of.values()
                    if free and (same or not by_module) and self._belongs(weight, own_keys):
                        bias_of[weight.name] = name
        for weight in found:
            yield replace(weight, bias=bias_of.get(weight.name))

    def _bias_key(self, call: Call, index: int) -> BiasKey | None:
        """Return what identifies the sum that is result ``index`` of a call; None if it cannot be a bias's gradient."""
        if call.target is aten.convolution_backward.default and index == 2:
            return ("convolution", call.name)
        if call.target is not aten.sum.dim_IntList:
            return None
        fake = self.step.values[call.args[0].value].fake
        summed = {dim % fake.dim() for dim in call.args[1]}
        kept = [dim for dim in range(fake.dim()) if dim not in summed]
        return _tensor_key(self.step, call.args[0].value, fake, kept)

    def _belongs(self, weight: Weight, keys: list[tuple[RowRange | None, BiasKey]]) -> bool:
        """Return whether the products of a bias are those of a weight: as many, and each with a counterpart."""
        wanted: list[set[BiasKey]] = []
        for block in weight.blocks:
            for use in block.uses:
                _, read = use.product.read(use.placement.batch, 0, False)
                value = use.product.gradients
                fake = self.step.values[value].fake.reshape(read.shape)  # type: ignore[union-attr]
                kept = [*read.groups, *read.features]  # type: ignore[union-attr,misc]
                wanted.append(
                    {("convolution", use.product.call.name), _tensor_key(self.step, value, fake, kept)}
                )
        own = [key for _, key in keys]
        if len(own) != len(wanted):
            return False
        return all(any(key in options for key in own) for options in wanted) and all(
            any(key in options for options in wanted) for key in own
        )


def _uses(weight: Weight) -> Iterator[Use]:
    for block in weight.blocks:
        yield from block.uses


def _tensor_key(step: CapturedStep, value: str, fake: torch.Tensor, kept: list[int]) -> BiasKey:
    dims = sorted((-fake.stride(d), fake.shape[d]) for d in kept if fake.shape[d] > 1)
    return (step.values[value].storage, int(fake.storage_offset()), fake.numel(), tuple(dims))


def _below_rows(placement: Placement, region: RowRange) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return ``split`` and ``order`` of one row of a range of a weight's rows (`Factors.matrix`). None if the range has
    several groups or its first dimension is not that of the matrix's rows."""
    if placement.groups > 1:
        return None
    if region.size == 1:
        return placement.split, placement.order
    if not placement.split or placement.split[0] != region.size or placement.order[0] != 0:
        return None
    return placement.split[1:], tuple(o - 1 for o in placement.order[1:])


def _effective_name(parts: list[str], used: set[str]) -> str:
    """Return the name of the parametrised attribute if all ``parts`` are parameters of one, else their names joined by
    ``+``. Apostrophes are appended while that name is in ``used``."""
    owners = {p.partition(".parametrizations.") for p in parts}
    stems = {(owner, rest.partition(".")[0]) for owner, mark, rest in owners if mark}
    if len(stems) == 1 and all(mark for _, mark, _ in owners):
        ((owner, attribute),) = stems
        name = f"{owner}.{attribute}"
    else:
        name = "+".join(parts)
    while name in used:
        name += "'"
    return name
