"""What several commands need for their arguments: readers of values, groups of options, and checks of output paths."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal

from rematplan.ir import UsageError
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.overlap.place_on_lanes import PAYS, USUAL
from rematplan.planner.registry import LIMIT, STRATEGIES, strategy

MOST_SIZES = 4096
"""The largest number of sizes of a range such as ``batch=1..64``."""
DEFAULT = "default"
"""The value of an option such as ``--inverses`` if the user states none with it."""
LARGEST = 2**31 - 1
"""The largest size or count that an option accepts."""
DTYPES = ("fp32", "bf16", "bf16-mixed")


def positive(text: str) -> int:
    """Read a whole number from 1 to `LARGEST` (2³¹ − 1), or raise `ArgumentTypeError`."""
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {LARGEST}")
    return int(text)


def positive_number(text: str) -> float:
    """Read a finite number above zero, or raise `ArgumentTypeError`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above zero")
    return number


def inversion_error(text: str) -> bool | float:
    """Read the value of ``--inverses``: True if it has none, else the largest relative error, above zero, or raise
    `ArgumentTypeError`."""
    return True if text == DEFAULT else positive_number(text)


def dimension(text: str) -> tuple[str, int]:
    """Read ``batch=8`` as ``("batch", 8)``, or raise `ArgumentTypeError`."""
    name, equals, size = text.rpartition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not of the form NAME=SIZE, such as batch=8")
    return name, positive(size)


def dimension_or_range(text: str) -> tuple[str, int | range]:
    """Read ``batch=8`` as ``("batch", 8)``, ``batch=1..64`` as ``("batch", range(1, 65))``, and ``length=8..64..8`` in
    steps of 8. A range includes both ends, and has 2 to `MOST_SIZES` sizes; else `ArgumentTypeError`."""
    name, equals, sizes = text.rpartition("=")
    ends = sizes.split("..")
    if not (name and equals and 2 <= len(ends) <= 3):
        return dimension(text)
    first, last, step = *map(positive, ends), *([1] * (3 - len(ends)))
    found = range(first, last + 1, step)
    if not 2 <= len(found) <= MOST_SIZES or found[-1] != last:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a range of 2 to {MOST_SIZES} sizes, such as batch=1..64 or length=8..64..8"
        )
    return name, found


