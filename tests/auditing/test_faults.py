"""`audit` finds what is wrong with checkpointing: each fault in a model of its own, with module, op and cause."""

import math
from dataclasses import dataclass
from functools import partial

import broken_models as broken
import more_broken_models as more
import pytest
import torch
from torch import nn

from rematplan import audit
from rematplan.auditing.audit import Audit


@dataclass(frozen=True)
class Expected:
    """``cause``: a part of the cause's text. ``result``: one of the results that differ, or its beginning."""

    cause: str
    module: str
    op: str
    result: str


DRAWN = "random numbers are drawn again"
TABLE = {
    "dropout, reentrant": (
        partial(broken.dropout_redrawn, True),
        Expected(DRAWN, "blocks.1.middle", "bernoulli_", "gradient stem.weight"),
    ),
    "dropout": (
        partial(broken.dropout_redrawn, False),
        Expected(DRAWN, "blocks.1.middle", "bernoulli_", "gradient stem.weight"),
    ),
    "batch norm, reentrant": (
        partial(broken.batch_norm_twice, True),
        Expected("batch norm", "blocks.0.middle", "", "buffer blocks.0.middle.running_mean"),
    ),
    "batch norm": (
        partial(broken.batch_norm_twice, False),
        Expected("batch norm", "blocks.0.middle", "", "buffer blocks.0.middle.running_mean"),
    ),
    "autocast": (
        partial(broken.autocast_lost, True),
        Expected("autocast is lost", "model.blocks.0.first", "addmm", "gradient model.blocks.0.first.weight"),
    ),
    "autocast, refused": (
        partial(broken.autocast_lost, False),
        Expected(
            "autocast is lost", "model.blocks.1.first", "addmm", "the step raises RuntimeError: mat1 and mat2"
        ),
    ),
    "no gradient": (
        broken.no_input_requires_grad,
        Expected("get no gradient", "blocks.0.first", "", "gradient blocks.0.first.weight"),
    ),
    "numpy": (
        broken.numpy_redrawn,
        Expected("NumPy's or Python's", "blocks.1.middle", "mul", "gradient blocks.1.last.weight"),
    ),
    "python": (
        broken.python_redrawn,
        Expected("NumPy's or Python's", "blocks.1.middle", "mul", "gradient stem.weight"),
    ),
    "own generator": (
        broken.own_generator,
        Expected("of the model's own", "blocks.1.middle.0", "randn", "gradient stem.weight"),
    ),
    "tied hook": (
        broken.tied_hook,
        Expected("runs 2 times instead of 1", "blocks.0.last.weight", "", "firings gradient hook"),
    ),
    "statistics hook": (
        broken.statistics_hook,
        Expected("calls is 2 instead of 1", "blocks.1.first", "", "attribute hook Mean"),
    ),
    "global hook": (
        broken.global_hook,
        Expected("calls['forward'] is", "blocks.0.middle", "", "attribute hook count"),
    ),
    "attribute": (
        broken.attribute_twice,
        Expected("calls is 2 instead of 1", "blocks.0.middle", "", "attribute blocks.0.middle.calls"),
    ),
    "buffer": (
        broken.buffer_twice,
        Expected("a buffer is changed", "blocks.0.middle", "", "buffer blocks.0.middle.mean"),
    ),
    "noisy router": (
        partial(broken.router, True, True),
        Expected("topk in blocks.0.middle chooses others", "blocks.0.middle", "add", "gradient stem.weight"),
    ),
    "balanced router": (
        partial(broken.router, False, True),
        Expected(
            "reads another tensor than the forward; topk", "blocks.0.middle", "add", "gradient stem.weight"
        ),
    ),
    "router, non-reentrant": (
        partial(broken.router, False, False),
        Expected(
            "reads another tensor than the forward; topk", "blocks.0.middle", "add", "gradient stem.weight"
        ),
    ),
    "hand-made dropout": (
        partial(broken.hand_made, partial(nn.Dropout, 0.5)),
        Expected(DRAWN, "blocks.1.middle", "bernoulli_", "gradient stem.weight"),
    ),
    "hand-made batch norm": (
        partial(broken.hand_made, partial(nn.BatchNorm1d, broken.WIDTH)),
        Expected("batch norm", "blocks.1.middle", "", "buffer blocks.1.middle.running_var"),
    ),
    "random state": (
        broken.random_state_reset,
        Expected("the random state differs after the step", "", "", "random state of cpu"),
    ),
    "late binding, reentrant": (
        partial(broken.late_binding, True),
        Expected("runs other modules", "blocks.2.first", "addmm", "gradient blocks.1.first.weight"),
    ),
    "late binding": (
        partial(broken.late_binding, False),
        Expected("runs other modules", "blocks.2.first", "addmm", "gradient blocks.0.first.weight"),
    ),
    "skipped, reentrant": (
        partial(broken.skipped_by_chance, True),
        Expected("NumPy's or Python's", "blocks.0.last", "addmm", "gradient stem.weight"),
    ),
    "skipped": (
        partial(broken.skipped_by_chance, False),
        Expected("NumPy's or Python's", "blocks.0.last", "addmm", "the step raises CheckpointError"),
    ),
    "list": (
        broken.inputs_in_a_list,
        Expected("tensors in a list or dictionary", "", "", "gradient block.first.weight"),
    ),
    "auxiliary loss": (
        broken.loss_left_in_an_attribute,
        Expected("leaves a reentrant checkpoint", "gate", "", "gradient gate.weight"),
    ),
    "lossy offload": (
        broken.lossy_offload,
        Expected("hooks on saved tensors (to_half)", "block.first", "", "gradient block.first.weight"),
    ),
    "overwritten input": (
        broken.input_overwritten,
        Expected("reads another tensor", "block.first", "addmm", "gradient block.first.weight"),
    ),
    "grown cache": (
        broken.grown_cache,
        Expected("reads another number", "blocks.1.middle", "mul", "gradient stem.weight"),
    ),
    "missing argument": (
        more.argument_without_gradient,
        Expected("the backward of Halved is not", "", "", "gradient scale"),
    ),
    "spectral norm": (
        more.spectral_norm,
        Expected(
            "a buffer is changed", "blocks.0.middle.parametrizations.weight.0", "", "buffer blocks.0.middle"
        ),
    ),
    "optimizer in the backward": (
        more.optimizer_in_the_backward,
        Expected("reads another tensor", "blocks.0.last", "addmm", "parameter stem.weight"),
    ),
    "wrong inverse": (
        more.wrong_inverse,
        Expected("reads another tensor", "f.first", "addmm", "gradient f.first.weight"),
    ),
    "second step": (
        partial(more.second_step, False),
        Expected(DRAWN, "block.middle", "bernoulli_", "gradient block.first.weight"),
    ),
    "error in the second step": (
        partial(more.second_step, True),
        Expected("the step raises ValueError: not again", "", "", "the step raises ValueError: not again"),
    ),
    "eval mode": (
        more.eval_mode,
        Expected("leaves out random numbers", "blocks.0.2", "tanh", "gradient blocks.0.0.weight"),
    ),
    "input in half": (
        more.input_kept_in_half,
        Expected("reads another tensor", "blocks.0.first", "addmm", "gradient blocks.0.first.weight"),
    ),
    "no gradients of parameters": (
        more.no_gradients_of_parameters,
        Expected("the backward of OfTheInputOnly is not", "", "", "gradient blocks.0.first.weight"),
    ),
    "seed of a counter": (
        more.seed_of_a_counter,
        Expected("of the model's own", "blocks.0.middle", "rand", "gradient stem.weight"),
    ),
    "offload in the wrong order": (
        more.offload_in_the_wrong_order,
        Expected("hooks on saved tensors (put_away)", "layers.2", "", "gradient layers.2.weight"),
    ),
    "other function": (
        more.other_function_in_the_recomputation,
        Expected("the backward of Doubling is not", "", "", "gradient stem.weight"),
    ),
    "mask of numpy": (
        more.mask_of_numpy,
        Expected("NumPy's or Python's", "blocks.0", "", "gradient stem.weight"),
    ),
    "mask of a generator": (
        more.mask_of_a_generator,
        Expected("of the model's own", "blocks.0", "", "gradient stem.weight"),
    ),
    "hook with slots": (
        more.hook_with_slots,
        Expected("calls is 2 instead of 1", "blocks.0.first", "", "attribute hook InSlots"),
    ),
    "hook with given arguments": (
        more.hook_with_given_arguments,
        Expected("['all'] is 2 instead of 1", "blocks.0.first", "", "attribute hook count"),
    ),
    "halves": (
        partial(more.swapped, False),
        Expected("one result of the forward in place of another", "g.0", "addmm", "gradient stem.weight"),
    ),
    "gradients of halves": (
        partial(more.swapped, True),
        Expected("the backward of Swapped is not the derivative", "", "", "gradient stem.weight"),
    ),
    "op left out": (more.op_left_out, Expected("leaves out an op", "1", "rsqrt", "gradient 0.weight")),
    "cache": (
        more.cache_extended,
        Expected("a cache, as one of keys", "blocks.0.middle", "cat", "gradient stem.weight"),
    ),
    "unread cache": (
        more.cache_that_nobody_reads,
        Expected(DRAWN, "blocks.0.middle", "bernoulli_", "gradient stem.weight"),
    ),
    "composable": (
        more.composable_dropout,
        Expected(DRAWN, "blocks.0.middle", "bernoulli_", "gradient stem.weight"),
    ),
    "flag in words": (
        more.flag_in_words,
        Expected("a flag for checkpointing has no effect", "", "", "activation_checkpointing"),
    ),
    "flag": (
        broken.flag_without_effect,
        Expected("a flag for checkpointing has no effect", "layers.0", "", "layers.0.gradient_checkpointing"),
    ),
}


