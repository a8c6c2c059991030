"""Running plans: the ONNX op table, capture of the joint graph, costs, code generation, measurement,
verification."""