def dimensions(pairs: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return dimensions' sizes by name; `UsageError` if one has two sizes."""
    bound: dict[str, int] = {}
    for name, size in pairs:
        if bound.setdefault(name, size) != size:
            raise UsageError(f"--dim {name} has two sizes, {bound[name]} and {size}; state one")
    return bound


MEANINGS: Mapping[str, tuple[str, str]] = {
    "time_limit": ("SECONDS", "time limit of the search"),
    "seed": ("N", "seed of the search's random numbers"),
    "keep_order": ("", "keep the first runs of all ops in the order of the model"),
    "reuse": (
        "",
        "start from plans that earlier commands have saved, and save new ones (see: rematplan info cache)",
    ),
    "gap": (
        "SHARE",
        "end the search when the overhead is proven to be this close to the optimum (0.001: 0.1 percent of the step)",
    ),
    "grid": ("N", "number of thresholds, in bytes, to try"),
    "objective": ("", "which plans to prefer: those with the least time, or those with the least memory"),
    "ticks": ("N", "number of units of recomputation time; more are finer and slower"),
    "budgets": ("N", "largest number of budgets to make a table for"),
    "max_lower_sets": (
        "N",
        "largest number of lower sets: exact_dp refuses problems with more, approx_dp uses as many of them",
    ),
    "units": ("N", "number of units of memory; more are finer and slower"),
    "plans": ("N", "number of plans to make from one table"),
    "near": ("BYTES", "make plans for this budget only; 0: for all"),
    "moves": (
        "N",
        "number of changes to try, instead of a time limit, for the same plan on every machine; 0: use the time limit",
    ),
    "upstream": ("N", "largest number of earlier ops that a stage may run again"),
    "two_lanes": (
        "",
        "run recomputation and inverses at the same time as the gradients, on a second thread or CUDA stream, as far "
        f"ahead as the budget allows; auto: if that is predicted to save {100 * PAYS:.0f} percent of the time",
    ),
    "lane_speed": (
        "X",
        "speed of each of two lanes while both work, from 0.5 (no gain) to 1; 0: measured if ops are measured, "
        f"otherwise {USUAL.speed}",
    ),
    "deterministic": ("", "count moves instead of seconds, a fixed number for each second of time_limit"),
    "shares": ("N", "number of plans, from one that inverts nothing to one that inverts as much as possible"),
}
"""For each option of the strategies, the unit of its value and its help text."""


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """Add to ``parser`` the option ``-S``, which states options of strategies (planning algorithms). The help text
    lists the strategies with their options."""
    _add_options(
        parser, "NAME=VALUE", "an option of the strategy, such as time_limit=60 (see below); may be repeated"
    )
    width = max(map(len, STRATEGIES))
    rows = (f"  {name:{width}}  {kind.summary}" for name, kind in STRATEGIES.items())
    parser.epilog = "\n".join(("strategies:", *rows, "", "options of strategies:", *_meanings()))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_time_limit(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add to ``parser`` the option ``-S`` of a command whose one strategy is `auto` with a time limit."""
    _add_options(parser, f"{LIMIT}=SECONDS", meaning)


def _add_options(parser: argparse.ArgumentParser, form: str, meaning: str) -> None:
    kind: dict[str, Any] = {"type": strategy_option, "action": "append", "default": []}
    parser.add_argument("-S", dest="strategy_options", **kind, metavar=form, help=meaning)


def time_limit(args: argparse.Namespace, usual: float) -> float:
    """Return the seconds of search that ``-S time_limit=`` states, or ``usual``; `UsageError` for other options."""
    stated = strategy_options(args)
    if unknown := sorted(stated.keys() - {LIMIT}):
        raise UsageError(f"-S {unknown[0]}: pipelines have one option of this kind, {LIMIT}")
    return float(getattr(strategy(Auto.name, **{LIMIT: usual} | stated), LIMIT))


def strategy_option(text: str) -> tuple[str, str]:
    """Read ``gap=0.01`` as ``("gap", "0.01")``, with underscores for hyphens, or raise `ArgumentTypeError`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not of the form NAME=VALUE, such as time_limit=60"
        )
    return name.replace("-", "_"), value


def _meanings() -> Iterator[str]:
    """Yield lines that explain each option of the strategies, with its defaults."""
    for name, owners in _fields_by_name().items():
        kinds = [typing.get_type_hints(STRATEGIES[owner])[name] for owner in owners]
        unit, meaning = MEANINGS[name]
        unit = _choices(kinds) or ("on,off" if kinds[0] is bool else unit)
        defaults = {owner: str(_shown(_default(field))) for owner, field in owners.items()}
        same = set(defaults.values())
        shown = (
            f"default {same.pop()}" if len(same) == 1 else "; ".join(map(": default ".join, defaults.items()))
        )
        of = "all" if len(owners) == len(STRATEGIES) else ", ".join(owners)
        yield from textwrap.wrap(
            f"{name}={unit}  {meaning} ({of}; {shown})", 100, initial_indent="  ", subsequent_indent="      "
        )


def _fields_by_name() -> dict[str, dict[str, Field[Any]]]:
    found: dict[str, dict[str, Field[Any]]] = {}
    for owner, kind in STRATEGIES.items():
        for field in fields(kind):
            found.setdefault(field.name, {})[owner] = field
    return found


def _default(field: Field[Any]) -> object:
    return "computed" if field.default is MISSING else field.default


def _shown(default: object) -> object:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else default


def _choices(kinds: Sequence[Any]) -> str:
    choices = dict.fromkeys(c for k in kinds if typing.get_origin(k) is Literal for c in typing.get_args(k))
    return ",".join(map(str, choices))


def strategy_options(args: argparse.Namespace) -> dict[str, object]:
    """Return the options of strategies that ``-S`` states, by name."""
    return dict(args.strategy_options)


def one_strategy(args: argparse.Namespace) -> Strategy:
    """Return the strategy (planning algorithm) that ``--strategy`` names, with the options that the arguments state."""
    return strategy(args.strategy, **strategy_options(args))


def several_strategies(names: Sequence[str], options: Mapping[str, object]) -> dict[str, Strategy]:
    """Return strategies by name, each with those of the options that it has. `UsageError` for an unknown strategy, and
    for an option, except ``time_limit``, that none of them has."""
    made: dict[str, Strategy] = {}
    unused = set(options) - {LIMIT}
    for name in names:
        known = {f.name for f in fields(STRATEGIES[name])} if name in STRATEGIES else set()
        made[name] = strategy(name, **{k: v for k, v in options.items() if k in known})
        unused -= known
    if unused:
        raise UsageError(
            f"none of the strategies {', '.join(names)} has the option {', '.join(sorted(unused))}; see --help"
        )
    return made


def check_outputs(*paths: Path | None) -> None:
    """Raise `UsageError` if an output file is a folder, is in a folder that does not exist, or is stated twice. Paths
    that are None are ignored."""
    stated: set[Path] = set()
    for path in filter(None, paths):
        if path.is_dir():
            raise UsageError(f"{path} is a folder; name a file")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: the folder {path.parent} does not exist; create it first")
        if path.resolve() in stated:
            raise UsageError(f"two outputs have the same path, {path}; name different files")
        stated.add(path.resolve())
