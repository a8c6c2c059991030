"""Elastic weight consolidation on two tasks: a network learns a second task without forgetting the first.

A network learns to tell even from odd among small digits (0 to 4), then among large ones (5 to 9). Before the second
task, a planned step with statistics computes the curvature of the first task's loss at the trained weights w₁: F ≈ (G
/ samples) ⊗ (A / rows) for each layer. The second task's loss gets the quadratic penalty λ/2 (w − w₁)ᵀ F (w − w₁)
(Kirkpatrick et al. 2017; with Kronecker factors: Ritter, Botev and Barber 2018), so weights that matter for the first
task change little.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import rematplan

SEGMENTS = {
    0: "abcdef",
    1: "bc",
    2: "abged",
    3: "abgcd",
    4: "fgbc",
    5: "afgcd",
    6: "afgedc",
    7: "abc",
    8: "abcdefg",
    9: "abcdfg",
}
PLACES = {
    "a": (0, slice(1, 7)),
    "d": (9, slice(1, 7)),
    "g": (5, slice(1, 7)),
    "f": (slice(0, 5), 1),
    "b": (slice(0, 5), 6),
    "e": (slice(5, 10), 1),
    "c": (slice(5, 10), 6),
}


def digits(count: int, labels: range, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of random digits in seven segments, (``count``, 120), and whether each digit is odd (0 or
    1).

    The pictures are shifted, and their strokes differ in strength. ``labels``: the digits to draw from.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(labels.start, labels.stop, (count,), generator=generator)
    x = torch.zeros(count, 12, 10)
    for at, label in enumerate(y.tolist()):
        down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
        picture = x[at, down : down + 10, right : right + 8]
        for segment in SEGMENTS[label]:
            picture[PLACES[segment]] = 0.6 + 0.4 * float(torch.rand((), generator=generator))
    return (x + 0.2 * torch.randn(x.shape, generator=generator)).flatten(1), y % 2


def accuracy(model: nn.Module, task: tuple[Tensor, Tensor]) -> float:
    """Return the share of a task's pictures that the model classifies correctly, from 0 to 1."""
    with torch.no_grad():
        return float((model(task[0]).argmax(1) == task[1]).float().mean())


def train(model: nn.Module, task: tuple[Tensor, Tensor], penalty: Callable[[], Tensor] | None = None) -> None:
    """Train the model in place for thirty epochs with Adam on the cross entropy, plus ``penalty()`` if it is not
    None."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = task
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        for rows in torch.randperm(len(x), generator=generator).split(128):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            (loss if penalty is None else loss + penalty()).backward()
            optimizer.step()


def consolidated(model: nn.Module, x: Tensor, strength: float) -> Callable[[], Tensor]:
    """Return a function that computes the penalty for changing the model's weights from their present values.

    The penalty is ``strength`` / 2 · (w − w₁)ᵀ F (w − w₁), where F is the curvature of the loss for the inputs ``x``.
    """
    planned = rematplan.plan_module(
        model,
        (x,),
        budget="1GiB",
        statistics=rematplan.Kronecker(fisher="type-2"),
        strategy=rematplan.Auto(time_limit=2),
    )
    planned(x).sum().backward()  # any loss works: the statistics draw labels from the model
    layers = rematplan.planning(planned).statistics().factors
    model.zero_grad()
    parameters = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in parameters.items()}

    def penalty() -> Tensor:
        total = torch.zeros(())
        for name, factors in layers.items():
            bias = factors.bias_name
            gone = factors.matrix(
                parameters[name] - start[name], parameters[bias] - start[bias] if bias else None
            )
            total = total + (factors.g @ gone @ factors.a * gone).sum() / factors.samples / factors.rows
        return strength / 2 * total

    return penalty


torch.manual_seed(0)
first, second = (digits(1500, range(start, start + 5), seed=start) for start in (0, 5))
model = nn.Sequential(nn.Linear(120, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
train(model, first)
print(f"after the first task:  {accuracy(model, first):.0%} of small digits")
plain, kept = copy.deepcopy(model), copy.deepcopy(model)
train(plain, second)
print(
    f"then the second:       {accuracy(plain, first):.0%} of small, {accuracy(plain, second):.0%} of large digits"
)
train(kept, second, consolidated(kept, first[0], strength=300.0))
print(
    f"with consolidation:    {accuracy(kept, first):.0%} of small, {accuracy(kept, second):.0%} of large digits"
)
assert accuracy(kept, first) > accuracy(plain, first) + 0.03
assert accuracy(kept, second) > 0.97
