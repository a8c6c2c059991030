"""Layers are found by what their gradients are made of, however they are written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from statistics_reference import error
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import rematplan
from rematplan.ir import ModelError, UsageError
from rematplan.runtime.statistics.factors import Statistics

SETTINGS: dict[str, Any] = {"budget": "1GiB", "strategy": "store_all", "costs": "roofline"}
pytestmark = pytest.mark.usefixtures("double")
N, T, D, E = 3, 5, 4, 6


def statistics(model: nn.Module, *args: Tensor, **options: Any) -> Statistics:
    options = {"fisher": "empirical", "loss_reduction": "sum"} | options
    planned = rematplan.plan_module(model, args, **SETTINGS, statistics=rematplan.Kronecker(**options))
    y = planned(*args)
    sum(one.sin().sum() for one in (y if isinstance(y, tuple) else (y,))).backward()
    return rematplan.planning(planned).statistics()


class Written(nn.Module):
    """A forward that a test writes, over parameters w (and b). What it gives to ``out`` is seen."""

    def __init__(self, forward: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.write = forward
        for name, shape in zip("wbc", shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)


def gram(rows: Tensor) -> Tensor:
    rows = rows.reshape(-1, rows.shape[-1])
    return rows.T @ rows


X = torch.randn(N, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradient(s: Tensor) -> Tensor:
    return s.cos()


LINEAR = {
    "x @ w": (lambda m, x: x @ m.w, (D, E), lambda w: X @ w),
    "linear": (lambda m, x: functional.linear(x, m.w), (E, D), lambda w: X @ w.T),
    "einsum": (lambda m, x: torch.einsum("ntd,de->nte", x, m.w), (D, E), lambda w: X @ w),
    "einsum, other order": (lambda m, x: torch.einsum("ed,ntd->etn", m.w, x), (E, D), lambda w: X @ w.T),
    "w @ xᵀ": (lambda m, x: (m.w @ x.mT).mT, (E, D), lambda w: X @ w.T),
    "bmm, expanded weight": (lambda m, x: torch.bmm(x, m.w.expand(N, D, E)), (D, E), lambda w: X @ w),
    "a flat weight": (lambda m, x: x @ m.w.view(D, E), (D * E,), lambda w: X @ w.view(D, E)),
    "a weight of heads": (
        lambda m, x: torch.einsum("ntd,hdk->ntkh", x, m.w),
        (2, D, 3),
        lambda w: X @ w.permute(1, 2, 0).reshape(D, E),
    ),
    "a transposed view": (lambda m, x: functional.linear(x, m.w.T), (D, E), lambda w: X @ w),
    "addmm": (lambda m, x: torch.addmm(x.new_zeros(N * T, E), x.view(-1, D), m.w), (D, E), lambda w: X @ w),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_layer_however_it_is_written(name: str) -> None:
    forward, shape, layer = LINEAR[name]
    model = Written(forward, shape)
    found = statistics(model, X.clone()).factors["w"]
    s = layer(model.w.detach())
    assert error(found.a, gram(X)) < 1e-13
    assert error(found.g, gram(gradient(s))) < 1e-13
    assert (found.rows, found.samples, found.groups, found.bias) == (N * T, found.samples, 1, False)
    wanted = gradient(s).reshape(-1, E).T @ X.reshape(-1, D)
    assert error(found.matrix(model.w.grad), wanted) < 1e-13


def test_weights_of_experts_are_groups() -> None:
    x = torch.randn(2, T, D)
    model = Written(lambda m, x: torch.bmm(x, m.w), (2, D, E))
    found = statistics(model, x).factors["w"]
    s = x @ model.w.detach()
    assert found.a.shape == (2, D, D)
    assert error(found.a, x.mT @ x) < 1e-13
    assert error(found.g, gradient(s).mT @ gradient(s)) < 1e-13
    assert error(found.matrix(model.w.grad), gradient(s).mT @ x) < 1e-13


def test_experts_that_share_samples() -> None:
    model = Written(lambda m, x: torch.matmul(x[:, None].expand(N, 2, T, D), m.w), (2, D, E))
    found = statistics(model, X.clone()).factors["w"]
    s = torch.einsum("ntd,hde->hnte", X, model.w.detach()).flatten(1, 2)
    assert error(found.a, torch.stack([gram(X)] * 2)) < 1e-13
    assert error(found.g, gradient(s).mT @ gradient(s)) < 1e-13
    assert found.rows == N * T


def test_uses_of_a_weight_are_summed_over_the_rows_of_each() -> None:
    model = Written(
        lambda m, x: functional.linear(functional.linear(x, m.w, m.b).tanh(), m.w, m.b), (D, D), (D,)
    )
    found = statistics(model, X.clone()).factors["w"]
    w, b = model.w.detach(), model.b.detach()
    first = functional.linear(X, w, b)
    second = functional.linear(first.tanh(), w, b)
    g2 = gradient(second)
    g1 = (g2 @ w) * (1 - first.tanh() ** 2)
    with_one = [functional.pad(a, (0, 1), value=1.0) for a in (X, first.tanh())]
    assert found.bias_name == "b"
    assert error(found.a, gram(with_one[0]) + gram(with_one[1])) < 1e-13
    assert error(found.g, gram(g1) + gram(g2)) < 1e-13
    assert found.rows == 2 * N * T


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(D, E)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), E)
        for at in range(x.shape[1]):
            h = self.cell(x[:, at], h)
        return h


def test_an_unrolled_recurrent_cell() -> None:
    found = statistics(Recurrent(), X.clone())
    assert not found.skipped
    own = found.factors["cell.weight_ih"]
    assert error(own.a, gram(functional.pad(X, (0, 1), value=1.0))) < 1e-13
    assert own.rows == found.factors["cell.weight_hh"].rows == N * T
    assert torch.equal(own.g, found.factors["cell.weight_hh"].g)


class Sequences(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(D, E, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_count_the_state_of_zeros_as_an_input(kind: type[nn.RNNBase]) -> None:
    model = Sequences(kind)
    found = statistics(model, X.clone())
    assert not found.skipped
    states = functional.pad(model(X).detach(), (0, 0, 1, 0))[:, :-1]
    for name, inputs in (("ih", X), ("hh", states)):
        own = found.factors[f"layer.weight_{name}_l0"]
        assert (own.rows, own.bias_name) == (N * T, f"layer.bias_{name}_l0")
        assert error(own.a, gram(functional.pad(inputs, (0, 1), value=1.0))) < 1e-13
        weight, bias = getattr(model.layer, f"weight_{name}_l0"), getattr(model.layer, own.bias_name[6:])
        assert error(own.matrix(weight.grad, bias.grad)[:, -1], bias.grad) < 1e-13


class Tied(nn.Module):
    def __init__(self, embedded: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(E, D) if embedded else nn.Linear(D, E, bias=False)
        self.between = nn.Linear(E, D)
        self.head = nn.Linear(D, E, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h if h.shape[-1] == D else self.between(h.tanh()))


def test_tied_weights_add_up() -> None:
    found = statistics(Tied(False), X.clone())
    assert set(found.factors) == {"first.weight", "between.weight"}
    assert found.factors["first.weight"].rows == 2 * N * T


def test_a_weight_that_is_an_embedding_too_is_named_with_its_reason() -> None:
    model = nn.Sequential(Tied(True), nn.Linear(E, E))
    found = statistics(model, torch.randint(0, E, (N, T)))
    assert "embedding_dense_backward" in found.skipped["0.first.weight"]
    assert set(found.factors) == {"1.weight"}


class LoRA(nn.Module):
    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base = nn.Linear(D, E)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(E, 2))
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return functional.linear(x, self.base.weight + 0.5 * self.up @ self.down, self.base.bias)
        return self.base(x) + 0.5 * functional.linear(functional.linear(x, self.down), self.up)


def test_low_rank_updates_of_a_frozen_weight() -> None:
    model = LoRA(False)
    found = statistics(model, X.clone())
    assert set(found.factors) == {"down", "up"}
    inner = X @ model.down.detach().T
    g = gradient(model.base(X) + 0.5 * inner @ model.up.detach().T)
    assert error(found.factors["up"].a, gram(inner)) < 1e-13
    assert error(found.factors["up"].g, gram(0.5 * g)) < 1e-13
    assert error(found.factors["down"].a, gram(X)) < 1e-13
    assert error(found.factors["down"].g, gram(0.5 * g @ model.up.detach())) < 1e-13


def test_a_merged_update_has_the_statistics_of_the_effective_weight() -> None:
    model = LoRA(True)
    found = statistics(model, X.clone())
    assert set(found.factors) == {"down+up"}
    own = found.factors["down+up"]
    assert error(own.a, gram(X)) < 1e-13
    assert error(own.g, gram(gradient(model(X).detach()))) < 1e-13
    assert "effective weight down+up" in found.skipped["up"]


@pytest.mark.parametrize("parametrized", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrised_weight_has_the_statistics_of_the_effective_one(parametrized: Any) -> None:
    model = nn.Sequential(parametrized(nn.Linear(D, E)), nn.Tanh(), nn.Linear(E, 2))
    found = statistics(model, X.clone())
    assert set(found.factors) == {"0.weight", "2.weight"}
    own = found.factors["0.weight"]
    assert own.bias_name == "0.bias"
    assert error(own.a, gram(functional.pad(X, (0, 1), value=1.0))) < 1e-13
    assert all("effective weight 0.weight" in why for why in found.skipped.values())


def test_a_weight_used_plainly_and_transposed_is_named_with_its_reason() -> None:
    model = Written(
        lambda m, x: functional.linear(functional.linear(x, m.w).tanh() @ m.w, m.b), (E, D), (2, D)
    )
    found = statistics(model, X.clone())
    assert set(found.factors) == {"b"}
    assert found.skipped == {"w": "its uses see it as different matrices"}


def test_weights_that_are_joined_have_the_statistics_of_the_whole() -> None:
    model = Written(lambda m, x: functional.linear(x, torch.cat([m.w, m.b])), (2, D), (4, D))
    found = statistics(model, X.clone())
    assert set(found.factors) == {"w+b"}
    assert error(found.factors["w+b"].a, gram(X)) < 1e-13
    s = X @ torch.cat([model.w, model.b]).detach().T
    assert error(found.factors["w+b"].g, gram(gradient(s))) < 1e-13


def test_an_effective_weight_never_has_the_name_of_a_parameter() -> None:
    def standardised(m: Any, x: Tensor) -> Tensor:
        return functional.linear(x, (m.w - m.w.mean(1, keepdim=True)) / m.w.std(1, keepdim=True))

    found = statistics(Written(standardised, (E, D)), X.clone())
    assert set(found.factors) == {"w'"}
    assert error(found.factors["w'"].a, gram(X)) < 1e-13
    assert "effective weight w'" in found.skipped["w"]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(D, E), nn.Tanh(), nn.Dropout(0.5), nn.Linear(E, D))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_checkpointed_blocks_are_summed_once() -> None:
    found = statistics(Checkpointed(), X.clone())
    assert set(found.factors) == {"block.0.weight", "block.3.weight"}
    assert error(found.factors["block.0.weight"].a, gram(functional.pad(X, (0, 1), value=1.0))) < 1e-13
    assert found.factors["block.0.weight"].rows == N * T


class Attends(nn.Module):
    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.cross = cross

    def forward(self, x: Tensor) -> Tensor:
        other = x[:, :2] * 2 if self.cross else x
        return self.attention(x, other, other, need_weights=False)[0]


@pytest.mark.parametrize("cross", [False, True])
def test_packed_projections_of_attention(cross: bool) -> None:
    model = Attends(cross)
    found = statistics(model, X.clone())
    assert not found.skipped
    own = found.factors["attention.in_proj_weight"]
    assert own.bias_name == "attention.in_proj_bias"
    with_one = functional.pad(X, (0, 1), value=1.0)
    weight = model.attention.in_proj_weight.grad
    if not cross:
        assert (own.groups, own.g.shape) == (1, (3 * D, 3 * D))
        assert error(own.a, gram(with_one)) < 1e-13
    else:
        assert (own.groups, own.g.shape, own.a.shape) == (3, (3, D, D), (3, D + 1, D + 1))
        other = functional.pad(X[:, :2] * 2, (0, 1), value=1.0)
        assert error(own.a[0], gram(with_one)) < 1e-13
        assert error(own.a[1], gram(other) * T / 2) < 1e-13
        assert torch.equal(own.a[1], own.a[2])
    matrix = own.matrix(weight, model.attention.in_proj_bias.grad)
    again, bias = own.tensors(matrix, weight.shape)
    assert torch.equal(again, weight)
    assert torch.equal(bias, model.attention.in_proj_bias.grad)
    # The gradients sum to that of the bias: the last column of the matrix is Σ g.
    assert error(matrix.reshape(-1, D + 1)[:, -1], model.attention.in_proj_bias.grad) < 1e-13


def test_slices_of_a_weight_are_its_blocks() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return functional.linear(x, m.w[:2]).sum(-1) + functional.linear(x.cos(), m.w[2:]).sum(-1)

    model = Written(forward, (E, D))
    found = statistics(model, X.clone()).factors["w"]
    assert found.groups == 3
    assert error(found.a[0], gram(X)) < 1e-13
    assert error(found.a[1], gram(X.cos())) < 1e-13
    assert found.matrix(model.w.grad).shape == (3, 2, D)


def test_layers_of_one_input_hold_one_sum() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(D, E) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * self.k(x) + self.v(x).tanh()

    found = statistics(Three(), X.clone()).factors
    q, k, v = (found[f"{name}.weight"] for name in "qkv")
    assert q.a is k.a is v.a
    packed = {id(found.packed(f"{name}.weight")[0][0]) for name in "qkv"}
    assert len(packed) == 1


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(D, E), nn.Linear(E, 2), nn.Linear(E, 3)
        self.frozen = nn.Linear(E, E)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.frozen(self.trunk(x).tanh())
        return self.one(h), self.other(h)


def test_a_head_that_no_gradient_reaches_is_dropped_and_said() -> None:
    model, options = Heads(), rematplan.Kronecker(fisher="empirical", loss_reduction="sum")
    planned = rematplan.plan_module(model, (X,), **SETTINGS, statistics=options)
    planned(X)[0].sum().backward()
    found = rematplan.planning(planned).statistics()
    assert set(found.factors) == {"trunk.weight", "one.weight"}
    assert found.skipped["other.weight"] == "no gradient reached it in this step"
    assert "frozen.weight" not in found.skipped
    assert model.other.weight.grad is None


def test_labels_of_one_output_give_other_heads_nothing() -> None:
    options = rematplan.Kronecker(output=1)
    planned = rematplan.plan_module(Heads(), (X,), **SETTINGS, statistics=options)
    one, other = planned(X)
    (one.sum() + other.sum()).backward()
    found = rematplan.planning(planned).statistics()
    assert set(found.factors) == {"trunk.weight", "other.weight"}
    assert found.skipped["one.weight"] == "no gradient of output 1 reaches it"


def test_normalisations_and_scales_are_named_with_their_reasons() -> None:
    model = nn.Sequential(nn.Linear(D, E), nn.LayerNorm(E), nn.Bilinear(E, E, 2))
    model[2].forward = lambda x: functional.bilinear(x, x, model[2].weight, model[2].bias)
    found = statistics(model, X.clone())
    assert set(found.factors) == {"0.weight"}
    assert "native_layer_norm_backward" in found.skipped["1.weight"]
    assert set(found.skipped) == {"1.weight", "1.bias", "2.weight", "2.bias"}


def test_a_model_without_any_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="no weight with statistics: of weight, its gradient comes from"):
        statistics(nn.LayerNorm(D), X.clone())


def test_words_that_no_option_knows_are_refused() -> None:
    with pytest.raises(UsageError, match="approx is 'shrink'; known: expand, reduce"):
        rematplan.Kronecker(approx="shrink")
    wrong = {
        "every": (0, 1.5),
        "seed": ("seven",),
        "share": (0.0, 1.5, "all", None),
        "terms": (0, 1.5, "all"),
        "output": ("logits",),
        "class_dim": (None,),
        "diagonal_above": ("1GiB",),
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(UsageError, match=f"{name} is {value!r}; "):
            rematplan.Kronecker(**{name: value})


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (nn.Sequential(nn.Linear(D, 50), nn.Tanh(), nn.Linear(50, E)), 10),
        (Attends(False), 10),
        (Attends(True), 3),
        (Written(lambda m, x: torch.matmul(x[:, None].expand(N, 2, T, D), m.w), (2, D, E)), 5),
    ],
    ids=["mlp", "packed", "blocks", "groups"],
)
def test_of_large_factors_only_the_diagonal_is_summed(model: nn.Module, most: int) -> None:
    model = model.to(torch.float64)
    found = []
    for limit in (1000, most):
        model.zero_grad()
        found.append(statistics(model, X.clone(), diagonal_above=limit).factors)
    large = 0
    for name, factors in found[1].items():
        for own, full in ((factors.a, found[0][name].a), (factors.g, found[0][name].g)):
            diagonal = full.shape[-1] > most or own.dim() < full.dim()
            assert error(own, full.diagonal(dim1=-2, dim2=-1) if diagonal else full) < 1e-13
            large += diagonal
        weight = dict(model.named_parameters())[name].grad
        bias = factors.bias_name and dict(model.named_parameters())[factors.bias_name].grad
        assert torch.equal(factors.tensors(factors.matrix(weight, bias), weight.shape)[0], weight)
    assert large


def test_a_bias_belongs_to_the_layer_of_its_module() -> None:
    model = Written(lambda m, x: m.bare(x.cos()) + m.biased(x))
    model.bare, model.biased = nn.Linear(D, E, bias=False), nn.Linear(D, E)
    found = statistics(model, X.clone()).factors
    assert (found["bare.weight"].bias_name, found["biased.weight"].bias_name) == (None, "biased.bias")
    assert error(found["bare.weight"].a, gram(X.cos())) < 1e-13
    assert torch.equal(found["bare.weight"].g, found["biased.weight"].g)
