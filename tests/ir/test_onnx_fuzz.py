"""Real files damaged some three thousand times: every one loads, or is refused in one line and in bounded time.

Three kinds of damage: bytes of the file, fields of its message, and the wiring of its graph.
"""

import contextlib
import random
import signal
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rematplan.ir import RematplanError
from rematplan.ir.onnx import control_flow as onnx_control
from rematplan.ir.onnx.load import load_onnx
from rematplan.ir.onnx.training_form import Forms

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
LIMIT = 20  # seconds a file may take, on a busy machine


def recurrent() -> onnx.ModelProto:
    """A training export in small: convolution, batch norm, dropout, a loop, an LSTM, a tied weight, metadata."""
    rng = np.random.default_rng(0)

    def weight(name, *shape):
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    def number(name, value):
        return numpy_helper.from_array(np.asarray(value), name)

    def info(name, shape=None, kind=TensorProto.FLOAT):
        return helper.make_tensor_value_info(name, kind, shape)

    step = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"], name="keep"),
            helper.make_node("MatMul", ["h", "m"], ["h2"], name="turn"),
        ],
        "step",
        [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("h")],
        [info("go_on"), info("h2")],
    )
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node(
            "BatchNormalization", ["c", "b", "b", "m1", "v1"], ["n", "", ""], name="norm", training_mode=1
        ),
        helper.make_node("Dropout", ["n", "half", "yes"], ["d"], name="drop"),
        helper.make_node("Identity", ["m"], ["tied"], name="tie"),
        helper.make_node("Reshape", ["d", "shape"], ["s"], name="flat"),
        helper.make_node("Loop", ["three", "", "s"], ["l"], name="loop", body=step),
        helper.make_node("LSTM", ["l", "lw", "lr"], ["", "o"], name="lstm", hidden_size=4),
        helper.make_node("MatMul", ["o", "tied"], ["y"], name="out"),
    ]
    weights = [
        *(
            weight(n, *s)
            for n, s in {"w": (4, 3, 3, 3), "b": (4,), "m": (4, 4), "m1": (4,), "v1": (4,)}.items()
        ),
        *(weight(n, 1, 16, 4) for n in ("lw", "lr")),
        number("half", np.float32(0.5)),
        number("yes", True),
        number("three", 3),
        number("shape", [16, 2, 4]),
    ]
    graph = helper.make_graph(nodes, "g", [info("x", [2, 3, 4, 4])], [info("y")], weights)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10, producer_name="pytorch"
    )
    node = model.graph.node[0]
    for key, value in {
        "pkg.torch.onnx.name_scopes": "['', 'net.conv', 'conv2d']",
        "pkg.torch.onnx.class_hierarchy": "['Net', 'Conv2d', 'aten.conv2d.default']",
    }.items():
        node.metadata_props.add(key=key, value=value)
    return model


FILES = {  # and how often each is damaged in each way
    "recurrent": (recurrent, 650),
    "light_bvlc_alexnet": (lambda: onnx.load(LIGHT / "light_bvlc_alexnet.onnx"), 250),
    "light_squeezenet": (lambda: onnx.load(LIGHT / "light_squeezenet.onnx"), 50),
    "light_shufflenet": (lambda: onnx.load(LIGHT / "light_shufflenet.onnx"), 10),
}


def flip_bytes(model, rng):
    data = bytearray(model.SerializeToString())
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def messages(message, depth=0):
    """The message and those within it."""
    yield message
    if depth < 6:
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                for inside in list(value) if field.is_repeated else [value]:
                    yield from messages(inside, depth + 1)


STRINGS = [
    "",
    "x",
    "y",
    "w",
    "loop",
    "Add",
    "Reshape",
    "If",
    "Loop",
    "LSTM",
    "a\nb",
    "../w",
    "\u00e9",
    "BatchNormalization",
]
NUMBERS = [0, 1, -1, 2, 3, 7, 64, 2**31 - 1, -(2**31)]


def change_field(model, rng):
    """Fields of a message somewhere: dropped, doubled, or given another value."""
    for _ in range(rng.randint(1, 3)):
        target = rng.choice(list(messages(model)))
        if not target.ListFields():
            continue
        field, value = rng.choice(target.ListFields())
        if field.is_repeated:
            if field.type == field.TYPE_MESSAGE:
                value.append(rng.choice(list(value))) if rng.random() < 0.4 else value.pop(
                    rng.randrange(len(value))
                )
            elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
                text = rng.choice(STRINGS)
                value[rng.randrange(len(value))] = text.encode() if field.type == field.TYPE_BYTES else text
            else:
                value[rng.randrange(len(value))] = rng.choice(NUMBERS)
        elif field.type == field.TYPE_STRING:
            setattr(target, field.name, rng.choice(STRINGS))
        elif field.type in (field.TYPE_INT64, field.TYPE_INT32, field.TYPE_ENUM) and rng.random() < 0.8:
            setattr(target, field.name, rng.choice(NUMBERS))
        else:
            target.ClearField(field.name)
    return model.SerializeToString()


def rewire(model, rng):
    """Values read in places where others belong; nodes moved."""
    nodes = model.graph.node
    names = [o for n in nodes for o in n.output] + [t.name for t in model.graph.initializer] + ["x", ""]
    for _ in range(rng.randint(1, 3)):
        node = rng.choice(nodes)
        side = node.input if rng.random() < 0.8 else node.output
        if side:
            side[rng.randrange(len(side))] = rng.choice(names)
        if rng.random() < 0.2:
            node.op_type = rng.choice([n.op_type for n in nodes])
    return model.SerializeToString()


@pytest.mark.parametrize("damage", [flip_bytes, change_field, rewire], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_load_or_are_refused_in_one_line(tmp_path, monkeypatch, name, damage):
    monkeypatch.setattr(onnx_control, "MAX_ITERATIONS", 1000)  # many a damaged loop has no end
    make, rounds = FILES[name]
    made, rng, path = (
        make().SerializeToString(),
        random.Random(f"{name} {damage.__name__}"),
        tmp_path / "m.onnx",
    )
    loaded = refused = 0
    for round_ in range(rounds):
        model = onnx.ModelProto.FromString(made)
        try:
            data = damage(model, rng)
        except (ValueError, TypeError, UnicodeError):  # a value that protobuf itself does not take
            continue
        path.write_bytes(data)
        forms = Forms(("as-is", "train", "frozen")[round_ % 3], ("as-is", "on", "off")[round_ % 3])
        with within(LIMIT):
            said = outcome(path, forms, {"batch": 2} if round_ % 2 else None)
        assert "\n" not in said
        loaded, refused = loaded + (not said), refused + bool(said)
    assert loaded > 0
    assert refused > 0


@contextlib.contextmanager
def within(seconds):
    """Fail what takes longer."""

    def stop(*_):
        raise TimeoutError(f"a damaged file took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(path, forms, dims):
    """What is said of a file that is refused; nothing of one that loads."""
    try:
        load_onnx(path, dims, forms=forms)
    except RematplanError as error:
        return str(error)
    return ""
