"""What a graph is: the forward graph as ONNX states it, the training graph to be planned, the JSON formats."""

from rematplan.ir.errors import (
    InfeasibleBudget,
    LatticeTooLarge,
    ModelError,
    ProblemError,
    ProcessEnded,
    RematplanError,
    UsageError,
    show_bytes,
)
from rematplan.ir.problem_json import load_problem, problem_from_json, problem_to_json, save_problem
from rematplan.ir.training_graph import Op, Phase, Tensor, TrainingGraph

__all__ = [
    "InfeasibleBudget",
    "LatticeTooLarge",
    "ModelError",
    "Op",
    "Phase",
    "ProblemError",
    "ProcessEnded",
    "RematplanError",
    "Tensor",
    "TrainingGraph",
    "UsageError",
    "load_problem",
    "problem_from_json",
    "problem_to_json",
    "save_problem",
    "show_bytes",
]
