"""An ONNX graph as a torch module: each node is a row of the op table, and the nodes run in order.

Values that are known without computing tensors (sizes, axes, indices computed from them) stay numpy arrays
while the graph runs. So shape arithmetic is done immediately and does not appear in a captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor, nn

from rematplan.ir.errors import ModelError
from rematplan.ir.onnx.graph import Graph, Node, Weight
from rematplan.ir.onnx.weight_roles import differentiated, trains_statistics
from rematplan.runtime.costs.measure import check_fits
from rematplan.runtime.graph.compat import disable_current_modes
from rematplan.runtime.guards.assertions import VALUES_DECIDE
from rematplan.runtime.onnx.init_weights import first_readers, initialise
from rematplan.runtime.onnx.op_table import row_of
from rematplan.runtime.onnx.ops.rows import Row, refuse, stated
from rematplan.runtime.onnx.ops.shape import stated_sizes
from rematplan.runtime.onnx.ops.values import constant_tensor, to_array, to_tensor, torch_dtype

MAX_KNOWN = 4096  # the largest number of elements of a value that stays a numpy array

Value = Any  # Tensor | np.ndarray | list | None: a tensor, a known value, a sequence, an absent input


def torch_name(name: str) -> str:
    """Return a unique name for a torch parameter from an ONNX name. :func:`onnx_name` is the inverse.

    Torch forbids dots, so they become colons; percent signs and colons are escaped as in a URL.
    """
    safe = quote(name, safe=" !\"#$&'()*+,/;<=>?@[\\]^`{|}~.").replace(".", ":")
    return f"{safe}%" if not safe or hasattr(OnnxModule, safe) or safe in _MODULE_FIELDS else safe


def onnx_name(name: str) -> str:
    """Return the ONNX name from which :func:`torch_name` made a parameter name."""
    return unquote(name.removesuffix("%").replace(":", "."))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One node of an ONNX graph, ready to run.

    ``node``: the node. ``row``: the op table's entry for its op and opset, with the function to call. ``last``: the
    names of the values that no later node reads, which are freed after the node.
    """

    node: Node
    row: Row
    last: tuple[str, ...]
    statistics: tuple[tuple[int, str], ...]
    """For a batch norm in training form: pairs of an output's position and the name of the buffer whose
    content it replaces."""
    inner: tuple[Instruction, ...] = ()
    """For a Gradient node: the instructions that compute the differentiated value from the node's inputs."""

    @classmethod
    def of(cls, node: Node) -> Instruction:
        """Return the instruction of a single node that frees none of its inputs.

        Raises:
            ModelError: the op table has no entry for the node, or the entry does not support its attributes.
        """
        return cls(node, row_of(node), (), ())


