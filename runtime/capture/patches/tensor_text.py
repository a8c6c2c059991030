"""Give traced tensors a text that is recognised where a forward leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch

from rematplan.runtime.graph.compat import FunctionalTensor

TEXT = "<a tensor of a step that is being planned>"
"""The text of a traced tensor, whose numbers are not known."""


@contextmanager
def tensors_have_text() -> Iterator[None]:
    """Let ``str``, ``repr`` and ``format`` of a traced tensor return `TEXT`, inside the block and in this thread. A
    tracer's own text has no numbers either, and it accepts no format such as ``.2f``."""
    thread = get_ident()  # all threads see the replaced methods

    def with_text(own: Callable[..., str]) -> Callable[..., str]:
        def text(tensor: torch.Tensor, *given: Any, **more: Any) -> str:
            is_traced = isinstance(tensor, FunctionalTensor) and get_ident() == thread
            return TEXT if is_traced else own(tensor, *given, **more)

        return text

    with (
        patch.object(torch.Tensor, "__format__", with_text(torch.Tensor.__format__)),
        patch.object(FunctionalTensor, "__repr__", with_text(FunctionalTensor.__repr__)),
    ):
        yield