def audited(make: object) -> Audit:
    torch.manual_seed(0)
    model, args = make()
    return audit(model, args, plan=False)


@pytest.mark.parametrize("name", TABLE)
def test_a_fault_is_named(name: str) -> None:
    make, expected = TABLE[name]
    found = audited(make)
    assert not found.sound
    fault = found.faults[0]
    assert expected.cause in fault.cause
    assert (fault.module, fault.op) == (expected.module, expected.op)
    assert any(result.startswith(expected.result) for result in fault.results), fault.results
    assert fault.advice or "raises" in fault.cause
    assert fault.error > 1e-6
    assert math.isinf(fault.op_error) or fault.op_error > 1e-4 or not fault.op


def test_a_complex_gradient_is_compared_in_both_parts() -> None:
    model, inputs = more.imaginary_part_of_a_gradient()
    weight = model.get_parameter("weight")
    found = audit(model, inputs, plain=lambda x: (x * weight).real, plan=False)
    assert found.faults[0].cause == "the backward of Turned is not the derivative of its forward"
    assert found.faults[0].error == pytest.approx(1.0)


def test_a_loss_in_chunks_is_compared_with_another_implementation() -> None:
    torch.manual_seed(0)
    model, other = broken.TokenLoss(True), broken.TokenLoss(False)
    other.load_state_dict(model.state_dict())
    inputs = (broken.batch(), torch.arange(6) % 5, torch.rand(6))
    assert audit(model, inputs, plan=False).sound
    found = audit(model, inputs, plain=other, plan=False)
    assert found.faults[0].cause == "the backward of ChunkedLoss is not the derivative of its forward"
    assert found.faults[0].results == ("gradient body.weight", "gradient body.bias", "gradient head.weight")
    equal = (*inputs[:2], torch.ones(6))
    assert audit(model, equal, plain=other, plan=False).sound


def test_inputs_may_have_names() -> None:
    model, inputs = broken.dropout_redrawn(True)
    (rows,) = inputs
    assert not audit(model, {"x": rows}, plan=False).sound
