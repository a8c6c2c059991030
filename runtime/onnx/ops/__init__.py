"""ONNX ops as functions on torch tensors. Each is an entry of the op table for one op and some opsets."""
