"""The error of the zoo. The zoo imports torch, and nothing else of rematplan."""

from __future__ import annotations


class ZooError(ValueError):
    """A network that is not in the zoo, or sizes that a network cannot have. The message is one line."""
