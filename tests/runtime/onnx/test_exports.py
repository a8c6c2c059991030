"""Files that people have: torch's own exports, by both exporters, against the module they were made from."""

import copy
import functools
import warnings

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx_names import onnx_name
from torch import nn

from rematplan.ir.onnx.load import load_onnx
from rematplan.runtime.onnx.module import OnnxModule


class Convolutional(nn.Module):
    """Convolutions, a group norm that exports as arithmetic, a skip."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.first, self.second = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(11, 4, 1)

    def forward(self, x):
        h = F.silu(self.first(self.down(x)))
        h = self.second(self.up(h))
        h = torch.cat(
            [F.interpolate(h, scale_factor=2, mode="bilinear"), F.interpolate(x, scale_factor=2)], 1
        )
        return self.out(F.max_pool2d(h, 2))


class Block(nn.Module):
    def __init__(self, d, causal):
        super().__init__()
        self.causal = causal
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)  # equal when fresh: exporters merge them
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p.view(b, t, 2, d // 2).transpose(1, 2) for p in self.qkv(self.n1(x)).split(d, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class Language(nn.Module):
    """Embeddings, a tied head, a scalar parameter, a buffer."""

    def __init__(self, d=16):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(20, d), nn.Sequential(Block(d, True))
        self.places = nn.Parameter(torch.randn(8, d) * 0.1)
        self.register_buffer("fixed", torch.randn(8, d) * 0.1)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 20, bias=False)
        self.head.weight = self.tokens.weight
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, i):
        h = self.blocks(self.tokens(i) + self.places + self.fixed)
        return self.head(self.norm(h)) * self.gain


class Copies(nn.Module):
    """Layers made by copying: equal random values, and not tied."""

    def __init__(self):
        super().__init__()
        layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.layers = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


class Encoder(nn.Module):
    """Torch's own transformer layers: copies of one layer, projections read by the attention itself."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)
        with torch.no_grad():  # exporters drop biases of zero
            for layer in self.encoder.layers:
                layer.self_attn.out_proj.bias.uniform_(-0.1, 0.1)

    def forward(self, x):
        return self.head(self.encoder(x))


class Mirrored(nn.Module):
    """An autoencoder whose decoder has the encoder's weight."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 4)

    def forward(self, x):
        return torch.tanh(self.encoder(x)) @ self.encoder.weight


class Cells(nn.Module):
    """An LSTM's cell step by step from zeros, of which dynamo computes the first linear layer beforehand."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        h, c = x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4)
        for t in range(3):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h)


class Tied(nn.Module):
    """A head that multiplies by the transpose of the embedding, without a linear layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.inner = nn.Embedding(15, 8), nn.Linear(8, 8)

    def forward(self, i):
        return torch.tanh(self.inner(self.tokens(i))) @ self.tokens.weight.t()


class Fresh(nn.Module):
    """Equal numbers that are not tied: of norms, statistics, buffers and gains; ops with numbers as arguments."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.gain = nn.Parameter(torch.ones(5))
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x):
        h = self.norm(F.softplus(self.inner(x), 2.0))
        return self.head(torch.addcmul(h, h, h, value=0.3).clamp(-0.7, 0.7) * self.scale * self.gain)


class Decoder(nn.Module):
    """Two attentions, of which one splits its bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
        with torch.no_grad():
            for attention in (self.layer.self_attn, self.layer.multihead_attn):
                attention.out_proj.bias.uniform_(-0.1, 0.1)

    def forward(self, x):
        return self.layer(x, x)


class Shared(nn.Module):
    """One layer under two numbers, which is tied, and two further layers with its values, which are not."""

    def __init__(self):
        super().__init__()
        one = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.layers = nn.ModuleList([one, one, copy.deepcopy(one), copy.deepcopy(one)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Stacked(nn.Module):
    """Gains of one that two modules stack from parameters of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Halves(), Halves()

    def forward(self, x):
        return self.second(self.first(x))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)
        self.upper, self.lower = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.tanh(self.linear(x) * torch.cat([self.upper, self.lower]))


