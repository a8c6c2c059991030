"""Which networks are captured with open sizes, and why the sizes of others are captured one by one.

Each network is planned for one batch and then trained on batches that differ in one size: the number of samples, then
the length (or the side of the image). A row says for each of the two how the sizes were served: ``open`` (one capture
serves all of them), ``ranges`` (captures with open sizes that serve some sizes each) or ``each size`` (with the reason
that `rematplan.planning(...).stats()` gives). Outputs' and gradients' bits are compared with eager mode's at each size.
The configurations are small and the weights random; classes are those of `transformers` (T, as `public_models.py`
trains them), torch (P) and the zoo (Z).

usage: python benchmarks/open_models.py [NAME ...]

Exit status 1 if some bits differ.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from public_architectures import WORDS, of_transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import rematplan
from rematplan.models import build, example_inputs

Batch = dict[str, Any]
SAMPLES = (4, 2, 3, 6, 5)
"""The numbers of samples that are trained on, where the length does not change."""
LENGTHS = (24, 16, 17, 33, 40)
"""The lengths, where the number of samples does not change."""
SIDES = (64, 32, 96, 128, 160)
"""The sides of images."""


@dataclass(frozen=True)
class Network:
    """A network and its batches. ``make``: builds it. ``batch``: returns a batch of a number of samples and a length
    (or a side of an image). ``sizes``: the lengths that are tried; a single one if the network has only one."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    sizes: Sequence[int] = LENGTHS


class Flat(nn.Module):
    """A model of the library ``transformers`` that returns only the first of its outputs, as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Tensor) -> Tensor:
        """Return the first output for the model's arguments."""
        found: Tensor = self.model(**arguments, return_dict=False)[0]
        return found


class Named(nn.Module):
    """A network of the zoo, whose arguments have the names ``x0``, ``x1`` and so on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Tensor) -> Any:
        """Return the network's output."""
        return self.model(*arguments.values())


def _library(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds a small model of ``transformers``, by the name of its class."""
    return lambda: Flat(of_transformers(name)[0])


def _zoo(name: str, **sizes: int) -> Callable[[], nn.Module]:
    return lambda: Named(build(name, **sizes))


def _words(samples: int, length: int) -> Batch:
    return {"input_ids": torch.randint(3, WORDS, (samples, length))}


def _masked(samples: int, length: int) -> Batch:
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[0, -max(1, length // 8) :] = 0
    return {**_words(samples, length), "attention_mask": mask}


def _decoded(samples: int, length: int) -> Batch:
    return {**_masked(samples, length), "decoder_input_ids": torch.randint(3, WORDS, (samples, length))}


def _sound(samples: int, length: int) -> Batch:
    # Whisper's encoder takes only spectra of one length; the text's length varies.
    words = torch.randint(3, WORDS, (samples, length))
    return {"input_features": torch.randn(samples, 8, 128), "decoder_input_ids": words}


def _pictures(samples: int, side: int) -> Batch:
    return {"pixel_values": torch.randn(samples, 3, side, side)}


def _images(samples: int, side: int) -> Batch:
    return {"x0": torch.randn(samples, 3, side, side)}


def _features(samples: int, length: int) -> Batch:
    return {"x0": torch.randn(samples, length, 16)}


def _latents(samples: int, side: int) -> Batch:
    given = example_inputs("diffusion_unet", samples, side, width=32)
    return {f"x{at}": tensor for at, tensor in enumerate(given)}


class Recurrent(nn.Module):
    """A recurrent layer, of which only the outputs are used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x0: Tensor) -> Tensor:
        """Return the layer's outputs (N, T, features)."""
        found: Tensor = self.layer(x0)[0]
        return found


NETWORKS: Mapping[str, Network] = {
    "BERT (T)": Network(_library("BertForMaskedLM"), _masked),
    "GPT-2 (T)": Network(_library("GPT2LMHeadModel"), _masked),
    "Llama (T)": Network(_library("LlamaForCausalLM"), _masked),
    "T5 (T)": Network(_library("T5ForConditionalGeneration"), _decoded),
    "Whisper (T)": Network(_library("WhisperForConditionalGeneration"), _sound),
    "Mixtral (T)": Network(_library("MixtralForCausalLM"), _words),
    "Mamba (T)": Network(_library("MambaForCausalLM"), _words),
    "ViT (T)": Network(_library("ViTForImageClassification"), _pictures, (64,)),
    "Swin (T)": Network(_library("SwinForImageClassification"), _pictures, SIDES),
    "SegFormer (T)": Network(_library("SegformerForSemanticSegmentation"), _pictures, SIDES),
    "LSTM (P)": Network(lambda: Recurrent(nn.LSTM(16, 16, 2, batch_first=True)), _features),
    "GRU (P)": Network(lambda: Recurrent(nn.GRU(16, 16, batch_first=True)), _features),
    "Transformer encoder (P)": Network(
        lambda: Named(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
            )
        ),
        _features,
    ),
    "ResNet-18 (Z)": Network(_zoo("resnet18"), _images, SIDES),
    "U-Net (Z)": Network(_zoo("unet", width=4), _images, SIDES),
    "U-Net of Stable Diffusion (Z)": Network(_zoo("diffusion_unet", width=32), _latents, (16, 8, 24, 32, 40)),
}


def _step(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Run one training step and return the outputs and the gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    found = [t for t in tree_leaves(model(**batch)) if isinstance(t, Tensor) and t.requires_grad]
    sum((t.square().mean() for t in found), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    return [*(t.detach() for t in found), *(p.grad for p in model.parameters() if p.grad is not None)]


def served(network: Network, batches: Sequence[Batch]) -> tuple[str, bool]:
    """Train a network on batches. Return how their sizes were served, and whether all bits are those of eager mode."""
    torch.manual_seed(0)
    plain = network.make().train()
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"budget": "1TiB", "strategy": "store_all", "costs": "roofline"}
    planned = rematplan.plan_module(model, (), batches[0], **options)
    equal = True
    for batch in batches:
        ours, theirs = _step(planned, batch), _step(plain, batch)
        equal &= len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    stats = rematplan.planning(planned).stats()
    if stats.captures == 1:
        return "open", equal
    kind = f"ranges: {stats.open_captures}" if stats.instances else "each size"
    return f"{kind} ({'; '.join(stats.reasons)})" if stats.reasons else kind, equal


def rows(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the table's rows, each with whether all bits are those of eager mode."""
    for name in names:
        network = NETWORKS[name]
        tried = [[network.batch(n, network.sizes[0]) for n in SAMPLES]]
        if len(network.sizes) > 1:
            tried.append([network.batch(SAMPLES[0], size) for size in network.sizes])
        found = []
        for batches in tried:
            try:
                found.append(served(network, batches))
            except rematplan.ModelError as error:
                found.append((f"refused: {error}", True))
        shown = [text for text, _ in found] + ["one size only"] * (2 - len(found))
        equal = all(same for _, same in found)
        yield f"| {name} | {' | '.join(shown)} |" + ("" if equal else " bits differ"), equal


def main() -> int:
    """Print the table; return 1 if some bits differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(NETWORKS), help="the beginnings of names")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| network | number of samples | length or side |\n|---|---|---|")
    equal = True
    for row, same in rows([n for n in NETWORKS if any(n.lower().startswith(a.lower()) for a in asked.names)]):
        print(row, flush=True)
        equal &= same
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
