"""Distributions of PyTorch among a forward's results, opened so that their tensors are results."""

from __future__ import annotations

from typing import Any

from torch.distributions import Distribution

from rematplan.runtime.graph.compat import pytree


def open_distributions(tree: Any) -> None:
    """Register the classes of the distributions in a pytree with PyTorch's pytrees, so that these find their tensors.

    Classes that a user wrote are not registered.
    """
    closed = dict.fromkeys(type(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Distribution))
    own = [kind for kind in closed if kind.__module__.startswith("torch.distributions.")]
    for kind in own:
        pytree.register_pytree_node(kind, _opened, _closing(kind))
    if own:
        open_distributions(tree)  # what they are made of


def _opened(one: Any) -> tuple[list[Any], tuple[str, ...]]:
    return list(one.__dict__.values()), tuple(one.__dict__)


def _closing(kind: type[Any]) -> Any:
    def closed(values: Any, names: tuple[str, ...]) -> Any:
        one = object.__new__(kind)
        one.__dict__.update(zip(names, values, strict=True))
        return one

    return closed
