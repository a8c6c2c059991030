"""Each example runs to its end in under a minute."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAIR = [ROOT / "examples" / f"train_{when}.py" for when in ("before", "after")]
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - set(PAIR))


def run(example: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,  # a crowded machine; alone each takes a few seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    assert run(example, tmp_path)


def test_three_lines_turn_a_script_into_a_planned_one(tmp_path: Path) -> None:
    before, after = PAIR
    added = [
        line[1:].strip()
        for line in difflib.unified_diff(before.read_text().splitlines(), after.read_text().splitlines(), n=0)
        if line.startswith("+") and line[1:].strip() and '"""' not in line and not line.startswith("+++")
    ]
    assert len(added) == 3, added
    losses = [[line for line in run(script, tmp_path).splitlines() if "loss" in line] for script in PAIR]
    assert losses[0] == losses[1]
