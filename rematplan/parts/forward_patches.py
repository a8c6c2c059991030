"""Replace the forward of several modules for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_MISSING = object()


class Patches:
    """Sets an attribute ``forward`` of modules inside of a ``with`` statement. ``forwards``: by module, its value."""

    def __init__(self, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self.forwards = forwards
        self._before: dict[nn.Module, Any] = {}

    def __enter__(self) -> None:
        for module, forward in self.forwards.items():
            self._before[module] = vars(module).get("forward", _MISSING)
            vars(module)["forward"] = forward

    def __exit__(self, *_raised: object) -> None:
        for module, own in self._before.items():
            vars(module).pop("forward", None)
            if own is not _MISSING:
                vars(module)["forward"] = own

    def inside(self, part: nn.Module) -> Patches:
        """Return those of the replaced forwards whose modules are inside of ``part``."""
        inner = [module for module in part.modules() if module in self.forwards and module is not part]
        some = Patches({module: self.forwards[module] for module in inner})
        some._before = {module: self._before[module] for module in inner}
        return some

    @contextmanager
    def away(self) -> Iterator[None]:
        """Give the modules their own forwards back inside of the block."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
