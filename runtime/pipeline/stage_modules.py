"""A model as a chain of stage modules: its exported graph, cut where some of its modules begin.

A stage's module has the model's own parameters and buffers under the model's names. What a later stage reads of an
earlier one passes through every stage between: PyTorch's schedules send from a stage to the next one only.
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
"""What an exported graph's nodes say of the modules that they come from."""
WITHOUT_GRADIENT = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default})
"""Ops that give tensors without gradients of tensors with them."""


@dataclass(frozen=True)
class StageModule:
    """One stage. ``inputs``, ``outputs``: tensors without data, of the shapes, strides and types of what it is called
    with and gives, saying which need gradients; those of the first stage are the model's positional tensors. ``args``,
    ``kwargs``: all that it is called with, such tensors among them.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[torch.Tensor, ...]

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The positional tensors."""
        return tuple(one for one in self.args if isinstance(one, torch.Tensor))


def exported(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Graph:
    """The model's forward for these arguments as a graph of ATen calls.

    Raises:
        ModelError: it cannot be exported, or gives something else than a tensor or a tuple of them; says why in a line.
    """
    try:
        program = torch.export.export(model, tuple(args), dict(kwargs))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{type(model).__name__} cannot be cut into stages, as its forward cannot be exported: {reason}"
        ) from error
    given = program.module_call_graph[0].signature.out_spec
    if not (given.is_leaf() or (given.type in (tuple, list) and all(c.is_leaf() for c in given.children()))):
        raise ModelError(
            f"{type(model).__name__} gives a {given.type.__name__}; a pipeline's gives tensors or a tuple"
        )
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    return module.graph


def cut_names(graph: fx.Graph) -> tuple[str, ...]:
    """The names at which the graph can be cut, in order: of modules all of whose ops stand in one piece."""
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
    """The stages of a model: one more than there are cuts.

    Args:
        args, kwargs: what the model is called with for one micro-batch; other values than tensors stay as they are.
        cuts: names of modules that each begin a stage, in the order in which they run.

    Raises:
        ModelError: the model cannot be exported, or two stages would share a parameter, or a buffer that changes.
        UsageError: a cut that is no module of one piece, or cuts in another order.
    """
    for one in (*args, *kwargs.values()):
        if any(isinstance(leaf, torch.Tensor) and leaf is not one for leaf in pytree.tree_leaves(one)):
            raise ModelError(
                f"{type(model).__name__} is given tensors within a {type(one).__name__}: give them as they are"
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
        given = received[: len(args)] if k == 0 else received
        sent = tuple(_like(n, needs, {}) for n in carried[k + 1])
        stages.append(StageModule(module, given, named, sent))
    return tuple(stages)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _ops(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _modules(node: fx.Node) -> tuple[str, ...]:
    """The names of the modules that a node is in, but for the model."""
    return tuple(name for name, _ in node.meta.get(MODULES, {}).values() if name)


def cut_places(graph: fx.Graph) -> dict[str, int]:
    """Of each module's name the position of its first op among all ops."""
    first: dict[str, int] = {}
    for at, node in enumerate(_ops(graph)):
        for name in _modules(node):
            first.setdefault(name, at)
    return first


def _places(graph: fx.Graph, cuts: Sequence[str], model: str) -> list[int]:
    """Among the ops, where each stage begins."""
    first, known = cut_places(graph), cut_names(graph)
    for cut in cuts:
        if cut not in known:
            near = ", ".join(difflib.get_close_matches(cut, known, 3, 0.3) or known[:3])
            raise UsageError(f"{model} cannot be cut at {cut!r}; near it: {near}")
    places = [0, *(first[cut] for cut in cuts)]
    for name, here, there in zip(cuts, places, places[1:], strict=False):
        if here >= there:
            raise UsageError(
                f"the cut {name!r} does not come after the one before it: write cuts in running order"
            )
    return places


def _owners(graph: fx.Graph, places: Sequence[int]) -> dict[fx.Node, int]:
    """The stage of each op."""
    return {node: bisect_right(places, at) - 1 for at, node in enumerate(_ops(graph))}


def _changed(graph: fx.Graph) -> frozenset[str]:
    """The names of the parameters and buffers that some op changes."""
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
    """Refuse parameters, and buffers that change, that several stages use."""
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
                f"is trained lives in one stage; cut elsewhere"
            )


def _needing_gradients(
    graph: fx.Graph, tensors: Mapping[str, torch.Tensor], values: Mapping[fx.Node, Any]
) -> set[fx.Node]:
    """The nodes whose tensors need gradients."""
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
    """The tensors made before a place among the ops, or given, that are read after it."""
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
    """The graph of one stage. ``values``: of incoming nodes that are arguments; those that are no tensors are fixed."""
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
    """Refuse another value of an argument that is no tensor than the stages were made with.

    Raises:
        ModelError: it is another.
    """
    if value != fixed:
        raise ModelError(f"the pipeline was planned for {name} = {fixed!r}, not {value!r}; plan it for that")


def _like(node: fx.Node, needs: Set[fx.Node], values: Mapping[fx.Node, Any]) -> Any:
    """A tensor without data that stands for a message, or for an argument, laid out as that is; or the argument, if it
    is no tensor."""
    fake = values.get(node, node.meta["val"])
    if not isinstance(fake, torch.Tensor):
        return fake
    strides = fake.stride() if node in values else torch.empty(fake.shape, device="meta").stride()
    empty = torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device="meta")
    return empty.requires_grad_(node in needs)
