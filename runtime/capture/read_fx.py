"""Read a joint fx graph, forward and backward, into a `CapturedStep`: calls, inputs, outputs, storages and views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import map_arg

from rematplan.ir import ModelError, NoGradients
from rematplan.runtime.capture.buffer_slices import with_new_buffers
from rematplan.runtime.capture.hidden_tensors import check_dense
from rematplan.runtime.capture.indexing import INDEXED
from rematplan.runtime.capture.joint_graph_roles import COPY, ModuleRoles, PositionRoles
from rematplan.runtime.capture.loss_in_place import with_losses_in_place
from rematplan.runtime.capture.output_storages import with_own_outputs, without_copies, without_saved_copies
from rematplan.runtime.capture.patches.in_place_layouts import FORWARD, IN_PIECE, TAG, WRITTEN, mark
from rematplan.runtime.capture.plain_copies import with_plain_copies
from rematplan.runtime.graph.captured_step import Call, CapturedStep, Ref, StepInput, StepOutput, Value, refs
from rematplan.runtime.graph.compat import FakeTensor, FunctionalTensor, HigherOrderOperator
from rematplan.runtime.graph.module_names import module_name
from rematplan.runtime.graph.passes import with_phases, without_dead_calls
from rematplan.runtime.graph.writing_calls import with_written_calls
from rematplan.runtime.symbols.expressions import ExpressionTable

MARKERS = frozenset({"profiler"})
"""Namespaces of ops that only mark the ranges of a profile."""

SIZES = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of the results of nodes that compute with sizes."""

# Ops that return their argument unchanged once autograd has finished. They become aliases of the argument.
SAME = frozenset(
    {
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
        # It copies a constant, such as torch.tensor([1, 2]) in a forward, so that ops in place do not change the
        # constant. A captured step has no ops in place. The fake tracer takes the copy for the constant itself.
        torch.ops.aten.lift_fresh_copy.default,
    }
)


def read_joint_graph(
    module: fx.GraphModule, names: Mapping[str, str], outputs: int, name: str, table: ExpressionTable | None
) -> CapturedStep:
    """Read the joint fx graph (forward and backward) of a module as a `CapturedStep`, to which `finished` must be
    applied before it is planned. ``names``: the module's names by the tracer's. ``outputs``: how many outputs the
    module has; further ones are checks. ``table``: receives symbolic sizes; None if sizes are fixed. Raises
    `ModelError` if the graph cannot be planned."""
    return _on_one_device(_Reader(module, ModuleRoles(names, outputs), table).read(name))


def finished(step: CapturedStep) -> CapturedStep:
    """Complete a step that was read from a graph, and return it."""
    # Writing calls make the tensors that they fill, outputs get storages, cross entropies are in place, partly read
    # buffers count once, needless copies go, calls get phases, and dead ones go.
    step = with_written_calls(without_copies(step))
    step = with_losses_in_place(with_own_outputs(with_new_buffers(with_plain_copies(step))))
    return without_dead_calls(without_saved_copies(with_phases(step)))


def read_flat_joint_graph(
    module: fx.GraphModule, early: int, name: str, table: ExpressionTable | None = None
) -> CapturedStep:
    """Read the joint fx graph that ``torch.compile`` passes to a partitioner, which knows no modules and parameters.
    Inputs are tangents, buffers if they get new content, or the batch; results are outputs up to ``early``, then
    gradients, by position. Raises `ModelError` if the graph cannot be planned."""
    read = _Reader(module, PositionRoles(module, early), table).read(name)
    return without_dead_calls(with_phases(_on_one_device(read)))


def _on_one_device(step: CapturedStep) -> CapturedStep:
    """Return ``step``; `ModelError` if it uses several accelerators."""
    accelerators = [str(d) for d in step.devices if d.type != "cpu"]
    if len(accelerators) > 1:
        raise ModelError(
            f"{step.name} is spread over {' and '.join(accelerators)}; a budget is for one device: plan its submodules"
        )
    return step


def fixed_size(size: torch.SymInt) -> int:
    """Return the present value of a symbolic size as an integer; `ModelError` if it depends on values of tensors."""
    try:
        return int(size)
    except GuardOnDataDependentSymNode as error:
        raise ModelError("a size depends on values of tensors; plans are for fixed shapes") from error


