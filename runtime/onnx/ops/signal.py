"""Implementations of ONNX's Fourier transform and window functions. Complex numbers are pairs (real, imaginary) in the
last axis of a real tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rematplan.ir.onnx.graph import Node
from rematplan.runtime.onnx.ops.rows import Known, integer, op, refuse
from rematplan.runtime.onnx.ops.values import ONNX_DTYPES


def _complex(x: Tensor) -> Tensor:
    """Return the numbers in the last axis of ``x``, real (size 1) or complex (size 2), without that axis, in double
    precision."""
    # As the reference code of the ONNX standard: torch has no Fourier transform for some types.
    wide = x.double()
    return wide.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(wide.contiguous())


@op("DFT", 20, known=(1, 2))
def dft(node: Node, x: Tensor, length: Known = None, axis: Known = None) -> Tensor:
    """Run ONNX DFT along ``axis`` (None: −2) for ``length`` entries (None: all), or its inverse. The last axis has size
    1 (real) or 2 (real and imaginary parts). If ``onesided`` is set, a transform returns the first half of the
    frequencies, and an inverse reads that half and returns real numbers."""
    along = (-2 if axis is None else int(axis.reshape(()))) % x.dim()
    size = None if length is None else int(length.reshape(()))
    half, values = bool(integer(node, "onesided", 0)), _complex(x)
    if integer(node, "inverse", 0):
        if half:
            back: Tensor = torch.fft.irfft(values, size, along)
            return back.unsqueeze(-1).to(x.dtype)
        return torch.view_as_real(torch.fft.ifft(values, size, along)).to(x.dtype)
    found = torch.fft.fft(values, size, along)
    if half:
        found = found.narrow(along, 0, found.shape[along] // 2 + 1)
    return torch.view_as_real(found.resolve_conj()).to(x.dtype)


@op("DFT", 17, known=(1,))
def dft_by_attribute(node: Node, x: Tensor, length: Known = None) -> Tensor:
    """Run ONNX DFT of opset 17. It is the same as `dft`, but the axis is an attribute (by default 1)."""
    return dft(node, x, length, np.asarray(integer(node, "axis", 1)))


@op("STFT", 17, known=(1, 3))
def stft(
    node: Node, x: Tensor, step: np.ndarray, window: Tensor | None = None, length: Known = None
) -> Tensor:
    """Run ONNX STFT on ``x`` (N, time, 1 or 2): (N, frames, frequencies, 2). Frames of ``length`` entries (None: the
    window's) begin ``step`` entries apart, without padding. If ``onesided`` is set, the first half of the frequencies
    is returned. `ModelError` if neither a window nor a length is given."""
    if length is not None:
        size = int(length.reshape(()))
    elif window is not None:
        size = len(window)
    else:
        raise refuse(node, "it has neither a window nor a frame length")
    frames = _complex(x).unfold(1, size, int(step.reshape(())))
    if window is not None:
        frames = frames * window.double()
    found = torch.fft.fft(frames)
    if integer(node, "onesided", 1):
        found = found.narrow(-1, 0, size // 2 + 1)
    return torch.view_as_real(found.resolve_conj()).to(x.dtype)


WINDOWS: dict[str, Callable[..., Tensor]] = {
    "BlackmanWindow": torch.blackman_window,
    "HammingWindow": lambda n, **more: torch.hamming_window(n, alpha=25 / 46, beta=21 / 46, **more),
    "HannWindow": torch.hann_window,
}


def _window(make: Callable[..., Tensor]) -> Callable[[Node, np.ndarray], Tensor]:
    def run(node: Node, size: np.ndarray) -> Tensor:
        values = make(int(size.reshape(())), periodic=bool(integer(node, "periodic", 1)), dtype=torch.float64)
        return values.to(ONNX_DTYPES[integer(node, "output_datatype", 1)])

    return run


for _op, _make in WINDOWS.items():
    op(_op, 17, known=(0,), size=lambda size: int(size.reshape(())))(_window(_make))
