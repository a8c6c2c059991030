"""Calls of each op with a rule: sizes to a target, arguments that name their tensors `x0`, `x1`, ..., and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rematplan.runtime.graph.captured_step import Ref

A = torch.ops.aten


def d(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def classes(n: int, c: int) -> Tensor:
    return torch.randint(c, (n,))


def log_probabilities(*shape: int) -> Tensor:
    return torch.log_softmax(d(*shape), 1)


Case = Callable[[int, int, int], tuple[Any, ...]]
"""From sizes to a target, arguments, tensors and, optionally, named arguments."""
x0, x1, x2, x3, x4, x5 = map(Ref, ("x0", "x1", "x2", "x3", "x4", "x5"))
CASES: dict[str, tuple[int, Case]] = {
    "add": (4, lambda a, b, c: (A.add.Tensor, (x0, x1), [d(a, b, c), d(b, c)])),
    "gelu_backward": (3, lambda a, b, c: (A.gelu_backward.default, (x0, x1), [d(a, b, c), d(a, b, c)])),
    "where": (2, lambda a, b, c: (A.where.self, (x0, x1, x2), [d(a, b) > 0, d(a, b), d(b)])),
    "_to_copy": (2, lambda a, b, c: (A._to_copy.default, (x0,), [d(a, b)])),
    "clone": (2, lambda a, b, c: (A.clone.default, (x0,), [d(a, b)])),
    "expand": (2, lambda a, b, c: (A.expand.default, (x0, [a, b, c]), [d(a, b, 1)])),
    "t": (2, lambda a, b, c: (A.t.default, (x0,), [d(a, b)])),
    "transpose": (3, lambda a, b, c: (A.transpose.int, (x0, 0, -1), [d(a, b, c)])),
    "permute": (3, lambda a, b, c: (A.permute.default, (x0, [2, 0, 1]), [d(a, b, c)])),
    "select": (2, lambda a, b, c: (A.select.int, (x0, 1, b - 1), [d(a, b, c)])),
    "unsqueeze": (2, lambda a, b, c: (A.unsqueeze.default, (x0, 1), [d(a, b)])),
    "squeeze": (2, lambda a, b, c: (A.squeeze.dim, (x0, 1), [d(a, 1, b)])),
    "slice": (2, lambda a, b, c: (A.slice.Tensor, (x0, 1, 0, max(1, b - 1)), [d(a, b, c)])),
    "split": (2, lambda a, b, c: (A.split.Tensor, (x0, 1, -1), [d(a, b, c)])),
    "split_with_sizes": (2, lambda a, b, c: (A.split_with_sizes.default, (x0, [1, c], -1), [d(a, b, c + 1)])),
    "cat": (2, lambda a, b, c: (A.cat.default, ([x0, x1], 1), [d(a, b, c), d(a, c, c)])),
    "slice_backward": (
        2,
        lambda a, b, c: (A.slice_backward.default, (x0, [a, b + 2, c], 1, 1, b + 1, 1), [d(a, b, c)]),
    ),
    "_softmax": (2, lambda a, b, c: (A._softmax.default, (x0, 1, False), [d(a, b, c)])),
    "_log_softmax": (2, lambda a, b, c: (A._log_softmax.default, (x0, -1, False), [d(a, b, c)])),
    "_softmax_backward_data": (
        2,
        lambda a, b, c: (
            A._softmax_backward_data.default,
            (x0, x1, -1, torch.float64),
            [d(a, b, c), d(a, b, c)],
        ),
    ),
    "_log_softmax_backward_data": (
        1,
        lambda a, b, c: (
            A._log_softmax_backward_data.default,
            (x0, x1, 1, torch.float64),
            [d(a, b), d(a, b)],
        ),
    ),
    "sum": (3, lambda a, b, c: (A.sum.dim_IntList, (x0, [0, 1], True), [d(a, b, c)])),
    "sum of all": (2, lambda a, b, c: (A.sum.default, (x0,), [d(a, b)])),
    "mean": (2, lambda a, b, c: (A.mean.dim, (x0, [1]), [d(a, b, c)])),
    "amax": (2, lambda a, b, c: (A.amax.default, (x0, [-1]), [d(a, b, c)])),
    "logsumexp": (2, lambda a, b, c: (A.logsumexp.default, (x0, [1], True), [d(a, b, c)])),
    "mm": (6, lambda a, b, c: (A.mm.default, (x0, x1), [d(a, b), d(b, c)])),
    "bmm": (9, lambda a, b, c: (A.bmm.default, (x0, x1), [d(4, a, b), d(4, b, c)])),
    "addmm": (4, lambda a, b, c: (A.addmm.default, (x0, x1, x2), [d(c), d(a, b), d(b, c)])),
    "baddbmm": (6, lambda a, b, c: (A.baddbmm.default, (x0, x1, x2), [d(4, a, c), d(4, a, b), d(4, b, c)])),
    "embedding": (
        2,
        lambda a, b, c: (A.embedding.default, (x0, x1), [d(7, c), classes(a * b, 7).view(a, b)]),
    ),
    "embedding_dense_backward": (
        2,
        lambda a, b, c: (
            A.embedding_dense_backward.default,
            (x0, x1, 7, -1, False),
            [d(a, b, c), classes(a * b, 7).view(a, b)],
        ),
    ),
    "native_layer_norm": (
        2,
        lambda a, b, c: (A.native_layer_norm.default, (x0, [c], x1, x2, 1e-5), [d(a, b, c), d(c), d(c)]),
    ),
    "native_layer_norm_backward": (
        2,
        lambda a, b, c: (
            A.native_layer_norm_backward.default,
            (x0, x1, [c], x2, x3, x4, x5, [True, True, True]),
            [d(a, b, c), d(a, b, c), d(a, b, 1), d(a, b, 1).exp(), d(c), d(c)],
        ),
    ),
    "nll_loss_forward": (
        1,
        lambda a, b, c: (
            A.nll_loss_forward.default,
            (x0, x1, None, 1, -100),
            [log_probabilities(a, b), classes(a, b)],
        ),
    ),
    "nll_loss_forward of weighted classes": (
        1,
        lambda a, b, c: (
            A.nll_loss_forward.default,
            (x0, x1, x2, 1, 1),
            [log_probabilities(a, b), classes(a, b), torch.rand(b, dtype=torch.float64) + 0.1],
        ),
    ),
    "nll_loss_forward of rows": (
        1,
        lambda a, b, c: (
            A.nll_loss_forward.default,
            (x0, x1, None, 0, 0),
            [log_probabilities(a, b), classes(a, b)],
        ),
    ),
    "nll_loss_backward": (
        1,
        lambda a, b, c: (
            A.nll_loss_backward.default,
            (x0, x1, x2, None, 1, 0, x3),
            [d(), log_probabilities(a, b), classes(a, b), torch.tensor(3.0, dtype=torch.float64)],
        ),
    ),
    "nll_loss2d_forward": (
        2,
        lambda a, b, c: (
            A.nll_loss2d_forward.default,
            (x0, x1, None, 2, 0),
            [log_probabilities(a, 3, b, c), classes(a * b * c, 3).view(a, b, c)],
        ),
    ),
    "nll_loss2d_backward": (
        2,
        lambda a, b, c: (
            A.nll_loss2d_backward.default,
            (x0, x1, x2, None, 1, 0, x3),
            [d(), log_probabilities(a, 3, b, c), classes(a * b * c, 3).view(a, b, c), d()],
        ),
    ),
    "convolution": (
        1,
        lambda a, b, c: (
            A.convolution.default,
            (x0, x1, x2, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
            [d(a, 2, b, c), d(3, 2, 3, 3), d(3)],
        ),
    ),
    "convolution of pixels": (
        3,
        lambda a, b, c: (
            A.convolution.default,
            (x0, x1, x2, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            [d(a, 2, b, c), d(3, 2, 1, 1), d(3)],
        ),
    ),
    "convolution_backward": (
        3,
        lambda a, b, c: (
            A.convolution_backward.default,
            (x0, x1, x2, [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]),
            [d(a, 3, b, c), d(a, 2, b, c), d(3, 2, 1, 1)],
        ),
    ),
}


def alike(target: Any, operands: int, *further: Any) -> Case:
    """An op of several tensors of one shape."""
    refs = [Ref(f"x{k}") for k in range(operands)]
    return lambda a, b, c: (target, (*refs, *further), [d(a, b, c) for _ in refs])


def image(a: int, b: int, c: int, scale: int = 1) -> Tensor:
    return d(a, 4, scale * 2 * b, scale * 2 * c)


def pooled(a: int, b: int, c: int) -> Tensor:
    return d(a, 4, b, c)


def padded(a: int, b: int, c: int) -> Tensor:
    return d(a, 4, 2 * b + 2, 2 * c + 2)


def upsampled(target: Any, *further: Any) -> tuple[int, Case]:
    return 2, lambda a, b, c: (target, (x0, [2 * b, 2 * c], *further), [pooled(a, b, c)])


def upsampled_backward(target: Any, *further: Any) -> tuple[int, Case]:
    return 2, lambda a, b, c: (target, (x0, [2 * b, 2 * c], [a, 4, b, c], *further), [image(a, b, c)])


def queries(a: int, b: int, c: int, heads: int = 3) -> Tensor:
    return d(a, heads, b, 8)


def attended(a: int, b: int, c: int) -> list[Tensor]:
    """The queries, keys and values, the result and its statistics."""
    q, k, v = queries(a, b, c), d(a, 3, c, 8), d(a, 3, c, 8)
    return [q, k, v, *A._scaled_dot_product_flash_attention_for_cpu(q, k, v)]


def probabilities(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


CASES |= {
    "alias": (2, alike(A.alias.default, 1)),
    "detach": (2, alike(A.detach.default, 1)),
    "masked_fill": (2, lambda a, b, c: (A.masked_fill.Tensor, (x0, x1, x2), [d(a, b), d(a, 1) > 0, d()])),
    "zeros_like": (2, alike(A.zeros_like.default, 1)),
    "ones_like": (2, alike(A.ones_like.default, 1)),
    "full_like": (2, alike(A.full_like.default, 1, 3.0)),
    "leaky_relu_backward": (3, alike(A.leaky_relu_backward.default, 2, 0.1, False)),
    "elu_backward": (
        3,
        lambda a, b, c: (A.elu_backward.default, (x0, 1.0, 1.0, 1.0, False, x1), [d(a, b, c), d(a, b, c)]),
    ),
    "softplus_backward": (3, alike(A.softplus_backward.default, 2, 1.0, 20.0)),
    "hardtanh_backward": (3, alike(A.hardtanh_backward.default, 2, -1.0, 1.0)),
    "hardswish_backward": (3, alike(A.hardswish_backward.default, 2)),
    "hardsigmoid_backward": (3, alike(A.hardsigmoid_backward.default, 2)),
    "mish_backward": (3, alike(A.mish_backward.default, 2)),
    "log_sigmoid_forward": (3, alike(A.log_sigmoid_forward.default, 1)),
    "log_sigmoid_backward": (3, alike(A.log_sigmoid_backward.default, 3)),
    "_prelu_kernel": (3, lambda a, b, c: (A._prelu_kernel.default, (x0, x1), [d(a, b, c), d(1, b, 1)])),
    "_prelu_kernel_backward": (3, alike(A._prelu_kernel_backward.default, 3)),
    "new_zeros": (2, lambda a, b, c: (A.new_zeros.default, (x0, [a, b, c]), [d(a, b, 1)])),
    "new_ones": (2, lambda a, b, c: (A.new_ones.default, (x0, [a, b, c]), [d(a, 1, c)])),
    "new_full": (2, lambda a, b, c: (A.new_full.default, (x0, [a, b, c], 2.0), [d(a, b, c)])),
    "unbind": (2, lambda a, b, c: (A.unbind.int, (x0, 1), [d(a, b, c)])),
    "stack": (2, lambda a, b, c: (A.stack.default, ([x0, x1], 1), [d(a, b, c), d(a, b, c)])),
    "select_backward": (2, lambda a, b, c: (A.select_backward.default, (x0, [a, b, c], 1, b - 1), [d(a, c)])),
    "glu": (2, lambda a, b, c: (A.glu.default, (x0,), [d(a, b, 2 * c)])),
    "glu_backward": (2, lambda a, b, c: (A.glu_backward.default, (x0, x1, -1), [d(a, b, c), d(a, b, 2 * c)])),
    "cumsum": (2, alike(A.cumsum.default, 1, 1)),
    "cumprod": (2, alike(A.cumprod.default, 1, -1)),
    "flip": (1, alike(A.flip.default, 1, [1, 2])),
    "roll": (2, alike(A.roll.default, 1, [1], [1])),
    "repeat": (2, lambda a, b, c: (A.repeat.default, (x0, [2, 1, 3, 1]), [d(a, b, c)])),
    "_safe_softmax": (2, alike(A._safe_softmax.default, 1, 1)),
    "topk": (2, lambda a, b, c: (A.topk.default, (x0, 1), [d(a, b, c)])),
    "amin": (2, alike(A.amin.default, 1, [-1])),
    "max.dim": (2, alike(A.max.dim, 1, 1)),
    "min.dim": (2, alike(A.min.dim, 1, 1, True)),
    "argmax": (2, alike(A.argmax.default, 1, 1)),
    "mean of all": (3, alike(A.mean.default, 1)),
    "var.correction": (2, lambda a, b, c: (A.var.correction, (x0, [1]), [d(a, b + 2, c)], {"correction": 1})),
    "std.correction": (2, lambda a, b, c: (A.std.correction, (x0, [1]), [d(a, b + 2, c)], {"keepdim": True})),
    "var_mean.correction": (2, lambda a, b, c: (A.var_mean.correction, (x0, [1]), [d(a, b + 2, c)])),
    "linalg_vector_norm": (2, alike(A.linalg_vector_norm.default, 1, 2, [1], True)),
    "gather": (
        2,
        lambda a, b, c: (A.gather.default, (x0, 1, x1), [d(a, 7, c), classes(a * b * c, 7).view(a, b, c)]),
    ),
    "scatter": (
        2,
        lambda a, b, c: (
            A.scatter.value,
            (x0, 1, x1, 1.0),
            [d(a, 7, c), classes(a * b * c, 7).view(a, b, c)],
        ),
    ),
    "scatter_add": (
        2,
        lambda a, b, c: (
            A.scatter_add.default,
            (x0, 1, x1, x2),
            [d(a, 7, c), classes(a * b * c, 7).view(a, b, c), d(a, b, c)],
        ),
    ),
    "index": (3, lambda a, b, c: (A.index.Tensor, (x0, [None, x1]), [d(a, 7, c), classes(b, 7)])),
    "_scaled_dot_product_flash_attention_for_cpu": (
        2,
        lambda a, b, c: (
            A._scaled_dot_product_flash_attention_for_cpu.default,
            (x0, x1, x2),
            [queries(a, b, c), d(a, 3, c, 8), d(a, 3, c, 8), d(a, 1, b, c)],
            {"attn_mask": x3},
        ),
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        2,
        lambda a, b, c: (
            A._scaled_dot_product_flash_attention_for_cpu_backward.default,
            (x0, x1, x2, x3, x4, x5, 0.0, False),
            [queries(a, b, c), *attended(a, b, c)],
        ),
    ),
    "mse_loss": (3, alike(A.mse_loss.default, 2)),
    "mse_loss of rows": (3, alike(A.mse_loss.default, 2, 0)),
    "mse_loss_backward": (
        3,
        lambda a, b, c: (A.mse_loss_backward.default, (x0, x1, x2, 1), [d(), d(a, b, c), d(a, b, c)]),
    ),
    "smooth_l1_loss": (3, alike(A.smooth_l1_loss.default, 2, 2, 0.7)),
    "smooth_l1_loss_backward": (
        3,
        lambda a, b, c: (
            A.smooth_l1_loss_backward.default,
            (x0, x1, x2, 1, 0.7),
            [d(), d(a, b, c), d(a, b, c)],
        ),
    ),
    "huber_loss": (3, alike(A.huber_loss.default, 2, 1, 0.7)),
    "huber_loss_backward": (
        3,
        lambda a, b, c: (A.huber_loss_backward.default, (x0, x1, x2, 1, 0.7), [d(), d(a, b, c), d(a, b, c)]),
    ),
    "binary_cross_entropy": (
        3,
        lambda a, b, c: (
            A.binary_cross_entropy.default,
            (x0, x1, x2),
            [probabilities(a, b, c), probabilities(a, b, c), d(b, 1)],
        ),
    ),
    "binary_cross_entropy_backward": (
        3,
        lambda a, b, c: (
            A.binary_cross_entropy_backward.default,
            (x0, x1, x2),
            [d(), probabilities(a, b, c), probabilities(a, b, c)],
        ),
    ),
    "binary_cross_entropy_with_logits": (
        3,
        lambda a, b, c: (
            A.binary_cross_entropy_with_logits.default,
            (x0, x1, None, x2),
            [d(a, b, c), probabilities(a, b, c), probabilities(b, 1)],
        ),
    ),
    "binary_cross_entropy_with_logits of a weighted sum": (
        3,
        lambda a, b, c: (
            A.binary_cross_entropy_with_logits.default,
            (x0, x1, x2, None, 2),
            [d(a, b, c), probabilities(a, b, c), probabilities(a, 1, c)],
        ),
    ),
    "native_group_norm": (
        1,
        lambda a, b, c: (
            A.native_group_norm.default,
            (x0, x1, x2, a, 4, 4 * b * c, 2, 1e-5),
            [image(a, b, c), d(4), d(4)],
        ),
    ),
    "native_group_norm_backward": (
        1,
        lambda a, b, c: (
            A.native_group_norm_backward.default,
            (x0, x1, x2, x3, x4, a, 4, 4 * b * c, 2, [True, True, True]),
            [image(a, b, c), image(a, b, c), d(a, 2), d(a, 2).exp(), d(4)],
        ),
    ),
    "tril": (1, alike(A.tril.default, 1)),
    "triu": (1, alike(A.triu.default, 1, 1)),
    "avg_pool2d": (2, lambda a, b, c: (A.avg_pool2d.default, (x0, [2, 2], [2, 2]), [image(a, b, c)])),
    "avg_pool2d_backward": (
        2,
        lambda a, b, c: (
            A.avg_pool2d_backward.default,
            (x0, x1, [2, 2], [2, 2], [0, 0], False, True, None),
            [pooled(a, b, c), image(a, b, c)],
        ),
    ),
    "_adaptive_avg_pool2d": (
        2,
        lambda a, b, c: (A._adaptive_avg_pool2d.default, (x0, [3, 2]), [image(a, b, c)]),
    ),
    "_adaptive_avg_pool2d_backward": (
        2,
        lambda a, b, c: (A._adaptive_avg_pool2d_backward.default, (x0, x1), [d(a, 4, 3, 2), image(a, b, c)]),
    ),
    "max_pool2d_with_indices": (
        2,
        lambda a, b, c: (A.max_pool2d_with_indices.default, (x0, [2, 2]), [image(a, b, c)]),
    ),
    "max_pool2d_with_indices_backward": (
        2,
        lambda a, b, c: (
            A.max_pool2d_with_indices_backward.default,
            (x0, x1, [2, 2], [2, 2], [0, 0], [1, 1], False, x2),
            [pooled(a, b, c), x := image(a, b, c), A.max_pool2d_with_indices(x, [2, 2], [2, 2])[1]],
        ),
    ),
    "upsample_nearest2d": upsampled(A.upsample_nearest2d.default),
    "upsample_nearest2d_backward": upsampled_backward(A.upsample_nearest2d_backward.default),
    "upsample_bilinear2d": upsampled(A.upsample_bilinear2d.default, False),
    "upsample_bilinear2d_backward": upsampled_backward(A.upsample_bilinear2d_backward.default, False),
    "upsample_bicubic2d": upsampled(A.upsample_bicubic2d.default, True),
    "upsample_bicubic2d_backward": upsampled_backward(A.upsample_bicubic2d_backward.default, True),
    "reflection_pad2d": (
        2,
        lambda a, b, c: (A.reflection_pad2d.default, (x0, [1, 1, 1, 1]), [image(a, b, c)]),
    ),
    "reflection_pad2d_backward": (
        2,
        lambda a, b, c: (
            A.reflection_pad2d_backward.default,
            (x0, x1, [1, 1, 1, 1]),
            [padded(a, b, c), image(a, b, c)],
        ),
    ),
    "pixel_shuffle": (1, lambda a, b, c: (A.pixel_shuffle.default, (x0, 2), [pooled(a, b, c)])),
    "pixel_unshuffle": (1, lambda a, b, c: (A.pixel_unshuffle.default, (x0, 2), [image(a, b, c)])),
}
