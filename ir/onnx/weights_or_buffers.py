"""Decide which floating-point initialisers are weights, by torch's metadata, else by names and values.

Buffers' names and values of attention masks are no weights. A generated name (``val_71``) is one if a layer
reads it as weights, or it is no scalar and no mask.
"""

from __future__ import annotations

import math
import re

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.draft import Array, Draft, Origin

MAX_MASK = 1 << 24  # larger tensors are not checked for being a mask
LARGE = 1e4  # no weight has values this large; attention masks have, at forbidden positions
# Names that torch's exporters give to what they make themselves.
GENERATED = re.compile(
    r"(val|onnx::\w+|_val|ortshared\w*|const\w*|.*_cast|scalar_tensor\w*)(_\d+)*$", re.ASCII
)
# TorchScript's name for the result of a Constant node, which tools turn into an initialiser.
CONSTANT = re.compile(r"(.*/)?Constant(_\d+)?_output_0$")
# Calls that make a tensor without reading one. A tensor computed from their results and from no weight is a constant.
FACTORY = re.compile(r"(arange|empty|eye|full|linspace|ones|scalar_tensor|tril|triu|zeros)(_like)?(_\d+)?$")
# The last part of a buffer's name. It is used for the tensors from which the exporter computed others.
BUFFER = re.compile(
    r"(inv_freq|freqs\w*|cos\w*|sin\w*|\w*mask|\w*_ids|running_\w+|\w*relative_position_index)$"
)

# Those buffer names that no weight has. They are used also in files that record no kinds.
SURELY_BUFFER = re.compile(
    r"(inv_freq|(cos|sin)(_cached)?|running_\w+|(\w*_)?mask|\w*relative_position_index)$"
)


class Evidence:
    """What an ONNX file says about its floating-point initialisers, to decide which are trained."""

    def __init__(self, draft: Draft, used: roles.Uses) -> None:
        self.origins, self.used, self.torch = draft.origins, used, draft.producer == "pytorch"
        self.written = {o for node in draft.nodes for o in node.outputs}
        self.arrays = draft.initialisers
        self.tells, self.signed = any(o.kind for o in draft.origins.values()), draft.signed

    def is_weight(self, array: Array) -> bool:
        """Return whether a floating-point initialiser may be a trained weight, judged by its origin, name, use and
        values."""
        origin = self.origins.get(array.name, Origin())
        if origin.kind:
            return origin.kind == "PARAMETER"
        if CONSTANT.match(array.name) or (self.tells and FACTORY.match(array.name)):
            return False  # in a file that records kinds, weights have one
        if origin.folded_from:
            return self._folded_from_weight(origin)
        if not self.tells and (
            SURELY_BUFFER.match(array.name.rpartition(".")[2])
            or _is_sinusoidal(array)
            or self._is_half_of_rotations(array)
        ):
            return False
        generated = bool(GENERATED.match(array.name))
        if array.shape and roles.in_weight_input(array.name, self.used):
            return True
        if not generated:
            return bool(array.shape or self.torch) and (self.tells or not _exceeds(array, -LARGE, math.inf))
        return math.prod(array.shape) > 1 and not _exceeds(array, -LARGE, LARGE)

    def _is_half_of_rotations(self, array: Array) -> bool:
        """Return whether a matrix whose first row is 0 or 1 has sines of which another initialiser has the cosines, or
        the other way round."""
        if len(array.shape) < 2 or not 1 < math.prod(array.shape) <= MAX_MASK:
            return False
        values = array.load().reshape(-1, array.shape[-1]).astype(np.float64)
        if not ((values[0] == 0).all() or (values[0] == 1).all()) or (values == values[0]).all():
            return False
        alike = (a for a in self.arrays.values() if (a.shape, a.dtype) == (array.shape, array.dtype))
        others = (a.load().reshape(values.shape).astype(np.float64) for a in alike)
        return any(np.allclose(values**2 + other**2, 1.0, atol=1e-2) for other in others)

    def _folded_from_weight(self, origin: Origin) -> bool:
        """Return whether a weight is among the tensors from which the exporter computed one."""
        sources = [s for s in origin.folded_from if not GENERATED.match(s)]
        stated = {s: self.origins[s].kind for s in sources if s in self.origins and self.origins[s].kind}
        # In this order: recorded kinds, qualified names (``layer.0.weight``) that are no buffers', calls such
        # as ``arange``, and sources that no node writes.
        if "PARAMETER" in stated.values() or self.signed:
            return "PARAMETER" in stated.values()
        qualified = [s for s in sources if "." in s and s not in stated]
        if qualified:
            return any(not BUFFER.match(s.rpartition(".")[2]) for s in qualified)
        if stated or any(FACTORY.match(s) for s in sources):
            return False
        return any(s not in self.written for s in sources)


def _exceeds(array: Array, low: float, high: float) -> bool:
    """Return whether a small tensor has a value outside of (``low``, ``high``) or NaN, as attention masks have."""
    if math.prod(array.shape) > MAX_MASK:
        return False
    values = np.asarray(array.load(), np.float32)
    return not bool(np.all((values > low) & (values < high)))


def _is_sinusoidal(array: Array) -> bool:
    """Return whether rows are pairs (a, b) with a² + b² ≈ 1, interleaved or in halves, as in tables of
    sinusoidal positions.
    """
    width = array.shape[-1] if array.shape else 0
    rows = math.prod(array.shape[:-1])
    if width < 4 or width % 2 or rows < 2 or rows * width > MAX_MASK:
        return False
    first = np.asarray(array.load().reshape(rows, width)[:2], np.float64)
    if not _on_circle(first):  # nearly all weights fail here
        return False
    return _on_circle(np.asarray(array.load().reshape(rows, width), np.float64))


def _on_circle(rows: np.ndarray) -> bool:
    half = rows.shape[1] // 2
    pairs = ((rows[:, 0::2], rows[:, 1::2]), (rows[:, :half], rows[:, half:]))
    return any(bool(np.allclose(a * a + b * b, 1.0, atol=1e-2)) for a, b in pairs)
