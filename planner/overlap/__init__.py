"""Plans that recompute tensors on a second thread or CUDA stream (lane) while the first one computes gradients."""
