"""ONNX ops as functions on torch tensors. Each function is an entry of the op table for one op and some opset
versions."""
