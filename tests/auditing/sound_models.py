"""Models whose checkpointing is right, in many forms: `audit` must find no fault in any of them."""

from collections.abc import Callable
from typing import Any

import torch
from broken_models import WIDTH, Block, Checkpointed, Pair, batch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

Parts = nn.ModuleDict
Forward = Callable[..., Any]


class Built(nn.Module):
    """A stem, whose output is checkpointed in some way, and named parts."""

    def __init__(self, forward: Forward, stem: nn.Module | None = None, **parts: nn.Module) -> None:
        super().__init__()
        self.stem, self.parts, self.run = stem or linear(), nn.ModuleDict(parts), forward

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.run(self.parts, self.stem(x), *more)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def saved(function: Forward, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def one(body: nn.Module, stem: nn.Module | None = None) -> nn.Module:
    """Return a stem and one checkpointed part."""
    return Built(lambda parts, x: saved(parts.body, x), stem, body=body)


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def rows() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH)


def frozen_norm() -> Pair:
    model = one(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.Conv2d(3, 4, 3))
    model.parts.body[0].eval()
    return model, (images(),)


def attention_with_a_mask() -> Pair:
    def forward(parts: Parts, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return saved(lambda y: parts.body(y, y, y, attn_mask=mask, need_weights=False)[0], x)

    body = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
    return Built(forward, body=body), (rows(), torch.ones(5, 5).triu(1).bool())


def keyword_arguments() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        return saved(lambda y, scale=1: parts.body(y) * scale, x, scale=2)

    return Built(forward, body=Block()), (batch(),)


def no_early_stop() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        with set_checkpoint_early_stop(False):
            return saved(parts.body, x)

    return Built(forward, body=Block()), (batch(),)


def teacher_without_gradients() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        with torch.no_grad():
            aim = parts.teacher(x)
        return (saved(parts.body, x) - aim).square().mean()

    return Built(forward, body=Block(), teacher=Block()), (batch(),)


def frozen_with_adapters() -> Pair:
    blocks = Checkpointed(Block(), Block(), use_reentrant=True).requires_grad_(False)
    adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))
    return Built(lambda parts, x: parts.blocks(x), adapter, blocks=blocks), (batch(),)


