"""Refuse what cannot fit in this machine's memory before it is made, instead of being killed while filling it."""

from __future__ import annotations

import os

from rematplan.ir.errors import ModelError, show_bytes


def check_fits(needed: int, what: str) -> None:
    """Refuse ``needed`` bytes that are more than this machine has.

    Raises:
        ModelError: with both figures.
    """
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise ModelError(
            f"{what} take {show_bytes(needed)}, this machine has {show_bytes(present)} "
            "(a device model plans without making them: --device-model a100)"
        )
