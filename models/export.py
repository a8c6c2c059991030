"""Export networks to ONNX in training form: batch norm and dropout remain training ops, weights remain parameters."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor, nn

from rematplan.models.names import ZooError

OPSET = 17
FILE_LIMIT = 2**31 - 2**24
"""The largest number of bytes of weights in one ONNX file: protobuf's 2 GiB, minus 16 MiB for the graph."""


def export_onnx(
    model: nn.Module, inputs: Sequence[Tensor], path: Path, *, dynamic_batch: bool = True
) -> None:
    """Write a network as an ONNX file in training form (opset 17), completely or not at all. It runs once, but keeps
    its state.

    ``dynamic_batch``: whether the first dimension of inputs and output is open. Raises ZooError above `FILE_LIMIT`
    bytes of weights.
    """
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    if weights > FILE_LIMIT:
        raise ZooError(f"{weights} bytes of weights do not fit in one ONNX file, which holds {FILE_LIMIT}")
    names = ["input"] if len(inputs) == 1 else [f"input_{i}" for i in range(len(inputs))]
    # PyTorch's newer exporter silently folds batch norm into convolutions, even in training mode.
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
    """Yield a temporary file that replaces ``path`` if the block succeeds, with the mode of an existing file; ``path``
    itself if it is a device or a pipe. IsADirectoryError if it is a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
        yield path
        return
    path = path.resolve()  # follow a link
    temporary = path.parent / f".{path.name[:32]}.{uuid4().hex}"
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore module modes, buffers, random state and autocast's cache after the block, which traces the
    network in training mode.
    """
    casts_once = torch.is_autocast_cache_enabled()
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    # By id, so that a shared buffer remains shared.
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in buffers}

    def restore(*_: object) -> None:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer

    # The exporter reads buffers after the forward, and must write the statistics from before it.
    hook = model.register_forward_hook(restore)
    for module, name, buffer in buffers:
        module._buffers[name] = copies[id(buffer)]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            # The exporter leaves the cache off if the network raises.
            torch.set_autocast_cache_enabled(casts_once)
            hook.remove()
            restore()
            for module, mode in modes:
                module.training = mode


@contextlib.contextmanager
def _silent_exporter() -> Iterator[None]:
    """Suppress deprecation notes, tracer warnings and log lines of the exporter."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
