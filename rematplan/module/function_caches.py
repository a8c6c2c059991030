"""Empty the caches of functions (`functools.lru_cache`) in which a trace has left its tensors."""

from __future__ import annotations

import functools
import gc
from typing import Any

from rematplan.runtime.graph.compat import FakeTensor, FunctionalTensor

CACHED: Any = type(functools.lru_cache(len))
LINK = "_lru_list_elem"
"""The name of the class of a cache's entries."""


def empty_traced_caches() -> bool:
    """Empty the caches of functions that have a tensor of a trace, which fails in any later use. Return whether
    there were any."""
    found: list[Any] = [one for one in gc.get_objects() if type(one) is CACHED and _has_traced(one)]
    for one in found:
        one.cache_clear()
    return bool(found)


def _has_traced(cache: Any) -> bool:
    """Return whether a function's cache has a tensor of a trace, also inside of dictionaries, lists and tuples."""
    seen: set[int] = set()
    todo = gc.get_referents(cache)
    while todo:
        one = todo.pop()
        if isinstance(one, (FakeTensor, FunctionalTensor)):
            return True
        if id(one) not in seen and (type(one) in (dict, list, tuple) or type(one).__name__ == LINK):
            seen.add(id(one))
            todo += gc.get_referents(one)
    return False
