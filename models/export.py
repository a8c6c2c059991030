"""Export to ONNX in training form: batch norm and dropout stay training ops, weights stay parameters."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rematplan.models.errors import ZooError

OPSET = 17
FILE_LIMIT = 2**31 - 2**24
"""Bytes of weights that one ONNX file can hold: protobuf's 2 GiB, less room for the graph."""


def export_onnx(
    model: nn.Module, inputs: Sequence[Tensor], path: Path, *, dynamic_batch: bool = True
) -> None:
    """Write the network as ONNX in training form (opset 17); the file appears whole or not at all.

    ``dynamic_batch``: dimension 0 of every input is symbolic and named ``batch``. The network's modes and
    buffers and torch's random state are left as they were, though tracing runs it once in training mode.

    The exporter by tracing is used because the other one folds batch norm into convolutions without a word,
    even in training mode.

    Raises:
        ZooError: the weights do not fit in one ONNX file.
        OSError: the file cannot be written.
    """
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    if weights > FILE_LIMIT:
        raise ZooError(f"{weights} bytes of weights do not fit in one ONNX file, which holds {FILE_LIMIT}")
    names = ["input"] if len(inputs) == 1 else [f"input_{i}" for i in range(len(inputs))]
    with _written_whole(path) as temporary, _untouched(model), _silent_exporter():
        torch.onnx.export(
            model,
            tuple(inputs),
            str(temporary),
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=OPSET,
            input_names=names,
            output_names=["output"],
            dynamic_axes={name: {0: "batch"} for name in [*names, "output"]} if dynamic_batch else None,
        )


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """A temporary neighbour of ``path`` that takes its place if all goes well and vanishes otherwise."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a device or a pipe: written to, not replaced
        yield path
        return
    path = path.resolve()  # a link is followed
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Keep module modes, buffers and random state from the trace, which runs the network in training mode.

    The trace runs on copies of the buffers, and the buffers themselves are back in place as soon as it ends:
    the exporter reads what it writes only then, and would write batch norm statistics that had moved.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in buffers}  # a shared buffer stays shared

    def bring_back(*_: object) -> None:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer

    hook = model.register_forward_hook(bring_back)
    for module, name, buffer in buffers:
        module._buffers[name] = copies[id(buffer)]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            hook.remove()
            bring_back()
            for module, mode in modes:
                module.training = mode


@contextlib.contextmanager
def _silent_exporter() -> Iterator[None]:
    """Without the exporter's deprecation notes, tracer warnings and log lines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
