"""Each example runs to its end in under a minute."""

import difflib
from pathlib import Path

import pytest
from forks import run_scripts

ROOT = Path(__file__).parent.parent.parent
PAIR = [ROOT / "examples" / f"train_{when}.py" for when in ("before", "after")]
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - set(PAIR))


def run(example: Path, folder: Path) -> str:
    (done,) = run_scripts([[example]], folder)
    assert done.status == 0, done.out + done.err
    return done.out


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
    losses = [
        [line for line in run(script, tmp_path).splitlines() if line.startswith("epoch")] for script in PAIR
    ]
    assert losses[0] == losses[1]
