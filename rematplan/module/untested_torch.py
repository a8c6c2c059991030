"""A comparison of the first planned step of a process with eager mode, for versions of PyTorch with which the test
suite was not run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.capture.restore_state import same_draws
from rematplan.runtime.graph.compat import TESTED_TORCH, is_tested, pytree
from rematplan.runtime.graph.warn import warn

_checked: set[str] = set()
"""The version of PyTorch, as the only element, once the first planned step of this process was compared with eager
mode."""


def check_untested_torch(
    model: nn.Module, planned: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], tolerance: float
) -> None:
    """Compare, on copies, the first planned step of this process with eager mode if this version of PyTorch is not
    tested, and warn of the outcome. `ModelError` if they differ by more than ``tolerance`` although eager mode repeats
    itself. If copying or running fails, or memory is short, nothing is compared."""
    version = torch.__version__
    if is_tested(version) or version in _checked:
        return
    _checked.add(version)
    untested = f"rematplan was not tested with torch {version} (tested: {', '.join(TESTED_TORCH)})"
    try:
        eager = _results(model, args, kwargs)
        different = _different(eager, _results(planned, args, kwargs), tolerance)
        if different and not _different(eager, _results(model, args, kwargs), tolerance):
            raise ModelError(
                f"{untested}, and the first planned step differs from eager mode in {different}; use a tested version"
            )
    except ModelError:
        raise
    except (MemoryError, torch.OutOfMemoryError):
        warn(f"{untested}; memory is too short to compare the first planned step with eager mode")
    except Exception as error:  # a model that cannot be copied is still planned
        warn(f"{untested}; the first planned step could not be compared with eager mode: {error}")
    else:
        warn(f"{untested}; the first planned step was compared with eager mode and is equal")


def _results(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Run forward and backward on copies, with ones as the outputs' gradients. Return outputs, gradients and buffers
    by description."""
    model, args, kwargs = copy.deepcopy((model, args, dict(kwargs)))
    with same_draws(), torch.enable_grad():
        outputs = [o for o in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(o, torch.Tensor)]
        trained = [o for o in outputs if o.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(o) for o in trained])
    inputs = [i for i in pytree.tree_leaves((args, kwargs)) if isinstance(i, torch.Tensor)]
    return {
        **{f"output {at}": output.detach() for at, output in enumerate(outputs)},
        **{f"the gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None},
        **{f"the gradient of input {at}": i.grad for at, i in enumerate(inputs) if i.grad is not None},
        **{f"buffer {name}": buffer for name, buffer in model.named_buffers()},
    }


def _different(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], tolerance: float
) -> str:
    """Return the key of the first tensor that differs by more than ``tolerance``, relative and absolute, has another
    shape or type, or is in one mapping only; empty if there is none. NaN at the same places are equal."""
    for name in dict.fromkeys((*expected, *found)):
        one, other = expected.get(name), found.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            return name
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            return name
    return ""
