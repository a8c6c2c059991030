"""Laws of buffers that a forward writes slice by slice: they count once if only written parts are read, and the bits
are those of eager mode whatever is read."""

import copy
import random
from typing import Any

import pytest
import torch
from same_bits import equal_after
from torch import Tensor, nn

import rematplan
from rematplan.module.captures import capture_call
from rematplan.runtime.capture.buffer_slices import NewBuffer

ROWS, WIDTH = 64, 16


class TiledHead(torch.autograd.Function):
    """The sum of exponentials of scores, tile by tile in one buffer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(h, w)
        ctx.chunk = chunk
        buffer, total = torch.empty(len(h), chunk), torch.zeros(len(h))
        for a in range(0, len(w), chunk):
            tile = buffer[:, : min(chunk, len(w) - a)]
            torch.mm(h, w[a : a + chunk].t(), out=tile)
            total += tile.exp().sum(-1)
        return total.log()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        h, w = ctx.saved_tensors
        of_h, of_w = torch.zeros_like(h), torch.zeros_like(w)
        buffer = torch.empty(len(h), ctx.chunk)
        for a in range(0, len(w), ctx.chunk):
            tile = buffer[:, : min(ctx.chunk, len(w) - a)]
            torch.mm(h, w[a : a + ctx.chunk].t(), out=tile)
            tile.exp_().mul_(gradients[0][:, None])
            of_h.addmm_(tile, w[a : a + ctx.chunk])
            of_w[a : a + ctx.chunk].addmm_(tile.t(), h)
        return of_h, of_w, None


class Tiled(nn.Module):
    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 100, bias=False)
        self.chunk = chunk

    def forward(self, x: Tensor) -> Tensor:
        return TiledHead.apply(self.body(x), self.head.weight, self.chunk).mean()


def new_buffers(model: nn.Module, *args: Tensor) -> int:
    step = capture_call(model, args, {})[1]
    return sum(isinstance(call.target, NewBuffer) for call in step.calls)


def use(*args: Tensor) -> Any:
    def run(model: nn.Module) -> list[Tensor]:
        for p in model.parameters():
            p.grad = None
        loss = model(*args)
        loss.backward()
        return [loss.detach()]

    return run


def planned(model: nn.Module, *args: Tensor) -> nn.Module:
    return rematplan.plan_module(
        copy.deepcopy(model), args, budget="1GiB", strategy="store_all", costs="roofline", loss_memory="1x"
    )


@pytest.mark.parametrize(("chunk", "found"), [(1000, 4), (100, 0), (40, 4)])
def test_tiles_of_one_buffer_count_once(chunk: int, found: int) -> None:
    model, x = Tiled(chunk), torch.randn(ROWS, WIDTH)
    ours = planned(model, x)
    equal_after(use(x), ours, model)
    assert new_buffers(model, x) == found  # a tile that is as wide as the buffer is no slice
    held = sum(4 * p.numel() for p in model.parameters()) * 2 + 4 * x.numel()
    tile, scores = 4 * ROWS * chunk, 4 * ROWS * min(chunk, 100)
    assert ours.plan.peak < held + tile + scores + 4 * 4 * ROWS * WIDTH + 4 * 100 * WIDTH


class Filling(nn.Module):
    """Writes parts of a buffer and reads parts of it, as a random program says."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear, self.seed = nn.Linear(8, 8), seed

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self.seed)
        y, total = self.linear(x), x.new_zeros(())
        buffer = torch.zeros(8, 12) if draw.random() < 0.7 else x.new_ones(12, 8).t()
        for at in range(draw.randint(2, 6)):
            a, b = sorted(draw.sample(range(9), 2))
            rows, row = slice(draw.choice([a, a - 8]), b if b < 8 else None), draw.randrange(-12, 12)
            if draw.random() < 0.5:
                buffer[rows, :8] = y[rows] * (at + 1)
            else:
                buffer[:, row] = y[0].sin()
            if draw.random() < 0.7:
                read = draw.choice([buffer[rows, :8], buffer[:, row], buffer[rows], buffer])
                total = total + read.clone().cos().sum()
        return total + (buffer.square().sum() if draw.random() < 0.3 else y.sum())


@pytest.mark.parametrize("seed", range(8))
def test_random_writes_and_reads_have_the_bits_of_eager_mode(seed: int) -> None:
    model, x = Filling(seed), torch.randn(8, 8)
    equal_after(use(x), planned(model, x), model)


class Diagonal(nn.Module):
    """Writes a diagonal of a buffer, and reads it with its dimensions counted from either end."""

    def __init__(self, dims: tuple[int, int]) -> None:
        super().__init__()
        self.linear, self.dims = nn.Linear(8, 8), dims

    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.zeros(9, 12)
        buffer.diagonal(1).copy_(torch.ones(9) * self.linear(x).sum())
        return buffer.diagonal(1, *self.dims).clone().cos().sum()


@pytest.mark.parametrize(("dims", "found"), [((0, 1), 1), ((-2, -1), 1), ((1, 0), 0)])
def test_a_diagonal_is_a_part(dims: tuple[int, int], found: int) -> None:
    model, x = Diagonal(dims), torch.randn(8, 8)
    assert new_buffers(model, x) == found
    equal_after(use(x), planned(model, x), model)


class Partly(nn.Module):
    """Writes a row or columns of an empty buffer, and reads what ``read`` says."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        buffer = torch.zeros(8, 12)
        buffer[:, 2:10] = y
        wholly = {"part": buffer[:, 2:-2], "more": buffer[:, 1:10], "whole": buffer}[self.read]
        return wholly.cos().sum()


@pytest.mark.parametrize(("read", "found"), [("part", 1), ("more", 0), ("whole", 0)])
def test_a_buffer_is_new_only_if_nothing_else_of_it_is_read(read: str, found: int) -> None:
    model, x = Partly(read), torch.randn(8, 8)
    assert new_buffers(model, x) == found
    equal_after(use(x), planned(model, x), model)
