"""Every term of the glossary is defined in the file that it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(
    r"^\| ([^|]+) \| [^|]+ \| (?:`(\w+)` in )?`([\w/]+\.py)` \|$",
    (ROOT / "docs/glossary.md").read_text(),
    re.MULTILINE,
)


def test_every_row_is_read() -> None:
    table = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(table) - 1  # the heading


@pytest.mark.parametrize(("term", "name", "file"), ROWS, ids=[row[0] for row in ROWS])
def test_a_term_is_defined_where_the_glossary_says(term: str, name: str, file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    if name:
        assert re.search(rf"^(class|def) {name}\b|^{name}\b.*=", text, re.MULTILINE), (
            f"{name} is not in {file}"
        )
    else:
        assert re.search(term.replace(" ", "[ _]"), text, re.IGNORECASE), f"{file} does not say {term}"
