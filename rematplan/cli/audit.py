"""``rematplan audit``: whether a model's own checkpointing is right, and what it costs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from rematplan.cli.arguments import DTYPES
from rematplan.cli.output import Output
from rematplan.cli.user_functions import user_function
from rematplan.ir import UsageError, first_line

SOUND, FAULTS = 0, 1
KEYWORDS = frozenset({"model", "args", "kwargs", "loss", "plain"})
"""What a function may return by name: the parameters of `rematplan.audit`."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rematplan audit`` to ``parser``."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="package.module:function, a function that returns a module and its inputs, or a dictionary of the "
        f"arguments of rematplan.audit ({', '.join(sorted(KEYWORDS))})",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="types of parameters and inputs, by default as the model has them; bf16-mixed: the forward "
        "runs in autocast",
    )
    parser.add_argument("--device", metavar="NAME", help="where the step runs: cpu, cuda or cuda:1")


def run(args: argparse.Namespace, out: Output) -> int:
    """Run ``rematplan audit``, and return the exit status: 0 if no fault was found, else 1."""
    function = user_function(args.target)
    from rematplan.auditing.audit import audit
    from rematplan.report.tables import audit_table, fault_lines

    given = _given(args.target, function)
    with _forward_as_stated(given, args.dtype, args.device), out.progress("auditing") as progress:
        found = audit(**given, progress=progress)
    out.show(str(found), *found.notes, *fault_lines(found), audit_table(found))
    faults = [asdict(replace(fault)) for fault in found.faults]
    out.data({"verdict": str(found), "sound": found.sound, **asdict(found), "faults": faults})
    return SOUND if found.sound else FAULTS


def _given(name: str, function: Any) -> dict[str, Any]:
    """Return what the user's function returns as arguments of `rematplan.audit`; `UsageError` if it fails or returns
    anything else."""
    from torch import nn

    try:
        made = function()
    except (Exception, SystemExit) as error:  # of any kind, in the user's code
        raise UsageError(f"{name} fails: {type(error).__name__}: {first_line(error)}") from error
    if isinstance(made, tuple) and len(made) == 2:
        made = dict(zip(("model", "args"), made, strict=True))
    if not (
        isinstance(made, Mapping) and made.keys() <= KEYWORDS and isinstance(made.get("model"), nn.Module)
    ):
        raise UsageError(
            f"{name} must return a pair of the module and its inputs, or a dictionary with model, and perhaps "
            f"{', '.join(sorted(KEYWORDS - {'model'}))}"
        )
    return {"args": (), **made}


def _forward_as_stated(
    given: dict[str, Any], dtype: str | None, device: str | None
) -> AbstractContextManager[object]:
    """Convert the model and its inputs in ``given``, in place, to a type and device, and return the context of the
    forward. None leaves types or devices unchanged; `UsageError` if the conversion is impossible."""
    import torch

    from rematplan.runtime.graph.compat import pytree

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    wanted = kinds.get(dtype or "")
    modules = [given[key] for key in ("model", "plain") if isinstance(given.get(key), torch.nn.Module)]
    try:
        for module in modules:
            module.to(device=device, dtype=wanted)
        for key in ("args", "kwargs"):
            given[key] = pytree.tree_map_only(
                torch.Tensor,
                lambda t: t.to(device=device, dtype=wanted if t.is_floating_point() else None),
                given.get(key, {} if key == "kwargs" else ()),
            )
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {first_line(error)}") from error
    kind = torch.device(device or "cpu").type
    return torch.autocast(kind, torch.bfloat16) if dtype == "bf16-mixed" else nullcontext()