def experts(sparse: bool) -> Pair:
    def dense(parts: Parts, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = parts.gate(x).softmax(-1).topk(2)
        results = torch.stack([expert(x) for expert in parts.experts], 1)
        return (results.gather(1, chosen[..., None].expand(-1, -1, WIDTH)) * weights[..., None]).sum(1)

    def by_rows(parts: Parts, x: torch.Tensor) -> torch.Tensor:
        chosen, out = parts.gate(x).argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(parts.experts):
            own = (chosen == k).nonzero()[:, 0]
            out = out.index_add(0, own, expert(x[own]))
        return out

    layer = by_rows if sparse else dense
    parts = {"gate": nn.Linear(WIDTH, 4), "experts": nn.ModuleList(linear() for _ in range(4))}
    return Built(lambda parts, x: saved(lambda y: layer(parts, y), x), **parts), (batch(),)


def stochastic_depth() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        return saved(lambda y: y + parts.body(y) * (torch.rand(len(y), 1) < 0.5), x)

    return Built(forward, body=Block()), (batch(),)


def layers_left_out_by_torch() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        return saved(lambda y: parts.body(y) if torch.rand(()) < 0.7 else y, x)

    return Built(forward, body=Block()), (batch(),)


class Spectrum(nn.Module):
    """A filter with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)


def saved_on_the_cpu() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return parts.body(x)

    return Built(forward, body=Block()), (batch(),)


def loss_in_checkpointed_chunks() -> Pair:
    def forward(parts: Parts, x: torch.Tensor, labels: torch.Tensor) -> Any:
        def part(y: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(parts.head(y), label, reduction="sum")

        pairs = zip(x.chunk(3), labels.chunk(3), strict=True)
        return torch.stack([saved(part, *pair) for pair in pairs]).sum() / len(x)

    return Built(forward, head=nn.Linear(WIDTH, 5)), (batch(), torch.arange(6) % 5)


def reentrant_around_the_other_kind() -> Pair:
    inner = Checkpointed(Block(nn.Dropout(0.5)), Block(), use_reentrant=False)
    return Checkpointed(inner, Block(), use_reentrant=True), (batch(),)


class Round(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def straight_through() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        return saved(lambda y: parts.body(Round.apply(y)), x)

    return Built(forward, body=Block()), (batch(),)


def mapped_by_vmap() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        return saved(lambda y: torch.vmap(parts.body)(y), x)

    return Built(forward, body=linear()), (batch(),)


def several_outputs() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        return {"one": saved(parts.body, x), "more": [parts.head(x), None]}

    return Built(forward, body=Block(), head=nn.Linear(WIDTH, 3)), (batch(),)


def levels_with_skips() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        inner = saved(parts.middle, F.avg_pool2d(x, 2))

        def joined(outer: torch.Tensor, inner: torch.Tensor) -> Any:
            return parts.last(torch.cat([outer, F.interpolate(inner, scale_factor=2.0)], 1))

        return saved(joined, x, inner)

    convs = {"middle": nn.Conv2d(4, 4, 3, padding=1), "last": nn.Conv2d(8, 3, 3, padding=1)}
    return Built(forward, nn.Conv2d(3, 4, 3, padding=1), **convs), (images(),)


def gradient_penalty() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(parts.critic(at).sum(), at, create_graph=True)
        return slope.square().sum() + saved(parts.body, x).sum()

    return Built(forward, critic=Block(nn.Tanh()), body=Block()), (batch(),)


def counter_outside_of_the_checkpoint() -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        parts.steps += 1
        return saved(parts.body, x)

    model = Built(forward, body=Block())
    model.parts.register_buffer("steps", torch.zeros((), dtype=torch.long))
    return model, (batch(),)


def sparse_matrix(layout: torch.layout) -> Pair:
    def forward(parts: Parts, x: torch.Tensor) -> Any:
        return saved(lambda y: parts.matrix @ parts.body(y), x)

    model = Built(forward, body=linear())
    model.parts.register_buffer("matrix", torch.eye(6).to_sparse(layout=layout), persistent=False)
    return model, (batch(),)


def composable() -> Pair:
    from torch.distributed._composable import checkpoint

    model = Checkpointed(Block(nn.Dropout(0.5)), run=lambda block, x: block(x))
    checkpoint(model.blocks[0])
    return model, (batch(),)


MODELS: dict[str, Callable[[], Pair]] = {
    "group norm": lambda: (
        one(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.InstanceNorm2d(4)), nn.Conv2d(3, 4, 3)),
        (images(),),
    ),
    "encoder layer": lambda: (
        one(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)),
        (rows(),),
    ),
    "weight norm": lambda: (one(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3))), (batch(),)),
    "complex weights": lambda: (one(Spectrum()), (batch(),)),
    "bfloat16": lambda: (Checkpointed(Block(nn.Dropout(0.5))).bfloat16(), (batch().bfloat16(),)),
    "float64": lambda: (Checkpointed(Block(nn.Dropout(0.5))).double(), (batch().double(),)),
    "in place": lambda: (one(nn.Sequential(Block(), nn.ReLU(inplace=True))), (batch(),)),
    "recurrent, dropout": lambda: (
        Built(
            lambda parts, x: saved(lambda y: parts.body(y)[0], x),
            body=nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True),
        ),
        (rows(),),
    ),
    "embedding": lambda: (
        one(Block(nn.LayerNorm(WIDTH)), nn.Embedding(11, WIDTH, padding_idx=0)),
        (torch.arange(6),),
    ),
    "sparse gradients": (lambda: (one(Block(), nn.Embedding(11, WIDTH, sparse=True)), (torch.arange(6),))),
    "sparse matrix": lambda: sparse_matrix(torch.sparse_coo),
    "sparse rows": lambda: sparse_matrix(torch.sparse_csr),
    "embedding bag": lambda: (one(Block(), nn.EmbeddingBag(11, WIDTH)), (torch.arange(12).view(6, 2) % 11,)),
    "dense experts": lambda: experts(False),
    "sparse experts": lambda: experts(True),
    **{
        made.__name__: made
        for made in (
            frozen_norm,
            attention_with_a_mask,
            keyword_arguments,
            no_early_stop,
            teacher_without_gradients,
            frozen_with_adapters,
            stochastic_depth,
            layers_left_out_by_torch,
            saved_on_the_cpu,
            loss_in_checkpointed_chunks,
            reentrant_around_the_other_kind,
            straight_through,
            mapped_by_vmap,
            several_outputs,
            levels_with_skips,
            gradient_penalty,
            counter_outside_of_the_checkpoint,
            composable,
        )
    },
}
