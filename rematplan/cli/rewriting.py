"""The options ``--split`` and ``--kernels``, which ask for other ops than those of eager mode."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypedDict

from rematplan.cli.arguments import dimension
from rematplan.ir import UsageError

if TYPE_CHECKING:
    from rematplan.plans.options import Splits


class Rewriting(TypedDict):
    """What `PlanOptions` takes from these options."""

    split: Splits
    kernels: str


def add_rewriting(parser: argparse.ArgumentParser, *, curve: bool = False) -> None:
    """Add ``--split`` and ``--kernels`` to ``parser``. ``curve``: whether there are several budgets; the help then says
    that ``auto`` splits for the lowest."""
    parser.add_argument(
        "--split",
        type=_split,
        action="append",
        default=[],
        metavar="WHAT",
        help="split ops along rows, so that only parts of large tensors exist at a time: auto chooses what, and into "
        f"how many parts{', for the lowest budget' if curve else ''}; or a module and a number of parts, such as "
        "lm_head=8 or loss=8, which may be repeated; off (default) splits nothing. Gradients of weights in what is "
        "split are sums over parts, and differ by rounding",
    )
    parser.add_argument(
        "--kernels",
        default="eager",
        metavar="KIND",
        help="eager (default), or fused: Inductor compiles one kernel for several neighbouring ops, between matrix "
        "products, convolutions and attention. Results differ by rounding",
    )


def stated_rewriting(args: argparse.Namespace) -> Rewriting:
    """Return what the arguments ask for; `UsageError` for a mixture of modules and words. Commands without the options
    ask for neither splits nor fused kernels."""
    from rematplan.plans.options import stated_splits

    stated = getattr(args, "split", [])
    named = [one for one in stated if not isinstance(one, str)]
    if len(named) < len(stated) and len(stated) > 1:
        raise UsageError("--split: state auto or off alone, or modules only")
    split = stated_splits(dict(named) or (stated[0] if stated else "off"))
    return {"split": split, "kernels": getattr(args, "kernels", "eager")}


def rewriting_options(args: argparse.Namespace) -> list[str]:
    """Return the names of the options that ask for other ops."""
    asked = {"--split": any(one != "off" for one in args.split), "--kernels": args.kernels != "eager"}
    return [name for name, stated in asked.items() if stated]


def refuse_rewriting(args: argparse.Namespace, why: str) -> None:
    """Raise a `UsageError` that says why an option that asks for other ops cannot be used, if there is one."""
    for name in rewriting_options(args):
        raise UsageError(f"{name} {why}")


def _split(text: str) -> str | tuple[str, int]:
    """Read ``off``, ``auto``, or a module and a number of parts, such as ``lm_head=8``; else `ArgumentTypeError`."""
    return text if text in ("off", "auto") else dimension(text)
