"""The error class of the zoo, the collection of networks. The zoo uses torch, but nothing else of rematplan."""

from __future__ import annotations


class ZooError(ValueError):
    """The requested network is not in the zoo, or cannot have the requested sizes or be exported. One line of text."""
