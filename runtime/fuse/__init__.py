"""Ops that are fused: regions of a captured step that one compiled kernel computes, and the step with these kernels."""
