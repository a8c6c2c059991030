"""Check that plans keep their budgets: `plan_module` at shares of eager mode's measured peak, zoo and Hugging Face
models.

usage: python benchmarks/promise.py [NAME ...] [--time-limit 10] [--optimizer AdamW]

At 90, 70, 50 and 30 % of eager mode's measured peak, it prints the measured peak of planned iterations as a share of
the budget (it must not exceed 1): from inputs to the optimizer's step, loss and optimizer states included; the
overhead; and whether outputs, gradients, buffers and the random state after a step, and the parameters after two
iterations, equal eager mode's, bit by bit. If no plan fits, it prints the smallest found that the error states. Exit
status 1 if a plan exceeds its budget or bits differ. Sizes are small; the Hugging Face models need `transformers`.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import rematplan
from rematplan.ir import InfeasibleBudget, show_bytes
from rematplan.models import ZOO, build, example_inputs
from rematplan.module.verification import same_bits
from rematplan.runtime.costs.measure import bytes_of, peak_above_entry
from rematplan.runtime.graph.tensor_storages import plain_tensors

SHARES = (0.9, 0.7, 0.5, 0.3)
BATCH = 16
"""Of each network, so that it is not its parameters that fill the memory."""

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def of_zoo(name: str) -> Made:
    """Return a network of the zoo at small sizes, with its positional and keyword arguments."""
    sizes = {**ZOO[name].tiny, "batch": BATCH}
    torch.manual_seed(0)
    return build(name, **{k: v for k, v in sizes.items() if k != "batch"}), example_inputs(name, **sizes), {}


Inputs = Callable[[], dict[str, Any]]


def of_hugging_face(kind: str, inputs: Inputs, **config: Any) -> Callable[[], Made]:
    """Return a function that makes a model of `transformers` with random weights, and its arguments."""

    def make() -> Made:
        import transformers

        torch.manual_seed(0)
        configured = getattr(
            transformers, re.sub(r"(Model|EncoderModel|LMHeadModel|For\w+)$", "", kind) + "Config"
        )
        return getattr(transformers, kind)(configured(**config)).train(), (), inputs()

    return make


def tokens() -> dict[str, Any]:
    """Return four sentences of 64 tokens as keyword arguments, one of them padded."""
    mask = torch.ones(4, 64, dtype=torch.int64)
    mask[0, -9:] = 0
    return {"input_ids": torch.randint(3, 100, (4, 64)), "attention_mask": mask}


def labelled() -> dict[str, Any]:
    """Return the sentences of `tokens` with labels, so that the model computes its loss."""
    batch = tokens()
    return {**batch, "labels": batch["input_ids"].clone()}


def pixels() -> dict[str, Any]:
    """Return images (8, 3, 64, 64) as keyword arguments."""
    return {"pixel_values": torch.randn(8, 3, 64, 64)}


def sounds() -> dict[str, Any]:
    """Return spectrograms (4, 8, 128) and their texts as labels (4, 32), as keyword arguments."""
    return {"input_features": torch.randn(4, 8, 128), "labels": torch.randint(3, 100, (4, 32))}


def pairs() -> dict[str, Any]:
    """Return four images with captions as keyword arguments. The model then computes its loss."""
    return {**tokens(), "pixel_values": torch.randn(4, 3, 64, 64), "return_loss": True}


VISION = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {"vocab_size": 500, **VISION}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 500, "n_embd": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 500, "d_model": 64, "d_ff": 128, "num_layers": 3, "num_heads": 4, "d_kv": 16}
TWO_SIDED = {
    "vocab_size": 500,
    "d_model": 64,
    **{
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("ffn_dim", 128))
    },
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
IMAGES = {"image_size": 64, **VISION}
STAGES = {"hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1]}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
HUGGING_FACE: Mapping[str, Callable[[], Made]] = {
    "hf_gpt2": of_hugging_face("GPT2Model", tokens, **GPT2),
    "hf_gpt2_loss": of_hugging_face("GPT2LMHeadModel", labelled, **GPT2),
    "hf_bert": of_hugging_face("BertModel", tokens, **TEXT),
    "hf_bert_loss": of_hugging_face("BertForMaskedLM", labelled, **TEXT),
    "hf_roberta": of_hugging_face("RobertaForMaskedLM", labelled, **TEXT),
    "hf_albert": of_hugging_face("AlbertForMaskedLM", labelled, embedding_size=32, **TEXT),
    "hf_deberta": of_hugging_face("DebertaV2ForMaskedLM", labelled, **DISENTANGLED, **TEXT),
    "hf_distilbert": of_hugging_face(
        "DistilBertForMaskedLM", labelled, vocab_size=500, dim=64, n_layers=3, n_heads=4, hidden_dim=128
    ),
    "hf_llama": of_hugging_face("LlamaForCausalLM", labelled, **GROUPED),
    "hf_mistral": of_hugging_face("MistralForCausalLM", labelled, sliding_window=16, **GROUPED),
    "hf_mixtral": of_hugging_face("MixtralForCausalLM", labelled, num_local_experts=4, **GROUPED),
    "hf_mamba2": of_hugging_face(
        "Mamba2ForCausalLM",
        labelled,
        **{"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 16, "chunk_size": 16},
        **{"num_heads": 8, "head_dim": 16, "n_groups": 1},
    ),
    "hf_t5": of_hugging_face("T5EncoderModel", tokens, **T5),
    "hf_t5_loss": of_hugging_face("T5ForConditionalGeneration", labelled, decoder_start_token_id=0, **T5),
    "hf_bart": of_hugging_face("BartForConditionalGeneration", labelled, **TWO_SIDED),
    "hf_whisper": of_hugging_face(
        "WhisperForConditionalGeneration", sounds, num_mel_bins=8, max_source_positions=64, **TWO_SIDED
    ),
    "hf_vit": of_hugging_face("ViTModel", pixels, **IMAGES),
    "hf_swin": of_hugging_face(
        "SwinModel", pixels, image_size=64, embed_dim=24, depths=[1, 1], num_heads=[2, 4], window_size=4
    ),
    "hf_convnext": of_hugging_face("ConvNextModel", pixels, drop_path_rate=0.1, **STAGES),
    "hf_segformer": of_hugging_face("SegformerModel", pixels, decoder_hidden_size=64, **STAGES),
    "hf_clip": of_hugging_face(
        "CLIPModel", pairs, text_config={**TEXT, "eos_token_id": 2}, vision_config=IMAGES, projection_dim=32
    ),
}


def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the model's scalar outputs; if there are none, the sum of the mean squares of its outputs."""
    own = [t for t in outputs if t.numel() == 1]
    return sum(own) if own else sum(t.float().square().mean() for t in outputs)


