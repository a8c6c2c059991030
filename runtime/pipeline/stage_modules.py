"""Cutting a model into a chain of stage modules for a pipeline: its exported graph is cut where given modules begin.

A tensor that a later stage reads passes through all stages in between, because PyTorch's schedules send only from
one stage to the next.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate, has_preserved_node_meta

from rematplan.ir import ModelError, UsageError
from rematplan.runtime.graph.compat import OpOverload, pytree
from rematplan.runtime.graph.module_names import MODULE, module_name, module_names, prefixes
from rematplan.runtime.pipeline.exported_model import exported
from rematplan.runtime.pipeline.message_layout import inverse, keeps_format, memory_order, turned

WITHOUT_GRADIENT = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default})
"""Ops whose results do not require gradients even if their arguments do."""


class _Named(fx.Interpreter):
    """Runs a graph, and records for each op the module of the exported model that calls it."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        with annotate({MODULE: module_name(n)}):
            return getattr(self, n.op)(n.target, *self.fetch_args_kwargs_from_env(n))


class StageGraph(fx.GraphModule):
    """The graph of one stage, whose ops are those of the mode at export: training or evaluation cannot be changed."""

    def recompile(self) -> Any:
        """Compile the graph's forward and return its code. In a capture that preserves nodes' metadata, the forward
        runs node by node, so that each op is annotated with its module."""
        code, cls = super().recompile(), type(self)
        compiled, signature = cls.forward, inspect.signature(self.forward)

        @functools.wraps(compiled)
        def forward(self: StageGraph, *args: Any, **kwargs: Any) -> Any:
            if not has_preserved_node_meta():
                return compiled(self, *args, **kwargs)
            return _Named(self).run(*signature.bind(*args, **kwargs).arguments.values())

        cls.forward = forward
        return code

    def train(self, mode: bool = True) -> StageGraph:
        """Do nothing for the mode that the graph has, and raise `UsageError` for the other one."""
        if mode != self.training:
            have, asked = ("training", "eval()") if self.training else ("evaluation", "train()")
            raise UsageError(
                f"a pipeline's stage keeps the mode in which the model was planned, {have}; for the other one, call "
                f"{asked} on the model and plan another pipeline, whose stages share the parameters"
            )
        return self


@dataclass(frozen=True)
class StageModule:
    """One stage of a pipeline: its module, and meta tensors like the tensors that it takes and returns."""

    module: nn.Module
    """The stage's module, which shares the model's parameters and buffers, under the model's names."""
    args: tuple[Any, ...]
    """The module's arguments; on the first stage the model's. Arguments that are no tensors are the real ones."""
    kwargs: Mapping[str, Any]
    """The module's keyword arguments by name, likewise; empty except on the first stage."""
    outputs: tuple[torch.Tensor, ...]
    """Meta tensors like the module's results."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the positional arguments."""
        return tuple(one for one in self.args if isinstance(one, torch.Tensor))

    @property
    def modules(self) -> frozenset[str]:
        """The names of the model's modules of which ops are in the stage."""
        nodes = self.module.graph.nodes if isinstance(self.module, fx.GraphModule) else ()
        return frozenset(name for node in nodes for inner in module_names(node) for name in prefixes(inner))

    @property
    def device(self) -> torch.device:
        """The device of the module's parameters and buffers; the CPU if it has none."""
        states = (*self.module.parameters(), *self.module.buffers())
        return next((t.device for t in states), torch.device("cpu"))


