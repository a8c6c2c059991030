"""More models with wrong checkpointing, most of them with hand-made Functions."""

from collections import deque
from functools import partial
from typing import Any

import numpy as np
import torch
from broken_models import WIDTH, Block, Checkpointed, Pair, batch
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import checkpoint


class Again(torch.autograd.Function):
    """A hand-made checkpoint that keeps its input in float16 if ``half``, and runs again in eval mode if ``evals``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module, half: bool, evals: bool) -> Any:
        ctx.module, ctx.evals = module, evals
        ctx.save_for_backward(x.half() if half else x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().float().requires_grad_()
        with torch.enable_grad():
            out = ctx.module.train(not ctx.evals)(x)
        ctx.module.train()
        torch.autograd.backward(out, gradients)
        return x.grad, None, None, None


class OfTheInputOnly(Again):
    """A hand-made checkpoint that forgets the gradients of parameters."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        return *torch.autograd.grad(out, x, *gradients), None, None, None


def eval_mode() -> Pair:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh())
    return Checkpointed(layers, run=lambda block, x: Again.apply(x, block, False, True)), (batch(),)


def input_kept_in_half() -> Pair:
    return Checkpointed(Block(), run=lambda block, x: Again.apply(x, block, True, False)), (batch(),)


def no_gradients_of_parameters() -> Pair:
    run = OfTheInputOnly.apply
    return Checkpointed(Block(), run=lambda block, x: run(x, block, False, False)), (batch(),)


class Seeded(nn.Module):
    """Dropout whose seed is a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seed += 1
        drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(self.seed))
        return x * (drawn < 0.5) * 2


def seed_of_a_counter() -> Pair:
    return Checkpointed(Block(Seeded())), (batch(),)


def offload_in_the_wrong_order() -> Pair:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
            )

        def forward(self, x: torch.Tensor) -> Any:
            kept = deque[torch.Tensor]()

            def put_away(t: torch.Tensor) -> Any:
                kept.append(t.clone())
                return t.shape

            def fetch(shape: Any) -> torch.Tensor:
                at = next(i for i, t in enumerate(kept) if t.shape == shape)  # the first one in, not the last
                found = kept[at]
                del kept[at]
                return found

            with torch.autograd.graph.saved_tensors_hooks(put_away, fetch):
                return self.layers(x)

    return Queue(), (batch(),)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def other_function_in_the_recomputation() -> Pair:
    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return Doubling.apply(x) if torch._C._current_graph_task_id() != -1 else x.clone()

    return Checkpointed(Block(Split()), use_reentrant=True), (batch(),)


class Turned(torch.autograd.Function):
    """Multiplies by a complex weight, whose gradient is turned by 90°."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight).real

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        # That of the plain product is gradient · x: equal in its real part.
        return (gradient * weight.conj()).real, (gradient * x * (1 + 1j)).sum(0)


def imaginary_part_of_a_gradient() -> Pair:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> Any:
            return Turned.apply(x, self.weight)

    return Weighted(), (batch(),)


class Masked(nn.Module):
    """Multiplies by a mask of NumPy's last; the mask is saved, and the product does not run again."""

    def __init__(self, own: np.random.Generator | None = None) -> None:
        super().__init__()
        self.last, self.own = nn.Linear(WIDTH, WIDTH), own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = self.own.random(x.shape) if self.own else np.random.rand(*x.shape)
        return self.last(x) * torch.from_numpy(drawn.astype("f4"))


def mask_of_numpy() -> Pair:
    return Checkpointed(Masked()), (batch(),)


def mask_of_a_generator() -> Pair:
    return Checkpointed(Masked(np.random.default_rng(1))), (batch(),)


class InSlots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_args: Any) -> None:
        self.calls += 1


def hook_with_slots() -> Pair:
    model = Checkpointed(Block())
    model.blocks[0].first.register_forward_hook(InSlots())
    return model, (batch(),)


def hook_with_given_arguments() -> Pair:
    def count(calls: dict[str, int], *_args: Any) -> None:
        calls["all"] += 1

    model = Checkpointed(Block())
    model.blocks[0].first.register_forward_hook(partial(count, {"all": 0}))
    return model, (batch(),)


