"""Reading ONNX files, and normalising their graphs to a training form."""
