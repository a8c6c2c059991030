"""A model as a chain of stage modules: its exported graph, cut where some of its modules begin.

A stage's module shares the model's parameters and buffers, under the model's names. A tensor that a later
stage reads passes through all stages in between, because PyTorch's schedules send only from one stage to the
next.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rematplan.ir import ModelError, UsageError
from rematplan.runtime.graph.compat import OpOverload, pytree

MODULES = "nn_module_stack"
"""The key under which an exported graph's nodes have the stack of their modules."""
WITHOUT_GRADIENT = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default})
"""Ops whose results do not require gradients even if their arguments do."""


@dataclass(frozen=True)
class StageModule:
    """One stage of a pipeline.

    ``module``: its module, which shares the model's parameters and buffers. ``args``, ``kwargs``: the module's
    arguments; tensors are meta tensors of the same shape, strides and type that say whether they require gradients.
    Those of the first stage are the model's arguments. ``outputs``: the module's results, as such meta tensors.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[torch.Tensor, ...]

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the positional arguments."""
        return tuple(one for one in self.args if isinstance(one, torch.Tensor))


def exported(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Graph:
    """Return the model's forward for these arguments as a graph of ATen calls, by ``torch.export``.

    Raises:
        ModelError: the model cannot be exported, or returns something else than a tensor or a tuple of tensors. The
            message has the reason in one line.
    """
    try:
        program = torch.export.export(model, tuple(args), dict(kwargs))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{type(model).__name__} cannot be cut into stages: its forward cannot be exported: {reason}"
        ) from error
    out_spec = program.module_call_graph[0].signature.out_spec
    if not (
        out_spec.is_leaf()
        or (out_spec.type in (tuple, list) and all(c.is_leaf() for c in out_spec.children()))
    ):
        raise ModelError(
            f"{type(model).__name__} returns a {out_spec.type.__name__}; "
            f"a pipeline needs a tensor or a tuple of tensors"
        )
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    return module.graph


def cut_names(graph: fx.Graph) -> tuple[str, ...]:
    """Return the names of the modules before which the graph can be cut: those whose ops are contiguous in the graph
    and do not begin with the graph's first op. They are sorted by their first ops, outer modules before inner ones."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    count: dict[str, int] = {}
    ops = [node for node in graph.nodes if node.op == "call_function"]
    for at, node in enumerate(ops):
        for name in _modules(node):
            first.setdefault(name, at)
            last[name] = at
            count[name] = count.get(name, 0) + 1
    whole = (name for name in first if first[name] > 0 and last[name] - first[name] + 1 == count[name])
    return tuple(sorted(whole, key=lambda name: (first[name], name.count("."), name)))


def stage_modules(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Sequence[str]
) -> tuple[StageModule, ...]:
    """Return a model as a chain of stages, one more than there are cuts. A tensor that a later stage reads passes
    through all stages in between.

    Args:
        model: the model.
        args: its positional arguments for one micro-batch. Arguments that are not tensors are fixed.
        kwargs: its keyword arguments for one micro-batch, likewise.
        cuts: names of the modules that begin the second and later stages, in running order.

    Raises:
        ModelError: the model cannot be exported; or an argument has tensors inside; or two stages would share a
            parameter, or a buffer that changes.
        UsageError: a cut is not a module whose ops are contiguous, or the cuts are out of order.
    """
    for one in (*args, *kwargs.values()):
        if any(isinstance(leaf, torch.Tensor) and leaf is not one for leaf in pytree.tree_leaves(one)):
            raise ModelError(
                f"{type(model).__name__} has an argument with tensors in a {type(one).__name__}; pass them directly"
            )
    graph = exported(model, args, kwargs)
    places = _places(graph, cuts, type(model).__name__)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    owners = _owners(graph, places)
    _check_shared(owners, tensors, _changed(graph))
    values = dict(zip(_placeholders(graph), (*args, *kwargs.values()), strict=True))
    needs = _needing_gradients(graph, tensors, values)
    results = list(graph.output_node().all_input_nodes)  # of a tuple each tensor once
    carried = [list(values), *(_carried(graph, place, values) for place in places[1:]), results]
    stages = []
    for k in range(len(places)):
        part = _part(
            [n for n in owners if owners[n] == k], carried[k], carried[k + 1], values if k == 0 else {}
        )
        used = {str(n.target): tensors[str(n.target)] for n in part.nodes if n.op == "get_attr"}
        module = fx.GraphModule(used, part, f"{type(model).__name__}Stage{k}")
        module.train(model.training)
        received = tuple(_like(n, needs, values if k == 0 else {}) for n in carried[k])
        named = dict(zip(kwargs, received[len(args) :], strict=True)) if k == 0 else {}
        arguments = received[: len(args)] if k == 0 else received
        sent = tuple(_like(n, needs, {}) for n in carried[k + 1])
        stages.append(StageModule(module, arguments, named, sent))
    return tuple(stages)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _ops(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _modules(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the modules that contain a node, without the model itself."""
    return tuple(name for name, _ in node.meta.get(MODULES, {}).values() if name)


def cut_places(graph: fx.Graph) -> dict[str, int]:
    """Return, by the name of each module in the graph, the position of the module's first op among all ops."""
    first: dict[str, int] = {}
    for at, node in enumerate(_ops(graph)):
        for name in _modules(node):
            first.setdefault(name, at)
    return first