class _Reader:
    """Reads a joint fx graph (forward and backward) into a `CapturedStep`, whose inputs and outputs ``roles`` names;
    `ModelError` if it cannot be planned. ``table`` receives symbolic sizes; None if sizes are fixed."""

    def __init__(
        self, module: fx.GraphModule, roles: ModuleRoles | PositionRoles, table: ExpressionTable | None
    ) -> None:
        self.module, self.roles, self.table = module, roles, table
        self.values: dict[str, Value] = {}
        self.calls: list[Call] = []
        self.inputs: list[StepInput] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.item: dict[tuple[str, int], str] = {}  # (call, position) → value name
        self.alias: dict[str, str] = {}  # fx name → value name
        self.sizes: dict[str, int] = {}  # fx name → the size's value
        self.renewed: list[StepOutput] = []  # inputs' new content, where the graph copies it into them
        self.storages: dict[int, str] = {}  # address of a fake's storage → its name

    def read(self, name: str) -> CapturedStep:
        """Read all nodes, and return the step. `ModelError` if a node cannot be planned, `NoGradients` if no output is
        a gradient."""
        graph = self.module.graph
        for at, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                self._placeholder(node, at)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)
        outputs = self._outputs(graph.find_nodes(op="output")[0])
        return CapturedStep(
            name, tuple(self.inputs), outputs, tuple(self.calls), dict(self.values), dict(self.constants)
        )

    def _value(self, name: str, fake: torch.Tensor, call: str | None) -> Value:
        """Add a tensor to `values` and return it; tensors on one storage of the trace share its name. `ModelError` if
        it is not dense."""
        if fake.layout != torch.strided:
            raise ModelError(
                f"{call or name} is a tensor of layout {fake.layout}, as the gradient of an embedding with sparse=True "
                f"is; plans need dense tensors"
            )
        # Addresses of fakes' storages are unique while the graph keeps the fakes alive.
        storage = self.storages.setdefault(fake.untyped_storage()._cdata, name)
        self.values[name] = value = Value(name, storage, call, fake)
        return value

    def _placeholder(self, node: fx.Node, at: int) -> None:
        """Add an input of the graph to the step, or to `sizes` if it is a fixed size. Tokens and symbolic sizes are
        skipped; `ModelError` for other inputs than tensors."""
        if "val" not in node.meta:  # a token that orders ops with side effects
            return
        if isinstance(node.meta["val"], torch.SymInt):
            if self.table is None:
                self.sizes[node.name] = fixed_size(node.meta["val"])
            return
        if not isinstance(node.meta["val"], torch.Tensor):
            raise ModelError(f"the input {node.name} is not a tensor")
        kind, target = self.roles.input(node, at)
        self._value(node.name, node.meta["val"], None)
        self.inputs.append(StepInput(kind, target, node.name))

    def _constant(self, node: fx.Node) -> None:
        """Add the tensor of a ``get_attr`` node to the step, as a constant and an input. `ModelError` if it is no dense
        tensor or requires a gradient."""
        tensor = getattr(self.module, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(
                f"an op has an argument of type {type(tensor).__name__}, which a plan cannot contain"
            )
        check_dense([tensor], "the model computes with")
        if tensor.requires_grad:
            raise ModelError(
                "the model uses a tensor that requires a gradient and is none of its parameters; make it one, or, if a "
                "hook of the model computes it (weight_norm, prune), plan nn.Sequential(model)"
            )
        self.constants[node.name] = tensor
        fake = node.meta.get("val", tensor)
        if isinstance(fake, FunctionalTensor):  # of a constant that no op reads, only the outputs
            fake = tensor
        if isinstance(fake, FakeTensor):
            # Each use has another fake. Views of the constant refer to the tracer's fake.
            fake = fake.fake_mode.from_tensor(tensor, static_shapes=True)
        self._value(node.name, fake, None)
        self.inputs.append(StepInput("constant", node.name, node.name))

    def _call(self, node: fx.Node) -> None:
        """Append the call of a node, unless the node is no call; `ModelError` if the call cannot be planned."""
        if self._is_no_call(node):
            return
        _check_plannable(node)
        args, kwargs = map_arg(node.args, self._ref), map_arg(node.kwargs, self._ref)
        read = {self.values[r.value].storage for r in refs((args, kwargs))}
        names = self._results(node)
        marks, tag = node.meta.get("custom") or {}, node.meta.get(TAG) or FORWARD
        call = Call(
            name=node.name,
            target=node.target,  # type: ignore[arg-type]
            args=args,
            kwargs=kwargs,
            results=names,
            single=isinstance(node.meta["val"], torch.Tensor),
            seeded=torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _draws(node),
            module=module_name(node),
            sequence=node.meta.get("seq_nr"),
            indexed=INDEXED in marks,
            in_piece=mark(IN_PIECE, tag) in marks,
            written=mark(WRITTEN, tag) in marks,
        )
        made = [self.values[n] for n in names if n]
        if call.waits:
            made = [self._same_storage(v, args) for v in made]
        is_view = bool(made) and all(v.storage in read for v in made)
        if not is_view:
            # If only some results share an argument's storage, they are counted as new storages, so that the counted
            # bytes are never fewer than the allocated ones.
            for v in made:
                if v.storage in read:
                    self.values[v.name] = replace(v, storage=v.name)
        self.calls.append(replace(call, is_view=is_view))

    def _is_no_call(self, node: fx.Node) -> bool:
        """Return whether a node creates no tensor: a size, a mark, an alias of an earlier value, or a buffer's new
        content. The last two are recorded in `alias` and `renewed`."""
        if self.table and isinstance(node.meta.get("val"), SIZES):
            return True
        if getattr(node.target, "__name__", "") == "getitem":
            source, at = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(at, int)
            self.alias[node.name] = self.item[source.name, at]
            return True
        if node.target in SAME:
            self.alias[node.name] = self._ref(node.args[0]).value
            return True
        if node.target is COPY and self._renews(node):
            return True
        return getattr(node.target, "namespace", "") in MARKERS

    def _results(self, node: fx.Node) -> tuple[str | None, ...]:
        """Add the tensors that a call returns to the step's values, and return their names; None for other results."""
        val = node.meta["val"]
        single = isinstance(val, torch.Tensor)
        names: list[str | None] = []
        for at, fake in enumerate((val,) if single else val):
            name = node.name if single else f"{node.name}_{at}_"
            names.append(name if isinstance(fake, torch.Tensor) else None)
            if isinstance(fake, torch.Tensor):
                self._value(name, fake, node.name)
                self.item[node.name, at] = name
        return tuple(names)

    def _same_storage(self, value: Value, args: Any) -> Value:
        """Return ``value``, the result of a call that waits for a collective, with the storage of the call's argument,
        whose memory it has. In the trace it has memory of its own."""
        (of,) = refs(args)
        storage = self.values[of.value].storage
        self.storages[value.fake.untyped_storage()._cdata] = storage  # also for its views
        self.values[value.name] = value = replace(value, storage=storage)
        return value

    def _renews(self, node: fx.Node) -> bool:
        """Return whether ``node``, an in-place copy, writes into a buffer; its value is then an output of the step."""
        targets = {i.value: i.target for i in self.inputs if i.kind == "buffer"}
        place, value = (self._ref(a).value for a in node.args[:2])
        if place in targets:
            self.renewed.append(StepOutput("buffer", targets[place], value))
            self.alias[node.name] = value
        return place in targets

    def _ref(self, node: Any) -> Any:
        if self.table and isinstance(node.meta.get("val"), SIZES):
            return self.table.add(node.meta["val"])
        if node.name in self.sizes:
            return self.sizes[node.name]
        return Ref(self.alias.get(node.name, node.name))

    def _outputs(self, node: fx.Node) -> tuple[StepOutput, ...]:
        """Return the outputs for which ``roles`` has a name, then the buffers' new contents; sizes are left out.
        `NoGradients` if none is a gradient."""
        outputs = []
        results: Any = node.args[0]
        descriptions = node.meta.get("desc") or [None] * len(results)
        for at, (result, description) in enumerate(zip(results, descriptions, strict=True)):
            found = self.roles.output(at, description)
            if isinstance(result, fx.Node) and not isinstance(result.meta.get("val"), SIZES) and found:
                outputs.append(StepOutput(*found, self.alias.get(result.name, result.name)))
        if not any("gradient" in o.kind for o in outputs):
            raise NoGradients("no output of the model depends on a trainable parameter")
        return (*outputs, *self.renewed)


def _check_plannable(node: fx.Node) -> None:
    """Raise `ModelError` for a node that computes a size, takes functions, returns no value, or writes into its
    arguments."""
    if isinstance(node.meta.get("val"), SIZES):
        raise ModelError(
            "the graph computes numbers from sizes, and one of its ops depends on the value of a size; compile it with "
            "torch.compile(dynamic=False)"
        )
    if isinstance(node.target, HigherOrderOperator) or "val" not in node.meta:
        raise ModelError(f"{node.target} takes functions or only checks values, so it cannot be planned here")
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        raise ModelError(f"{node.target} changes its arguments in place, so it cannot be planned")


def _draws(node: fx.Node) -> bool:
    """Return whether an op that is tagged as random draws; attention with dropout rate 0 does not."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0) != 0
