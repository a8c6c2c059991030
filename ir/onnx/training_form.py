"""Put the batch norms and dropouts of an ONNX graph into training or inference form.

A batch norm folded into a convolution is lost: ``train`` inserts a new one behind, with scale 1, the bias as
shift, mean 0 and variance 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rematplan.ir.errors import ModelError, UsageError
from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.draft import Array, Draft, Origin, Scope
from rematplan.ir.onnx.graph import Attribute, Node

BN_FORMS = ("as-is", "train", "frozen")
DROPOUT_FORMS = ("as-is", "on", "off")
FOLDED_BY_SCRIPT = re.compile(r"onnx::Conv_\d+$")  # the name TorchScript gives to a kernel that it changed


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of a file's batch norms and dropouts; UsageError if one is unknown."""

    bn: str = "as-is"
    """``as-is``, ``train`` (by the batch, with updates of statistics) or ``frozen`` (by running statistics)."""
    dropout: str = "as-is"
    """``as-is``, ``on`` or ``off``."""

    def __post_init__(self) -> None:
        for option, form, known in (("bn", self.bn, BN_FORMS), ("dropout", self.dropout, DROPOUT_FORMS)):
            if form not in known:
                raise UsageError(f"--{option} {form}: known forms are {', '.join(known)}")


def in_form(draft: Draft, forms: Forms) -> tuple[Draft, tuple[str, ...]]:
    """Return the content with batch norms and dropouts in the forms ``forms``, and notes on what was changed or is
    absent. `ModelError` if a batch norm cannot be frozen."""
    notes: list[str] = []
    if forms.bn in BATCH_NORM:
        draft, count = _change_all(draft, "BatchNormalization", BATCH_NORM[forms.bn])
        if count:
            notes.append(f"{count} batch norms were put into the form {forms.bn!r}")
    if forms.bn == "train":
        draft, count = _insert_folded_norms(draft)
        if count:
            notes.append(
                f"{count} batch norms that the export had folded into Conv are batch norms again, with scale one: "
                "their former scales are now factors of the kernels"
            )
    if forms.bn != "as-is" and not notes and not any(n.op == "BatchNormalization" for n in draft.nodes):
        notes.append(f"no batch norm to put into the form {forms.bn!r}")
    if forms.dropout in DROPOUT:
        draft, count = _change_all(draft, "Dropout", DROPOUT[forms.dropout])
        if count:
            notes.append(f"{count} dropouts were put into the form {forms.dropout!r}")
        elif forms.dropout == "on" and not any(n.op == "Dropout" for n in draft.nodes):
            notes.append("no dropout is left in the file to switch on")
    return draft, tuple(notes)


@dataclass
class _Additions:
    """The content that is built while nodes of one op are changed."""

    initialisers: dict[str, Array]
    """Stored tensors by name, with new ones."""
    nodes: list[Node]
    """The new nodes so far."""
    read: frozenset[str]
    """Values that nodes read, and graph outputs."""

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initialisers[name] = Array.of(name, value)
        return name


Change = Callable[[Node, _Additions], Node | None]


def _change_all(draft: Draft, op: str, change: Change) -> tuple[Draft, int]:
    """Change all nodes of one op, unless ``change`` returns None. Return the content and the number changed."""
    read = {i for n in draft.nodes for i in n.inputs} | {o.name for o in draft.outputs}
    more = _Additions(dict(draft.initialisers), [], frozenset(read))
    count = 0
    for node in draft.nodes:
        new = change(node, more) if node.op == op and not node.domain else None
        more.nodes.append(new or node)
        count += new is not None
    return replace(draft, initialisers=more.initialisers, nodes=tuple(more.nodes)), count


# ------------------------------------------------------------------ batch norm


def _trained(node: Node, _: _Additions) -> Node | None:
    if roles.trains_statistics(node):
        return None
    outputs = (node.outputs[0], "", "") if node.version >= 7 else node.outputs
    return replace(node, outputs=outputs, attributes=_with_mode(node, training=True))


def _with_mode(node: Node, training: bool) -> dict[str, Attribute]:
    """Return a batch norm's attributes with the one that chooses its form; opsets 7 to 13 have none."""
    if node.version >= 14:
        return {**node.attributes, "training_mode": int(training)}
    if node.version < 7:
        return {**node.attributes, "is_test": int(not training)}
    return dict(node.attributes)