def step_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], list[torch.Tensor]]:
    """Return a function that runs forward and backward, and returns the outputs that had a gradient, detached."""

    def step() -> list[torch.Tensor]:
        out = [
            t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        loss_of(out).backward()
        return [t.detach() for t in out]

    return step


def results(
    model: nn.Module, made: Made, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, torch.Tensor]]:
    """Run a step and two iterations with an optimizer. Return the peak of the iterations in bytes, and what all of them
    leave.

    The peak includes parameters, buffers, inputs and optimizer states. The tensors by name: outputs, gradients, buffers
    and random state after the step; parameters after the iterations.
    """
    step = step_of(model, *made[1:])
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    outputs = step()
    left = {f"output {k}": t for k, t in enumerate(outputs)} | {"random state": torch.get_rng_state()}
    left |= {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    left |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    fixed = bytes_of((*model.parameters(), *model.buffers(), made[1:]))

    def iteration() -> None:
        model.zero_grad(set_to_none=True)
        step()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    peaks = []
    for _ in range(2):  # the first makes the optimizer's states
        states = sum(t.nbytes for of in optimizer.state.values() for t in plain_tensors(of))
        peaks.append(fixed + states + peak_above_entry(iteration, torch.device("cpu"))[0])
    left |= {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    return max(peaks), left


def check(name: str, make: Callable[[], Made], time_limit: float, optimizer: str) -> Iterator[bool]:
    """Plan one network at each of `SHARES` of eager mode's peak, print a line for each, and yield whether it is kept.

    A promise is kept if the measured peak is within the budget and all results equal eager mode's bit by bit; or if the
    budget was refused with a larger smallest peak. ``optimizer``: the name of a class of `torch.optim`.
    """
    made = make()

    def copied() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(made[0])
        return model, getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)

    model, stepping = copied()
    eager_peak, expected = results(model, made, stepping)
    print(f"{name}: eager mode holds {show_bytes(eager_peak)}", flush=True)
    for share in SHARES:
        budget = int(share * eager_peak)
        model, stepping = copied()
        try:
            planned = rematplan.plan_module(
                model,
                *made[1:],
                budget=budget,
                reserved=[stepping],
                strategy=rematplan.Auto(time_limit=time_limit),
            )
        except InfeasibleBudget as error:
            print(f"  {share:.0%}: refused, smallest found {error.smallest / eager_peak:.1%}", flush=True)
            yield error.smallest > budget
            continue
        peak, found = results(planned, made, stepping)
        wrong = [k for k in expected if k not in found or not same_bits(expected[k], found[k])]
        overhead = planned.plan.estimate.overhead
        print(
            f"  {share:.0%}: measured ÷ budget {peak / budget:.4f}, overhead {overhead:.2%}, "
            + (f"{len(wrong)} of {len(expected)} differ: {wrong[:3]}" if wrong else "bit-equal"),
            flush=True,
        )
        yield peak <= budget and not wrong


def main() -> int:
    """Check each named network. Return the exit status: 0 if all promises are kept, otherwise 1."""
    every = {**{name: lambda name=name: of_zoo(name) for name in ZOO}, **HUGGING_FACE}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(every), metavar="NAME")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--optimizer", default="AdamW", metavar="CLASS", help="of torch.optim")
    args = parser.parse_args()
    kept = [ok for name in args.names for ok in check(name, every[name], args.time_limit, args.optimizer)]
    print(f"{sum(kept)} of {len(kept)} promises kept")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
