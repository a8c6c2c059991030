"""What each gloo process of the pipeline tests runs: one task after another."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from captured_once import captured_once
from forks import begin
from torch import distributed

from rematplan.ir import ModelError, ProcessEnded


def serve(rank: int, world: int, rendezvous: str, pipe: Any) -> None:
    """Run what comes through a pipe until it is closed."""
    begin()
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    with captured_once():
        while True:
            try:
                function, more = pipe.recv()
            except EOFError:
                return
            _answer(function, rank, more, pipe)


def _answer(function: Callable[..., Any], rank: int, more: dict[str, Any], pipe: Any) -> None:
    """Send what a task gives, or its error."""
    try:
        pipe.send((True, function(rank, **more)))
    except Exception as error:  # the test says it
        why = f" because of {error.__cause__!r}" if error.__cause__ else ""
        pipe.send((False, f"{type(error).__name__}: {error}{why}"))
        if isinstance(error, (ModelError, ProcessEnded)):  # so ends a program, and with it its neighbours
            os._exit(1)
