"""The changes that capture makes in PyTorch while it runs. `PATCHES` has a row for each change."""

from rematplan.runtime.capture.patches.patched_functions import PATCHES, Patch

__all__ = ["PATCHES", "Patch"]
