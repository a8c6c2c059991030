"""The zoo's networks have the published sizes and the promised shapes, and refuse wrong sizes in words."""

from dataclasses import fields

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rematplan.api import Sizes
from rematplan.models import SIZES, ZOO, ZooError, build, example_inputs
from rematplan.models.names import SUMMARIES
from rematplan.models.swin import apart, window_side
from rematplan.models.transformer import heads_of
from rematplan.models.vgg import grid_side

# Trainable parameters at the sizes that the networks have when nobody says otherwise, as their papers or their
# authors' public implementations count them. PSPNet's is published as 65.7 million, the LSTM's as 20 million.
PUBLISHED = {
    "pspnet": 65_707_475,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "googlenet": 6_998_552,
    "mobilenet_v2": 3_504_872,
    "efficientnet_b0": 5_288_548,
    "vit_s": 22_050_664,
    "vit_b": 86_567_656,
    "swin_t": 28_288_354,
    "gpt12": 124_439_808,
    "gpt24": 354_823_168,
    "bert": 109_514_298,
    "roberta": 124_697_433,
    "diffusion_unet": 859_520_964,
    "lstm": 19_780_400,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg19": 143_667_240,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_as_published(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def output_shape(sizes: dict[str, int], kind: str) -> tuple[int, ...]:
    batch, side = sizes["batch"], sizes.get("image", 0)
    return {
        "classes": lambda: (batch, sizes["classes"]),
        "pixels": lambda: (batch, sizes["classes"], side, side),
        "tokens": lambda: (batch, sizes["tokens"], sizes["vocabulary"]),
        "noise": lambda: (batch, 4, side, side),
    }[kind]()


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("batch", [2, 3])
def test_output_shape_and_gradients(name: str, batch: int) -> None:
    torch.manual_seed(0)
    sizes = ZOO[name].complete({**ZOO[name].tiny, "batch": batch})
    model = build(name, **sizes)
    for _ in range(4):  # stochastic depth may leave a branch out for the whole of a small batch
        output = model(*example_inputs(name, **sizes))
        assert output.shape == output_shape(sizes, ZOO[name].output)
        output.square().mean().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        if all(p.grad.any() for p in model.parameters()):
            return
    pytest.fail("some parameter has no influence")


@pytest.mark.parametrize("name", ZOO)
def test_defaults_build(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    with FakeTensorMode():
        inputs = example_inputs(name)
    assert model.training
    assert all(x.shape[0] == ZOO[name].sizes["batch"] for x in inputs)


def test_what_goes_in_has_the_sizes() -> None:
    assert example_inputs("resnet18", 2, 64)[0].shape == (2, 3, 64, 64)
    (tokens,) = example_inputs("gpt12", batch=3, tokens=200, vocabulary=7)
    assert tokens.shape == (3, 200)
    assert tokens.min() == 0
    assert tokens.max() == 6
    latents, times, text = example_inputs("diffusion_unet", 2, 16, tokens=5, width=64)
    assert (latents.shape, times.shape, text.shape) == ((2, 4, 16, 16), (2,), (2, 5, 153))


def test_sizes_are_those_of_the_table_and_of_the_front_door() -> None:
    assert {size for entry in ZOO.values() for size in entry.sizes} <= set(SIZES)
    assert {f.name for f in fields(Sizes)} == set(SIZES)
    assert list(ZOO) == list(SUMMARIES)
    for entry in ZOO.values():
        assert set(entry.tiny) <= set(entry.sizes)


@pytest.mark.parametrize("image", [33, 75, 96, 192])
def test_other_image_sizes(image: int) -> None:
    for name in ("resnet18", "vgg19", "googlenet", "mobilenet_v2"):
        output = build(name, image=image, width=2, classes=3)(*example_inputs(name, 2, image))
        assert output.shape == (2, 3)


def test_vgg_grid_is_the_papers_at_224_and_always_divides() -> None:
    assert grid_side(224) == 7
    for image in range(32, 700):
        side = grid_side(image)
        assert 1 <= side <= 7
        assert (image // 32) % side == 0


def test_swins_window_is_the_papers_at_224_and_always_divides() -> None:
    assert window_side(224) == 7
    assert [window_side(image) for image in (32, 64, 256, 384)] == [1, 2, 4, 6]


def test_a_shifted_window_keeps_apart_what_was_not_together() -> None:
    mask = apart(4, 2, 1)
    assert mask.shape == (4, 1, 4, 4)
    assert not mask[0].any()  # wholly inside
    assert (mask[3, 0] == 0).tolist() == torch.eye(4, dtype=torch.bool).tolist()  # four corners met


def test_heads_divide_the_width() -> None:
    assert [heads_of(w) for w in (768, 1024, 384, 100, 200, 8)] == [12, 16, 6, 1, 2, 1]


def test_nothing_after_a_token_changes_its_scores() -> None:
    torch.manual_seed(0)
    for name in ("gpt12", "lstm"):
        model = build(name, **ZOO[name].tiny).eval()
        (tokens,) = example_inputs(name, **ZOO[name].tiny)
        changed = tokens.clone()
        changed[:, 4:] = (changed[:, 4:] + 1) % 20
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :4], after[:, :4])
        assert not torch.equal(before[:, 4:], after[:, 4:])


def test_width_scales_every_channel() -> None:
    narrow, wide = (build("unet", image=32, width=w).state_dict() for w in (4, 8))
    assert narrow["bottom.0.weight"].shape == (64, 32, 3, 3)
    assert wide["bottom.0.weight"].shape == (128, 64, 3, 3)


def test_inputs_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = example_inputs("resnet18", 2, 32), example_inputs("resnet18", 2, 32)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], example_inputs("resnet18", 2, 32, seed=1)[0])


def test_unknown_name_lists_the_known() -> None:
    for call in (lambda: build("resnet51"), lambda: example_inputs("")):
        with pytest.raises(ZooError, match=r"known: unet, resnet18, .*vgg19"):
            call()


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("unet", {"image": 40}, "divisible by 16"),
        ("unet", {"image": 0}, "must be 16 or more"),
        ("vgg19", {"image": 31}, "32 or more"),
        ("resnet18", {"width": -4}, "width is -4"),
        ("resnet18", {"classes": 0}, "classes is 0"),
        ("vit_s", {"depth": 10**18}, "depth is 1000000000000000000; it must be 10000 or less"),
        ("vit_s", {"image": 40}, "divisible by 16"),
        ("swin_t", {"image": 48}, "divisible by 32"),
        ("diffusion_unet", {"width": 48}, "divisible by 32"),
        ("gpt12", {"image": 32}, "gpt12 has no size image; it has batch, tokens, depth, width, vocabulary"),
        ("resnet18", {"depth": 3}, "has no size depth"),
        ("pspnet", {"batch": 1}, "batch is 1; it must be 2 or more"),
    ],
)
def test_sizes_refused(name: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ZooError, match=words):
        build(name, **sizes)


def test_batch_norm_with_one_value_refused() -> None:
    with pytest.raises(ZooError, match="batch norm gets one value per channel"):
        example_inputs("resnet18", 1, 32)
    assert build("resnet18", image=33, width=2)(*example_inputs("resnet18", 1, 33)).shape == (1, 1000)
    assert build("vgg19", image=32, width=2)(*example_inputs("vgg19", 1, 32)).shape == (1, 1000)


def test_unet_refuses_an_odd_image_in_forward() -> None:
    with pytest.raises(ZooError, match="the image is 24×32"):
        build("unet", image=32, width=4)(torch.zeros(2, 3, 24, 32))
