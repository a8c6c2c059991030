"""The ONNX op table: one row for each operator and version."""
