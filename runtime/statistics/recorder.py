"""Collect the statistics that backwards compute, and sum them over the micro-batches of a training step."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from rematplan.runtime.execute.compiled_plan import Sink
from rematplan.runtime.graph.allocator_rounding import allocated
from rematplan.runtime.statistics.factors import Factors, Statistics
from rematplan.runtime.statistics.fisher_output_gradients import Draws
from rematplan.runtime.statistics.insert import Layer, StatisticsStep, Sums
from rematplan.runtime.statistics.options import Kronecker
from rematplan.runtime.statistics.packing import diagonal_blocks, unpack

Listener = Callable[[Mapping[str, Factors], int], None]
"""A function that receives the factors that a backward has just completed, by weight name (maybe none), and the number
of the training step."""
NO_GRADIENT = "no gradient reached it in this step"


@dataclass(frozen=True)
class LayerSums:
    """What the sums of a training step for one weight are called, and how many rows are in them."""

    layer: Layer
    """The weight, and the names of its sums."""
    rows: tuple[int, ...]
    """The rows summed so far, for each block of the weight's rows."""


class PackedFactors(Mapping[str, Factors]):
    """Kronecker factors by weight name, stored packed and made dense on access. Weights with the same input
    share ``a`` while a reference to it exists."""

    def __init__(self, layers: Mapping[str, LayerSums], tensors: Mapping[str, Tensor], samples: int) -> None:
        self._layers, self._tensors, self._samples = dict(layers), dict(tensors), samples
        self._dense: weakref.WeakValueDictionary[Any, Tensor] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, name: object) -> bool:  # that of Mapping would make the dense factors
        return name in self._layers

    def packed(self, name: str) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the stored factors ``a`` and ``g`` of a weight: a pair for each block of its rows with separate
        inputs; KeyError if it has none. A factor is (groups, `packing.packed_size`), or (groups, d) if only its
        diagonal is computed."""
        sums = self._layers[name].layer.sums
        return tuple((self._tensors[one.a], self._tensors[one.g]) for one in sums)

    def __getitem__(self, name: str) -> Factors:
        """Return a layer's factors as dense matrices. The factor of equal inputs is unpacked once and shared."""
        one_layer = self._layers[name]
        layer, sums = one_layer.layer, one_layer.layer.sums
        key = tuple(one.a for one in sums), tuple(one.count for one in sums), one_layer.rows
        a = self._dense.get(key)
        if a is None:
            self._dense[key] = a = self._joined(
                [
                    self._inputs(one, max(one_layer.rows) / max(1, rows))
                    for one, rows in zip(sums, one_layer.rows, strict=True)
                ]
            )
        g = self._joined([self._gradients(one) for one in sums])
        return Factors(
            a,
            g,
            rows=max(one_layer.rows),
            samples=self._samples,
            bias=layer.bias is not None,
            bias_name=layer.bias,
            groups=layer.groups,
            split=layer.split,
            order=layer.order,
            of_loss=layer.of_loss,
        )

    @staticmethod
    def _joined(blocks: list[Tensor]) -> Tensor:
        whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return whole if len(whole) > 1 else whole[0]

    def _inputs(self, sums: Sums, scale: float) -> Tensor:
        tensor = self._tensors[sums.a]
        dense = tensor if sums.diagonal[0] else unpack(tensor, sums.d_in, sums.ones)
        dense = dense if scale == 1 else dense * scale
        return dense if sums.count == 1 else dense.expand(sums.count, *dense.shape[1:])

    def _gradients(self, sums: Sums) -> Tensor:
        tensor = self._tensors[sums.g]
        if sums.diagonal[1]:
            return tensor if sums.count == 1 else tensor[0].unflatten(0, (sums.count, -1))
        if sums.count == 1:
            return unpack(tensor, sums.d_out)
        return diagonal_blocks(tensor[0], sums.d_out, sums.count)


def shapes(of: StatisticsStep) -> Mapping[str, Factors]:
    """Return the factors that a step with statistics will compute, by weight name, as tensors on the device ``meta``
    (shapes and types only)."""
    outputs = {o.target: of.step.values[o.value].fake for o in of.step.outputs if o.kind == "statistic"}
    tensors = {
        target: torch.empty(fake.shape, dtype=fake.dtype, device="meta") for target, fake in outputs.items()
    }
    return PackedFactors({layer.name: _layer_sums(layer) for layer in of.layers}, tensors, of.terms)


