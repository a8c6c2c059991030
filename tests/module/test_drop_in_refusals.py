"""What a planned step could not do as the model does is refused in one line, or withheld."""

import copy
import functools
import random
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import rematplan
from rematplan.ir import ModelError, UsageError

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


GENERATOR = np.random.default_rng(3)
DEFAULT, seed_of_all_devices = torch.default_generator, torch.manual_seed


def planned(model: nn.Module, given: Any = X) -> nn.Module:
    return rematplan.plan_module(model, (given,), budget="min", strategy="approx_dp", costs="roofline")


def seeded() -> float:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return 1.0


class Drawing(nn.Linear):
    """Draws outside of PyTorch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(16, 16)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.draw()


class Loose(nn.Linear):
    """Has a trained tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.loose = [torch.ones(16, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.loose[0]


class Box:
    """Hides a tensor."""

    def __init__(self) -> None:
        self.x = X


class Boxed(nn.Linear):
    """Takes a box."""

    def forward(self, box: Any) -> Tensor:
        return super().forward(box.x)


class Caching(nn.Linear):
    """Gives a list of boxes beside its result."""

    def forward(self, x: Tensor) -> Any:
        cache = Box()
        cache.x = [Box()]
        cache.x[0].x = super().forward(x)
        return cache.x[0].x.tanh(), cache


class Layers(nn.Linear):
    """Keeps a state for its next call in a list that it does not replace."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.states = [torch.zeros(8, 16)]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.states[0]
        self.states[0] = y.detach()
        return y


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.calls = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return super().forward(x) * self.calls


class Clipped(nn.Linear):
    """Changes its trained weight by another way than an op in place."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class Damped(nn.Linear):
    """Goes by the gradient of an earlier step, which a trace does not see."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.weight.grad is None else y / (1 + self.weight.grad.norm())


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.data = y.data * 2
        return y


class Ragged(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x, x[:3]], layout=torch.jagged)
        return super().forward(rows).to_padded_tensor(0.0)


class Following(nn.Linear):
    """A buffer that is the weight from the first forward on."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("copied", torch.zeros(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.copied.data = self.weight.data
        return super().forward(x) @ self.copied


class Explained(nn.Linear):
    """Wants the gradient of an activation."""

    def forward(self, x: Tensor) -> Tensor:
        self.features = super().forward(x)
        self.features.retain_grad()
        return self.features.tanh()


class Sparse(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("graph", torch.eye(8).to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return self.graph @ super().forward(x)


class SparseAttribute(nn.Linear):
    graph = torch.eye(8).to_sparse_coo()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, super().forward(x))


class Unequal:
    """Can be neither hashed nor pickled."""

    __hash__ = None

    def __reduce__(self) -> Any:
        raise TypeError


def why_without_plan(model: nn.Module, given: Any) -> str:
    """What the error says, or the warning that the model runs in eager mode; empty if there is neither."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            planned(model, given)
        except ModelError as error:
            return str(error)
    return "".join(text for one in told if "it runs in eager mode" in (text := str(one.message)))


def test_what_a_plan_would_get_wrong_has_none() -> None:
    state, generator = random.getstate(), GENERATOR.bit_generator.state
    for model, given, why in (
        (Drawing(random.random), X, "draws from Python's random"),
        (Drawing(np.random.rand), X, "draws from numpy.random"),
        (Drawing(random.Random(3).random), X, "draws from Python's random"),
        (Drawing(functools.partial(GENERATOR.random)), X, "draws from numpy.random"),
        (Drawing(lambda: GENERATOR.random()), X, "draws from numpy.random"),
        (Drawing(lambda: torch.initial_seed()), X, "asks for their seed"),
        (Drawing(seeded), X, "seeds the random numbers"),
        (
            Drawing(lambda: torch.default_generator.manual_seed(0).initial_seed()),
            X,
            "seeds the random numbers",
        ),
        (Drawing(lambda: DEFAULT.seed()), X, "seeds the random numbers"),
        (Drawing(lambda: torch.cuda.manual_seed(3)), X, "seeds the random numbers"),
        (Drawing(lambda: torch.mps.manual_seed(3)), X, "seeds the random numbers"),
        (Drawing(lambda: seed_of_all_devices(3)), X, "seeds the random numbers"),
        (Loose(), X, "none of its parameters"),
        (Counting(), X, "make it a buffer"),
        (
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None)),
            X,
            "changes the buffer 1.num_batches_tracked and reads it as a number",
        ),
        (Layers(), X, "changes states and computes with it.*make it a buffer"),
        (nn.Embedding(9, 4, max_norm=1.0), torch.arange(3), "changes the parameter weight in place"),
        (Clipped(16, 16), X, "changes the parameter weight in place"),
        (Doubling(16, 16), X, "assigns the data of a tensor that it computes"),
        (Damped(16, 16), X, "uses the gradient"),
        (Ragged(16, 16), X, "makes nested tensors"),
        (Following(), X, "assigns as data the memory of another"),
        (Explained(16, 16), X, "retains the gradient"),
        (Sparse(), X, "a tensor of layout torch.sparse_csr; plans are for dense ones"),
        (SparseAttribute(16, 16), X, "computes with a tensor of layout torch.sparse_coo"),
        (
            nn.Linear(16, 16),
            torch.nested.nested_tensor([X, X[:3]]),
            "a nested tensor; plans are for dense ones",
        ),
        (Boxed(16, 16), Unequal(), "neither hashed nor pickled"),
    ):
        assert re.search(why, why_without_plan(model, given))
    assert (random.getstate(), GENERATOR.bit_generator.state) == (state, generator)


class Unlucky(nn.Linear):
    """Decides by what its weights give."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum().item() > 0 else -y


def test_the_reason_says_where_and_which_parts_are_left() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sequential(nn.Tanh(), Unlucky(16, 16)))
    with pytest.warns(UserWarning, match=r"dense.default in 2\.1\), .*plan the submodules \(0\) that do not"):
        planned(model)


class Routing(nn.Module):
    """Picks rows by the values of its gate, and fails if it is told that it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(16, 2), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones(len(x), 1)
        return self.expert((x * mask)[self.gate(x).argmax(-1) == 1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.route = nn.Linear(16, 16), Routing()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.route(self.attention(x)).sum()


def test_the_reason_names_no_part_that_has_no_plan_either() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Block(), Block())
    with pytest.warns(
        UserWarning, match=r"nonzero.default in 1\.route\), .*\(0, 1.attention, 1.route.gate, ...\)"
    ):
        planned(model)


class Doubled(TorchFunctionMode):
    """Doubles what linear layers give."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {})) * (2 if function is nn.functional.linear else 1)


def test_other_derivatives_than_the_backward_are_refused() -> None:
    for model in (planned(nn.Linear(16, 16)), rematplan.apply(nn.Linear(16, 16), "100%")):
        with pytest.raises(ModelError, match=r"torch\.func"):
            torch.func.vmap(model)(X[None])
        with pytest.raises(ModelError, match=r"torch\.func"):
            torch.func.jvp(model, (X,), (X,))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(ModelError, match="forward-mode"):
            model(X)
        with Doubled(), pytest.raises(ModelError, match="inside of a Doubled"):
            model(X)


def test_what_calls_would_share_is_refused() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(16, 16))
    plain = nn.Sequential(layer, nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)))
    model = planned(plain)
    in_parts = rematplan.apply(copy.deepcopy(plain), "100%", modules="1", costs="roofline", refine=False)
    for use in (lambda: model(X), lambda: planned(plain), lambda: in_parts(X)):
        with (
            parametrize.cached(),
            pytest.raises(UsageError, match=r"parametrize\.cached.*inside the forward$"),
        ):
            use()
    model(X).sum().backward()
    in_parts(X).sum().backward()