NETS = {
    "mirrored": (Mirrored, lambda: torch.randn(2, 3, 6)),
    "shared": (Shared, lambda: torch.randn(4, 6)),
    "fresh": (Fresh, lambda: torch.randn(4, 6)),
    "decoder": (Decoder, lambda: torch.randn(2, 5, 8)),
    "tied": (Tied, lambda: torch.randint(0, 15, (2, 5))),
    "cells": (Cells, lambda: torch.randn(2, 3, 6)),
    "encoder": (Encoder, lambda: torch.randn(2, 5, 8)),
    "convolutional": (Convolutional, lambda: torch.randn(2, 3, 16, 16)),
    "language": (Language, lambda: torch.randint(0, 20, (2, 8))),
    "copies": (Copies, lambda: torch.randn(2, 3, 6)),
}
EXPORTS = {
    "dynamo": {"dynamo": True},
    "dynamo-20": {"dynamo": True, "opset_version": 20},
    "dynamo-23": {"dynamo": True, "opset_version": 23},
    "dynamo-batch": {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim("batch")},)},
    "script-13": {"dynamo": False, "opset_version": 13},
    "script-17": {"dynamo": False, "opset_version": 17},
}
CASES = [
    ("fresh", "dynamo"),
    ("shared", "dynamo"),
    *(("mirrored", e) for e in ("dynamo", "script-17")),
    ("decoder", "dynamo"),
    *(("cells", e) for e in ("dynamo", "script-17")),
    *(("convolutional", e) for e in ("dynamo", "script-13", "script-17")),
    *(("language", e) for e in ("dynamo", "dynamo-20", "dynamo-23", "dynamo-batch", "script-17")),
    *(("copies", e) for e in ("dynamo", "script-13")),
    *(("tied", e) for e in ("dynamo", "script-17")),
    *(("encoder", e) for e in ("dynamo", "dynamo-23", "script-17")),
]


@functools.cache
def exported(folder, net, how):
    """The original module, its input, the file."""
    torch.manual_seed(0)
    make, inputs = NETS[net]
    module, x = make().eval(), inputs()
    path = folder / f"{net}-{how}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), path, verbose=False, **EXPORTS[how])
    return module, x, path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exports")


@functools.cache
def both(folder, net, how):
    """Both modules after one backward of the same loss, and the graph."""
    module, x, path = exported(folder, net, how)
    declared = onnx.load(path, load_external_data=False).graph.input[0].type.tensor_type.shape.dim
    graph = load_onnx(path, {d.dim_param: 2 for d in declared if d.dim_param})
    ours = OnnxModule(graph).train()
    (y,) = ours(x)
    torch.backends.mha.set_fastpath_enabled(False)
    wanted = module(x)
    torch.backends.mha.set_fastpath_enabled(True)
    y.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    return module, {onnx_name(n): p for n, p in ours.named_parameters()}, graph


@pytest.mark.parametrize(("net", "how"), CASES)
def test_exports_compute_and_differentiate_as_their_module(folder, net, how):
    module, ours, _ = both(folder, net, how)
    theirs = {**dict(module.named_parameters(remove_duplicate=False))}
    common = [n for n in ours if n in theirs and theirs[n].shape == ours[n].shape]
    assert len(common) >= len(dict(module.named_parameters())) // 2
    for name in common:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-3, atol=1e-4, msg=name)
    # TorchScript files do not tell a buffer from a parameter
    buffers = sum(b.numel() for b in module.buffers()) if how.startswith("script") else 0
    assert sum(p.numel() for p in ours.values()) == sum(p.numel() for p in module.parameters()) + buffers


@pytest.mark.parametrize(("net", "how"), [c for c in CASES if c[1].startswith("dynamo")])
def test_dynamo_exports_have_all_parameters_by_name(folder, net, how):
    module, ours, _ = both(folder, net, how)
    theirs = dict(module.named_parameters(remove_duplicate=False))
    assert {n: theirs[n].shape for n in ours} == {n: p.shape for n, p in ours.items()}
    assert {id(theirs[n]) for n in ours} == {id(p) for p in module.parameters()}


def test_what_was_undone_is_said(folder):
    _, _, graph = both(folder, "language", "dynamo")
    assert any("have the module's layout again" in n for n in graph.notes)
    assert any("are separate again" in n for n in graph.notes)
    roles = {w.name: w.role for w in graph.weights}
    assert roles["fixed"] == "constant"
    assert roles["gain"] == "parameter"


def test_parameters_that_the_export_dropped_are_named(tmp_path):
    net, x, path = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8), tmp_path / "n.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net.eval(), (x, x, x), path, dynamo=True, verbose=False)
    notes = load_onnx(path).notes
    assert any(
        n.startswith("1 parameters of the module are not in the file (out_proj.bias): ") for n in notes
    )


