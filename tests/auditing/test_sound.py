"""`audit` raises no false alarm: checkpointing that is right passes, with notes at most. The model stays as it was."""

import copy
from collections.abc import Callable
from typing import Any

import broken_models as broken
import pytest
import torch
from broken_models import Block, Checkpointed, Pair, Recompute, UnderAutocast, batch
from sound_models import MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from rematplan import audit
from rematplan.ir import UsageError

WIDTH = broken.WIDTH


def plain_blocks(reentrant: bool) -> Pair:
    return Checkpointed(Block(), Block(nn.Dropout(0.5)), use_reentrant=reentrant), (batch(),)


def tied(reentrant: bool) -> Pair:
    model = Checkpointed(Block(), Block(), Block(), use_reentrant=reentrant)
    model.blocks[1].last.weight = model.blocks[2].last.weight = model.blocks[0].last.weight
    return model, (batch(),)


def norm_outside(reentrant: bool) -> Pair:
    model = Checkpointed(Block(), use_reentrant=reentrant)
    return nn.Sequential(model, nn.BatchNorm1d(WIDTH)), (batch(),)


def autocast(reentrant: bool) -> Pair:
    return UnderAutocast(Checkpointed(Block(), Block(nn.Dropout(0.5)), use_reentrant=reentrant)), (batch(),)


def recurrent(reentrant: bool) -> Pair:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(lambda t: self.lstm(t)[0], self.stem(x), use_reentrant=reentrant)

    return Recurrent(), (batch().unsqueeze(0),)


def nested(reentrant: bool) -> Pair:
    inner = Checkpointed(Block(nn.Dropout(0.5)), Block(), use_reentrant=reentrant)
    return Checkpointed(inner, Block(), use_reentrant=reentrant), (batch(),)


def parameter_outside_of_modules(reentrant: bool) -> Pair:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            y = x @ self.weight
            return checkpoint(lambda t: (t @ self.weight).relu(), y, use_reentrant=reentrant)

    return UnderAutocast(Product()), (batch(),)


BOTH = (plain_blocks, tied, norm_outside, autocast, recurrent, nested, parameter_outside_of_modules)


def hand_made() -> Pair:
    return Checkpointed(Block(), Block(nn.Dropout(0.5)), run=lambda b, x: Recompute.apply(b, x)), (batch(),)


class RecomputeInAutocast(torch.autograd.Function):
    """A hand-made checkpoint that keeps autocast."""

    @staticmethod
    def forward(x: torch.Tensor, function: Callable[..., Any]) -> Any:
        return function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.function, ctx.enabled = inputs[1], torch.is_autocast_enabled("cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=ctx.enabled):
            out = ctx.function(x)
        torch.autograd.backward(out, gradients)
        return x.grad, None


def hand_made_in_autocast() -> Pair:
    taken = RecomputeInAutocast.apply
    return UnderAutocast(Checkpointed(Block(), Block(), run=lambda b, x: taken(x, b))), (batch(),)


class Couple(torch.autograd.Function):
    """An additive coupling whose backward computes its inputs from its outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: nn.Module, g: nn.Module) -> torch.Tensor:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            a, b = x.chunk(2, dim=1)
            a = a + f(b)
            y = torch.cat([a, b + g(a)], dim=1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        a, b = y.chunk(2, dim=1)
        with torch.no_grad():
            b = b - ctx.g(a)
            a = a - ctx.f(b)
        x = torch.cat([a, b], dim=1).requires_grad_()
        with torch.enable_grad():
            first, second = x.chunk(2, dim=1)
            first = first + ctx.f(second)
            out = torch.cat([first, second + ctx.g(first)], dim=1)
        torch.autograd.backward(out, gradients)
        return x.grad, None, None


def reversible() -> Pair:
    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            half = WIDTH // 2
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.pairs = nn.ModuleList(
                nn.ModuleList(nn.Sequential(nn.Linear(half, half), nn.Tanh()) for _ in range(2))
                for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for f, g in self.pairs:
                x = Couple.apply(x, f, g)
            return x

    return Reversible(), (batch(),)


def offloaded() -> Pair:
    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
                return self.block(x)

    return Offloaded(), (batch(),)


def selective() -> Pair:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    return Checkpointed(Block(), Block(), context_fn=contexts), (batch(),)


def sequential() -> Pair:
    layers = nn.Sequential(*(Block() for _ in range(4)))

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layers = nn.Linear(WIDTH, WIDTH), layers

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint_sequential(self.layers, 2, self.stem(x), use_reentrant=False)

    return Segments(), (batch(),)


def counted_once() -> Pair:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() == -1:
                self.calls += 1
            return x.relu()

    return Checkpointed(Block(Counting()), Block()), (batch(),)


def nothing_recomputed() -> Pair:
    return Block(nn.BatchNorm1d(WIDTH)), (batch(),)


def not_repeatable() -> Pair:
    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> Any:
            drift.append(1.0)
            return checkpoint(self.block, self.block(x) * len(drift), use_reentrant=False)

    drift: list[float] = []
    return Drifting(), (batch(),)


def upsampled() -> Pair:
    """An attribute whose name has a part of a flag's."""
    up = nn.Upsample(scale_factor=2.0, mode="linear", recompute_scale_factor=True)
    return nn.Sequential(nn.Conv1d(1, 2, 3), up), (batch().unsqueeze(1),)


def wrapped() -> Pair:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), checkpoint_wrapper(Block(nn.Dropout(0.5)))), (batch(),)


