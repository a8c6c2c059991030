"""ONNX files: reading them, and normalising their graphs to a training form."""