def test_gains_that_modules_stacked_are_not_tied(tmp_path):
    net, x, path = Stacked(), torch.randn(2, 6), tmp_path / "n.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net.eval(), (x,), path, dynamo=True, verbose=False)
    ours = OnnxModule(load_onnx(path))
    ours(x)[0].square().sum().backward()
    net(x).square().sum().backward()
    wanted = [torch.cat([h.upper.grad, h.lower.grad]) for h in (net.first, net.second)]
    found = [p.grad for p in ours.parameters() if p.dim() == 1]
    assert len(found) == 2
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_large_weights_stay_outside_the_file(folder):
    _, _, path = exported(folder, "language", "dynamo")
    assert path.with_name(path.name + ".data").exists()


def test_batch_norm_that_dynamo_folds_away_is_said(tmp_path):
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.train(), (torch.randn(2, 3, 8, 8),), tmp_path / "n.onnx", dynamo=True, verbose=False
        )
    assert any("looks like a folded inference export" in n for n in load_onnx(tmp_path / "n.onnx").notes)


class Positions(nn.Module):
    """A table of sines beside cosines, kept as a buffer, which a TorchScript file does not say."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(6).unsqueeze(1) / 10 ** torch.linspace(0, 3, 4)
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], 2).flatten(1))
        self.linear, self.learned = nn.Linear(8, 8), nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        return self.linear(x + self.pe + self.learned)


@pytest.mark.parametrize("training", [torch.onnx.TrainingMode.EVAL, torch.onnx.TrainingMode.TRAINING])
def test_a_table_of_sines_is_no_weight(tmp_path, training):
    net, path = Positions(), tmp_path / "n.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (torch.randn(2, 6, 8),), path, dynamo=False, training=training, do_constant_folding=False
        )
    roles = {w.name: w.role for w in load_onnx(path).weights}
    assert roles["pe"] == "constant"
    assert roles["learned"] == "parameter"


class Rotary(nn.Module):
    """Tables of cosines and of sines, longer than the sequence."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(9.0), 10 ** -torch.linspace(0, 3, 4))
        self.register_buffer("table_a", angles.cos().repeat(1, 2))
        self.register_buffer("table_b", angles.sin().repeat(1, 2))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        return (
            h * self.table_a[: x.shape[1]]
            + torch.cat([-h[..., 4:], h[..., :4]], -1) * self.table_b[: x.shape[1]]
        )


@pytest.mark.parametrize("folding", [True, False])
def test_tables_of_rotations_are_no_weights(tmp_path, folding):
    net, path = Rotary(), tmp_path / "n.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.randn(2, 6, 8),), path, dynamo=False, do_constant_folding=folding)
    trained = sum(w.load().size for w in load_onnx(path).weights if w.role == "parameter")
    assert trained == 8 * 8 + 8


class Decays(nn.Module):
    """Rates that start equal in all channels."""

    def __init__(self):
        super().__init__()
        self.rates = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(6, 1))

    def forward(self, x):
        return (x.unsqueeze(-1) * -torch.exp(self.rates).unsqueeze(0)).sum(-1)


def test_equal_rows_of_a_computed_weight_are_not_tied(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Decays(), (torch.randn(2, 6),), tmp_path / "n.onnx", dynamo=True, verbose=False)
    (rates,) = (w for w in load_onnx(tmp_path / "n.onnx").weights if w.role == "parameter")
    assert rates.load().size == 24


class Masked(nn.Module):
    """A float mask of attention, kept as a buffer under the name ``name``."""

    def __init__(self, name, forbidden):
        super().__init__()
        self.name, self.scores, self.bias = name, nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))
        self.register_buffer(name, torch.triu(torch.full((6, 6), forbidden), 1))

    def forward(self, x):
        return torch.softmax(self.scores(x) + getattr(self, self.name)[None] + self.bias, -1)


@pytest.mark.parametrize(
    ("name", "forbidden", "dynamo"),
    [("mask", -1e9, True), ("causal_mask", 0.5, False), ("band", -torch.inf, True), ("band", -1e4, False)],
)
def test_a_float_mask_is_no_weight(tmp_path, name, forbidden, dynamo):
    net, path = Masked(name, forbidden), tmp_path / "n.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (torch.randn(2, 6, 6),), path, dynamo=dynamo, do_constant_folding=False, verbose=False
        )
    graph = load_onnx(path)
    trained = sum(w.load().size for w in graph.weights if w.role == "parameter")
    assert trained == sum(p.numel() for p in net.parameters())
    assert dynamo or any(f"are not trained ({name})" in note for note in graph.notes)
