"""The plain tensors of which others consist, and the storages of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rematplan.runtime.graph.compat import pytree

_SPARSE: Mapping[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""The methods that return the dense tensors of which a sparse one consists, by its layout."""


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in an object: sparse and nested tensors, subclasses that wrap others, mappings and
    sequences are searched recursively."""
    if isinstance(value, torch.Tensor):
        if value.layout in _SPARSE:
            yield from (getattr(value.detach(), part)() for part in _SPARSE[value.layout])
        elif hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from plain_tensors(getattr(value, name))
        else:
            yield value.detach().values() if value.is_nested else value
    elif isinstance(value, (Mapping, list, tuple, deque)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from plain_tensors(one)


def storages_in(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the `plain_tensors` in a pytree, each once, by a key that only equal storages share."""
    found = (t.untyped_storage() for leaf in pytree.tree_leaves(tree) for t in plain_tensors(leaf))
    return {storage._cdata: storage for storage in found}
