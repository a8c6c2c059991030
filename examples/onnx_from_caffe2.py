"""Train a file of another framework: SqueezeNet, exported for inference by Caffe2 in 2017, with a batch of one.

The file is among the test data of the `onnx` package, without weights. rematplan changes the batch size, adds a loss,
plans the training step at 70 % of its peak, and compares every gradient with plain autograd.
"""

from pathlib import Path

import onnx

import rematplan

path = Path(onnx.__file__).parent / "backend/test/data/light/light_squeezenet.onnx"
print(f"{path.name}, written by {onnx.load(path).producer_name}")

loaded = rematplan.load_step(path, dims={"batch": 2}, dropout="on")
for note in loaded.notes:
    print("note:", note)
graph = rematplan.problem(loaded, costs="profile")
base = rematplan.no_recompute(graph)
plan = rematplan.plan(graph, budget=base.estimate.peak * 7 // 10, strategy=rematplan.Auto(time_limit=5))
print(plan)

report = rematplan.run_step(loaded, plan, steps=2, check=True)
print(
    f"measured peak {report.measured_peak} bytes, predicted {plan.estimate.peak}, eager {report.eager_peak}"
)
print(report.verification)
assert report.measured_peak <= plan.estimate.peak < base.estimate.peak
assert report.verification is not None
assert report.verification.bit_equal
