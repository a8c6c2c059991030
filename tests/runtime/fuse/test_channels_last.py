"""Steps with images in channels-last layout: the numbers stay, few copies are made, and the ends keep their layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from rematplan.module.captures import capture_call
from rematplan.runtime.fuse.channels_last import FOLLOWING, in_channels_last
from rematplan.runtime.fuse.fuse import Kernels, fuse
from rematplan.runtime.fuse.kernel import CannotFuse, FusedKernel
from rematplan.runtime.fuse.regions import Region
from rematplan.runtime.graph.captured_step import CapturedStep, substitute

ATEN = torch.ops.aten
LAST = torch.channels_last


class Residual(nn.Module):
    """Convolutions with a norm, a squeezed gate and a residual."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module], groups: int = 1) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, width, 3, padding=1, groups=groups, bias=False)
        self.b = nn.Conv2d(width, width, 1)
        self.norm, self.gate = norm(width), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(functional.silu(self.norm(self.a(x))))
        return x + y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid()


class Classifier(nn.Module):
    """Residual blocks, pooling and a linear layer."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(*(Residual(8, norm, groups) for _ in range(2)))
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 2)
        return self.head(y.flatten(1)).square().mean()


class Branches(nn.Module):
    """Convolutions of some of the channels, and activations without PyTorch's tag of pointwise ops."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)),
        )
        self.up = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3), nn.PixelShuffle(2), nn.PReLU(2))

    def forward(self, x: Tensor) -> Tensor:
        y, z = functional.hardswish(self.a(x)).split(4, 1)
        y = torch.stack([self.b[0](y), functional.leaky_relu(self.b[1](z))]).sum(0)
        y = self.up(torch.cat([functional.mish(y), functional.elu(z)], 1))
        return functional.cross_entropy(y, y.argmax(1))


class UNet(nn.Module):
    """Skips by concatenation, upsampling, a transposed convolution, padding, and halves of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(1, 6, 3, 2, 1), nn.Conv2d(6, 12, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(12, 6, 2, 2), nn.Conv2d(13, 2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = functional.avg_pool2d(self.low(self.down(x)), 2)
        a, b = functional.interpolate(h, scale_factor=2).chunk(2, 1)
        y = torch.cat([a * b.sigmoid(), self.down(x).relu()], 1)
        y = torch.cat([self.up(y), functional.interpolate(h, scale_factor=4, mode="bilinear"), x], 1)
        y = self.out(functional.pad(y[:, 5:-1], (1, 1, 1, 1)))
        return y, y.square().mean()


class Attention(nn.Module):
    """Attention over the pixels of an image, and layer norms over its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.out = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 1)
        self.norm, self.qkv, self.group = nn.LayerNorm(8), nn.Linear(8, 24), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        n, c, height, width = h.shape
        words = self.norm(h.permute(0, 2, 3, 1)).view(n, height * width, c)
        q, k, v = self.qkv(words).view(n, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, height, width, c)
        h = h + self.out(mixed.permute(0, 3, 1, 2))
        return (self.group(h.flatten(2)).sum(-1) * h.amax((2, 3))).square().mean()