class Around(nn.Sequential):
    """Runs its first layer inside of a context."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(nn.Linear(16, 16), nn.Tanh())
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            x = self[0](x)
        return self[1](x)


def halved() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())


def entering(model: nn.Module) -> nn.Module:
    """Make a submodule's hooks of forward enter and leave hooks on saved tensors."""
    open_ = ExitStack()
    model[0].register_forward_pre_hook(lambda *_: open_.enter_context(halved()) and None)
    model[0].register_forward_hook(lambda *_: open_.close())
    return model


@pytest.mark.filterwarnings("ignore:.*has hooks on 0:UserWarning")
def test_hooks_on_saved_tensors_are_refused() -> None:
    with pytest.warns(UserWarning, match=r"Around: its forward uses .* at line \d+ of test_drop.*halved"):
        planned(Around(halved))
    with pytest.warns(UserWarning, match="Around: its forward uses"):
        planned(entering(Around(nullcontext)))
    model = planned(Around(nullcontext))
    with halved(), pytest.raises(ModelError, match=r"Around is called inside .*halved"):
        model(X)
    with halved(), torch.no_grad():
        model(X)


def test_hooks_on_saved_tensors_that_keep_the_bits_have_no_effect() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        with save_on_cpu():
            y = model(X)
        y.pow(2).sum().backward()
        checkpoint(model, X, use_reentrant=False).sum().backward()
        return [p.grad for p in model.parameters()]

    plain = Around(save_on_cpu)
    with pytest.warns(UserWarning, match="the forward of Around uses torch.autograd.graph.save_on_cpu"):
        model = planned(copy.deepcopy(plain))
    with pytest.warns(UserWarning, match="Around is called inside torch.autograd.graph.save_on_cpu") as told:
        assert all(map(torch.equal, run(model), run(plain)))
    assert all(one.filename == __file__ for one in told)
    with disable_saved_tensors_hooks("none here"):
        planned(Around(lambda: disable_saved_tensors_hooks("none here")))(X).sum().backward()


