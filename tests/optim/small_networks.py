"""Networks and batches for tests of optimizers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def convolutional() -> nn.Module:
    """Convolutions, one in groups, with and without bias, a batch norm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 9, 5),
    )


def perceptron() -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7, bias=False), nn.Tanh(), nn.Linear(7, 5))


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {convolutional: (2, 5, 5), perceptron: (6,)}


def maker(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """What makes a network of a kind, always with the same weights, in float64; ``shape`` is that of its samples."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind().double()

    make.shape = SHAPES[kind]
    return make


def batch(make: Callable[[], nn.Module], seed: int, samples: int = 12) -> tuple[Tensor, Tensor]:
    """Random inputs of a network and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, *make.shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (samples,), generator=generator)
