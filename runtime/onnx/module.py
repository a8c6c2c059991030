"""An ONNX graph as a torch module, which executes the nodes in order by the functions of the op table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate

from rematplan.ir.errors import ModelError, first_line
from rematplan.ir.onnx.graph import Graph, Weight
from rematplan.ir.onnx.weight_roles import differentiated
from rematplan.runtime.costs.measure import check_fits
from rematplan.runtime.graph.module_names import ONNX_NODE, dotted
from rematplan.runtime.guards.assertions import VALUES_DECIDE
from rematplan.runtime.onnx.init_weights import first_readers, initialise
from rematplan.runtime.onnx.instructions import Instruction, program_of
from rematplan.runtime.onnx.known_values import (
    SIZES,
    Value,
    all_known,
    known_results,
    known_weights,
    stays_small,
    wanted_as_tensors,
)
from rematplan.runtime.onnx.ops.rows import refuse, stated
from rematplan.runtime.onnx.ops.values import BY_NAME, constant_tensor, to_tensor, torch_dtype


def torch_name(name: str) -> str:
    """Return a unique name for a torch parameter from an ONNX name."""
    # Torch forbids dots, so they become colons. Percent signs and colons are escaped as in a URL.
    safe = quote(name, safe=" !\"#$&'()*+,/;<=>?@[\\]^`{|}~.").replace(".", ":")
    return f"{safe}%" if not safe or hasattr(OnnxModule, safe) or safe in _MODULE_FIELDS else safe


class OnnxModule(nn.Module):
    """The forward of a :class:`~rematplan.ir.onnx.graph.Graph` as a torch module; :func:`torch_name` names its
    parameters and buffers. Weights that the file fills with a constant get random values of ``seed``, if not None; on
    ``"meta"`` none are read. Raises `ModelError` for unknown ops and unusable weights."""

    def __init__(self, graph: Graph, seed: int | None = 0, device: str = "cpu") -> None:
        super().__init__()
        self.graph = graph
        self.program = program_of(graph)
        for value in graph.inputs:
            torch_dtype(value.dtype, f"the graph input {value.name!r}")
        self.known = known_weights(graph.weights)
        tensors = wanted_as_tensors(self.program, self.known) | {w.name for w in graph.weights} - set(
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
        """Return the graph's outputs, in order, for the graph's inputs, in order."""
        values = self.start(inputs)
        self._execute(self.program, values)
        return tuple(self._tensor(o.name, values[o.name]) for o in self.graph.outputs)

    def start(self, inputs: Sequence[Tensor]) -> dict[str, Value]:
        """Return inputs and weights by name, before the first node runs; `ModelError` for another number of inputs."""
        if len(inputs) != len(self.graph.inputs):
            raise ModelError(
                f"the graph has {len(self.graph.inputs)} inputs, but was called with {len(inputs)}"
            )
        values = {v.name: x for v, x in zip(self.graph.inputs, inputs, strict=True)}
        return self._weights() | values

    def _weights(self) -> dict[str, Value]:
        return {**{name: self._weight(name) for name in self.names}, **self.known}

    def _execute(self, program: Iterable[Instruction], values: dict[str, Value]) -> None:
        """Execute nodes in order on ``values``, which get all results and lose what no later node reads. Copy new
        running statistics of batch norms to their buffers. A trace records each node's name."""
        for step in program:
            with annotate({ONNX_NODE: dotted(step.node.name)}):
                results = self.advance(step, values)
                for place, buffer in step.statistics:
                    values[buffer] = results[place]
                    self._weight(buffer).copy_(results[place].detach())
            for name in step.last:
                values.pop(name, None)

    def _weight(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, self.names[name])
        return tensor

    def _tensor(self, name: str, value: Value) -> Tensor:
        """Return a value as a tensor. A NumPy array is converted; if it is a weight, its buffer is returned."""
        if not isinstance(value, np.ndarray):
            tensor: Tensor = value
            return tensor
        return self._weight(name) if name in self.names else constant_tensor(value, f"the value {name!r}")

    def _run(self, step: Instruction, args: list[Value]) -> Sequence[Value]:
        """Execute a node and return its results: NumPy arrays if it needs only sizes, or known inputs with small
        results; else tensors or sequences. Errors become a `ModelError`, except for lack of memory. Those of
        `VALUES_DECIDE` are raised with a `ModelError` as their attribute ``refusal``."""
        node, row = step.node, step.row
        try:
            if node.op in SIZES and isinstance(args[0], Tensor):
                return (SIZES[node.op](node, args[0]),)
            if step.inner:
                return self._differentiate(step, args)
            if row.raw:
                results = row.run(node, *args)
            elif all_known(args) and stays_small(row, args):
                return known_results(row, node, args)
            else:
                results = row.run(node, *self._operands(step, args))
        except VALUES_DECIDE as error:
            # A trace may run the forward again, and then read the values that the node needs.
            why = "its result's shape depends on data; plans are for fixed shapes"
            error.refusal = refuse(node, why)  # type: ignore[union-attr]
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, ArithmeticError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise refuse(node, first_line(error)[:200]) from error
        return results if isinstance(results, tuple) else (results,)

    def advance(self, step: Instruction, values: dict[str, Value]) -> Sequence[Value]:
        """Execute one node, move its results to the device of the first tensor in ``values`` (the CPU if there is
        none), add them to ``values``, and return them."""
        results = self._run(step, [values[n] if n else None for n in step.node.inputs])
        place = next((v.device for v in values.values() if isinstance(v, Tensor)), torch.device("cpu"))
        # Tensors made from known values (NumPy arrays) are on the CPU.
        results = [r.to(place) if isinstance(r, Tensor) and r.device != place else r for r in results]
        for name, result in zip(step.node.outputs, results, strict=False):
            if name:
                values[name] = result
        return results

    def _differentiate(self, step: Instruction, args: Sequence[Value]) -> tuple[Tensor, ...]:
        """Return the results of an ONNX Gradient node: the derivatives of its ``y`` with respect to its ``xs``,
        themselves differentiable if gradients are enabled."""
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
            self._execute(step.inner, values)
            y = self._tensor(names.y, values[names.y])
            return torch.autograd.grad(y, by, torch.ones_like(y), create_graph=again, materialize_grads=True)

    def _operands(self, step: Instruction, args: list[Value]) -> list[Value]:
        """Return a node's inputs as its function expects them: known values as arrays, numbers or tensors, and None
        for an absent one."""
        rank = max((a.dim() for a in args if isinstance(a, Tensor)), default=-1)
        device = next((a.device for a in args if isinstance(a, Tensor)), None)
        return [
            self._operand(step, at, value, rank, device) if value is not None else None
            for at, value in enumerate(args)
        ]

    def _operand(
        self, step: Instruction, at: int, value: Value, rank: int, device: torch.device | None
    ) -> Value:
        """Return input ``at`` of a node as `_operands` does. ``rank``, ``device``: the largest rank and the first
        device of its tensors."""
        node, row, is_known = step.node, step.row, isinstance(value, np.ndarray)
        if at in row.known:
            return stated(node, at, value)
        if not is_known or at in row.literal:
            return value
        if row.scalars and value.size == 1 and value.ndim <= rank:
            return value.ravel()[0].item()
        tensor = self._tensor(node.inputs[at], value)
        return tensor if device is None else tensor.to(device)


def _made(weight: Weight, device: str, filled: bool) -> Tensor:
    """Return a weight's tensor on ``device``: with the file's values if ``filled``, unless on ``meta``, else
    uninitialised. `ModelError` for an unknown type, or values of another shape than the file states."""
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
    needed = sum(math.prod(w.shape) * BY_NAME[w.dtype].itemsize for w in weights if w.dtype in BY_NAME)
    check_fits(needed, "its weights")


_MODULE_FIELDS = frozenset(nn.Module().__dict__) | {"graph", "program", "known", "names"}
