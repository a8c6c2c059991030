"""The classes of Python's and NumPy's random number generators. Their states are in host memory and are unknown to
PyTorch."""

from __future__ import annotations

import random

import numpy as np

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