def not_trained() -> Pair:
    model = Checkpointed(Block(), Block())
    model.blocks[0].requires_grad_(False)
    return model, (batch(),)


def generator_of_its_own_outside() -> Pair:
    return nn.Sequential(Checkpointed(Block()), broken.Noise(), nn.Tanh()), (batch(),)


def hooks_that_change_nothing() -> Pair:
    model = Checkpointed(Block(), Block())
    model.blocks[0].register_forward_hook(lambda _module, _args, output: output * 2)
    model.blocks[1].first.weight.register_hook(lambda g: g * 0.5)
    return model, (batch(),)


def buffers_set_by_the_forward() -> Pair:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(6, WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            self.last = x.detach().clone()
            return x.relu()

    return Checkpointed(Block(Keeping())), (batch(),)


ONE = (
    upsampled,
    wrapped,
    not_trained,
    generator_of_its_own_outside,
    hooks_that_change_nothing,
    buffers_set_by_the_forward,
    hand_made,
    hand_made_in_autocast,
    reversible,
    offloaded,
    selective,
    sequential,
    counted_once,
    nothing_recomputed,
    not_repeatable,
)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", BOTH)
def test_both_kinds_of_checkpoints_are_sound(make: Callable[[bool], Pair], reentrant: bool) -> None:
    assert_sound(*make(reentrant))


@pytest.mark.parametrize("make", ONE)
def test_other_forms_are_sound(make: Callable[[], Pair]) -> None:
    assert_sound(*make())


@pytest.mark.parametrize("name", MODELS)
def test_many_models_are_sound(name: str) -> None:
    torch.manual_seed(0)
    assert_sound(*MODELS[name]())


def test_an_op_need_not_run_again_where_a_checkpoint_runs() -> None:
    assert audit(*MODELS["mapped_by_vmap"](), plan=False).notes == ()


def assert_sound(model: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    torch.manual_seed(0)
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = audit(model, args, plan=False)
    assert found.sound, found.faults
    assert found.own is not None
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_rounding_is_a_note() -> None:
    found = audit(*reversible(), plan=False)
    assert found.notes[0].startswith("rounding errors, at most")
    assert found.recomputed > 0


def test_what_is_not_repeatable_is_a_note() -> None:
    assert audit(*not_repeatable(), plan=False).notes[0].startswith("two plain runs differ: loss")


def test_a_backward_that_is_not_checked_is_a_note() -> None:
    found = audit(*MODELS["straight_through"](), plan=False)
    assert str(found).endswith(": sound, but Round is not checked")
    assert found.notes[-1].startswith(
        "the backward of Round is not checked: pass plain=, a function of the same"
    )


def test_a_flag_that_some_layers_ignore_is_a_note() -> None:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.grad_checkpointing = Block(), True

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    model = Checkpointed(Flagged(), Flagged(), run=lambda layer, x: layer(x))
    assert audit(model, (batch(),), plan=False).notes == ()
    layers = model.blocks
    model.run = lambda layer, x: layer.block(x) if layer is layers[1] else layer(x)
    found = audit(model, (batch(),), plan=False)
    assert found.sound
    assert found.notes[0].endswith("set in 2 modules of Flagged; in blocks.1 nothing is recomputed")


def test_a_loss_that_is_no_number_is_a_note() -> None:
    model, (x,) = plain_blocks(False)
    found = audit(model, (x.fill_(torch.inf),), plan=False)
    assert found.sound
    assert found.notes[-1].startswith("infinite or no number in a plain run: loss and ")


def test_a_caller_in_autocast() -> None:
    model, args = plain_blocks(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert audit(model, args, plan=False).sound


@pytest.mark.parametrize(("name", "reentrant"), [("Llama", False), ("T5", True)])
def test_checkpointing_of_transformers_is_sound(name: str, reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    of_t5 = {
        "num_layers": 2,
        "num_heads": 2,
        "d_model": 16,
        "d_ff": 32,
        "d_kv": 8,
        "decoder_start_token_id": 0,
    }
    kind, sizes = {"Llama": ("LlamaForCausalLM", layers), "T5": ("T5ForConditionalGeneration", of_t5)}[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **sizes)
    model = getattr(transformers, kind)(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    found = audit(model, (), {"input_ids": ids, "labels": ids}, plan=False)
    assert found.sound, found.faults
    assert found.recomputed > 0


def test_a_plan_at_that_peak() -> None:
    layers = (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3))
    found = audit(Checkpointed(*layers), batch(256))
    assert found.own is not None
    assert found.planned is not None, found.notes
    assert found.planned.peak <= found.own.peak < found.plain.peak


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": len}, "is no torch.nn.Module"),
        ({"model": nn.LazyLinear(2)}, "call it once before the audit"),
        ({"args": 3}, "the inputs must be a tensor"),
        ({"args": None}, "the inputs must be a tensor"),
        ({"args": "text"}, "the inputs must be a tensor"),
        ({"kwargs": [1]}, "kwargs must be a mapping"),
        ({"loss": 3}, "loss must be a function"),
        ({"plain": 3}, "plain must be a function"),
    ],
)
def test_malformed_arguments_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        audit(**{"model": Block(), "args": batch(), **given})