def _layer_sums(layer: Layer) -> LayerSums:
    return LayerSums(layer, tuple(one.rows for one in layer.sums))


class Recorder:
    """Collects the statistics of one planned module and sums them over the micro-batches of a training step. A step
    ends with an optimizer's step, `take`, or a forward that finds no gradients after a backward."""

    def __init__(self, options: Kronecker) -> None:
        self.options = options
        self.draws = Draws(options.seed)
        #: The number of the present training step. It can be set, for example when training resumes.
        self.step = 0
        self._asked: bool | None = None
        self._ended = False
        self._backwards = 0
        self._parameters: frozenset[int] = frozenset()
        self._shards: tuple[weakref.ref[Tensor], ...] = ()
        self._listener: weakref.WeakMethod[Listener] | None = None
        self._clear()
        _RECORDERS.add(self)
        _watch_optimizers()

    def take(self, wanted: bool | None) -> None:
        """End the present training step. The following ones all compute statistics (True), none does (False),
        or every n-th does (None)."""
        self._asked, self._ended = wanted, True

    def watch_shards(self, parameters: Iterable[Tensor]) -> None:
        """Remember, by weak references, the parameters that FSDP2 has sharded; if none, keep those known before."""
        # A forward under FSDP2 sees gathered parameters: they have no gradients of earlier micro-batches, and
        # no optimizer updates them.
        shards = tuple(weakref.ref(p) for p in parameters if hasattr(p, "device_mesh"))
        self._shards = shards or self._shards

    def forward(self, parameters: Collection[Tensor], accumulating: bool) -> bool:
        """Begin a forward with the module's ``parameters`` and return whether it computes statistics. If the training
        step has ended, or a backward has run and no gradients are left, begin the next step and drop the sums.
        ``accumulating``: whether gradients of earlier micro-batches exist."""
        shards = [shard for ref in self._shards if (shard := ref()) is not None]
        accumulating = accumulating or any(shard.grad is not None for shard in shards)
        if self._ended or (self._backwards and not accumulating):
            self.step += 1
            self._ended, self._backwards = False, 0
            self._clear()
        self._parameters = frozenset(map(id, (*parameters, *shards)))
        return self.step % self.options.every == 0 if self._asked is None else self._asked

    def ends_with(self, optimizer: Optimizer) -> None:
        """End the training step if the optimizer, which has just stepped, has a parameter of the module."""
        groups = (group["params"] for group in optimizer.param_groups)
        if any(id(p) in self._parameters for parameters in groups for p in parameters):
            self._ended = True

    def listen(self, listener: Listener) -> None:
        """Call a bound method, held weakly, with complete factors during each backward. It replaces the method
        registered before. It gets the factors of one backward that are complete since its last call, maybe none, and
        the training step's number."""
        self._listener = weakref.WeakMethod(listener)

    def sink(self, of: StatisticsStep | None) -> Sink:
        """Return a function that takes the statistics of a backward's segment, by name, and whether the segment is the
        last. It reports complete factors to the listener, and adds all after the last segment; neither if another
        training step has begun. ``of``: None for a backward without statistics, which is only counted."""
        step, pending, reported = self.step, dict[str, Tensor | None](), set[str]()

        def receive(found: Mapping[str, Tensor | None], last: bool) -> None:
            """Collect the statistics of one backward, and add them to the sums at its ``last`` call. Those of an
            earlier step are dropped."""
            pending.update(found)
            if of and step == self.step:
                self._report(of, pending, reported)
            if last and step == self.step:
                self._backwards += 1
                if of:
                    self._add(of, pending)
            if last:
                pending.clear()
                reported.clear()

        return receive

    def _report(self, of: StatisticsStep, found: Mapping[str, Tensor | None], reported: set[str]) -> None:
        """Call the listener, if any, with the factors of layers that are newly complete in this backward, and add their
        names to ``reported``. ``found``: the statistics so far, by name; None where no gradient arrived."""
        listener = self._listener and self._listener()
        if not listener:
            return
        tensors = {target: t for target, t in found.items() if t is not None}
        new = [
            layer
            for layer in of.layers
            if layer.name not in reported and all(one.a in tensors and one.g in tensors for one in layer.sums)
        ]
        reported.update(layer.name for layer in new)
        listener(
            PackedFactors({layer.name: _layer_sums(layer) for layer in new}, tensors, of.terms), self.step
        )

    @property
    def summed_bytes(self) -> dict[int, int]:
        """The bytes of the statistics summed so far, by the address of PyTorch's storage object."""
        storages = [t.untyped_storage() for t in self._tensors.values()]
        devices = [t.device for t in self._tensors.values()]
        return {s._cdata: allocated(s.nbytes(), d) for s, d in zip(storages, devices, strict=True)}

    def statistics(self) -> Statistics:
        """Return the statistics of the present training step, summed over its micro-batches so far. There are no
        factors if the training step computes no statistics."""
        factors = PackedFactors(self._layers, self._tensors, self._samples)
        left = {name: why for name, why in self._skipped.items() if name not in self._layers}
        return Statistics(factors, left, self.step)

    def _clear(self) -> None:
        self._layers: dict[str, LayerSums] = {}
        self._tensors: dict[str, Tensor] = {}
        self._skipped: dict[str, str] = {}
        self._samples = 0

    def _add(self, of: StatisticsStep, found: Mapping[str, Tensor | None]) -> None:
        """Add the statistics of one backward to those of earlier ones. Layers without a gradient count as skipped."""
        self._samples += of.terms
        self._skipped |= of.skipped
        new = {}
        for layer in of.layers:
            if all(found.get(one.g) is not None and found.get(one.a) is not None for one in layer.sums):
                new[layer.name] = _layer_sums(layer)
            else:
                names = (layer.name, *filter(None, (layer.bias,)))
                self._skipped.update(dict.fromkeys(names, NO_GRADIENT))
        needed = {
            target
            for layer_sums in new.values()
            for one in layer_sums.layer.sums
            for target in (one.a, one.g)
        }
        tensors = {target: t for target, t in found.items() if t is not None and target in needed}
        if not self._layers:
            self._layers, self._tensors = new, tensors
        elif _geometry(self._layers) == _geometry(new):
            for target, tensor in tensors.items():
                self._tensors[target] += tensor
            self._layers = {name: _with_rows(self._layers[name], one.rows) for name, one in new.items()}
        else:
            self._add_apart(new, tensors)

    def _add_apart(self, new: Mapping[str, LayerSums], tensors: Mapping[str, Tensor]) -> None:
        """Add a micro-batch whose weights, or shared inputs, differ from those of earlier ones. Each weight gets
        tensors of its own. A weight that the micro-batches use as different matrices loses its statistics."""
        layers, summed = {}, {}
        for name in {**self._layers, **new}:
            parts = [
                (had[name], pool)
                for had, pool in ((self._layers, self._tensors), (new, tensors))
                if name in had
            ]
            layer = parts[0][0].layer
            if len({_shape(one.layer) for one, _ in parts}) > 1:
                self._skipped[name] = "micro-batches of this step use it as different matrices"
                continue
            own = []
            for at, one in enumerate(layer.sums):
                a, g = f"a of {name}, part {at}", f"g of {name}, part {at}"
                summed[a] = sum_of([pool[p.layer.sums[at].a] for p, pool in parts])
                summed[g] = sum_of([pool[p.layer.sums[at].g] for p, pool in parts])
                own.append(replace(one, a=a, g=g))
            rows = tuple(map(sum, zip(*(p.rows for p, _ in parts), strict=True)))
            layers[name] = LayerSums(replace(layer, sums=tuple(own)), rows)
        self._layers, self._tensors = layers, summed


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Return the sum of the tensors of a list as a new tensor. They have the same shape, and the list must not be
    empty."""
    found = tensors[0].clone()
    for tensor in tensors[1:]:
        found += tensor
    return found


def _with_rows(sums: LayerSums, rows: tuple[int, ...]) -> LayerSums:
    return LayerSums(sums.layer, tuple(map(operator.add, sums.rows, rows)))


def _geometry(layers: Mapping[str, LayerSums]) -> dict[str, Layer]:
    """Return the weights and their sums without numbers of rows. If two micro-batches have equal ones, sums
    of the same name can be added."""
    return {
        name: replace(one.layer, sums=tuple(replace(s, rows=0) for s in one.layer.sums))
        for name, one in layers.items()
    }


def _shape(layer: Layer) -> Layer:
    return replace(layer, sums=tuple(replace(s, a="", g="", rows=0) for s in layer.sums))


_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _stepped(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for recorder in list(_RECORDERS):
        recorder.ends_with(optimizer)


@functools.cache
def _watch_optimizers() -> None:
    """Register a hook after every optimizer's step, which ends the training step of each recorder with a
    parameter in that optimizer."""
    register_optimizer_step_post_hook(_stepped)
