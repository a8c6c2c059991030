"""Two lanes that run parts of a plan at the same time: two threads, and on CUDA two streams.

The main lane is the caller's thread; the recovery lane's thread lives for one step. Tensors that change lanes are
recorded on the taking stream, so that memory is not reused too early.
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
    """Raised in a lane that waits for the other lane, if the other lane has failed. The caller gets the other
    lane's exception."""


class Lane:
    """The progress of one of two lanes (threads on the CPU, streams on CUDA), for which the other lane can wait."""

    def __init__(self, device: torch.device, condition: threading.Condition) -> None:
        self.device, self.condition = device, condition
        self.count = 0
        self.failure: BaseException | None = None
        self.events: dict[int, torch.cuda.Event] = {}

    def reached(self, count: int) -> None:
        """Announce that ``count`` op executions of this lane are finished, and that tensors which only these needed
        are freed. Called by this lane."""
        if self.device.type == "cuda":
            self.events[count] = torch.cuda.current_stream(self.device).record_event()
        with self.condition:
            self.count = count
            self.condition.notify_all()

    def wait(self, count: int) -> None:
        """Wait, in the other lane, until ``count`` op executions of this lane are finished; raise `Stopped` if this
        lane failed before. On CUDA the other lane's stream waits, too."""
        with self.condition:
            self.condition.wait_for(lambda: self.count >= count or self.failure is not None)
            if self.count < count:
                raise Stopped
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self.events[count])

    def fail(self, failure: BaseException) -> None:
        """Announce that this lane failed with an exception; a lane that waits for it then raises `Stopped`."""
        with self.condition:
            self.failure = failure
            self.condition.notify_all()


class Recovery(Lane):
    """The lane that rematerialises tensors in a second thread, while the caller's thread runs the main lane."""

    def __init__(self, device: torch.device, main: Lane) -> None:
        super().__init__(device, main.condition)
        self.main = main

    @contextmanager
    def running(self, recover: Callable[[], None]) -> Iterator[None]:
        """Run ``recover`` in a second thread while the body runs on the main lane. Both have ended when the statement
        ends. A failure is raised; if both fail independently, that of ``recover``."""
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
                    del failed  # otherwise a reference cycle: its traceback refers to this frame

    def _run(self, recover: Callable[[], None], stream: Any) -> None:
        """Run ``recover`` in this thread, on ``stream`` if it is not None, without gradients and autocast. An exception
        is announced by `fail`."""
        torch.get_num_threads()  # oneDNN otherwise ignores torch.set_num_threads in a new thread: other bits and peaks
        try:
            plain = torch.no_grad(), torch.autocast(self.device.type, enabled=False)
            with _on(stream), plain[0], plain[1], watched():
                recover()
        except Stopped:  # the caller already has the main lane's exception
            pass
        except BaseException as failure:
            self.fail(failure)


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@cache
def recovery_stream(device: torch.device) -> Any:
    """Return the CUDA stream on which all recovery lanes of a device run. Each device has one, since libraries
    allocate a workspace for each stream."""
    return torch.cuda.Stream(device)


def two_lanes(device: torch.device) -> tuple[Lane, Recovery]:
    """Return a new main lane and a new recovery lane, for one step on ``device``."""
    main = Lane(device, threading.Condition())
    return main, Recovery(device, main)


def stream_recorder(device: torch.device) -> Callable[[torch.Tensor], None]:
    """Return a function for tensors that a lane takes over. On CUDA it records device tensors on the current stream;
    else it does nothing."""

    def record(tensor: torch.Tensor) -> None:
        if not on_host(tensor):
            tensor.record_stream(torch.cuda.current_stream(device))

    return record if device.type == "cuda" else lambda tensor: None


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in CPU memory, which is not tied to a stream."""
    return tensor.device.type == "cpu"
