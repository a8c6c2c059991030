"""The planning problem with its JSON format, the forward graphs read from ONNX files, and the error classes."""

from rematplan.ir.errors import (
    CHEAP,
    CapturedAnew,
    InfeasibleBudget,
    LatticeTooLarge,
    ModelError,
    NoGradients,
    NotCaptured,
    ProblemError,
    ProcessEnded,
    RematplanError,
    UnfitSizes,
    UsageError,
    first_line,
    show_bytes,
)
from rematplan.ir.problem_json import load_problem, problem_from_json, problem_to_json, save_problem
from rematplan.ir.training_graph import Op, Phase, Tensor, TrainingGraph, topological_order

__all__ = [
    "CHEAP",
    "CapturedAnew",
    "InfeasibleBudget",
    "LatticeTooLarge",
    "ModelError",
    "NoGradients",
    "NotCaptured",
    "Op",
    "Phase",
    "ProblemError",
    "ProcessEnded",
    "RematplanError",
    "Tensor",
    "TrainingGraph",
    "UnfitSizes",
    "UsageError",
    "first_line",
    "load_problem",
    "problem_from_json",
    "problem_to_json",
    "save_problem",
    "show_bytes",
    "topological_order",
]
