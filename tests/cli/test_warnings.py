"""A command prints a warning as one line."""

import sys
import warnings

import pytest

from rematplan.cli import info, main


def test_a_warning_is_one_line_without_a_place_in_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = warnings.formatwarning

    def warning(*_: object) -> int:
        sys.stderr.write(warnings.formatwarning("costs vary", UserWarning, "file.py", 1))
        return 0

    monkeypatch.setattr(info, "run", warning)
    assert main(["info", "devices"]) == 0
    assert capsys.readouterr().err == "rematplan: costs vary\n"
    assert warnings.formatwarning is before