def cut_names(graph: fx.Graph) -> tuple[str, ...]:
    """Return the modules before which the graph can be cut: their ops are contiguous, and do not begin with the graph's
    first. They are sorted by their first ops, outer modules first."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    count: dict[str, int] = {}
    ops = [node for node in graph.nodes if node.op == "call_function"]
    for at, node in enumerate(ops):
        for name in module_names(node):
            first.setdefault(name, at)
            last[name] = at
            count[name] = count.get(name, 0) + 1
    whole = (name for name in first if first[name] > 0 and last[name] - first[name] + 1 == count[name])
    return tuple(sorted(whole, key=lambda name: (first[name], name.count("."), name)))


def stage_modules(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Sequence[str]
) -> tuple[StageModule, ...]:
    """Cut a model before the modules ``cuts`` into a chain of pipeline stages, which share its parameters and buffers.
    Raises `UsageError` for cuts that are unknown or not in running order, `ModelError` for nested arguments, or if
    stages would compute something else."""
    for one in (*args, *kwargs.values()):
        leaves = pytree.tree_leaves(one)
        if len(leaves) != 1 or leaves[0] is not one:
            raise ModelError(
                f"{type(model).__name__} has an argument that is a {type(one).__name__}; pass its elements directly"
            )
    graph = exported(model, args, kwargs)
    places = _places(graph, cuts, type(model).__name__)
    tensors = _tensors(model, graph)
    owners = _owners(graph, places)
    _check_shared(owners, tensors, _changed(graph))
    _check_views(graph, owners)
    values = dict(zip(graph.find_nodes(op="placeholder"), (*args, *kwargs.values()), strict=True))
    needs = _needing_gradients(graph, tensors, values)
    results = list(graph.output_node().all_input_nodes)  # a tensor that is returned twice is here once
    carried = [list(values), *(_carried(graph, place, values) for place in places[1:]), results]
    stages = []
    for k in range(len(places)):
        own, last = [n for n in owners if owners[n] == k], k == len(cuts)
        part = _part(own, carried[k], carried[k + 1], values if k == 0 else {}, last)
        used = {str(n.target): tensors[str(n.target)] for n in part.nodes if n.op == "get_attr"}
        module = StageGraph(used, part, f"{type(model).__name__}Stage{k}")
        nn.Module.train(module, model.training)
        received = tuple(_like(n, needs, values if k == 0 else {}) for n in carried[k])
        named = dict(zip(kwargs, received[len(args) :], strict=True)) if k == 0 else {}
        arguments = received[: len(args)] if k == 0 else received
        sent = tuple(_like(n, needs, {}, last) for n in carried[k + 1])
        stages.append(StageModule(module, arguments, named, sent))
    return tuple(stages)


def _tensors(model: nn.Module, graph: fx.Graph) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers, and the constants that its forward creates, by their names in the
    exported graph."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    read = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    assert graph.owning_module is not None
    return named | {name: attrgetter(name)(graph.owning_module) for name in read if name not in named}


def _ops(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def cut_places(graph: fx.Graph) -> dict[str, int]:
    """Return a dict from the name of each module in the graph to the position of its first op among all ops of the
    graph."""
    first: dict[str, int] = {}
    for at, node in enumerate(_ops(graph)):
        for name in module_names(node):
            first.setdefault(name, at)
    return first


def _places(graph: fx.Graph, cuts: Sequence[str], model: str) -> list[int]:
    """Return the positions of stages' first ops; `UsageError` if a cut is unknown or not after the one before."""
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
    """Return a dict from each op to the index of its stage. ``places``: the position of each stage's first op."""
    return {node: bisect_right(places, at) - 1 for at, node in enumerate(_ops(graph))}


def _changed(graph: fx.Graph) -> frozenset[str]:
    """Return the parameters and buffers that ops write in place, perhaps through a view, as running statistics."""
    found = set()
    memory = _memory(graph)
    for node in _ops(graph):
        written = [memory[value] for argument, value in _arguments_of(node) if _is_written(node, argument)]
        found |= {str(value.target) for value in written if value.op == "get_attr"}
    return frozenset(found)


def _arguments_of(node: fx.Node) -> list[tuple[torch.Argument, fx.Node]]:
    """Return an op's positional arguments that are other nodes' values, each after its entry in the op's schema."""
    schema = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    pairs = zip(schema, node.args, strict=False)
    return [(argument, value) for argument, value in pairs if isinstance(value, fx.Node)]


def _is_written(node: fx.Node, argument: torch.Argument) -> bool:
    state = node.target is torch.ops.aten.batch_norm.default and argument.name.startswith("running")
    return state or (argument.alias_info is not None and argument.alias_info.is_write)