class OnnxModule(nn.Module):
    """The forward pass of a :class:`~rematplan.ir.onnx.graph.Graph` as a torch module.

    Parameters and buffers are registered under the :func:`torch_name` of their ONNX names. Weights that the file
    generates by random ops start with random values from ``seed``. A batch norm in training form updates its buffers
    once per forward.

    Args:
        graph: the graph.
        seed: the seed of the random initial values; None keeps the values that the file generates.
        device: the device of the weights; with ``"meta"`` no weights are read.

    Raises:
        ModelError: an op is not in the op table (the message names the node and its opset), or a weight cannot be read.
    """

    def __init__(self, graph: Graph, seed: int | None = 0, device: str = "cpu") -> None:
        super().__init__()
        self.graph = graph
        self.program = _program(graph)
        for value in graph.inputs:
            torch_dtype(value.dtype, f"the graph input {value.name!r}")
        self.known = _known_weights(graph.weights)
        tensors = _wanted_as_tensors(self.program, self.known) | {w.name for w in graph.weights} - set(
            self.known
        )
        self.names = {w.name: torch_name(w.name) for w in graph.weights if w.name in tensors}
        if device != "meta":
            _check_memory(graph.weights)
        readers, generator = first_readers(graph), torch.Generator().manual_seed(seed or 0)
        for weight in graph.weights:
            if weight.name not in tensors:
                continue
            random = weight.generated and seed is not None
            tensor = _made(weight, device, filled=not random)
            if random and device != "meta":
                initialise(tensor, readers.get(weight.name), generator)
            self._register(weight, tensor)

    def _register(self, weight: Weight, tensor: Tensor) -> None:
        name = self.names[weight.name]
        if weight.role == "parameter":
            self.register_parameter(name, nn.Parameter(tensor))
        else:
            self.register_buffer(name, tensor, persistent=weight.role == "buffer")

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the graph's outputs, in order, for the graph's inputs, in order.

        Raises:
            ModelError: the number of inputs is wrong, or a node cannot run on its inputs.
        """
        values = self.start(inputs)
        updates: dict[str, Tensor] = {}
        self._execute(self.program, values, updates)
        outputs = tuple(self._tensor(o.name, values[o.name]) for o in self.graph.outputs)
        with torch.no_grad():
            for buffer, value in updates.items():
                self._weight(buffer).copy_(value)
        return outputs

    def start(self, inputs: Sequence[Tensor]) -> dict[str, Value]:
        """Return the values that exist before the first node runs (the graph's inputs and the weights), by name.

        Raises:
            ModelError: the number of inputs is wrong.
        """
        if len(inputs) != len(self.graph.inputs):
            raise ModelError(
                f"the graph has {len(self.graph.inputs)} inputs, but was called with {len(inputs)}"
            )
        values = {v.name: x for v, x in zip(self.graph.inputs, inputs, strict=True)}
        return self._weights() | values

    def _weights(self) -> dict[str, Value]:
        return {**{name: self._weight(name) for name in self.names}, **self.known}

    def _execute(
        self, program: Iterable[Instruction], values: dict[str, Value], updates: dict[str, Tensor]
    ) -> None:
        """Run nodes in order. Their results are added to ``values``, and new contents of buffers also to
        ``updates``."""
        for step in program:
            results = self.advance(step, values)
            for place, buffer in step.statistics:
                values[buffer] = updates[buffer] = results[place]
            for name in step.last:
                values.pop(name, None)

    def _weight(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, self.names[name])
        return tensor

    def _tensor(self, name: str, value: Value) -> Tensor:
        """Return a value as a tensor. A known value that is a weight is returned as the buffer of that weight."""
        if not isinstance(value, np.ndarray):
            tensor: Tensor = value
            return tensor
        return self._weight(name) if name in self.names else constant_tensor(value, f"the value {name!r}")

    def _run(self, step: Instruction, args: list[Value]) -> Sequence[Value]:
        """Return the results of one node: NumPy arrays if all its inputs are known and the results are small, else
        tensors.

        Raises:
            ModelError: the node cannot run on its inputs.
        """
        node, row = step.node, step.row
        try:
            if node.op in SIZES and isinstance(args[0], Tensor):
                return (SIZES[node.op](node, args[0]),)
            if step.inner:
                return self._differentiate(step, args)
            if row.raw:
                results = row.run(node, *args)
            elif _all_known(args) and _stays_small(row, args):
                return _known_results(row, node, args)
            else:
                results = row.run(node, *self._operands(step, args))
        except VALUES_DECIDE as error:
            raise refuse(node, "its result's shape depends on data; plans are for fixed shapes") from error
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, ArithmeticError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise refuse(node, _first_line(error)) from error
        return results if isinstance(results, tuple) else (results,)

    def advance(self, step: Instruction, values: dict[str, Value]) -> Sequence[Value]:
        """Run one node on ``values`` (by name), add its results to ``values``, and return the results.

        Raises:
            ModelError: the node cannot run on its inputs.
        """
        results = self._run(step, [values[n] if n else None for n in step.node.inputs])
        place = next((v.device for v in values.values() if isinstance(v, Tensor)), torch.device("cpu"))
        # Results that are made from known values are on the CPU.
        results = [r.to(place) if isinstance(r, Tensor) and r.device != place else r for r in results]
        for name, result in zip(step.node.outputs, results, strict=False):
            if name:
                values[name] = result
        return results

    def _differentiate(self, step: Instruction, args: Sequence[Value]) -> tuple[Tensor, ...]:
        """Return the results of a Gradient node: the derivatives of ``y`` with respect to the first of the
        node's inputs."""
        names = differentiated(step.node)
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            tensors = [self._tensor(n, a) for n, a in zip(step.node.inputs, args, strict=True)]
            by = [
                t if again and t.requires_grad else t.detach().requires_grad_()
                for t in tensors[: len(names.xs)]
            ]
            values = self._weights() | dict(
                zip((*names.xs, *names.zs), (*by, *tensors[len(by) :]), strict=True)
            )
            self._execute(step.inner, values, {})
            y = self._tensor(names.y, values[names.y])
            return torch.autograd.grad(y, by, torch.ones_like(y), create_graph=again, materialize_grads=True)

    def _operands(self, step: Instruction, args: list[Value]) -> list[Value]:
        """Return a node's inputs in the form that its row expects."""
        rank = max((a.dim() for a in args if isinstance(a, Tensor)), default=-1)
        device = next((a.device for a in args if isinstance(a, Tensor)), None)
        return [
            self._operand(step, at, value, rank, device) if value is not None else None
            for at, value in enumerate(args)
        ]

    def _operand(
        self, step: Instruction, at: int, value: Value, rank: int, device: torch.device | None
    ) -> Value:
        node, row, is_known = step.node, step.row, isinstance(value, np.ndarray)
        if at in row.known:
            return stated(node, at, value)
        if not is_known or at in row.literal:
            return value
        if row.scalars and value.size == 1 and value.ndim <= rank:
            return value.ravel()[0].item()
        tensor = self._tensor(node.inputs[at], value)
        return tensor if device is None else tensor.to(device)


# ------------------------------------------------------------------ known values


# Ops that need only a tensor's sizes.
SIZES: Mapping[str, Callable[[Node, Tensor], np.ndarray]] = {
    "Shape": lambda node, x: np.asarray(stated_sizes(node, x), np.int64),
    "Size": lambda _, x: np.asarray(math.prod(x.shape), np.int64),
}


def _all_known(args: Iterable[Value]) -> bool:
    return all(a is None or isinstance(a, np.ndarray) for a in args)


def _stays_small(row: Row, args: Sequence[np.ndarray | None]) -> bool:
    """Return whether the results of a node on known values are small enough to be known values."""
    if row.random:
        return False
    if row.size is not None:
        return row.size(*args) <= MAX_KNOWN
    shapes = [a.shape for a in args if a is not None]
    try:
        return math.prod(np.broadcast_shapes(*shapes)) <= MAX_KNOWN
    except ValueError:  # not elementwise: gather, concatenation and the like
        return sum(math.prod(s) for s in shapes) <= MAX_KNOWN


def _known_results(row: Row, node: Node, args: Sequence[np.ndarray | None]) -> tuple[Value, ...]:
    """Run a row on known values, invisible to any tracer."""
    with disable_current_modes(), torch.no_grad():
        operands = [
            a if a is None or k in row.known | row.literal else to_tensor(a) for k, a in enumerate(args)
        ]
        results = row.run(node, *operands)
        return tuple(to_array(r) for r in (results if isinstance(results, tuple) else (results,)))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


# ------------------------------------------------------------------ making the module


def _program(graph: Graph) -> tuple[Instruction, ...]:
    """Return the nodes as instructions, each with the names of the values that no later node reads."""
    rows = [row_of(node) for node in graph.nodes]
    kept = {o.name for o in graph.outputs} | {w.name for w in graph.weights}
    seen: set[str] = set()
    program = []
    for node, row in zip(reversed(graph.nodes), reversed(rows), strict=True):
        names = dict.fromkeys(n for n in node.inputs if n and n not in seen and n not in kept)
        seen.update(names)
        inner = _inner(graph, node) if node.op == "Gradient" else ()
        program.append(Instruction(node, row, tuple(names), _statistics(node, graph.weights), inner))
    return tuple(reversed(program))


def _inner(graph: Graph, gradient: Node) -> tuple[Instruction, ...]:
    """Return the nodes that compute the differentiated value of a Gradient node from its inputs."""
    names = differentiated(gradient)
    inner = {*names.xs, *names.zs}
    needed, chosen = {names.y}, []
    for node in reversed(graph.nodes):
        if node is not gradient and needed.intersection(node.outputs):
            chosen.append(node)
            needed.update(set(node.inputs) - inner)
    missing = {v.name for v in graph.inputs} & needed
    if missing or not chosen:
        raise refuse(gradient, f"{names.y!r} is not computed from {sorted(inner)} alone")
    return tuple(
        Instruction(n, row_of(n), (), (), _inner(graph, n) if n.op == "Gradient" else ())
        for n in reversed(chosen)
    )


def _wanted_as_tensors(program: Iterable[Instruction], known: Mapping[str, np.ndarray]) -> set[str]:
    """Return the known weights that an op reads as a tensor. They are registered as buffers, so that they are
    on the module's device."""
    settled, wanted = {*known, ""}, set()
    for step in program:
        node, row = step.node, step.row
        if node.op in SIZES or (settled.issuperset(node.inputs) and not row.random):
            settled.update(node.outputs)
            continue
        for at, name in enumerate(node.inputs):
            if (
                name in known
                and at not in row.known | row.literal
                and not (row.scalars and known[name].size == 1)
            ):
                wanted.add(name)
    return wanted


def _statistics(node: Node, weights: Iterable[Weight]) -> tuple[tuple[int, str], ...]:
    """Return which results of a batch norm in training form are new contents of buffers."""
    if node.op != "BatchNormalization" or not trains_statistics(node):
        return ()
    buffers = {w.name for w in weights if w.role == "buffer"}
    return tuple((out, node.inputs[at]) for out, at in ((1, 3), (2, 4)) if node.inputs[at] in buffers)


def _known_weights(weights: Iterable[Weight]) -> Mapping[str, np.ndarray]:
    """Return small constants as arrays."""
    small = (w for w in weights if w.role == "constant" and math.prod(w.shape) <= MAX_KNOWN)
    return {w.name: w.load() for w in small if w.dtype != "bfloat16"}


def _made(weight: Weight, device: str, filled: bool) -> Tensor:
    dtype = torch_dtype(weight.dtype, f"the weight {weight.name!r}")
    if device == "meta" or not filled:
        return torch.empty(weight.shape, dtype=dtype, device=device)
    array = weight.load()
    if array.shape != weight.shape:
        raise ModelError(
            f"the weight {weight.name!r} has shape {array.shape}, but the file states {weight.shape}"
        )
    return to_tensor(array).to(device)


def _check_memory(weights: Iterable[Weight]) -> None:
    needed = sum(
        math.prod(w.shape) * np.dtype(_width(w.dtype)).itemsize for w in weights if w.dtype != "object"
    )
    check_fits(needed, "its weights")


def _width(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else dtype


_MODULE_FIELDS = frozenset(nn.Module().__dict__) | {"graph", "program", "known", "names"}
