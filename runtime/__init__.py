"""Everything that runs plans with PyTorch: capture of training steps, the ops of ONNX files, costs of ops, code
generation, measurement and verification."""
