"""The zoo's networks: published sizes, the shapes they promise, and refusals in words."""

import pytest
import torch

from rematplan.models import ZOO, ZooError, build, example_inputs
from rematplan.models.vgg import grid_side

# Trainable parameters at full width and 1000 classes: He et al., table 1's networks and VGG configuration E,
# as counted by their public implementations.
PUBLISHED = {
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
        model = build(name, image=224, width=64, classes=1000)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("batch", "image"), [(2, 32), (3, 64)])
def test_output_shape_and_gradients(name: str, batch: int, image: int) -> None:
    torch.manual_seed(0)
    model = build(name, image=image, width=4, classes=5)
    output = model(*example_inputs(name, batch, image))
    per_pixel = ZOO[name].output == "pixels"
    assert output.shape == ((batch, 5, image, image) if per_pixel else (batch, 5))
    output.square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("name", ZOO)
def test_defaults_build(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    assert model.training
    assert example_inputs(name)[0].shape == (ZOO[name].batch, 3, ZOO[name].image, ZOO[name].image)


@pytest.mark.parametrize("image", [33, 75, 96, 192, 256, 352])
def test_other_image_sizes(image: int) -> None:
    for name in ("resnet18", "vgg19"):
        output = build(name, image=image, width=2, classes=3)(*example_inputs(name, 2, image))
        assert output.shape == (2, 3)


def test_vgg_grid_is_the_papers_at_224_and_always_divides() -> None:
    assert grid_side(224) == 7
    for image in range(32, 700):
        side = grid_side(image)
        assert 1 <= side <= 7
        assert (image // 32) % side == 0


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
        ("unet", {"image": 0}, "must be 1 or more"),
        ("vgg19", {"image": 31}, "32 or more"),
        ("resnet18", {"width": -4}, "width is -4"),
        ("resnet18", {"classes": 0}, "classes is 0"),
    ],
)
def test_sizes_refused(name: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ZooError, match=words):
        build(name, **sizes)


def test_batch_norm_with_one_value_refused() -> None:
    with pytest.raises(ZooError, match="batch norm sees one value a channel"):
        example_inputs("resnet18", 1, 32)
    assert build("resnet18", image=33, width=2)(*example_inputs("resnet18", 1, 33)).shape == (1, 1000)
    assert build("vgg19", image=32, width=2)(*example_inputs("vgg19", 1, 32)).shape == (1, 1000)


def test_unet_refuses_an_odd_image_in_forward() -> None:
    with pytest.raises(ZooError, match="the image is 24×32"):
        build("unet", image=32, width=4)(torch.zeros(2, 3, 24, 32))
