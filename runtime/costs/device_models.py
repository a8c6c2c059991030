"""CPUs and GPUs for the roofline model: peak arithmetic, memory bandwidth, launch time. Needs no torch at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rematplan.ir import UsageError
from rematplan.ir.files import stated_json

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A device of the roofline model. In `DEVICE_MODELS`, figures of GPUs are from their vendors' data sheets."""

    name: str
    summary: str
    """One line that describes the device in lists."""
    flops: Mapping[str, float]
    """By type (``float32``, without tensor cores), the peak rate for dense operands in 10¹² operations per second."""
    bandwidth: float
    """The memory's bandwidth, in 10⁹ bytes per second."""
    launch: float
    """The fixed time of each op, in microseconds."""
    is_cpu: bool = False
    """Whether it is a CPU."""

    def time(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        """Return the microseconds of an op: the launch time, plus the larger of arithmetic and memory time. ``moved``:
        bytes. A type without a rate counts as float32."""
        rate = self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])
        return self.launch + max(flops / (rate * 1e6), moved / (self.bandwidth * 1e3))


def _rates(f64: float, f32: float, f16: float) -> dict[str, float]:
    return {"float64": f64, "float32": f32, "float16": f16, "bfloat16": f16}


_MODELS = (
    DeviceModel("laptop-cpu", "4 cores with AVX2", _rates(0.1, 0.2, 0.2), 50, 3.0, is_cpu=True),
    DeviceModel("server-cpu", "32 cores with AVX-512", _rates(1.5, 3.0, 6.0), 200, 5.0, is_cpu=True),
    DeviceModel("t4", "NVIDIA T4 16 GB", _rates(0.25, 8.1, 65), 320, 4.0),
    DeviceModel("v100", "NVIDIA V100 32 GB SXM2", _rates(7.8, 15.7, 125), 900, 4.0),
    DeviceModel("rtx4090", "NVIDIA RTX 4090 24 GB", _rates(1.3, 82.6, 165), 1008, 3.0),
    DeviceModel("a100", "NVIDIA A100 80 GB SXM", _rates(9.7, 19.5, 312), 2039, 3.0),
    DeviceModel("h100", "NVIDIA H100 80 GB SXM", _rates(34, 67, 989), 3350, 3.0),
    DeviceModel("h200", "NVIDIA H200 141 GB SXM", _rates(34, 67, 989), 4800, 3.0),
)

DEVICE_MODELS: Mapping[str, DeviceModel] = {m.name: m for m in _MODELS}
PROFILE, ROOFLINE = "profile", "roofline"
"""The options ``costs`` that measure ops here, and that model them for `DEFAULT_DEVICE_MODEL`."""
DEFAULT_DEVICE_MODEL = "a100"
KNOWN_COSTS = (
    f"known: {PROFILE}, {ROOFLINE}, the device models {', '.join(DEVICE_MODELS)}, and files of a profile or of a "
    f"device model (NAME.json)"
)


def check_costs(costs: str) -> None:
    """Raise `UsageError` for an unknown name of costs. Files (``NAME.json``) are read later."""
    if costs not in (PROFILE, ROOFLINE, *DEVICE_MODELS) and not costs.endswith(".json"):
        raise UsageError(f"unknown costs {costs!r}; {KNOWN_COSTS}")


def device_model(name: str) -> DeviceModel:
    """Return the known device model ``name``, or that of the file ``name`` if it ends with ``.json``. `UsageError` if
    the name is unknown, or the file unreadable or malformed."""
    if name.endswith(".json"):
        return _model_of_file(name)
    if name not in DEVICE_MODELS:
        raise UsageError(
            f"unknown device model {name!r}; known: {', '.join(DEVICE_MODELS)}; or state a file, FILE.json"
        )
    return DEVICE_MODELS[name]


def _model_of_file(path: str) -> DeviceModel:
    """Return the device model in a JSON file; `UsageError` unless it has flops of float32, bandwidth and launch time,
    and all its numbers are above zero and finite."""
    data = stated_json(path)
    fields = data if isinstance(data, dict) else {}
    flops = fields.get("flops")
    rates = {str(key): _positive(rate) for key, rate in flops.items()} if isinstance(flops, dict) else {}
    numbers = [*rates.values(), _positive(fields.get("bandwidth")), _positive(fields.get("launch"))]
    if "float32" not in rates or None in numbers:
        raise UsageError(
            f"{path}: a device model needs positive numbers: flops of float32 and perhaps of other types (10^12 a "
            f"second), bandwidth (10^9 bytes a second) and launch (microseconds)"
        )
    known = {key: rate for key, rate in rates.items() if rate is not None}
    return DeviceModel(
        path,
        str(fields.get("summary", "")),
        known,
        float(fields["bandwidth"]),
        float(fields["launch"]),
        fields.get("is_cpu") is True,
    )


def _positive(value: Any) -> float | None:
    """Return a positive finite number as a float; None for anything else."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and 0 < value < float("inf") else None
