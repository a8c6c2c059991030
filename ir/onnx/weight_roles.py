"""How the nodes of an ONNX graph read its tensors, to decide which are parameters, buffers or constants.

A gradient reaches a parameter over ops that are differentiable in the input that they read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx.graph import Node

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

# Ops that only rearrange one tensor or round it: an op that reads the result of one of them on a weight reads that
# weight.
VIEW_OPS = frozenset({"FakeQuantize", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})

# Ops that are differentiable in their first input only.
IN_THE_FIRST = (
    "CenterCropPad", "Clip", "CumSum", "Dropout", "Expand", "Gather", "GatherElements", "GatherND", "Pad",
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Tile",
    "TopK", "Trilu", "Unsqueeze", "Upsample", "Pow", "MaxUnpool", "Compress", "CumProd", "RotaryEmbedding",
    "Col2Im", "DFT", "FakeQuantize", "ReverseSequence",
)  # fmt: skip

# Ops that are differentiable in no input.
IN_NONE = (
    "And", "ArgMax", "ArgMin", "ConstantOfShape", "Equal", "EyeLike", "Greater", "GreaterOrEqual", "IsInf",
    "IsNaN", "Less", "LessOrEqual", "NonZero", "NonMaxSuppression", "Not", "OneHot", "Or",
    "DynamicQuantizeLinear", "MatMulInteger", "Range", "Shape", "Size", "Xor", "Bernoulli",
    "RandomNormalLike", "RandomUniformLike", "Multinomial", "QuantizeLinear",
)  # fmt: skip

# By op: the positions of the inputs in which it is differentiable. Ops that are absent: all inputs.
DIFFERENTIABLE_INPUTS: dict[str, frozenset[int]] = {
    **dict.fromkeys(IN_THE_FIRST, frozenset({0})),
    "BatchNormalization": frozenset({0, 1, 2}),
    "DequantizeLinear": frozenset({1}),
    "ScatterElements": frozenset({0, 2}),
    "ScatterND": frozenset({0, 2}),
    "TensorScatter": frozenset({0, 1}),
    "Where": frozenset({1, 2}),
    **dict.fromkeys(IN_NONE, frozenset()),
}

# By op: the positions of the inputs that weights usually have. A generated tensor that is read there is a weight.
WEIGHT_INPUTS: dict[str, frozenset[int]] = {
    "BatchNormalization": frozenset({1, 2}),
    "CausalConvWithState": frozenset({1, 2}),
    "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}),
    "GRU": frozenset({1, 2, 3}),
    "Gather": frozenset({0}),
    "Gemm": frozenset({1, 2}),
    "GroupNormalization": frozenset({1, 2}),
    "InstanceNormalization": frozenset({1, 2}),
    "LSTM": frozenset({1, 2, 3}),
    "LayerNormalization": frozenset({1, 2}),
    "MatMul": frozenset({0, 1}),
    "PRelu": frozenset({1}),
    "RMSNormalization": frozenset({1}),
    "RNN": frozenset({1, 2, 3}),
}
AFFINE_OPS = frozenset({"Add", "Div", "Mul", "Sub"})  # per-channel scale and shift written as arithmetic
ROUNDING = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"})
STATISTICS = frozenset({3, 4})  # batch norm's mean and variance


@dataclass(frozen=True)
class Uses:
    """The readers of each value of an ONNX graph.

    ``readers``: for each value, by name, the nodes that read it, as pairs (node, input position).
    """

    readers: Mapping[str, tuple[tuple[Node, int], ...]]

    def through_views(self, name: str) -> Iterable[tuple[Node, int]]:
        """Yield the readers of a value as (node, input position); in place of nodes that only rearrange it,
        their readers.
        """
        waiting = [name]
        while waiting:
            for node, at in self.readers.get(waiting.pop(), ()):
                if node.op in VIEW_OPS and at == 0 and not node.domain:
                    waiting.append(node.outputs[0])
                else:
                    yield node, at


def uses(nodes: Iterable[Node]) -> Uses:
    """Return, for every value that the nodes read, which nodes read it in which input."""
    readers: dict[str, list[tuple[Node, int]]] = defaultdict(list)
    for node in nodes:
        for at, name in enumerate(node.inputs):
            if name:
                readers[name].append((node, at))
    return Uses({name: tuple(found) for name, found in readers.items()})


def is_statistic(name: str, used: Uses) -> bool:
    """Return whether a batch norm reads the value, possibly through views, as its mean or variance."""
    return any(node.op == "BatchNormalization" and at in STATISTICS for node, at in used.through_views(name))


def is_rounded(name: str, used: Uses) -> bool:
    """Return whether a node reads the value, possibly through views, to quantise it, or as integers that it
    dequantises."""
    return any(node.op in ROUNDING and at == 0 for node, at in used.through_views(name))


def in_weight_input(name: str, used: Uses) -> bool:
    """Return whether a layer reads the value, possibly through views, in an input for weights (such as a
    convolution's kernel)."""
    return any(at in WEIGHT_INPUTS.get(node.op, ()) for node, at in used.through_views(name))


def is_generated_weight(name: str, fill: float, used: Uses) -> bool:
    """Return whether a tensor that a node fills with ``fill`` is a weight, by its readers."""
    if in_weight_input(name, used) or is_statistic(name, used):
        return True
    # Such a number is rather a mask or an initial state.
    if fill in (0.0, 1.0, -1.0) or not abs(fill) < 1e4:
        return False
    return any(node.op in AFFINE_OPS for node, _ in used.through_views(name))


def differentiable_values(nodes: Iterable[Node], outputs: Iterable[str]) -> frozenset[str]:
    """Return the names of the values that gradients of the outputs reach. ``nodes``: in topological order."""
    reached = set(outputs)
    for node in reversed(tuple(nodes)):
        if not any(o in reached for o in node.outputs if o):
            continue
        positions = DIFFERENTIABLE_INPUTS.get(node.op)
        reached.update(n for at, n in enumerate(node.inputs) if n and (positions is None or at in positions))
    return frozenset(reached)


@dataclass(frozen=True, slots=True)
class Differentiated:
    """What an ONNX Gradient node computes: gradients of ``y`` with respect to ``xs``. ``zs``: other values
    that ``y`` depends on.
    """

    xs: tuple[str, ...]
    zs: tuple[str, ...]
    y: str


def differentiated(node: Node) -> Differentiated:
    """Return the names in the attributes ``xs``, ``zs`` and ``y`` of an ONNX Gradient node. `ModelError` unless it has
    an input for each of ``xs``, at least one, and of ``zs``."""
    stated: Any = node.attributes
    found = Differentiated(tuple(stated.get("xs", ())), tuple(stated.get("zs", ())), str(stated.get("y", "")))
    if not found.xs or len(found.xs) + len(found.zs) != len(node.inputs):
        named = len(found.xs) + len(found.zs)
        raise ModelError(
            f"node {node.name!r} (Gradient): it names {named} values for {len(node.inputs)} inputs"
        )
    return found


def reads(node: Node) -> tuple[str, ...]:
    """Return the names of the values that a node needs: its inputs, and what a Gradient node differentiates."""
    named = (differentiated(node).y,) if node.op == "Gradient" and node.domain else ()
    return (*filter(None, node.inputs), *named)


def trains_statistics(node: Node) -> bool:
    """Return whether a batch norm normalises by the batch and updates its running statistics, in any opset."""
    if node.version >= 14:
        return bool(node.attributes.get("training_mode", 0))
    if node.version >= 7:
        return len(node.outputs) > 1
    return not node.attributes.get("is_test", 0)
