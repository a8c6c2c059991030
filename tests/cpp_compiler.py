"""A mark of tests that compile fused kernels: without a C++ compiler, steps run eager ops, which other tests check."""

import os
import shutil

import pytest

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="no C++ compiler"
)
