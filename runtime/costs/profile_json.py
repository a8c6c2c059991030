"""Profile files (format ``rematplan.profile/1``): measured costs, so that a plan for one machine can be made
on another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rematplan.ir import UsageError
from rematplan.ir.files import stated_json, write_whole
from rematplan.runtime.costs.profile import device_name, signature
from rematplan.runtime.graph.call_cost import CallCost
from rematplan.runtime.graph.captured_step import CapturedStep

PROFILE_FORMAT = "rematplan.profile/1"


@dataclass(frozen=True)
class Profile:
    """Measured costs of calls, so that a plan for one machine can be made on another."""

    device: str
    """The name of the device on which they were measured."""
    calls: Mapping[str, CallCost]
    """The costs by `profile.signature`."""
    source: str = "the profile"
    """The path of the file, for messages."""

    def costs(self, step: CapturedStep) -> dict[str, CallCost]:
        """Return, by name, the costs of a step's calls and inverses, without views; `UsageError` if one is lacking."""
        wanted = {c.name: signature(step, c) for c in step.priced_calls}
        missing = [name for name, text in wanted.items() if text not in self.calls]
        if missing:
            raise UsageError(
                f"{self.source}, measured on {self.device}, lacks {len(missing)} of the {len(wanted)} ops of "
                f"{step.name}, the first {missing[0]} ({step.call[missing[0]].target}): profile it with the same sizes"
            )
        return {name: self.calls[text] for name, text in wanted.items()}


def profile_of(step: CapturedStep, costs: Mapping[str, CallCost]) -> Profile:
    """Return the measured costs of a captured step as a profile, which serves other steps with equal calls as well."""
    calls = {signature(step, c): costs[c.name] for c in step.priced_calls}
    return Profile(device_name(step.device), calls)


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a JSON file of the format ``rematplan.profile/1``. If that fails, the old file stays."""
    data = {
        "format": PROFILE_FORMAT,
        "device": profile.device,
        "torch": torch.__version__,
        "calls": {text: cost.to_row() for text, cost in profile.calls.items()},
    }
    write_whole(path, json.dumps(data, indent=0))


def is_profile(path: Path) -> bool:
    """Return whether a JSON file states a ``format``, as profiles do and device models do not; `UsageError` if it
    cannot be read."""
    data = stated_json(path)
    return isinstance(data, dict) and "format" in data


def read_profile(path: Path) -> Profile:
    """Read a profile from a JSON file of the format ``rematplan.profile/1``; `UsageError` if the file is unreadable or
    malformed, or a cost is negative or infinite."""
    data = stated_json(path)
    if not isinstance(data, dict) or data.get("format") != PROFILE_FORMAT:
        raise UsageError(f"{path}: not a {PROFILE_FORMAT} file")
    try:
        calls = {str(text): CallCost.from_row(*row) for text, row in data["calls"].items()}
        if any(
            not (0 <= c.time < float("inf")) or min(c.workspace, c.library, *c.results) < 0
            for c in calls.values()
        ):
            raise ValueError("a cost is negative or infinite")
        return Profile(str(data["device"]), calls, str(path))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path}: a field is missing or has a wrong type: {error}") from None
