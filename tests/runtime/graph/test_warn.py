"""A warning's place: the user's line, whatever lies between it and where the warning is issued."""

import contextlib
import sys
import warnings
from typing import Any

import pytest

from rematplan.runtime.graph.warn import warn

SOURCE = """
def call(inner):
    inner()

@contextmanager
def block():
    yield
    warn("look")
"""


def functions_of(name: str | None) -> dict[str, Any]:
    """Functions from generated code whose module has this name, or none."""
    scope = {"warn": warn, "contextmanager": contextlib.contextmanager}
    if name is not None:
        scope["__name__"] = name
    exec(compile(SOURCE, f"<code of {name}>", "exec"), scope)
    return scope


OURS = eval("lambda: warn('look')", {"__name__": "rematplan.runtime", "warn": warn})
"""Warns as a file of the package would."""


@pytest.mark.parametrize("name", [None, "rematplan", "rematplan.runtime.graph", "torch.nn.modules.module"])
def test_frames_of_the_package_of_torch_and_of_generated_code_are_passed_over(name: str | None) -> None:
    call = functions_of(name)["call"]
    line = sys._getframe().f_lineno + 2
    with pytest.warns(UserWarning, match="look") as said:
        call(OURS)
    assert (said[0].filename, said[0].lineno) == (__file__, line)


def test_the_end_of_a_block_of_the_package_is_passed_over() -> None:
    block = functions_of("rematplan.runtime.capture.restore_state")["block"]
    with pytest.warns(UserWarning, match="look") as said, block():
        pass
    assert said[0].filename == __file__


def test_a_module_whose_name_only_begins_alike_is_the_users() -> None:
    with pytest.warns(UserWarning, match="look") as said:
        functions_of("torchvision.models")["call"](OURS)
    assert said[0].filename == "<code of torchvision.models>"


def test_a_filter_for_the_users_module_holds() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=__name__)
        OURS()
    assert not said


def test_a_category_is_kept() -> None:
    with pytest.warns(DeprecationWarning, match="look"):
        warn("look", DeprecationWarning)
