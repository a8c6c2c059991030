"""What the site takes from the program itself: a line ``{{ help COMMAND }}`` becomes the command's own help text."""

import contextlib
import io
import os
import re
from typing import Any

LINE = re.compile(r"^\{\{ help (\w*) ?\}\}$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text with each help text in its place."""
    return LINE.sub(lambda found: f"```text\n{help_of(found[1])}```", markdown)


def help_of(command: str) -> str:
    """What ``rematplan COMMAND --help`` prints, 100 columns wide."""
    from rematplan.cli import main

    os.environ["COLUMNS"] = "100"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main([*filter(None, [command]), "--help"])
    return said.getvalue()
