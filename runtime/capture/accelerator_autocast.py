"""PyTorch's autocast for a step that is captured on the CPU. If it is to run on an accelerator, the functions that
CUDA's autocast computes in float32 are computed so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rematplan.runtime.graph.compat import pytree

NAMES = (
    "softmax log_softmax softmin cumprod cumsum prod sum layer_norm group_norm rms_norm nll_loss cross_entropy "
    "binary_cross_entropy_with_logits kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "hinge_embedding_loss cosine_embedding_loss soft_margin_loss triplet_margin_loss poisson_nll_loss "
    "multilabel_margin_loss multi_margin_loss cosine_similarity softplus norm dist pdist cdist renorm logsumexp "
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow"
)
"""The functions that CUDA's autocast computes in float32. Autocast of a CPU computes most of them in the type of their
inputs. Source: aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE."""
FLOAT32 = frozenset(NAMES.split())


class MixedPrecision(nn.Module):
    """Runs ``module`` in bfloat16 autocast of the CPU. ``accelerator``: whether the functions in `FLOAT32` compute in
    float32, as on CUDA."""

    def __init__(self, module: nn.Module, accelerator: bool) -> None:
        super().__init__()
        self.module, self.accelerator = module, accelerator

    def forward(self, *batch: torch.Tensor) -> Any:
        """Call the module."""
        with torch.autocast("cpu", torch.bfloat16), _InFloat32() if self.accelerator else nullcontext():
            return self.module(*batch)


class _InFloat32(TorchFunctionMode):
    """Converts tensors of bfloat16 and float16 among the arguments of functions in `FLOAT32` to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").strip("_") in FLOAT32:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (tuple(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _widened(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
