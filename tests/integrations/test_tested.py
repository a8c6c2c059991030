"""A version of a library that was not tested warns once."""

import warnings
from importlib.metadata import version

from rematplan.integrations.tested import warn_if_untested


def test_an_untested_version_warns_once_wherever_it_is_noticed() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_if_untested("torch", ("1.2", "1.3"))
        warn_if_untested("torch", ("1.2", "1.3"))
    (one,) = seen
    assert "was not tested with torch 2." in str(one.message)
    assert "(tested: 1.2, 1.3)" in str(one.message)


def test_a_tested_version_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("torch", (".".join(version("torch").split(".")[:2]),))
