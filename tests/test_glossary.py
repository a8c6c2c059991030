"""Every term of the glossary is defined in the file that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = re.findall(
    r"^\| ([^|]+) \| [^|]+ \| (?:`(\w+)` in )?`([\w/]+\.py)` \|$",
    (ROOT / "docs/glossary.md").read_text(),
    re.MULTILINE,
)


def test_every_row_is_read() -> None:
    table = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(table) - 1  # the heading


def test_a_term_is_defined_where_the_glossary_says() -> None:
    for term, name, file in ROWS:
        text = (ROOT / file).read_text(encoding="utf-8")
        if name:
            found = re.search(rf"^(class|def) {name}\b|^{name}\b.*=", text, re.MULTILINE)
            assert found, f"{name} is not in {file}"
        else:
            found = re.search(term.replace(" ", "[ _]"), text, re.IGNORECASE)
            assert found, f"{file} does not say {term}"