class Dropped(nn.Module):
    """Random numbers for images, which are drawn in the order of their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(self.a(x).relu(), 0.5)
        y = functional.dropout2d(self.b(y + torch.rand_like(y)), 0.5)
        return y.square().mean()


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "batch norm": lambda: (Classifier(), torch.randn(2, 3, 16, 16)),
    "group norm": lambda: (Classifier(lambda width: nn.GroupNorm(2, width)), torch.randn(2, 3, 16, 16)),
    "groups": lambda: (Classifier(nn.InstanceNorm2d, groups=4), torch.randn(2, 3, 24, 16)),
    "depthwise": lambda: (Classifier(groups=8), torch.randn(1, 3, 16, 16)),
    "branches": lambda: (Branches(), torch.randn(2, 3, 8, 8)),
    "u-net": lambda: (UNet(), torch.randn(2, 1, 16, 16)),
    "attention": lambda: (Attention(), torch.randn(2, 3, 16, 16)),
    "dropout": lambda: (Dropped(), torch.randn(2, 3, 8, 8)),
    "channels-last already": lambda: (Classifier(), torch.randn(2, 3, 16, 16).to(memory_format=LAST)),
    "an expanded image": lambda: (Classifier(), torch.randn(2, 1, 16, 1).expand(2, 3, 16, 16)),
}


def results(step: CapturedStep, model: nn.Module, x: Tensor) -> dict[tuple[str, str], Tensor]:
    """Run the calls of a step one after the other, and return its outputs. All results must have the expected
    strides."""
    state = {
        f"model.{name}": t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    known = {}
    for i in step.inputs:
        like = step.values[i.value].fake
        known[i.value] = (
            state[i.target] if i.target in state else x if i.kind == "batch" else torch.ones(like.shape)
        )
        known[i.value] = known[i.value].to(like.dtype)
    torch.manual_seed(1)
    for call in step.calls:
        args, kwargs = substitute((call.args, dict(call.kwargs)), known.__getitem__)
        with torch.no_grad():
            found = call.target(*args, **kwargs)
        for name, made in zip(call.results, (found,) if call.single else found, strict=True):
            if name:
                assert made.stride() == step.values[name].fake.stride(), call
                known[name] = made
    return {(o.kind, o.target): known[o.value] for o in step.outputs}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_numbers_and_the_layouts_of_results_stay(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model, x = model.to(dtype), x.to(dtype)
    step = capture_call(model, (x,), {})[1]
    changed = in_channels_last(step)
    assert len(changed.calls) > len(step.calls) or name == "channels-last already"
    expected, found = results(step, model, x), results(changed, model, x)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        torch.testing.assert_close(found[key], one, rtol=tolerance, atol=tolerance)
        assert found[key].stride() == one.stride(), key


def test_only_the_ends_are_copied() -> None:
    model, x = MODELS["batch norm"]()
    step = capture_call(model, (x,), {})[1]
    changed = in_channels_last(step)
    added = [c for c in changed.priced_calls if c.name not in step.call]
    # The image, its pooled features, and the gradients of kernels of more than one pixel.
    weights = {f"model.{name}" for name, p in model.named_parameters() if p.ndim == 4 and p.shape[-1] > 1}
    ends = {o.value: o for o in changed.outputs}
    assert {ends[c.name].target for c in added if c.name in ends} == weights
    assert len(added) == len(weights) + 2


def test_a_step_without_kernels_stays_as_captured() -> None:
    class NoCompiler(Kernels):
        def begin(self, step: CapturedStep, regions: Sequence[Region]) -> None:
            pass

        def of(self, step: CapturedStep, region: Region) -> FusedKernel:
            raise CannotFuse("no compiler")

    model, x = MODELS["batch norm"]()
    step = capture_call(model, (x,), {})[1]
    assert fuse(step, NoCompiler()).step is step


@pytest.mark.parametrize(("kernel", "changes"), [(1, True), (3, False)])
def test_a_convolution_whose_weights_are_far_larger_than_its_images_stays(kernel: int, changes: bool) -> None:
    deep, x = nn.Conv2d(64, 64, kernel, padding=kernel // 2), torch.randn(1, 64, 4, 4)
    step = capture_call(deep, (x,), {})[1]
    assert (in_channels_last(step) is not step) == changes
    model, x = nn.Sequential(nn.Conv2d(3, 64, 3, 16, 1), nn.ReLU(), deep), torch.randn(1, 3, 64, 64)
    step = in_channels_last(capture_call(model, (x,), {})[1])
    read = [step.values[c.operands[0]].fake for c in step.calls if c.target is ATEN.convolution.default]
    assert [fake.is_contiguous(memory_format=LAST) for fake in read] == [True, changes]


def test_steps_without_convolutions_of_images_stay() -> None:
    for model, x in ((nn.Linear(4, 4), torch.randn(2, 4)), (nn.Conv1d(2, 2, 3), torch.randn(2, 2, 8))):
        step = capture_call(model, (x,), {})[1]
        assert in_channels_last(step) is step


class Strided(torch.autograd.Function):
    """Reads a storage by strides of its own, so the layout decides what it reads."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.as_strided((4, 4), (4, 1)).clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.repeat(1, 8).view(1, 8, 4, 4)


