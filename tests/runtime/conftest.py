"""What the runtime's tests share."""

from collections.abc import Iterator

import pytest

from rematplan.models import (
    densenet,
    diffusion_unet,
    efficientnet,
    googlenet,
    mobilenet,
    pspnet,
    resnet,
    revcol,
    revnet,
    revvit,
    swin,
)

BLOCKS = (2, 2)
"""Of each stage: one that changes the shape, and one that does not."""
DILATED = (1, 1, 1, 2)
"""Only the last two stages dilate; one has a block that does not change the shape."""


@pytest.fixture(scope="module")
def few_blocks() -> Iterator[None]:
    """The zoo's networks with fewer of the same stages and blocks: tracing them takes as long as they are deep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(densenet, "DEPTHS", {121: (densenet.DEPTHS[121][0], BLOCKS)})
        patch.setattr(diffusion_unet, "BLOCKS", 1)
        patch.setattr(diffusion_unet, "MULTIPLES", diffusion_unet.MULTIPLES[:2])
        patch.setattr(efficientnet, "ROWS", efficientnet.ROWS[:3])
        patch.setattr(googlenet, "STAGES", tuple(stage[:1] for stage in googlenet.STAGES[:2]))
        patch.setattr(mobilenet, "ROWS", mobilenet.ROWS[:3])
        patch.setattr(pspnet, "DEPTHS", {101: (pspnet.DEPTHS[101][0], DILATED)})
        patch.setattr(resnet, "DEPTHS", {n: (resnet.DEPTHS[n][0], BLOCKS) for n in (18, 50)})
        patch.setattr(revcol, "BLOCKS", (1, 1, 1))
        patch.setattr(revnet, "BLOCKS", {38: 2, 110: 5})
        patch.setattr(revvit, "BLOCKS", BLOCKS)
        patch.setattr(swin, "BLOCKS", BLOCKS)
        yield
