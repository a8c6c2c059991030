"""Find the weights of a captured step that can have statistics, by the calls that compute their gradients,
not by module class.

A weight's gradient is a sum of products (`products`), one for each use. If a parameter reaches the products
through other ops (a parametrisation, a merged low-rank update), the weight is the result of these ops: an
effective weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from rematplan.runtime.graph.captured_step import Call, CapturedStep, refs
from rematplan.runtime.statistics.products import LAYERS, Product, matrix_size, product_of
from rematplan.runtime.statistics.trace_gradients import SAME, NoRow, Placement, Region, Term, mapped, terms

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a weight, or of a region of it.

    ``product``: the product that computes the gradient of this use. ``placement``: how the weight is viewed as the
    matrix of that product.
    """

    product: Product
    placement: Placement


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a weight with separate statistics, since they have separate inputs.

    ``uses``: the uses of these rows, in the order in which their products are computed. ``count``: the number of
    equal groups of output rows, all with the same inputs, into which the block is divided.
    """

    uses: tuple[Use, ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight with statistics.

    ``name``: its name. ``blocks``: its rows, divided by the inputs with which they are multiplied. ``split``,
    ``order``, ``groups``: how it becomes a matrix, as in `Factors`. ``bias``: the parameter that is added to all of
    its outputs; None if there is none. ``parts``: the names of the parameters from which it is computed, if it is an
    effective weight (the result of a parametrisation, for example); empty for a parameter.
    """

    name: str
    blocks: tuple[Block, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    groups: int
    bias: str | None = None
    parts: tuple[str, ...] = ()


BiasKey: TypeAlias = tuple[object, ...]
"""What the gradient of a bias sums: a convolution's call, or a tensor by its location in memory and the
dimensions kept."""


class Weights:
    """The weights of a captured step that can have statistics, found by the calls that compute their gradients.

    ``found``: these weights, in the order of their first products. ``skipped``: the other trained parameters by name,
    and the reasons.
    """

    def __init__(self, step: CapturedStep) -> None:
        self.step = step
        self.skipped: dict[str, str] = {}
        found: list[Weight] = []
        effective: dict[str, list[str]] = defaultdict(list)
        left: dict[str, str] = {}  # parameters that are no weights: biases, and those without statistics
        for output in step.outputs:
            if output.kind != "gradient":
                continue
            name = output.target.removeprefix("model.")
            try:
                found.append(self._weight(name, output.value))
            except NoRow as error:
                left[name] = output.value
                self.skipped[name] = str(error)
                for value in self._effective(output.value, error.at):
                    effective[value].append(name)
        parameters = {o.target.removeprefix("model.") for o in step.outputs if o.kind == "gradient"}
        for value, parts in effective.items():
            name = _effective_name(parts, {w.name for w in found} | parameters)
            found.append(self._weight(name, value, tuple(parts)))
            for part in parts:
                self.skipped[part] = f"it is part of the effective weight {name}, which has statistics"
        biased = self._with_biases(found, left)
        at = {call.name: position for position, call in enumerate(step.calls)}
        self.found = sorted(biased, key=lambda w: min(at[u.product.call.name] for u in _uses(w)))
        for weight in self.found:
            self.skipped.pop(weight.bias or "", None)

    @cached_property
    def _without_batch(self) -> set[str]:
        """The values of the forward half that depend on no input of the module."""
        found = {i.value for i in self.step.inputs if i.kind not in ("batch", "tangent")}
        for call in self.step.calls:
            if all(ref.value in found for ref in refs((call.args, call.kwargs))):
                found.update(r for r in call.results if r)
        return found

    @cached_property
    def _layers(self) -> dict[str, list[tuple[Call, str]]]:
        """By the storage of the inputs, the products of the forward half with a weight, and that weight."""
        found: dict[str, list[tuple[Call, str]]] = defaultdict(list)
        for call in self.step.calls:
            positions = LAYERS.get(getattr(call.target, "overloadpacket", None))
            if positions is None or call.name in self.step.after_loss:
                continue
            one, other = (call.args[at].value for at in positions)
            for inputs, weight in ((one, other), (other, one)):
                if weight in self._without_batch and inputs not in self._without_batch:
                    found[self.step.values[inputs].storage].append((call, weight))
        return found

    def _product(self, call: Call, index: int) -> Product | None:
        """Return a call's result as a product, if a layer of the forward half has its inputs and a matching
        weight; else None."""
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
        """Return a weight whose gradient is ``value``.

        Raises:
            NoRow: it cannot have statistics.
        """
        by_region: dict[Region | None, list[Use]] = defaultdict(list)
        for term in terms(self.step, value, self._product):
            use = Use(term.found, mapped(term.found, term.chain))
            by_region[term.region].append(use)
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
        self, name: str, value: str, regions: dict[Region, list[Use]], parts: tuple[str, ...]
    ) -> Weight:
        """Return a weight whose row ranges are used by matrices with different inputs (packed projections,
        for example)."""
        rows = self.step.values[value].fake.shape[0]
        own = sorted(regions, key=lambda r: r.start)
        end = 0
        for region in own:
            if region.start != end:
                raise NoRow("its used parts overlap or have gaps between them", value)
            end += region.size
        if end != rows:
            raise NoRow("some of its rows are not used", value)
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
        """Yield the gradients of effective weights from which a parameter's gradient is computed.

        ``at``: the value in whose computation they are searched. The summands of ``gradient`` are uses of the parameter
        itself.
        """
        uses = set(self._summands(gradient))
        seen, open_ = {at}, [at]
        if at not in uses and self._is_weight(at):
            yield at
            return
        while open_:
            call = self.step.call.get(self.step.values[open_.pop()].call or "")
            for ref in refs((call.args, call.kwargs)) if call else ():
                maker = self.step.values[ref.value].call
                if ref.value in seen or maker not in self.step.after_loss:
                    continue
                seen.add(ref.value)
                if not self._is_weight(ref.value):
                    open_.append(ref.value)
                elif ref.value not in uses:
                    yield ref.value

    def _summands(self, gradient: str) -> Iterator[str]:
        """Yield a gradient, and what is added to get it, through ops that keep all numbers."""
        open_ = [gradient]
        while open_:
            yield (value := open_.pop())
            call = self.step.call.get(self.step.values[value].call or "")
            if call is None or call.name not in self.step.after_loss:
                continue
            size = self.step.values[value].fake.numel()
            if call.is_view or call.target in SAME or call.target is aten.add.Tensor:
                of = {ref.value for ref in refs((call.args, call.kwargs))}
                open_ += [one for one in of if self.step.values[one].fake.numel() == size]

    def _is_weight(self, gradient: str) -> bool:
        try:
            self._weight("", gradient)
        except NoRow:
            return False
        return True

    def _with_biases(self, found: list[Weight], left: dict[str, str]) -> Iterator[Weight]:
        keys: dict[str, list[tuple[Region | None, BiasKey]]] = {}
        for name, value in left.items():
            try:
                own: list[Term[BiasKey]] = terms(self.step, value, self._bias_key)
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
            yield _biased(weight, bias_of.get(weight.name))

    def _bias_key(self, call: Call, index: int) -> BiasKey | None:
        if call.target is aten.convolution_backward.default and index == 2:
            return ("convolution", call.name)
        if call.target is not aten.sum.dim_IntList:
            return None
        fake = self.step.values[call.args[0].value].fake
        summed = {dim % fake.dim() for dim in call.args[1]}
        kept = [dim for dim in range(fake.dim()) if dim not in summed]
        return _tensor_key(self.step, call.args[0].value, fake, kept)

    def _belongs(self, weight: Weight, keys: list[tuple[Region | None, BiasKey]]) -> bool:
        wanted: list[set[BiasKey]] = []
        for block in weight.blocks:
            for use in block.uses:
                _, read = use.product.read(use.placement.batch, 0, False)
                value = use.product.gradients
                fake = self.step.values[value].fake.reshape(read.shape)  # type: ignore[union-attr]
                kept = [*read.groups, *read.features]  # type: ignore[union-attr,misc]
                wanted.append(
                    {
                        ("convolution", use.product.call.name),
                        _tensor_key(self.step, value, fake, kept),
                    }
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


def _biased(weight: Weight, bias: str | None) -> Weight:
    return Weight(weight.name, weight.blocks, weight.split, weight.order, weight.groups, bias, weight.parts)


def _tensor_key(step: CapturedStep, value: str, fake: torch.Tensor, kept: list[int]) -> BiasKey:
    dims = sorted((-fake.stride(d), fake.shape[d]) for d in kept if fake.shape[d] > 1)
    return (step.values[value].storage, int(fake.storage_offset()), fake.numel(), tuple(dims))


def _below_rows(placement: Placement, region: Region) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return split and order of a region's matrix without its first dimension; None if that dimension is not
    one of the outputs."""
    if placement.groups > 1:
        return None
    if region.size == 1:
        return placement.split, placement.order
    if not placement.split or placement.split[0] != region.size or placement.order[0] != 0:
        return None
    return placement.split[1:], tuple(o - 1 for o in placement.order[1:])


def _effective_name(parts: list[str], used: set[str]) -> str:
    """Return the attribute of the parametrisation, or else the names of the parameters, joined."""
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
