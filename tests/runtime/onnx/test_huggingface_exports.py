"""Exports of Hugging Face models: loss and gradients are the module's own, and a planned step's are ours to the bit."""

import functools
import logging
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made from their configuration, nothing is fetched

import transformers as hf
from onnx_names import onnx_name

import rematplan
from rematplan.ir.onnx.load import load_onnx
from rematplan.runtime.onnx.module import OnnxModule

TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VIT = {k: v for k, v in TEXT.items() if k not in ("vocab_size", "max_position_embeddings")}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def words():
    # not 0 and 1: of padding the module stops the gradient, which ONNX has no way to say
    return torch.randint(2, 40, (4, 32))


MODELS = {
    "gpt2": lambda: (
        hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=40, n_positions=40, n_embd=16, n_layer=1, n_head=2, **NO_DROPOUT)
        ),
        words(),
    ),
    "bert": lambda: (hf.BertForMaskedLM(hf.BertConfig(**TEXT)), words()),
    "vit": lambda: (
        hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, **VIT)),
        torch.randn(4, 3, 32, 32),
    ),
    "swin": lambda: (
        hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32,
                patch_size=2,
                embed_dim=8,
                depths=[2, 1],
                num_heads=[1, 2],
                window_size=4,
                drop_path_rate=0.0,
            )
        ),
        torch.randn(2, 3, 32, 32),
    ),
    "segformer": lambda: (
        hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(
                num_encoder_blocks=2,
                depths=[1, 1],
                sr_ratios=[2, 1],
                hidden_sizes=[8, 16],
                patch_sizes=[7, 3],
                strides=[4, 2],
                num_attention_heads=[1, 2],
                mlp_ratios=[4, 4],
                decoder_hidden_size=16,
                drop_path_rate=0.0,
                classifier_dropout_prob=0.0,
            )
        ),
        torch.randn(2, 3, 64, 64),
    ),
    "t5": lambda: (
        hf.T5EncoderModel(
            hf.T5Config(
                vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0
            )
        ),
        words(),
    ),
}
EAGER_ATTENTION = {("swin", "dynamo"), ("t5", "dynamo")}  # torch's exporter breaks down over the other kind
SCRIPT = {"dynamo": False, "opset_version": 17}
EXPORTS = {
    "script": SCRIPT,
    "script-train": {**SCRIPT, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False},
    **{f"dynamo-{v}": {"dynamo": True, "opset_version": v} for v in (18, 19, 20)},
}
CASES = [
    ("gpt2", "script"),
    ("gpt2", "dynamo-20"),
    ("bert", "script-train"),
    ("bert", "dynamo-19"),
    ("vit", "script-train"),
    ("vit", "dynamo-18"),
    ("swin", "script"),
    ("segformer", "script-train"),
    ("segformer", "dynamo-20"),
    ("t5", "script"),
    ("t5", "dynamo-19"),
]
FOLDED = "net.decode_head.linear_fuse.weight"  # by exporters for inference, with the batch norm behind it


class Scores(nn.Module):
    """A Hugging Face model as a function of one tensor to one tensor."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        # a mask of ones, without which GPT-2 looks for packed sequences by an op that TorchScript cannot export
        more = {"attention_mask": torch.ones_like(x)} if x.dtype == torch.int64 else {}
        found = self.net(x, **more)
        return found["logits"] if "logits" in found else found["last_hidden_state"]


@functools.cache
def exported(folder, name, how):
    """The module after one backward, its batch, its loss's value, the file."""
    torch.manual_seed(0)
    net, x = MODELS[name]()
    if (name, how.partition("-")[0]) in EAGER_ATTENTION:
        net.set_attn_implementation("eager")
    with torch.no_grad():
        for p in net.parameters():  # what starts as zeros or ones is told apart by its values too
            p.add_(0.05 * torch.randn_like(p))
    module, path = Scores(net).train(how == "script-train"), folder / f"{name}-{how}.onnx"
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), path, verbose=False, **EXPORTS[how])
    logging.disable(logging.NOTSET)
    return module, x, path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("huggingface")


def loss_of(scores):
    """Cross entropy, classes last or second, of labels that depend on nothing."""
    flat = scores.flatten(0, 1) if scores.dim() == 3 else scores
    shape = (flat.shape[0], *flat.shape[2:])
    return F.cross_entropy(
        flat, torch.randint(flat.shape[1], shape, generator=torch.Generator().manual_seed(1))
    )


def content(gradient):
    """A gradient's entries in ascending order, without zeros: alike for a transpose, or for rows in use."""
    flat = gradient.flatten()
    return flat[flat != 0].sort().values


@pytest.mark.parametrize(("name", "how"), CASES)
def test_loss_and_gradients_are_the_modules(folder, name, how):
    module, x, path = exported(folder, name, how)
    ours = OnnxModule(load_onnx(path)).train()
    module.zero_grad()
    loss, wanted = loss_of(ours(x)[0]), loss_of(module(x))
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    theirs = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}
    if name == "segformer" and how != "script-train":
        _fold(module, theirs)
    found = {onnx_name(n): p.grad for n, p in ours.named_parameters()}
    close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5)
    others = {}
    for key, gradient in found.items():
        if key in theirs and theirs[key].shape == gradient.shape:
            close(gradient, theirs[key], msg=f"the gradients of {key} differ")
        else:
            others[key] = content(gradient)
    rest = [content(theirs[k]) for k in theirs.keys() - found.keys()]
    for key, entries in others.items():
        close_to = [r for r in rest if r.shape == entries.shape and torch.allclose(r, entries, 1e-3, 1e-5)]
        assert close_to, f"{key} has the gradient of none of the module's parameters"
    assert len(others) <= len(rest)


def _fold(module, gradients):
    """The gradients as inference exports have them: of a kernel that its batch norm's scale is folded into."""
    norm = module.net.decode_head.batch_norm
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    gradients[FOLDED] = (gradients[FOLDED] / scale.reshape(-1, 1, 1, 1)).detach()


@pytest.mark.parametrize(
    ("name", "how"), [("gpt2", "script"), ("segformer", "dynamo-20"), ("t5", "dynamo-19")]
)
def test_planned_steps_are_bit_equal_to_unplanned_ones(folder, name, how):
    loaded = rematplan.load_step(exported(folder, name, how)[2])
    graph = rematplan.problem(loaded, costs="roofline")
    budget = rematplan.no_recompute(graph).estimate.peak // 2
    try:
        plan = rematplan.plan(graph, budget, "approx_dp")
    except rematplan.InfeasibleBudget as error:  # in small networks the parameters weigh much
        plan = rematplan.plan(graph, error.smallest, "approx_dp")
    assert plan.estimate.overhead > 0
    assert rematplan.run_step(loaded, plan, check=True, steps=1).verification.bit_equal
