"""The ONNX op table: one row an operator."""
