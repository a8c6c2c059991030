"""Check the peaks that `rematplan.fit` states against those that training steps have, on this machine's CPU.

usage: python benchmarks/fit_peaks.py [NAME ...] [--optimizers SGD Adam AdamW]

For networks of the zoo, of timm (if it is installed) and of Hugging Face with random weights, and modules of PyTorch,
it prints the peak without a plan as it is measured, divided by the stated one (from 0.99 to 1.01 is right); and the
peak of a planned step under the budget that `fit` states for its plan, divided by that (at most 1 is right; more if no
plan is found). Exit status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from promise import HUGGING_FACE, loss_of
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from training_peaks import training_peak

import rematplan
from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.models import ZOO, build, example_inputs

TOLERANCE = 0.01
BATCH = 16
SEARCH, LONGER = rematplan.Auto(time_limit=1.0), rematplan.Auto(time_limit=4.0)

Made = tuple[nn.Module, Callable[[], Mapping[str, Any] | Sequence[Any]]]


class WithLoss(nn.Module):
    """A model whose inputs are given by position, and its loss."""

    def __init__(self, model: nn.Module, others: Mapping[str, Any], names: Sequence[str], dtype: str) -> None:
        super().__init__()
        self.model, self.others, self.names, self.dtype = model, others, names, dtype

    def forward(self, *batch: torch.Tensor) -> Any:
        """Return the loss of a batch."""
        named = dict(zip(self.names, batch, strict=True)) if self.names else {}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "mixed"):
            out = self.model(*(() if self.names else batch), **named, **self.others)
        return loss_of([t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad])


def whole_step(
    made: Callable[[], nn.Module], inputs: Mapping[str, Any] | Sequence[Any], dtype: str = ""
) -> nn.Module:
    """Return the model of `made` with its loss. ``inputs``: a batch, by position or by name."""
    named = inputs if isinstance(inputs, Mapping) else {}
    others = {k: v for k, v in named.items() if not isinstance(v, torch.Tensor)}
    return WithLoss(made(), others, [k for k in named if k not in others], dtype)


def tensors(inputs: Mapping[str, Any] | Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a batch."""
    every = inputs.values() if isinstance(inputs, Mapping) else inputs
    return tuple(t for t in every if isinstance(t, torch.Tensor))


def of_zoo(name: str) -> Made:
    """Return how a network of the zoo is made at small sizes, and a batch for it."""
    sizes = {**ZOO[name].tiny, "batch": BATCH}
    model = {k: v for k, v in sizes.items() if k != "batch"}
    return lambda: build(name, **model), lambda: example_inputs(name, **sizes)


def of_timm(name: str, side: int, **options: Any) -> Made:
    """Return how a model of timm is made, and images (8, 3, side, side)."""

    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=10, **options).train()

    return make, lambda: [torch.randn(8, 3, side, side)]


def of_hugging_face(name: str) -> Made:
    """Return how a model of Hugging Face is made, and a batch by name."""
    whole = HUGGING_FACE[name]
    return lambda: whole()[0], lambda: whole()[2]


class Recurrent(nn.Module):
    """Words, a recurrent layer of PyTorch, and scores."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(500, 64), kind(64, 96, 2, batch_first=True, **options)
        self.head = nn.Linear(96 * (1 + self.cells.bidirectional), 500)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of words (rows, length)."""
        scores = self.head(self.cells(self.words(words))[0])
        return functional.cross_entropy(scores.flatten(0, 1), words.flatten())


class Tied(nn.Module):
    """A transformer with a loss whose scores are made with the weights of its words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, 2000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of words (rows, length)."""
        scores = self.head(self.body(self.words(words)))
        return functional.cross_entropy(scores.flatten(0, 1), words.flatten(), label_smoothing=0.1)


class Volumes(nn.Module):
    """Convolutions of volumes, transposed ones, and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose3d(8, 1, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of volumes (rows, 1, n, n, n)."""
        return functional.mse_loss(self.up(functional.max_pool3d(self.down(x), 2)), x)


class Wide(nn.Module):
    """More parameters than activations, so that the optimizer's step is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(700, 700) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(700))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of rows (n, 700)."""
        return self.scale * self.layers(x - self.mean).square().mean()