def _memory(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return, for each node, the node that allocated its value's memory: another one for a view or the result of an
    in-place op."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        shared = _shared(node)
        found[node] = found[shared[0]] if shared else node
    return found


def _shared(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of an op whose memory its result has: of a view, or of an op that writes in place."""
    if node.target is getitem:
        return [n for n in node.args if isinstance(n, fx.Node)]
    return [value for argument, value in _arguments_of(node) if argument.alias_info is not None]


def _check_views(graph: fx.Graph, owners: Mapping[fx.Node, int]) -> None:
    """Raise `ModelError` if a stage changes a received tensor in place and another received tensor in that memory is
    read afterwards. Tensors that share memory in the model are separate in a later stage."""
    memory = _memory(graph)
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node, stage in owners.items():
        first = next((v for a, v in _arguments_of(node) if _is_written(node, a)), None)
        if first is None or memory[first].op == "get_attr" or owners.get(memory[first], 0) == stage:
            continue
        while owners.get(first, 0) == stage:
            first = _shared(first)[0]
        earlier = [
            n for n in order if owners.get(n, 0) < stage and memory[n] is memory[first] and n is not first
        ]
        if any(order[user] > order[node] for other in earlier for user in other.users):
            raise ModelError(
                f"stage {stage} changes a tensor of an earlier stage in place by {node.target}, and afterwards a view "
                f"of it is read: stages share no memory; cut elsewhere, or do not change the tensor in place"
            )


def _check_shared(
    owners: Mapping[fx.Node, int], tensors: Mapping[str, torch.Tensor], changed: Set[str]
) -> None:
    """Raise `ModelError` if several stages use the same parameter, or the same buffer that some op writes
    (``changed``)."""
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
    """Return the nodes of the model's graph whose results require gradients."""
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
    """Return the nodes whose tensors pass the cut: arguments and earlier ops that a later op or the output reads."""
    ops = _ops(graph)
    late = {*ops[place:], graph.output_node()}
    made = [n for n in values if isinstance(values[n], torch.Tensor)] + ops[:place]
    return [n for n in made if not late.isdisjoint(n.users)]


def _part(
    ops: Sequence[fx.Node],
    incoming: Sequence[fx.Node],
    outgoing: Sequence[fx.Node],
    values: Mapping[fx.Node, Any],
    last: bool,
) -> fx.Graph:
    """Return the graph of one stage: the ops from ``incoming`` to ``outgoing`` nodes, with checks of arguments that are
    no tensors. ``values``: on the first stage the model's arguments, else empty. ``last``: whether results keep their
    dimensions' order in memory, instead of a message's."""
    part = fx.Graph()
    # An argument called like a builtin, such as input, has another name as a node.
    names = {n: str(n.target) if n in values else n.name for n in incoming}
    copies: dict[fx.Node, fx.Node] = {n: part.placeholder(name) for n, name in names.items()}
    for node in incoming:
        if node not in values:
            copies[node] = _turned(copies[node], node, back=True)
    for node, value in values.items():
        if node in copies and not isinstance(value, torch.Tensor):
            part.call_function(check_fixed, (copies[node], value, names[node]))

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = part.node_copy(node)
        return copies[node]

    # Autograd allows no changes of a stage's inputs in place: an op that changes one returns a new tensor
    # instead.
    received = set() if values else set(incoming)
    for node in _changed_in_parts(ops, received):
        copies[node] = part.call_function(torch.ops.aten.clone.default, (copies[node],))
        received.remove(node)
    for node in ops:
        copies[node] = part.node_copy(node, copied)
        first = node.args[0] if node.args else None
        functional = _functional(node.target)
        if functional and isinstance(first, fx.Node) and first in received:
            copies[node].target = functional
            copies[first] = copies[node]
    sent = []
    for node in outgoing:
        out = _turned(copied(node), node, message=not last)
        # The strides of a result may differ from those in the export.
        out = part.call_function(torch.ops.aten.contiguous.default, (out,))
        sent.append(_turned(out, node, back=True, message=False) if last else out)
    part.output(sent[0] if len(sent) == 1 else tuple(sent))
    return part


def _order(node: fx.Node) -> list[int] | None:
    """Return the order in which a message has a node's dimensions; None for its own order, or for no tensor."""
    fake = node.meta["val"]
    return memory_order(fake) if isinstance(fake, torch.Tensor) else None


def _turned(out: fx.Node, node: fx.Node, back: bool = False, message: bool = True) -> fx.Node:
    """Return a view of ``out`` with the dimensions in a message's order, or with ``back`` in the node's own; ``out``
    itself if both are the same. ``message``: whether the gradient passes as a message, too."""
    order = _order(node)
    if order is None:
        return out
    permute = torch.ops.aten.permute.default if keeps_format(node.meta["val"]) or not message else turned
    return out.graph.call_function(permute, (out, inverse(order) if back else order))


def _changed_in_parts(ops: Sequence[fx.Node], received: Set[fx.Node]) -> list[fx.Node]:
    """Return the received tensors that an op changes in place although it cannot return a new tensor instead."""
    base, viewed, found = {node: node for node in received}, set[fx.Node](), dict[fx.Node, None]()
    for node in ops:
        shared = [n for n in _shared(node) if n in base]
        if not shared:
            continue
        whole = base[shared[0]]
        if not any(_is_written(node, argument) for argument, _ in _arguments_of(node)):
            viewed.add(whole)
        # It changes them through a view, or while a view exists, or has no variant that returns a new tensor.
        elif shared[0] is not whole or whole in viewed or _functional(node.target) is None:
            found[whole] = None
        base[node] = whole
    return list(found)


def _functional(target: object) -> OpOverload | None:
    """Return the op that computes ``target`` without changing its first argument, as ``relu`` for ``relu_``; None
    without one, and for ``copy_``."""
    name, _, overload = target.name().partition(".") if isinstance(target, OpOverload) else ("", "", "")
    if not (name.startswith("aten::") and name.endswith("_")) or name == "aten::copy_":
        return None
    packet = getattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, overload or "default", None)


def check_fixed(value: object, fixed: object, name: str) -> None:
    """Refuse an argument that is not a tensor and differs from the value with which the model was cut into stages."""
    if value != fixed:
        raise ModelError(f"the pipeline was planned for {name} = {fixed!r}, not {value!r}; plan it again")


def _like(node: fx.Node, needs: Set[fx.Node], values: Mapping[fx.Node, Any], last: bool = False) -> Any:
    """Return a meta tensor like a node's value between stages: an argument in ``values`` keeps its strides, others are
    contiguous messages. A result of the ``last`` stage keeps its dimensions' order. A value that is no tensor is
    returned itself."""
    fake = values.get(node, node.meta["val"])
    if not isinstance(fake, torch.Tensor):
        return fake
    if node in values:
        empty = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    else:
        order = _order(node) or range(fake.dim())
        empty = torch.empty([fake.shape[d] for d in order], dtype=fake.dtype, device="meta")
        empty = empty.permute(inverse(order)) if last else empty
    return empty.requires_grad_(node in needs)
