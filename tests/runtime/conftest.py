"""What the runtime's tests share."""

from collections.abc import Iterator

import pytest

from rematplan.models import densenet, diffusion_unet, pspnet, revcol, revvit, swin

BLOCKS = (2, 2, 2, 2)
"""Of each stage: one that changes the shape, and one that does not."""


@pytest.fixture(scope="module")
def few_blocks() -> Iterator[None]:
    """The zoo's deepest networks with fewer of the same blocks: tracing them takes as long as they are deep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(densenet, "DEPTHS", {121: (densenet.DEPTHS[121][0], BLOCKS)})
        patch.setattr(diffusion_unet, "BLOCKS", 1)
        patch.setattr(pspnet, "DEPTHS", {101: (pspnet.DEPTHS[101][0], BLOCKS)})
        patch.setattr(revcol, "BLOCKS", (1, 1, 1, 1))
        patch.setattr(revvit, "BLOCKS", BLOCKS)
        patch.setattr(swin, "BLOCKS", BLOCKS)
        yield
