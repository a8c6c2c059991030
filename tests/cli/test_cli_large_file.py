"""A file with more weights than memory is planned from its metadata; no weights are read."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rematplan
from rematplan.ir import ModelError, UsageError

F = TensorProto.FLOAT
PROGRAM = """
import sys
from pathlib import Path
from rematplan.cli import main
status = main(sys.argv[1:])
# of this program alone: getrusage counts what the parent held when it forked
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
sys.exit(status)
"""


def perceptron(folder, layers, width):
    """Blocks of two matrices each, their data in a sparse file; its bytes."""
    size, nodes, weights, x = 0, [], [], "x"
    for i in range(layers):
        for name, shape in (
            (f"a{i}", (width, 4 * width)),
            (f"b{i}", (4 * width,)),
            (f"c{i}", (4 * width, width)),
        ):
            tensor = TensorProto(name=name, data_type=F, dims=shape, data_location=TensorProto.EXTERNAL)
            length = 4 * int(np.prod(shape))
            for key, value in (("location", "weights.bin"), ("offset", size), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            size += length
            weights.append(tensor)
        nodes += [
            helper.make_node("MatMul", [x, f"a{i}"], [f"h{i}"]),
            helper.make_node("Add", [f"h{i}", f"b{i}"], [f"s{i}"]),
            helper.make_node("Relu", [f"s{i}"], [f"r{i}"]),
            helper.make_node("MatMul", [f"r{i}", f"c{i}"], [f"m{i}"]),
            helper.make_node("Add", [f"m{i}", x], [f"x{i}"]),
        ]
        x = f"x{i}"
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("x", F, ["batch", 256, width])],
        [helper.make_tensor_value_info(x, F, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "large.onnx")
    with (folder / "weights.bin").open("wb") as data:
        data.truncate(size)
    return size


def test_planning_reads_no_weights(tmp_path):
    assert perceptron(tmp_path, 3, 7000) > 2**32
    command = ["plan", str(tmp_path / "large.onnx"), "--dim", "batch=256", "--costs", "a100"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command, "--budget", "100%", "--strategy", "chen_sqrt", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kibibytes = int(done.stdout.split()[-2])
    # The program itself takes almost 2**20 of them, and each of the matrices would take 765,625.
    assert kibibytes < 3 * 2**19


def test_the_problem_without_weights_equals_the_problem_with_them(tmp_path):
    perceptron(tmp_path, 2, 32)
    path = tmp_path / "large.onnx"
    loaded = rematplan.load_step(path, dims={"batch": 2}, weightless=True)
    graph = rematplan.problem(loaded)
    assert graph == rematplan.problem(rematplan.load_step(path, dims={"batch": 2}))
    with pytest.raises(UsageError, match="can be planned, but not run"):
        rematplan.run_step(loaded, rematplan.no_recompute(graph))


def test_a_file_with_text_tensors_is_refused(tmp_path):
    nodes = [helper.make_node("Equal", ["t", "t"], ["e"]), helper.make_node("Where", ["e", "w", "w"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "text",
        [helper.make_tensor_value_info("t", TensorProto.STRING, [3])],
        [helper.make_tensor_value_info("y", F, [3])],
        [numpy_helper.from_array(np.ones(3, np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.save(model, tmp_path / "text.onnx")
    for weightless in (False, True):
        with pytest.raises(ModelError, match="'t' is of type string"):
            rematplan.load_step(tmp_path / "text.onnx", weightless=weightless)


@pytest.mark.parametrize(
    ("shape", "repeats", "said"),
    [((1 << 38, 4), (1, 1), "the graph input 'x'"), ((4, 4), (1 << 30, 1 << 10), "the targets of its loss")],
)
def test_tensors_larger_than_memory_are_refused_before_allocation(tmp_path, shape, repeats, said):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tile", ["h", "times"], ["y"])]
    arrays = {"w": np.ones((4, 4), np.float32), "times": np.asarray(repeats)}
    graph = helper.make_graph(
        nodes,
        "absurd",
        [helper.make_tensor_value_info("x", F, shape)],
        [helper.make_tensor_value_info("y", F, None)],
        [numpy_helper.from_array(v, k) for k, v in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "absurd.onnx")
    with pytest.raises(ModelError, match=rf"{said}.* take .* this machine has"):
        rematplan.load_step(tmp_path / "absurd.onnx")