def _frozen(node: Node, more: _Additions) -> Node | None:
    """Return a batch norm in inference form, None if it has this form. New running statistics that are read become the
    old ones; `ModelError` if the batch's statistics are read."""
    if not roles.trains_statistics(node):
        return None
    if any(o in more.read for o in node.outputs[3:] if o):
        raise ModelError(f"node {node.name!r}: its batch's statistics are read, so it cannot be frozen")
    for out, at in ((1, 3), (2, 4)):
        name = node.outputs[out] if out < len(node.outputs) else ""
        if name in more.read and name:
            identity = Node(f"{node.name}.{out}", "Identity", "", node.version, (node.inputs[at],), (name,))
            more.nodes.append(identity)
    return replace(node, outputs=node.outputs[:1], attributes=_with_mode(node, training=False))


BATCH_NORM: Mapping[str, Change] = {"train": _trained, "frozen": _frozen}


def _insert_folded_norms(draft: Draft) -> tuple[Draft, int]:
    """Insert a batch norm after each convolution into which one was folded; the convolution loses its bias. Return
    the content and the number inserted."""
    initialisers, origins, nodes = dict(draft.initialisers), dict(draft.origins), []
    readers = Counter(i for n in draft.nodes for i in n.inputs)
    count = 0
    for node in draft.nodes:
        scope = draft.scopes.get(node.name, Scope())
        if not _was_folded(node, scope, draft):
            nodes.append(node)
            continue
        bias = initialisers[node.inputs[2]]
        where = scope.module or f"{bias.name}.norm"
        added: dict[str, Callable[[], np.ndarray]] = {
            f"{where}.weight": partial(np.ones, bias.shape, bias.dtype),
            f"{where}.bias": bias.load,
            f"{where}.running_mean": partial(np.zeros, bias.shape, bias.dtype),
            f"{where}.running_var": partial(np.ones, bias.shape, bias.dtype),
        }
        if readers[bias.name] == 1:
            del initialisers[bias.name]
        hidden = f"{node.outputs[0]}.{node.name}.folded"
        nodes.append(replace(node, inputs=node.inputs[:2], outputs=(hidden,)))
        for name, load in added.items():
            initialisers[name] = Array(name, bias.dtype, bias.shape, load)
            origins[name] = Origin("PARAMETER")
        norm = Node(
            f"{node.name}.norm",
            "BatchNormalization",
            "",
            max(node.version, 15),
            (hidden, *added),
            (node.outputs[0], "", ""),
            {"training_mode": 1},
        )
        nodes.append(norm)
        count += 1
    return replace(draft, initialisers=initialisers, origins=origins, nodes=tuple(nodes)), count


def _was_folded(node: Node, scope: Scope, draft: Draft) -> bool:
    """Return whether a batch norm was folded into a convolution with a stored bias, by metadata or
    TorchScript's names.
    """
    if node.op not in ("Conv", "ConvTranspose") or node.domain or len(node.inputs) < 3:
        return False
    if node.inputs[2] not in draft.initialisers:
        return False
    named = all(FOLDED_BY_SCRIPT.match(name) for name in node.inputs[1:3])
    return "batch_norm" in scope.operator or (named and draft.producer == "pytorch")


# ------------------------------------------------------------------ dropout


def _switched_on(node: Node, more: _Additions) -> Node:
    """Return a dropout in training mode, in the form of opset 13 or later."""
    ratio = node.inputs[1] if node.version >= 12 and len(node.inputs) > 1 else ""
    if node.version < 12:
        stated = np.asarray(node.attributes.get("ratio", 0.5), np.float32)
        ratio = more.constant(f"{node.name}.ratio", stated)
    training = more.constant(f"{node.name}.training", np.asarray(True))
    inputs = (node.inputs[0], ratio, training)
    return replace(node, version=max(node.version, 13), inputs=inputs, attributes={})


DROPOUT: Mapping[str, Change] = {
    "on": _switched_on,
    "off": lambda node, _: replace(
        node, version=max(node.version, 13), inputs=node.inputs[:1], attributes={}
    ),
}
