"""The documentation's site builds without a warning, and each page of it is in the navigation."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "reference/api/index.html").read_text(encoding="utf-8")
    assert "rematplan.plan_any_module.plan_module" in api
    assert "usage: rematplan plan" in (tmp_path / "reference/command-line/index.html").read_text(
        encoding="utf-8"
    )


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}" in navigation, page