def _places(graph: fx.Graph, cuts: Sequence[str], model: str) -> list[int]:
    """Return the position of each stage's first op among all ops."""
    first, known = cut_places(graph), cut_names(graph)
    for cut in cuts:
        if cut not in known:
            near = ", ".join(difflib.get_close_matches(cut, known, 3, 0.3) or known[:3])
            raise UsageError(f"{model} cannot be cut at {cut!r}; similar: {near}")
    places = [0, *(first[cut] for cut in cuts)]
    for name, here, there in zip(cuts, places, places[1:], strict=False):
        if here >= there:
            raise UsageError(
                f"the cut {name!r} does not come after the previous one: write cuts in running order"
            )
    return places


def _owners(graph: fx.Graph, places: Sequence[int]) -> dict[fx.Node, int]:
    """Return the stage of each op."""
    return {node: bisect_right(places, at) - 1 for at, node in enumerate(_ops(graph))}


def _changed(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the parameters and buffers that some op changes."""
    found = set()
    for node in _ops(graph):
        arguments = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
        for argument, value in zip(arguments, node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            state = node.target is torch.ops.aten.batch_norm.default and argument.name.startswith("running")
            if isinstance(value, fx.Node) and value.op == "get_attr" and (written or state):
                found.add(str(value.target))
    return frozenset(found)


def _check_shared(
    owners: Mapping[fx.Node, int], tensors: Mapping[str, torch.Tensor], changed: Set[str]
) -> None:
    """Refuse parameters, and buffers that change, if several stages use them."""
    users: dict[int, dict[int, str]] = {}
    for node, stage in owners.items():
        for read in node.all_input_nodes:
            if read.op == "get_attr":
                name = str(read.target)
                users.setdefault(id(tensors[name]), {}).setdefault(stage, name)
    for one, by_stage in users.items():
        names = [name for name, tensor in tensors.items() if id(tensor) == one]
        is_parameter = isinstance(tensors[names[0]], nn.Parameter)
        if len(by_stage) > 1 and (is_parameter or not changed.isdisjoint(names)):
            kind = "parameter" if is_parameter else "buffer"
            raise ModelError(
                f"stages {' and '.join(map(str, sorted(by_stage)))} share the {kind} {', '.join(names)}: a tensor that "
                f"changes must be in one stage; cut elsewhere"
            )


def _needing_gradients(
    graph: fx.Graph, tensors: Mapping[str, torch.Tensor], values: Mapping[fx.Node, Any]
) -> set[fx.Node]:
    """Return the nodes whose tensors require gradients."""
    found = {n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    found |= {n for n in graph.nodes if n.op == "get_attr" and tensors[str(n.target)].requires_grad}
    for node in _ops(graph):
        if not found.isdisjoint(node.all_input_nodes) and node.target not in WITHOUT_GRADIENT:
            found.add(node)
    return {n for n in found if _is_differentiable(n)}


def _is_differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def _carried(graph: fx.Graph, place: int, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Return the tensors that exist before a place among the ops and are read after it."""
    ops = _ops(graph)
    late = {*ops[place:], graph.output_node()}
    made = [n for n in values if isinstance(values[n], torch.Tensor)] + ops[:place]
    return [n for n in made if not late.isdisjoint(n.users)]


def _part(
    ops: Sequence[fx.Node],
    incoming: Sequence[fx.Node],
    outgoing: Sequence[fx.Node],
    values: Mapping[fx.Node, Any],
) -> fx.Graph:
    """Return the graph of one stage. ``values``: arguments by incoming node; those that are not tensors are
    fixed."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {n: part.placeholder(n.name) for n in incoming}
    for node, value in values.items():
        if node in copies and not isinstance(value, torch.Tensor):
            part.call_function(check_fixed, (copies[node], value, node.name))

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = part.node_copy(node)
        return copies[node]

    for node in ops:
        copies[node] = part.node_copy(node, copied)
    sent = []
    for node in outgoing:
        out = copied(node)
        if not node.meta["val"].is_contiguous():
            out = part.call_function(torch.ops.aten.contiguous.default, (out,))
        sent.append(out)
    part.output(sent[0] if len(sent) == 1 else tuple(sent))
    return part


def check_fixed(value: object, fixed: object, name: str) -> None:
    """Refuse an argument that is not a tensor and differs from the value with which the stages were made.

    Args:
        value: the argument.
        fixed: the value with which the stages were made.
        name: the argument's name, for the message.

    Raises:
        ModelError: ``value`` differs from ``fixed``.
    """
    if value != fixed:
        raise ModelError(f"the pipeline was planned for {name} = {fixed!r}, not {value!r}; plan it again")


def _like(node: fx.Node, needs: Set[fx.Node], values: Mapping[fx.Node, Any]) -> Any:
    """Return a meta tensor like a message or an argument, with the same strides; an argument that is not a
    tensor is returned itself."""
    fake = values.get(node, node.meta["val"])
    if not isinstance(fake, torch.Tensor):
        return fake
    strides = fake.stride() if node in values else torch.empty(fake.shape, device="meta").stride()
    empty = torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device="meta")
    return empty.requires_grad_(node in needs)
