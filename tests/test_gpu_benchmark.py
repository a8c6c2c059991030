"""benchmarks/gpu.py without a GPU: its files are complete whenever it ends, and state what is missing."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("gpu.json", "gpu.md")]
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu.py"),
        "--device",
        "cpu",
        "--small",
        "--minutes",
        "0",
    ]
    subprocess.run(
        [*command, "--json", files[0], "--table", files[1]], check=True, cwd=ROOT, capture_output=True
    )
    rows = json.loads(Path(files[0]).read_text())["rows"]
    assert {row["network"] for row in rows} == {"resnet50", "gpt", "unet", "llama"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert len(rows) == 4 * 2 * (7 + 2)
    assert all(row["note"] for row in rows)
    assert Path(files[1]).read_text().count("left out: no time") == len(rows)


def test_a_missing_device_is_said(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu.py: no CUDA device is here")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "gpu.json").exists()
