"""What the commands' arguments share: their types, groups of options, checks of output files."""

from __future__ import annotations

import argparse
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from rematplan.ir import UsageError
from rematplan.planner.core.strategy import Strategy
from rematplan.planner.registry import LIMIT, STRATEGIES, strategy

LARGEST = 2**31 - 1
"""A size or count that nobody means to exceed."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError`s: one line, like every other error."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to {LARGEST}")
    return int(text)


def positive_number(text: str) -> float:
    """A number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above zero")
    return number


def dimension(text: str) -> tuple[str, int]:
    """A binding such as ``batch=8``."""
    name, equals, size = text.rpartition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not of the form NAME=SIZE, such as batch=8")
    return name, positive(size)


def dimensions(pairs: Sequence[tuple[str, int]]) -> dict[str, int]:
    """The bindings by name.

    Raises:
        UsageError: a name is bound twice to different sizes.
    """
    bound: dict[str, int] = {}
    for name, size in pairs:
        if bound.setdefault(name, size) != size:
            raise UsageError(f"--dim {name} is given twice, as {bound[name]} and as {size}")
    return bound


SIZES = {
    "batch": "samples in a batch",
    "image": "side of the image",
    "width": "channels, or features of a token",
    "tokens": "length of the sequence",
    "depth": "layers",
    "classes": "classes to score",
    "vocabulary": "distinct tokens",
}
"""Sizes of a network of the zoo, and what they count. `rematplan.models` would load torch to say so."""


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Sizes of a network of the zoo."""
    group = parser.add_argument_group(
        "sizes of a network of the zoo (rematplan models lists which has which)"
    )
    for size, text in SIZES.items():
        group.add_argument(f"--{size}", type=positive, metavar="N", help=text)


def given_sizes(args: argparse.Namespace) -> dict[str, int | None]:
    """The sizes by name, None where none is given."""
    return {size: getattr(args, size) for size in SIZES}


MEANINGS: Mapping[str, tuple[str, str]] = {
    "time_limit": ("SECONDS", "how long to search"),
    "seed": ("N", "of the search's random numbers"),
    "keep_order": ("", "keep the first runs of all ops in the order of the model"),
    "reuse": ("", "begin with plans that earlier runs have kept, and keep those found (rematplan cache)"),
    "gap": (
        "SHARE",
        "end once the overhead is proven to be within this of the least there is (0.001: 0.1 percent)",
    ),
    "grid": ("N", "how many thresholds of bytes are tried"),
    "objective": ("", "which chains of a table are taken: from its least time up, or from its least memory"),
    "ticks": ("N", "steps that recomputation time is rounded to; more are finer and slower"),
    "budgets": ("N", "how many budgets a table is filled for, at most"),
    "max_lower_sets": ("N", "lower sets at most: exact_dp refuses more, approx_dp takes as many of them"),
    "units": ("N", "units that memory is rounded to; more are finer and slower"),
    "plans": ("N", "how many plans are made of a table"),
    "near": ("BYTES", "the one budget that plans are made for; 0: all"),
    "moves": ("N", "changes to try in place of the time limit, for the same plan on every machine; 0: none"),
    "upstream": ("N", "how many earlier ops a stage may run again"),
    "shares": ("N", "how many plans, from one that inverts nothing to one that inverts all it can"),
}
"""What each option of the strategies means, and the unit of its value."""


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """An option for every field of every strategy, and below all options what each strategy does."""
    width = max(map(len, STRATEGIES))
    rows = (f"  {name:{width}}  {kind.summary}" for name, kind in STRATEGIES.items())
    parser.epilog = "\n".join(("strategies:", *rows))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    group = parser.add_argument_group("options of the strategies")
    for name, owners in _fields_by_name().items():
        kinds = [typing.get_type_hints(STRATEGIES[owner])[name] for owner in owners]
        unit, meaning = MEANINGS[name]
        defaults = {owner: _shown(_default(field)) for owner, field in owners.items()}
        text = f"{meaning} ({'; '.join(f'{owner}: default {one}' for owner, one in defaults.items())})"
        flag, target = "--" + name.replace("_", "-"), f"option_{name}"
        if kinds[0] is bool:
            group.add_argument(
                flag, dest=target, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            group.add_argument(flag, dest=target, metavar=_choices(kinds) or unit, help=text)


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
    return "{" + ",".join(map(str, choices)) + "}" if choices else ""


def strategy_options(args: argparse.Namespace) -> dict[str, object]:
    """The strategy options that were given."""
    names = (n.removeprefix("option_") for n in vars(args) if n.startswith("option_"))
    return {n: value for n in names if (value := getattr(args, f"option_{n}")) is not None}


def one_strategy(args: argparse.Namespace) -> Strategy:
    """The strategy that ``--strategy`` names, with its options.

    Raises:
        UsageError: an unknown strategy, or an option that it does not have.
    """
    return strategy(args.strategy, **strategy_options(args))


def several_strategies(names: Sequence[str], options: Mapping[str, object]) -> dict[str, Strategy]:
    """Strategies by name; each gets the options it has.

    Raises:
        UsageError: an unknown strategy, or an option that none of them has.
    """
    made: dict[str, Strategy] = {}
    unused = set(options) - {LIMIT}
    for name in names:
        known = {f.name for f in fields(STRATEGIES[name])} if name in STRATEGIES else set()
        made[name] = strategy(name, **{k: v for k, v in options.items() if k in known})
        unused -= known
    if unused:
        flags = ", ".join("--" + n.replace("_", "-") for n in sorted(unused))
        raise UsageError(f"none of the strategies {', '.join(names)} has the option {flags}")
    return made


def check_outputs(*paths: Path | None) -> None:
    """Refuse output files that cannot be written, before any work is done for them.

    Raises:
        UsageError: a folder that is not there, a folder in place of the file, or one file for two outputs.
    """
    given = [p for p in paths if p is not None]
    for path in given:
        if path.is_dir():
            raise UsageError(f"{path} is a folder; name a file")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
    if len({p.resolve() for p in given}) < len(given):
        raise UsageError(f"{given[0]} is named for more than one output")
