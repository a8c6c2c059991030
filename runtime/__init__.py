"""How to run: ONNX op table, capture of the joint graph, costs, the executor, measurement, verification."""
