"""What libraries keep on a device for good, as a problem charges it: one more input, so much for each thread."""

LIBRARIES = "library_workspaces"
"""The input's name."""
THREADS = 2
"""On CUDA the forward half runs in the caller's thread, the backward half in one of autograd's."""
