"""The classes of random number generators outside PyTorch."""

from __future__ import annotations

import random

import numpy as np

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
