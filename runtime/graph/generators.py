"""The kinds of random number generators outside of PyTorch."""

from __future__ import annotations

import random

import numpy as np

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
