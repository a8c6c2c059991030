"""A process that solves integer programs with HiGHS, which cannot be interrupted, for another process, which
can kill it.

Messages on its standard streams are preceded by their length. It imports OR-tools alone, to start fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import IO

LENGTH = struct.Struct("<Q")
CPU_SECONDS = struct.Struct("<d")
"""The CPU seconds of this process for a request, which precede each response."""
PR_SET_PDEATHSIG = 1
"""Linux's number of the request to send a signal when the parent ends (prctl(2))."""


def read_message(stream: IO[bytes]) -> bytes | None:
    """Return the next message of a stream, without the eight bytes of its length that precede it; None at the end of
    the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def write_message(stream: IO[bytes], body: bytes) -> None:
    """Write a message to a stream, preceded by its length in eight bytes, and flush the stream."""
    stream.write(LENGTH.pack(len(body)))
    stream.write(body)
    stream.flush()


def respond(request: bytes) -> bytes:
    """Solve a program with HiGHS. ``request``: a serialised `SolveRequest` of OR-tools.

    Return a serialised `SolveResponse`; it has no fields if the solver fails.
    """
    from ortools.math_opt import callback_pb2, rpc_pb2
    from ortools.math_opt.core.python import solver

    asked = rpc_pb2.SolveRequest.FromString(request)
    response = rpc_pb2.SolveResponse()
    try:
        result = solver.solve(
            asked.model,
            asked.solver_type,
            asked.initializer,
            asked.parameters,
            asked.model_parameters,
            None,
            callback_pb2.CallbackRegistrationProto(),
            None,
            None,
        )
        response.result.CopyFrom(result)
    except Exception as error:  # of a type that the bindings do not export
        print(error, file=sys.stderr)
    return bytes(response.SerializeToString())


def end_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends. On other systems it does nothing."""
    # While HiGHS solves, this process cannot notice that by itself.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Read requests to solve programs from standard input and write the responses to standard output, until the input
    ends."""
    end_with_parent()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        # HiGHS sometimes prints to standard output although told not to.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        while (request := read_message(sys.stdin.buffer)) is not None:
            began = time.process_time()
            response = respond(request)
            write_message(answers, CPU_SECONDS.pack(time.process_time() - began) + response)


if __name__ == "__main__":
    main()
