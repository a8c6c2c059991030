"""Every Python and console block of the README and of the documentation runs, page by page.

Blocks of a page share one namespace and one empty folder, and run in their order. An HTML comment in front of a block,
``<!-- tests: ARGUMENTS -->``, adds arguments to its ``rematplan`` commands, so that the tests run them on a smaller
network; ``<!-- tests: raises NAME -->`` says that a Python block ends with that exception, and
``<!-- tests: needs NAME -->`` that it runs only where that package is installed. What a console block shows
is compared line by line with what the command prints, numbers and their units of bytes aside: the zoo's networks have
fewer blocks here.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from rematplan.auditing import measured_steps
from rematplan.cli import main
from rematplan.fitting import question
from rematplan.planner.auto.auto_strategy import Auto
from rematplan.planner.strategies.anneal import Anneal
from rematplan.planner.strategies.approx_dp import ApproxDP
from rematplan.runtime.graph.compat import functorch_config

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- tests: (?P<note>[^\n]*?) -->\s*\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
TIMED = ("plan", "step", "curve", "compare")
"""Commands that take a time limit, which the tests make short."""
SECONDS = "0.1"
SHELL = re.compile(
    r"(make( [a-z]+)?|pip install .*|python (benchmarks|tests)/\w+\.py.*|rematplan (demo|pipeline) ?.*|torchrun .*)$"
)
"""What a block of plain shell may say: nothing that should run as a console block."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text and the note in front of it."""

    page: Path
    line: int
    language: str
    body: str
    note: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text[: found.start("body")].count("\n")
        body = re.sub(rf"^{found['indent']}", "", found["body"], flags=re.MULTILINE)
        yield Block(page, line, found["language"], body, found["note"] or "")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty folder to work in, searches of a tenth of a second, and PyTorch's settings restored afterwards."""
    monkeypatch.chdir(tmp_path)
    for kind in (Auto, Anneal):
        defaults = kind.__init__.__defaults__
        monkeypatch.setattr(kind.__init__, "__defaults__", (float(SECONDS), *defaults[1:]))
    monkeypatch.setattr(measured_steps, "SECONDS", float(SECONDS))
    monkeypatch.setattr(question, "SEARCH", ApproxDP())
    settings = functorch_config.get_config_copy()
    yield
    for name, value in settings.items():
        if getattr(functorch_config, name) != value:
            setattr(functorch_config, name, value)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
@pytest.mark.usefixtures("short", "few_blocks", "one_load")
def test_the_blocks_of_a_page_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        needed = re.fullmatch(r"needs (\w+)", block.note)
        if needed and find_spec(needed[1]) is None:
            continue
        if block.language == "python":
            run_python(block, namespace)
        elif block.language == "console":
            run_console(block, capsys)
        elif block.language == "json":
            json.loads(block.body)
        elif block.language in ("sh", "bash", "shell"):
            for line in filter(None, (line.partition("#")[0].strip() for line in block.body.splitlines())):
                assert SHELL.match(line), f"{block.place}: {line!r} must be a console block"


def run_python(block: Block, namespace: dict[str, object]) -> None:
    # Blank lines in front, so that a traceback names the page's line.
    code = compile("\n" * block.line + block.body, str(block.page), "exec")
    raises = re.fullmatch(r"raises (\w+)", block.note)
    if raises is None:
        exec(code, namespace)
        return
    with pytest.raises(Exception) as error:  # noqa: PT011, B017, RUF100
        exec(code, namespace)
    assert type(error.value).__name__ == raises[1]


def commands(block: Block) -> Iterator[tuple[list[str], list[str]]]:
    """Each command of a console block, as words, and the lines that the block shows of its output."""
    joined = block.body.replace("\\\n", " ")
    for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield shlex.split(command, comments=True), [line for line in shown if line.strip() not in ("", "...")]


def with_options(words: list[str], more: list[str]) -> list[str]:
    """The words with further options. Sizes and options of the strategy replace those of the same name."""
    names = {word.partition("=")[0] for word in more if "=" in word}
    pairs = [pair for pair in pairwise(words) if pair[0] in ("--dim", "-S")]
    gone = {value for _, value in pairs if value.partition("=")[0] in names}
    kept = [word for word, after in zip(words, [*words[1:], ""], strict=True) if not {word, after} & gone]
    return [*kept, *more]


def run_console(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    status = int(found[1]) if (found := re.search(r"exit (\d)", block.note)) else 0
    more = shlex.split(re.sub(r"exit \d", "", block.note))
    for words, shown in commands(block):
        capsys.readouterr()
        if words[0] == "rematplan":
            arguments = with_options(words[1:], more if words[1] in (*TIMED, "fit", "report") else [])
            if words[1] in TIMED and not any(word.startswith("time_limit=") for word in arguments):
                arguments += ["-S", f"time_limit={SECONDS}"]
            assert main(arguments) == status, f"{block.place}: {words} {capsys.readouterr().err}"
            said = "".join(capsys.readouterr())
        else:
            assert words[0] == "python", f"{block.place}: {words[0]} is not run by the tests"
            script = ROOT / words[1]
            done = subprocess.run(
                [sys.executable, str(script) if script.exists() else words[1], *words[2:]],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            said = done.stdout + done.stderr
            assert done.returncode == status, f"{block.place}: {said}"
        printed = {label(line) for line in said.splitlines()}
        for line in shown:
            assert label(line) in printed, f"{block.place}: {line!r} is not printed by {words}"


def label(line: str) -> str:
    """What a line of output says before its value, numbers and their units of bytes aside."""
    first = re.split(r"\s{2,}", line.strip())[0]
    return re.sub(r"[-+]?\d[\d.,]*( [KMG]iB)?", "#", first)


def test_the_pages_have_blocks() -> None:
    assert sum(block.language in ("python", "console") for page in PAGES for block in blocks(page)) >= 10


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def test_every_file_that_a_page_names_exists() -> None:
    named = re.compile(r"`((?:ir|planner|runtime|models|rematplan|benchmarks|tests|examples|docs)/[\w/.-]*)`")
    for page in PAGES:
        for path in named.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)} names {path}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200
