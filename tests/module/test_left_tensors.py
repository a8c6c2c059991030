"""Tensors that a forward leaves elsewhere than in its results are found among all that Python holds."""

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from rematplan.parts.left_tensors import left_tensors
from rematplan.runtime.graph.compat import FunctionalTensor


def test_left_tensors_are_found_next_to_those_of_a_capture_that_failed() -> None:
    with FunctionalTensorMode():
        of_capture = FunctionalTensor.to_functional(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    kept = {"feature": first.sin()}
    result = first.exp().sin()  # the exponential is held by the graph alone
    found = left_tensors({first.grad_fn}, [first, result])
    assert [id(one) for one in found] == [id(kept["feature"])]
    assert type(of_capture) is FunctionalTensor
