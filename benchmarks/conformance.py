"""Run ONNX's own test suite against rematplan's ONNX ops, and count the cases that passed, were refused, or failed.

usage: python benchmarks/conformance.py [--refusals] [--kind Node] [--kind Real] ...

Exit status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
import tempfile
import unittest
import unittest.mock
import warnings

import onnx.backend.test.runner as suite

import rematplan.onnx_backend as backend

KINDS = {
    "Real": "real",
    "Simple": "simple",
    "PyTorchConverted": "pytorch-converted",
    "PyTorchOperator": "pytorch-operator",
    "Node": "node",
}
"""The suite's kinds of cases, and what its loader calls them."""


class Tally(unittest.TestResult):
    """A `unittest.TestResult` that counts the outcomes of ONNX's test cases.

    ``counts``: for each kind of case, how many passed, were refused or failed. ``reasons``: how often each op, or other
    reason, was refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.reasons: collections.Counter[str] = collections.Counter()

    def _count(self, test: unittest.TestCase, outcome: str) -> None:
        self.counts[type(test).__name__.removeprefix("OnnxBackend").removesuffix("ModelTest")][outcome] += 1

    def addSuccess(self, test: unittest.TestCase) -> None:
        """Count a case with right outputs as passed."""
        self._count(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Count a case as refused, with the unsupported op or the reason. Cases for a device that this machine lacks do
        not count."""
        if "doesn't support device" in reason:
            return
        self._count(test, "refused")
        op = re.search(r"the op (\w+) is not supported", reason)
        self.reasons[op.group(1) if op else reason[-90:]] += 1

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        """Count a case with wrong outputs as failed."""
        super().addFailure(test, err)  # type: ignore[arg-type]
        self._count(test, "failed")

    def addError(self, test: unittest.TestCase, err: object) -> None:
        """Count a case that raised an error as failed."""
        super().addError(test, err)  # type: ignore[arg-type]
        self._count(test, "failed")


def run(kinds: tuple[str, ...] = tuple(KINDS)) -> Tally:
    """Run the cases of ONNX's test suite of the given kinds (keys of `KINDS`), and return their outcomes."""
    tally, wanted, load = Tally(), {KINDS[k] for k in kinds}, suite.load_model_tests
    # The suite loads every kind, and computes the node cases' references by it, which takes longer than the others run.
    only = unittest.mock.patch.object(
        suite, "load_model_tests", lambda kind: load(kind=kind) if kind in wanted else []
    )
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings(), only:
        warnings.simplefilter("ignore")
        os.environ.setdefault("ONNX_HOME", home)  # the suite writes its references there
        cases = suite.Runner(backend, __name__).test_cases
        for name in (f"OnnxBackend{k}ModelTest" for k in kinds):
            unittest.defaultTestLoader.loadTestsFromTestCase(cases[name]).run(tally)
    return tally


def show(tally: Tally, refusals: bool) -> None:
    """Print a table of the outcomes by kind, the failed cases and, if ``refusals``, how often each op was refused."""
    print(f"{'cases':<18}{'passed':>8}{'refused':>9}{'failed':>8}")
    for kind, counts in tally.counts.items():
        print(f"{kind:<18}{counts['passed']:>8}{counts['refused']:>9}{counts['failed']:>8}")
    for test, trace in (*tally.failures, *tally.errors):
        print(f"failed: {test.id().rsplit('.', 1)[-1]}: {trace.strip().splitlines()[-1][:150]}")
    if refusals:
        for reason, count in tally.reasons.most_common():
            print(f"refused {count:>4}: {reason}")


def main() -> int:
    """Run the chosen cases and print the table. Return the exit status: 1 if a case failed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refusals", action="store_true", help="list what was refused")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these cases")
    arguments = parser.parse_args()
    tally = run(tuple(arguments.kind or KINDS))
    show(tally, arguments.refusals)
    return 1 if tally.failures or tally.errors else 0


if __name__ == "__main__":
    sys.exit(main())
