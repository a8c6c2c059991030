"""Networks of the kinds for which op logs of Dynamic Tensor Rematerialization (Kirisame et al. 2021, arXiv:2006.09616)
are public, and that the zoo lacks: a ResNet-32 for CIFAR, and a child-sum TreeLSTM. No weights are allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rematplan.models.resnet import conv, make_stages
from rematplan.runtime.capture.fake_weights import without_data
from rematplan.runtime.capture.with_loss import with_loss
from rematplan.step_loading import LoadedModel, LoadedStep, captured

State = tuple[Tensor, Tensor]
"""The hidden state and the cell of a node, each (N, width)."""


class CifarResNet(nn.Module):
    """ResNet-32 (He et al. 2016, section 4.2): from images (N, 3, 32, 32) to class scores (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.stages, features = make_stages(False, (5, 5, 5), 16)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(features, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores."""
        return self.head(self.pool(self.stages(self.stem(x))).flatten(1))


class TreeLSTM(nn.Module):
    """A child-sum TreeLSTM (Tai et al. 2015, arXiv:1503.00075) over a complete binary tree: from features of the leaves
    (N, leaves, width) to class scores (N, 5) of the root."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.gates_x, self.gates_h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.forget_h = nn.Linear(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, leaves: Tensor) -> Tensor:
        """Return class scores of the root."""
        nodes = [self.node(self.gates_x(x), []) for x in leaves.unbind(1)]
        while len(nodes) > 1:
            pairs = zip(nodes[::2], nodes[1::2], strict=True)
            nodes = [self.node(self.gates_h(a[0] + b[0]), [a, b]) for a, b in pairs]
        return self.head(nodes[0][0])

    def node(self, gates: Tensor, children: list[State]) -> State:
        """Return the state of a node. ``gates``: its input, output and update gates before their nonlinearities."""
        i, o, u = gates.chunk(3, 1)
        cell = i.sigmoid() * u.tanh()
        for hidden, below in children:
            cell = cell + self.forget_h(hidden).sigmoid() * below
        return o.sigmoid() * cell.tanh(), cell


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet32": (CifarResNet, (56, 3, 32, 32)),
    "treelstm": (TreeLSTM, (32, 32, 256)),
}
"""By name, the model and the shape of its input."""


def load(name: str) -> LoadedStep:
    """Return the captured step of a network. ``name``: a key of `MODELS`."""
    make, shape = MODELS[name]
    model, inputs, mode = without_data(make, lambda: (torch.randn(*shape),))
    with mode:
        loaded = LoadedModel(*with_loss(model, inputs, "cross_entropy"), name, (), mode)
    return captured(loaded)
