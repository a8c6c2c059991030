"""Models with wrong checkpointing: each has one fault, which `audit` must name."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
Pair = tuple[nn.Module, tuple[torch.Tensor, ...]]


def batch(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """``middle`` runs between two linear layers."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(WIDTH, WIDTH),
            middle or nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.middle(self.first(x)))
        return out


class Checkpointed(nn.Module):
    """Blocks of which each is run by ``run``; a layer in front of them has parameters, too."""

    def __init__(
        self, *blocks: nn.Module, run: Callable[..., Any] | None = None, stem: bool = True, **kwargs: Any
    ):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if stem else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.run = run or (lambda block, x: checkpoint(block, x, **{"use_reentrant": False, **kwargs}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


def dropout_redrawn(reentrant: bool) -> Pair:
    blocks = (Block(), Block(nn.Dropout(0.5)))
    return Checkpointed(*blocks, use_reentrant=reentrant, preserve_rng_state=False), (batch(),)


def batch_norm_twice(reentrant: bool) -> Pair:
    return Checkpointed(Block(nn.BatchNorm1d(WIDTH)), use_reentrant=reentrant), (batch(),)


class Recompute(torch.autograd.Function):
    """A hand-made checkpoint that restores the random state and forgets autocast."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], x: torch.Tensor) -> Any:
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            out = ctx.function(x)
        torch.autograd.backward(out, gradients)
        return None, x.grad


class RecomputeOnly(torch.autograd.Function):
    """A hand-made checkpoint that restores nothing."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], x: torch.Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, gradients)
        return None, x.grad


def hand_made(middle: Callable[[], nn.Module]) -> Pair:
    def run(block: nn.Module, x: torch.Tensor) -> Any:
        return RecomputeOnly.apply(block, x)

    return Checkpointed(Block(), Block(middle()), run=run), (batch(),)


class Reset(RecomputeOnly):
    """A hand-made checkpoint that does not set the random state again after the recomputation."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], x: torch.Tensor) -> Any:
        ctx.state = torch.get_rng_state()
        return RecomputeOnly.forward(ctx, function, x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.set_rng_state(ctx.state)
        return RecomputeOnly.backward(ctx, *gradients)


def random_state_reset() -> Pair:
    blocks = (Block(nn.Dropout(0.5)), Block(nn.Dropout(0.5)))
    return Checkpointed(*blocks, run=lambda block, x: Reset.apply(block, x)), (batch(),)


class UnderAutocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: torch.Tensor = self.model(x)
        return out.float()


def autocast_lost(silent: bool) -> Pair:
    """Recomputed in float32, or refused, since the weights are not cast."""
    taken = Recompute.apply  # as libraries do

    def run(block: nn.Module, x: torch.Tensor) -> Any:
        return taken(block, x.float() if silent else x)

    return UnderAutocast(Checkpointed(Block(), Block(), run=run)), (batch(),)


def no_input_requires_grad() -> Pair:
    model = Checkpointed(Block(), Block(), stem=False, use_reentrant=True)
    model.blocks.append(nn.Linear(WIDTH, WIDTH))
    model.run = lambda block, x: (
        block(x) if isinstance(block, nn.Linear) else checkpoint(block, x, use_reentrant=True)
    )
    return model, (batch(),)


class Scaled(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.draw()


def numpy_redrawn() -> Pair:
    return Checkpointed(Block(), Block(Scaled(np.random.rand))), (batch(),)


def python_redrawn() -> Pair:
    return Checkpointed(Block(), Block(Scaled(random.random)), use_reentrant=True), (batch(),)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator)


def own_generator() -> Pair:
    return Checkpointed(Block(), Block(nn.Sequential(Noise(), nn.Tanh()))), (batch(),)


def tied_hook() -> Pair:
    model = Checkpointed(Block(), Block(), use_reentrant=True)
    model.blocks[1].last.weight = model.blocks[0].last.weight
    model.blocks[0].last.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return model, (batch(),)


class Mean:
    """A hook that keeps a running mean of a layer's outputs."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, 0.0

    def __call__(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self.calls += 1
        self.mean += (output.detach().mean().item() - self.mean) / self.calls


def statistics_hook() -> Pair:
    model = Checkpointed(Block(), Block())
    model.blocks[1].first.register_forward_hook(Mean())
    return model, (batch(),)


calls = {"forward": 0}


def count(*_args: Any) -> None:
    calls["forward"] += 1


def global_hook() -> Pair:
    model = Checkpointed(Block(), Block())
    model.blocks[0].middle.register_forward_pre_hook(count)
    return model, (batch(),)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.relu()


def attribute_twice() -> Pair:
    return Checkpointed(Block(Counting())), (batch(),)


class Average(nn.Module):
    """Keeps a running mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x.sigmoid()


def buffer_twice() -> Pair:
    return Checkpointed(Block(Average())), (batch(),)


class Router(nn.Module):
    """Sends the rows with the highest scores to an expert; ``bias`` balances the load after each call."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.scores, self.expert, self.noisy = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), noisy
        self.bias = torch.zeros(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(x).squeeze(-1)
        if self.noisy:
            scores = scores + torch.from_numpy(np.random.randn(len(x)).astype("f4"))
        best = torch.topk(scores + self.bias, 2).indices
        self.bias = self.bias.index_fill(0, best, -9.0)
        return x.index_add(0, best, self.expert(x[best]))


def router(noisy: bool, reentrant: bool) -> Pair:
    return Checkpointed(Block(Router(noisy)), use_reentrant=reentrant), (batch(),)


class ChunkedLoss(torch.autograd.Function):
    """A cross entropy without reduction, in chunks, whose backward takes one weight for all tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses, g_x, g_weight = [], [], torch.zeros_like(weight)
        for rows, labels in zip(x.split(2), target.split(2), strict=True):
            scores = rows @ weight.T
            losses.append(nn.functional.cross_entropy(scores, labels, reduction="none"))
            g = scores.softmax(1) - nn.functional.one_hot(labels, len(weight))
            g_x.append(g @ weight)
            g_weight += g.T @ rows
        ctx.save_for_backward(torch.cat(g_x), g_weight)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        g_x, g_weight = ctx.saved_tensors
        return g_x * gradients[0].mean(), g_weight * gradients[0].mean(), None


class TokenLoss(nn.Module):
    def __init__(self, chunked: bool) -> None:
        super().__init__()
        self.body, self.head, self.chunked = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5, bias=False), chunked

    def forward(self, x: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.chunked:
            losses = ChunkedLoss.apply(x, self.head.weight, target)
        else:
            losses = nn.functional.cross_entropy(self.head(x), target, reduction="none")
        return (losses * weights).sum()


class Flagged(nn.Module):
    """Checkpoints its block if its flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.gradient_checkpointing = Block(), True

    def __call__(self, x: torch.Tensor) -> Any:
        if self.gradient_checkpointing and self.training:
            return checkpoint(super().__call__, x, use_reentrant=False)
        return super().__call__(x)

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x)


class Around(nn.Module):
    """A wrapper that calls the forward of its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Flagged() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


def flag_without_effect() -> Pair:
    return Around(), (batch(),)


def late_binding(reentrant: bool) -> Pair:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(nn.Tanh()) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.blocks[0](x)
            for i in range(1, 3):
                x = checkpoint(lambda y: self.blocks[i](y), x, use_reentrant=reentrant)  # noqa: B023
            return x

    return Late(), (batch(),)


def skipped_by_chance(reentrant: bool) -> Pair:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(nn.Tanh())

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x) if random.random() < 0.5 else x

    random.seed(1)
    return Checkpointed(*(Block(Skipping()) for _ in range(4)), use_reentrant=reentrant), (batch(),)


def inputs_in_a_list() -> Pair:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(WIDTH, WIDTH), Block()

        def forward(self, x: torch.Tensor) -> Any:
            run = lambda pair: self.block(pair[0] * pair[1])  # noqa: E731
            y = self.stem(x)
            return y + checkpoint(run, [y, y.tanh()], use_reentrant=True)

    return Pairs(), (batch(),)


def loss_left_in_an_attribute() -> Pair:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate, self.block = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), Block()

        def forward(self, x: torch.Tensor) -> Any:
            y = checkpoint(self.inner, self.stem(x), use_reentrant=True)
            return y.sum() + self.auxiliary

        def inner(self, x: torch.Tensor) -> Any:
            scores = self.gate(x).softmax(1)
            self.auxiliary = scores.mean(0).square().sum()
            return self.block(x) * scores[:, :1]

    return Balanced(), (batch(),)


def lossy_offload() -> Pair:
    def to_half(t: torch.Tensor) -> torch.Tensor:
        return t.half()

    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(to_half, lambda t: t.float()):
                return self.block(x)

    return Offloaded(), (batch(),)


def input_overwritten() -> Pair:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(WIDTH, WIDTH), Block()

        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            y = checkpoint(self.block, x, use_reentrant=True)
            x.data.mul_(2)
            return y

    return Overwriting(), (batch(),)


def grown_cache() -> Pair:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> Any:
            self.seen.append(x.detach())
            return x * len(self.seen)

    return Checkpointed(Block(), Block(Caching()), use_reentrant=True), (batch(),)
