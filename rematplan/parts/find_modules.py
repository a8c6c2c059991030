"""Which modules of a model are planned in parts: those that a user names, or those that are tried."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from rematplan.ir import ModelError, UsageError
from rematplan.module.plan_access import IN_PLACE, HasRunner


def named_modules(model: nn.Module, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of modules that match ``patterns``, without those inside of others; `UsageError` if a pattern is
    no text or matches none."""
    if not isinstance(patterns, Iterable):
        raise UsageError(f"modules is {patterns!r}; name modules by texts, such as 'layers.*'")
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not isinstance(pattern, str):
            raise UsageError(
                f"modules has a {type(pattern).__name__}; name modules by texts, such as 'layers.*'"
            )
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise UsageError(
                f"a {type(model).__name__} has no module {pattern!r}; it has {', '.join(names[:6])}"
                f"{', ...' * (len(names) > 6)}"
            )
        found.update(dict.fromkeys(matching))
    inner = {name for name in found if any(name.startswith(f"{outer}.") for outer in found)}
    return tuple(name for name in names if name in found and name not in inner)


def modules_of_names(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules of these names; `ModelError` if the model has one of them no longer."""
    every, found = dict(model.named_modules()), dict[str, nn.Module]()
    for name in names:
        if name not in every:
            raise ModelError(f"this {type(model).__name__} has no module {name} any longer; plan it again")
        found[name] = every[name]
    return found


def modules_to_try(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the inner modules that may be worth a plan: no single layers of PyTorch, and none that are
    planned."""
    return {
        name: part
        for name, part in model.named_modules()
        if name and not _is_layer(part) and not isinstance(part, HasRunner) and IN_PLACE not in vars(part)
    }


def _is_layer(part: nn.Module) -> bool:
    of_torch = type(part).__module__.startswith("torch.nn.")
    return of_torch and not any(True for _ in part.children())
