"""A scripted loop of torch's, exported as Loop and If: unrolled, it computes and trains as the module does."""

import warnings

import torch
from onnx_names import onnx_name
from planned_steps import PlannedStep, verify
from torch import nn

from rematplan import api
from rematplan.ir.onnx.load import load_onnx
from rematplan.runtime.onnx.module import OnnxModule


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x, h):
        return torch.tanh(self.inner(h) + self.outer(x))


class Recurrent(nn.Module):
    """A loop over the first axis, whose length is the input's."""

    def __init__(self):
        super().__init__()
        self.cell = torch.jit.script(Cell())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(1), 4)
        for t in range(x.size(0)):
            h = self.cell(x[t], h)
        return h


def test_a_scripted_loop(tmp_path):
    torch.manual_seed(0)
    module, x, path = torch.jit.script(Recurrent()), torch.randn(5, 2, 3), tmp_path / "loop.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), path, dynamo=False, opset_version=17, do_constant_folding=False)
    graph = load_onnx(path)
    assert not any(n.op in ("Loop", "If") for n in graph.nodes)
    ours = OnnxModule(graph)
    y, wanted = ours(x)[0], module(x)
    torch.testing.assert_close(y, wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    theirs = dict(module.named_parameters())
    found = {onnx_name(n): p.grad for n, p in ours.named_parameters()}
    assert len(found) == 4
    for name, grad in found.items():
        if name in theirs:
            torch.testing.assert_close(grad, theirs[name].grad)
    loaded = api.load_step(path)
    plan = api.no_recompute(api.problem(loaded))
    assert verify(PlannedStep(loaded.module, loaded.step, plan.schedule), loaded.batch).bit_equal
