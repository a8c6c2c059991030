"""The types of NumPy arrays by what their elements are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Words = NDArray[np.uint64]
"""Bit masks, 64 bits a word, or states of random generators."""
