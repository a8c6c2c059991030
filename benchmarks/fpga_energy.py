"""Energy of a training step on an FPGA and on a GPU, from a table of devices: a model, not measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """An FPGA board or a GPU. ``rate``: peak GFLOP/s (or GOP/s), from least to most. ``watts``: power, from least to
    most.

    ``name``: the device's name. ``source``: where both figures come from.
    """

    name: str
    rate: tuple[float, float]
    watts: tuple[float, float]
    source: str

    @property
    def efficiency(self) -> tuple[float, float]:
        """GFLOP/s (or GOP/s) per watt at the peak rate, from least to most."""
        return self.rate[0] / self.watts[1], self.rate[1] / self.watts[0]


def fpga(slices: int, each: int) -> tuple[float, float]:
    """Return GFLOP/s of an FPGA's DSP slices at 200 and at 300 MHz.

    ``slices``: their number. ``each``: how many of them one multiplication and addition takes.
    """
    return slices / each * 2 * 0.2, slices / each * 2 * 0.3


U280 = "9024 DSP slices, 300 MHz: experiments of CODO; 45 W measured (SPLAG, FPGA 2022) to 225 W (DS963)"
ZCU = "2520 DSP slices: DS891; 10 to 36 W at the board (estimate around 13 to 23 W of published designs)"
DEVICES = {
    "float32": (
        Device("U280, float32 of 5 slices", fpga(9024, 5), (45, 225), U280),
        Device("ZCU102, float32 of 5 slices", fpga(2520, 5), (10, 36), ZCU),
        Device(
            "A100, float32",
            (19500, 19500),
            (300, 400),
            "data sheet: 19.5 TFLOP/s, 300 W (PCIe) and 400 W (SXM)",
        ),
    ),
    "16 bits": (
        Device("U280, int16", fpga(9024, 1), (45, 225), U280),
        Device("ZCU102, int16", fpga(2520, 1), (10, 36), ZCU),
        Device("A100, bfloat16", (312000, 312000), (300, 400), "data sheet: 312 TFLOP/s"),
    ),
}
USED = (0.3, 0.9)
"""Shares of an FPGA's slices that a dataflow design keeps busy, least and most."""
EXTRA = 4 / 3
"""Work of a step that inverts ÷ work of one that keeps all: forward, inversion, backward of twice the forward."""


def energy(_quick: bool, _folder: Path | None) -> None:
    """Print the utilisation of a GPU below which an FPGA takes less energy for the same step. Both arguments are
    ignored."""
    print("model, not measured")
    for kind, (*boards, gpu) in DEVICES.items():
        for board in boards:
            low = board.efficiency[0] * USED[0] / EXTRA / gpu.efficiency[1]
            high = board.efficiency[1] * USED[1] / EXTRA / gpu.efficiency[0]
            print(
                f"{kind}: {board.name}: {board.efficiency[0]:.1f} to {board.efficiency[1]:.1f} a watt; {gpu.name}: "
                f"{gpu.efficiency[0]:.0f} to {gpu.efficiency[1]:.0f}; less energy where the GPU runs below "
                f"{100 * low:.1f} % (surely) or {100 * high:.1f} % (at best) of its peak"
            )