def test_what_depends_on_a_layout_gets_the_captured_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(2, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return Strided.apply(self.a(x)).square().sum()

    model, x = Model(), torch.randn(1, 2, 4, 4)
    step = capture_call(model, (x,), {})[1]
    changed = in_channels_last(step)
    assert changed is not step
    expected, found = results(step, model, x), results(changed, model, x)
    assert all(torch.allclose(found[key], one) for key, one in expected.items())


def ones_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, SMALL, PAIR = ones_of(2, 4, 6, 6), ones_of(2, 4, 3, 3), [2, 2]
LARGE, MEAN, SCALE = ones_of(2, 4, 12, 12), ones_of(4), ones_of(4).abs()
POOL = (PAIR, PAIR, [0, 0], [1, 1], False)
ARGUMENTS: Mapping[object, tuple[object, ...]] = {
    ATEN._native_batch_norm_legit_functional: (X, SCALE, MEAN, MEAN, SCALE, True, 0.1, 1e-5),
    ATEN._native_batch_norm_legit_no_training: (X, SCALE, MEAN, MEAN, SCALE, 0.1, 1e-5),
    ATEN.native_batch_norm_backward: (X, X.cos(), SCALE, MEAN, SCALE, MEAN, SCALE, True, 1e-5, [True] * 3),
    ATEN.max_pool2d_with_indices: (X, *POOL),
    ATEN.max_pool2d_with_indices_backward: (
        SMALL,
        X,
        *POOL,
        torch.nn.functional.max_pool2d(X, 2, return_indices=True)[1],
    ),
    ATEN.avg_pool2d: (X, PAIR),
    ATEN.avg_pool2d_backward: (SMALL, X, PAIR, PAIR, [0, 0], False, True, None),
    ATEN._adaptive_avg_pool2d: (X, PAIR),
    ATEN._adaptive_avg_pool2d_backward: (SMALL, X),
    ATEN.upsample_nearest2d: (X, [12, 12]),
    ATEN.upsample_nearest2d_backward: (LARGE, [12, 12], [2, 4, 6, 6]),
    ATEN.upsample_bilinear2d: (X, [12, 12], False),
    ATEN.upsample_bilinear2d_backward: (LARGE, [12, 12], [2, 4, 6, 6], False),
    ATEN.constant_pad_nd: (X, [1, 1, 0, 2]),
    ATEN.reflection_pad2d: (X, [1, 1, 2, 0]),
    ATEN.reflection_pad2d_backward: (ones_of(2, 4, 8, 8), X, [1, 1, 2, 0]),
    ATEN.pixel_shuffle: (X, 2),
    ATEN.pixel_unshuffle: (X, 2),
    ATEN.cat: ([X, X.cos()], 1),
    ATEN.stack: ([X, X.cos()], 1),
    ATEN.amin: (X, [2]),
    ATEN.var: (X, [1]),
    ATEN.var_mean: (X, [2, 3]),
    ATEN._softmax: (X, 1, False),
    ATEN._softmax_backward_data: (X.cos(), X.softmax(1), 1, X.dtype),
    ATEN._log_softmax: (X, 1, False),
    ATEN._log_softmax_backward_data: (X.cos(), X.log_softmax(1), 1, X.dtype),
    ATEN.sum: (X, [0, 2, 3]),
    ATEN.mean: (X, [2, 3], True),
    ATEN.amax: (X, [1]),
    ATEN._to_copy: (X,),
    ATEN.clone: (X,),
    ATEN.slice: (X, 1, 1, 3),
    ATEN.select: (X, 1, 2),
    ATEN.split: (X, 2, 1),
    ATEN.split_with_sizes: (X, [1, 3], 1),
    ATEN.slice_backward: (X, [2, 7, 6, 6], 1, 2, 6, 1),
    ATEN.expand: (X[:, :1], [2, 5, 6, 6]),
    ATEN.permute: (X, [0, 2, 3, 1]),
    ATEN.transpose: (X, 1, 3),
    ATEN.squeeze: (X[:, :1], 1),
    ATEN.unsqueeze: (X, 2),
    ATEN.view: (X, [2, 4, 36]),
    ATEN._unsafe_view: (X, [2, 4, 36]),
    ATEN.detach: (X,),
    ATEN.alias: (X,),
    ATEN.t: (X[0, 0],),
    ATEN.mm: (X[0, 0], X[0, 1]),
    ATEN.addmm: (X[1, 0], X[0, 0], X[0, 1]),
    ATEN.bmm: (X[0], X[1]),
    ATEN.native_layer_norm: (X, [6], ones_of(6), ones_of(6), 1e-5),
    ATEN.native_layer_norm_backward: (
        X,
        X.cos(),
        [6],
        *torch.native_layer_norm(X, [6], None, None, 1e-5)[1:],
        ones_of(6),
        ones_of(6),
        [True] * 3,
    ),
}


def test_each_op_that_takes_any_layout_has_arguments_here() -> None:
    assert ARGUMENTS.keys() == FOLLOWING


@pytest.mark.parametrize("op", ARGUMENTS, ids=str)
def test_an_op_that_takes_any_layout_computes_the_same_of_all(op: Callable[..., object]) -> None:
    args = ARGUMENTS[op]
    whole = [tuple(a) if isinstance(a, list) and isinstance(a[0], Tensor) else a for a in args]
    leaves, spec = tree_flatten(whole)
    expected = tree_leaves(op(*args))
    images = [
        at
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[-1] > 1
    ]
    for changed in itertools.product((False, True), repeat=len(images)):
        given = list(leaves)
        for at, other in zip(images, changed, strict=True):
            if other:
                given[at] = turned(given[at])
        found = op(*(list(a) if isinstance(a, tuple) else a for a in tree_unflatten(given, spec)))
        for a, b in zip(tree_leaves(found), expected, strict=True):
            torch.testing.assert_close(a, b)


def turned(tensor: Tensor) -> Tensor:
    """Return a copy in channels-last layout; of other than images, a transposed one."""
    if tensor.ndim == 4:
        return tensor.clone(memory_format=LAST)
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
