"""The leaves and the structure of a call's arguments are the same by the short path as by PyTorch's own."""

from typing import Any

import pytest
import torch
from torch import nn

from rematplan.runtime.capture.flat_module import flattened, flattened_call

CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((torch.ones(2), 3, None), {"b": nn.Parameter(torch.ones(1)), "a": "x"}),
    ((1.5, True), {"mask": None}),
    (([torch.ones(2)], (1, 2)), {"deep": {"x": torch.ones(1)}}),
    ((torch.Size([2, 3]),), {}),
    ((torch.ones(2),), {"sizes": torch.Size([1])}),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_has_the_leaves_and_the_structure_of_its_tree(
    call: tuple[tuple[Any, ...], dict[str, Any]],
) -> None:
    (leaves, spec), (expected, of) = flattened_call(*call), flattened(call)
    assert spec == of
    assert hash(spec) == hash(of)
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))


def test_calls_with_other_names_have_other_structures() -> None:
    assert flattened_call((1,), {"a": 1})[1] != flattened_call((1,), {"b": 1})[1]
    assert flattened_call((1, 2), {})[1] != flattened_call((1,), {"a": 2})[1]