class WithoutEps(torch.autograd.Function):
    """A norm whose backward forgets a summand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x * x.square().mean(-1, keepdim=True).rsqrt()
        return torch.autograd.grad(y, x, gradients)[0]


def op_left_out() -> Pair:
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return WithoutEps.apply(x)

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm()), (batch(),)


class Extended(nn.Module):
    """Reads what it has read before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("read", torch.zeros(0, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.read = torch.cat([self.read, x.detach()])
        return x * self.read.sum(0)


def cache_extended() -> Pair:
    return Checkpointed(Block(Extended()), use_reentrant=True), (batch(),)


class Unread(Extended):
    """Extends what nobody reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return nn.functional.dropout(x)


def cache_that_nobody_reads() -> Pair:
    return Checkpointed(Block(Unread()), use_reentrant=True, preserve_rng_state=False), (batch(),)


def composable_dropout() -> Pair:
    model = Checkpointed(Block(nn.Dropout(0.5)), run=lambda block, x: block(x))
    composable(model.blocks[0], preserve_rng_state=False)
    return model, (batch(),)


def flag_in_words() -> Pair:
    model = Block()
    model.activation_checkpointing = "full"
    return model, (batch(),)


class Swapped(torch.autograd.Function):
    """An additive coupling whose backward takes its saved halves, or the gradients of its inputs, in another order."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, *args: Any) -> Any:
        ctx.f, ctx.g, ctx.gradients = args
        with torch.no_grad():
            c = a + ctx.f(b)
            d = b + ctx.g(c)
        ctx.save_for_backward(c, d)
        return c, d

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_c, of_d = gradients
        c, d = ctx.saved_tensors if ctx.gradients else reversed(ctx.saved_tensors)
        c = c.detach().requires_grad_()
        with torch.enable_grad():
            moved = ctx.g(c)
        moved.backward(of_d)
        of_c = of_c + c.grad
        b = (d - moved).detach().requires_grad_()
        with torch.enable_grad():
            ctx.f(b).backward(of_c)
        found = of_c, of_d + b.grad
        return *(reversed(found) if ctx.gradients else found), None, None, None


def swapped(gradients: bool) -> Pair:
    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            half = WIDTH // 2
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.f, self.g = (nn.Sequential(nn.Linear(half, half), nn.Tanh()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.stem(x).chunk(2, dim=1)
            return torch.cat(Swapped.apply(a, b, self.f, self.g, gradients), dim=1)

    return Reversible(), (batch(),)


class Halved(torch.autograd.Function):
    """A scale that passes no gradient to its second argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x * scale.detach()
        return torch.autograd.grad(y, x, gradients)[0], None


def argument_without_gradient() -> Pair:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            return Halved.apply(self.stem(x), self.scale)

    return Scale(), (batch(),)


def spectral_norm() -> Pair:
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return Checkpointed(Block(normed), use_reentrant=True), (batch(),)


def optimizer_in_the_backward() -> Pair:
    model = Checkpointed(Block(), Block(), use_reentrant=True)
    model.blocks[1].last.weight = model.blocks[0].last.weight

    def update(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return model, (batch(),)


def wrong_inverse() -> Pair:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, f: nn.Module) -> torch.Tensor:
            ctx.f = f
            with torch.no_grad():
                y = x + 0.5 * f(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (y,) = ctx.saved_tensors
            with torch.no_grad():
                x = y
                for _ in range(2):  # of a fixed-point iteration
                    x = y - 0.5 * ctx.f(x)
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                out = x + 0.5 * ctx.f(x)
            torch.autograd.backward(out, gradients)
            return x.grad, None

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.f = nn.Linear(WIDTH, WIDTH), Block(nn.Tanh())

        def forward(self, x: torch.Tensor) -> Any:
            return Wrong.apply(self.stem(x), self.f)

    return Residual(), (batch(),)


class Later(nn.Module):
    """Its second step is wrong; or it refuses to run a second time in a backward."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.block, self.steps, self.raises = Block(nn.Dropout(0.5)), 0, raises

    def forward(self, x: torch.Tensor) -> Any:
        self.steps += 1
        return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.steps < 2)

    def inner(self, x: torch.Tensor) -> Any:
        if self.raises and self.steps == 2 and torch._C._current_graph_task_id() != -1:
            raise ValueError("not again")
        return self.block(x)


def second_step(raises: bool) -> Pair:
    return Later(raises), (batch(),)
