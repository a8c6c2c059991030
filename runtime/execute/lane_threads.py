"""Two lanes that run at the same time: two threads, and on CUDA two streams.

Lanes share no tensors but those that one hands to the other, through a variable that the other takes over, and wait for
each other where the plan says so. Handing over and waiting order the two for the CPU; on CUDA each waiting lane has its
stream wait for an event of the other's, without the host, and a tensor that changes lanes is recorded on the stream of
the lane that takes it, so that its memory is not given away while that still reads it.

The main lane is the caller's thread and stream. The other thread lives for one step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from rematplan.runtime.costs.measure import watched


class Stopped(Exception):
    """The other lane has failed: raised in a lane that waits for it. The caller gets the other's exception."""


class Lane:
    """How far one lane has come, for the other to wait for."""

    def __init__(self, device: torch.device, condition: threading.Condition) -> None:
        self.device, self.condition = device, condition
        self.count = 0
        self.failure: BaseException | None = None
        self.events: dict[int, torch.cuda.Event] = {}

    def reached(self, count: int) -> None:
        """Called on this lane: ``count`` of its runs are over and what they alone held is freed."""
        if self.device.type == "cuda":
            self.events[count] = torch.cuda.current_stream(self.device).record_event()
        with self.condition:
            self.count = count
            self.condition.notify_all()

    def wait(self, count: int) -> None:
        """Called on the other lane, for a ``count`` that this one says it has reached.

        Raises:
            Stopped: it never will.
        """
        with self.condition:
            self.condition.wait_for(lambda: self.count >= count or self.failure is not None)
            if self.count < count:
                raise Stopped
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self.events[count])

    def fail(self, failure: BaseException) -> None:
        """Note why this lane goes no further."""
        with self.condition:
            self.failure = failure
            self.condition.notify_all()


class Recovery(Lane):
    """The lane beside the caller's, the other being ``main``."""

    def __init__(self, device: torch.device, main: Lane) -> None:
        super().__init__(device, main.condition)
        self.main = main

    @contextmanager
    def running(self, recover: Callable[[], None]) -> Iterator[None]:
        """A block, the main lane, beside which ``recover`` runs. Both have ended when it ends, whichever way.

        Raises what either raises.
        """
        stream = recovery_stream(self.device) if self.device.type == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        thread = threading.Thread(target=self._run, args=(recover, stream), name="rematplan recovery")
        try:
            thread.start()
            yield
            thread.join()
        except BaseException as failure:
            self.main.fail(failure)
            raise
        finally:
            if thread.ident is not None:
                thread.join()
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)
            failed, self.failure = self.failure, None
            if failed is not None:
                try:
                    raise failed from None
                finally:
                    del failed  # it holds this frame

    def _run(self, recover: Callable[[], None], stream: Any) -> None:
        try:
            plain = torch.no_grad(), torch.autocast(self.device.type, enabled=False)
            with _on(stream), plain[0], plain[1], watched():
                recover()
        except Stopped:  # the caller knows why
            pass
        except BaseException as failure:
            self.fail(failure)


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@cache
def recovery_stream(device: torch.device) -> Any:
    """The stream of a device's recovery lanes: one, since libraries keep a workspace for each that they meet."""
    return torch.cuda.Stream(device)


def two_lanes(device: torch.device) -> tuple[Lane, Recovery]:
    """The main lane and the recovery lane of one step."""
    main = Lane(device, threading.Condition())
    return main, Recovery(device, main)


def taken(device: torch.device) -> Callable[[torch.Tensor], None]:
    """A function to be called on the lane that takes a tensor over from the other one. Some are on the host: where the
    random numbers of an attention began."""

    def record(tensor: torch.Tensor) -> None:
        if not on_host(tensor):
            tensor.record_stream(torch.cuda.current_stream(device))

    return record if device.type == "cuda" else lambda tensor: None


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the CPU's memory, which no stream gives away."""
    return tensor.device.type == "cpu"