class Several(nn.Module):
    """Branches, values used several times, a frozen layer, and losses of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.frozen = nn.Linear(128, 256), nn.Linear(256, 256).requires_grad_(False)
        self.heads = nn.ModuleList(nn.Linear(256, n) for n in (10, 20, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of rows (n, 128)."""
        y = functional.silu(self.stem(x))
        z = y + functional.dropout(self.frozen(y), 0.2).tanh() * y
        a, b, c = (head(z) for head in self.heads)
        losses = (
            functional.nll_loss(a.log_softmax(-1), a.argmax(-1)),
            functional.huber_loss(b, b.detach() + 1),
        )
        return sum(losses) + functional.binary_cross_entropy_with_logits(c, torch.ones_like(c)) + z.std()


def _words() -> list[torch.Tensor]:
    return [torch.randint(500, (8, 48))]


TIMM: Mapping[str, Made] = {
    "timm_convnext": of_timm("convnext_atto", 64),
    "timm_mixer": of_timm("mixer_s32_224", 64, img_size=64),
    "timm_regnet": of_timm("regnety_002", 64),
    "timm_mobilenetv3": of_timm("mobilenetv3_small_050", 96),
}
MODELS: Mapping[str, Made] = {
    **{name: of_zoo(name) for name in ("resnet18", "resnet50", "unet", "vgg19", "densenet121", "googlenet")},
    **{
        name: of_zoo(name)
        for name in ("efficientnet_b0", "vit_s", "swin_t", "gpt12", "bert", "lstm", "chain")
    },
    **{name: of_zoo(name) for name in ("diffusion_unet", "pspnet", "revnet38")},
    **{name: of_hugging_face(name) for name in HUGGING_FACE},
    **(TIMM if find_spec("timm") else {}),
    "torch_lstm": (lambda: Recurrent(nn.LSTM, dropout=0.1), _words),
    "torch_gru": (lambda: Recurrent(nn.GRU, bidirectional=True), _words),
    "torch_rnn": (lambda: Recurrent(nn.RNN), _words),
    "tied": (Tied, _words),
    "volumes": (Volumes, lambda: [torch.randn(2, 1, 32, 32, 32)]),
    "wide": (Wide, lambda: [torch.randn(8, 700)]),
    "several": (Several, lambda: [torch.randn(512, 128)]),
}
MIXED = ("vit_s", "gpt12", "hf_llama", "resnet18")
"""The models that run in autocast, too."""


def check(name: str, made: Made, optimizer: str, dtype: str) -> Iterator[bool]:
    """Print a line about one model with one optimizer, and yield whether its two peaks are right."""
    make, batch = made
    given = batch()
    kind = getattr(torch.optim, optimizer)

    def whole() -> nn.Module:
        return whole_step(make, given, dtype)

    def fit(memory: int) -> rematplan.Fit:
        return rematplan.fit(
            whole,
            lambda _: [torch.empty(t.shape, dtype=t.dtype) for t in tensors(given)],
            memory=memory,
            optimizer=kind,
            costs="profile",
            largest=False,
            strategy=SEARCH,
        )

    plain = fit(1 << 40).here
    torch.manual_seed(0)
    model, inputs = whole(), tensors(given)
    own = training_peak(model, inputs, kind(p for p in model.parameters() if p.requires_grad))
    right = abs(own / plain.without - 1) <= TOLERANCE
    tight = fit((plain.without + plain.least) // 2).here
    torch.manual_seed(0)
    model, inputs = whole(), tensors(given)
    stepping = kind(p for p in model.parameters() if p.requires_grad)
    try:
        planned = rematplan.plan_module(
            model, inputs, budget=tight.planned, reserved=[stepping], strategy=LONGER, refine=False
        )
        peak = training_peak(planned, inputs, stepping)
    except InfeasibleBudget as error:
        peak = error.smallest
    kept = peak <= tight.planned
    print(
        f"{name:18}{dtype:7}{optimizer:6} {show_bytes(plain.without):>11}  plain {own / plain.without:.4f}"
        f"  planned {tight.planned / plain.without:.2f}: {peak / tight.planned:.4f}"
        f"{'' if right and kept else '  WRONG'}",
        flush=True,
    )
    yield right
    yield kept


def main() -> int:
    """Check each named model. Return the exit status: 0 if all stated peaks are right, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(MODELS), metavar="NAME")
    parser.add_argument("--optimizers", nargs="+", default=["SGD", "Adam", "AdamW"], metavar="CLASS")
    args = parser.parse_args()
    found = [
        ok
        for name in args.names
        for dtype in (("", "mixed") if name in MIXED else ("",))
        for optimizer in args.optimizers
        for ok in check(name, MODELS[name], optimizer, dtype)
    ]
    print(f"{sum(found)} of {len(found)} peaks are right")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
