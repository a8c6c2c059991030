"""What the site takes from the program and its pages.

A line ``{{ commands }}`` becomes the help texts of all commands, ``<!-- rooms -->`` a picture of the rooms in the
tables below it.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import Any

from rematplan.cli import main
from rematplan.cli.run_command import COMMANDS


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text with each help text in its place."""
    if "{{ commands }}" in markdown:
        markdown = markdown.replace("{{ commands }}", "\n".join(sections()))
    return (
        markdown.replace("<!-- rooms -->", picture_of(markdown)) if "<!-- rooms -->" in markdown else markdown
    )


FOLDER = re.compile(r"^## `(\w+)/`: ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROOM = re.compile(r"^\| `([\w/]+)` \|", re.MULTILINE)
WIDTH, HEIGHT, GAP = 190, 24, 6
"""Of a room's box, in pixels, and the space between two."""


def picture_of(markdown: str) -> str:
    """An SVG: the folders as columns, each with its rooms from first to last; arrows show the flow of data."""
    columns = [(name, what, ROOM.findall(table)) for name, what, table in FOLDER.findall(markdown)]
    height = 60 + max(len(rooms) for _, _, rooms in columns) * (HEIGHT + GAP)
    parts = []
    for k, (name, what, rooms) in enumerate(columns):
        x = k * (WIDTH + 40)
        parts.append(
            f'<text x="{x}" y="16" font-weight="bold">{name}/</text><text x="{x}" y="34" font-size="11">{what}</text>'
        )
        if k:
            parts.append(f'<path d="M{x - 34} 14 h26 m-6 -5 l6 5 l-6 5" fill="none" stroke="currentColor"/>')
        for row, room in enumerate(rooms):
            y = 44 + row * (HEIGHT + GAP)
            box = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="none" stroke="currentColor"/>'
            parts.append(f'{box}<text x="{x + 8}" y="{y + 16}" font-size="12">{room}</text>')
    size = f'viewBox="0 0 {len(columns) * (WIDTH + 40)} {height}"'
    style = 'role="img" aria-label="The rooms" style="max-width:100%" fill="currentColor"'
    return f"<svg {size} {style}>{''.join(parts)}</svg>"


def sections() -> Iterator[str]:
    """The help text of the program, then a section for each command."""
    yield f"```text\n{help_of('')}```\n"
    for command in COMMANDS:
        yield f"## {command}\n\n```text\n{help_of(command)}```\n"


def help_of(command: str) -> str:
    """What ``rematplan COMMAND --help`` prints, 100 columns wide."""
    os.environ["COLUMNS"] = "100"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main([*filter(None, [command]), "--help"])
    return said.getvalue()