def test_outputs_that_hide_tensors_are_withheld() -> None:
    plain = Caching(16, 16)
    model = planned(copy.deepcopy(plain))
    with pytest.raises(ModelError, match="returns a Box, whose tensors"):
        _ = model(X)[1].x
    assert not hasattr(model(X)[1], "to")
    for each in (model, plain):
        each(X)[0].sum().backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    with torch.no_grad():
        assert torch.equal(model(X)[1].x[0].x, plain(X)[1].x[0].x)


@pytest.mark.parametrize("later", [lambda y: (2 * t for t in [y]), lambda y: lambda: 2 * y])
def test_what_computes_later_is_withheld(later: Callable[[Tensor], Any]) -> None:
    class Late(nn.Linear):
        def forward(self, x: Tensor, both: bool) -> Any:
            y = super().forward(x)
            return (y, later(y)) if both else later(y)

    model = rematplan.plan_module(
        Late(16, 16), (X, True), budget="min", strategy="approx_dp", costs="roofline"
    )
    y, withheld = model(X, True)
    y.sum().backward()
    for use in (iter, lambda one: one()):
        with pytest.raises(ModelError, match="a planned step does not return it"):
            use(withheld)
    with pytest.raises(ModelError, match="returns nothing but a"):
        model(X, False)


def test_a_module_all_of_whose_outputs_hide_tensors_is_refused_by_that_name() -> None:
    class Boxing(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            box = Box()
            box.x = super().forward(x)
            return box

    with pytest.raises(ModelError, match="Boxing returns nothing but a Box, whose tensors"):
        planned(Boxing(16, 16))


def test_a_model_that_hides_a_result_is_not_left_to_eager_mode_whose_bytes_are_not_known() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y, box = super().forward(x), Box()
            box.x = y if y.sum().item() > 0 else -y
            return y, box

    with pytest.raises(ModelError, match=r"reads values of tensors.*no part of it can be planned"):
        planned(Deciding(16, 16))


def test_a_model_without_data_is_refused_by_the_name_of_a_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("meta")
    said = r"Sequential: 0\.weight is on the meta device"
    with pytest.raises(rematplan.ModelError, match=said):
        rematplan.plan_module(model, (torch.randn(2, 4, device="meta"),), budget="100%", costs="roofline")
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    later = rematplan.plan_module(model, (x,), budget="100%", costs="roofline").to("meta")
    with pytest.raises(rematplan.ModelError, match=said):
        later(x.to("meta"))
