"""Words that only insiders understand are absent from docstrings, comments and names; docs/glossary.md has the terms to
use instead.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREE = ("ir", "planner", "runtime", "rematplan", "models", "benchmarks", "examples")
ABOLISHED = {
    r"(the|a|each|next|last) turns?": "loss boundary, iteration, round",
    r"partings?": "split of storages",
    r"presumptions?": "speculated assertions",
    r"unscattered": "scatter to cat",
    r"(the|its|an) outside(?! of)": "globals",
    r"beside": "next to, in addition to, concurrently with",
    r"(br(ing|ings|ought)|comes?|came|gives?|gave|had) back": "recover, rematerialise, return",
    r"ways? back": "recovery",
    r"lies?": "is, is stored",
    r"stands?(?! (for|out))": "is",
    r"but for": "except",
    r"lets? (it |them )?go": "free",
    r"(comes?|came) anew": "again",
}
"""Word → what to say instead. Matched without regard to case, at word boundaries."""
ABOLISHED_IDENTIFIERS = {
    "turn": "loss boundary, iteration, last forward op",
    "turns": "iterations, rounds",
    "way": "cache entry, recovery, rule",
    "ways": "cache entries, recoveries, rules",
    "parted": "split",
    "parting": "split",
    "presumption": "speculated assertion",
    "presumptions": "speculated assertions",
    "unscattered": "scatter to cat",
    "beside": "in addition to, concurrently with",
    "lie": "strides, layout",
    "lies": "strides, layout",
    "stand": "position, is",
    "stands": "position, is",
    "brought": "recovered",
}
"""Word of an identifier → what to say instead. Words are separated by underscores and capital letters."""
ABOLISHED_NAMES = ("members_plans", "carried_over", "outside")
"""Parts of names of modules, classes and functions that are abolished in addition."""


def files() -> list[Path]:
    """All files of the tree, each once: the package has links to its folders."""
    found = (path for top in TREE for path in sorted((ROOT / top).rglob("*.py")))
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Every docstring and comment with its line."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_no_text_uses_an_abolished_word() -> None:
    found = []
    for file in files():
        for line, text in texts(file.read_text(encoding="utf-8")):
            for word, instead in ABOLISHED.items():
                for match in re.finditer(rf"\b({word})\b", " ".join(text.split()), re.IGNORECASE):
                    found.append(f"{file.relative_to(ROOT)}:{line}: {match[0]!r}; say {instead}")
    assert not found, "\n".join(found)


def test_nothing_has_an_abolished_name() -> None:
    for file in files():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        kinds = (ast.ClassDef, ast.FunctionDef)
        names = [file.stem, *(node.name for node in ast.walk(tree) if isinstance(node, kinds))]
        for name in names:
            assert not any(word in name.lower() for word in ABOLISHED_NAMES), (
                f"{file.relative_to(ROOT)}: {name}"
            )
        for name in [file.stem, *identifiers(tree)]:
            for word in words(name) & ABOLISHED_IDENTIFIERS.keys():
                raise AssertionError(f"{file.relative_to(ROOT)}: {name}; say {ABOLISHED_IDENTIFIERS[word]}")


@pytest.mark.parametrize("folder", ["ir", "planner", "runtime", "rematplan"])
def test_a_class_has_a_name_of_its_own_in_its_folder(folder: str) -> None:
    homes: dict[str, list[str]] = {}
    kinds = {"RematplanCallback": 2}  # one for each trainer, by the name that users look for
    for file in files():
        if file.relative_to(ROOT).parts[0] != folder:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            # What a user meets has no alias of the name of a class, either.
            for name in (
                types_named_by(node) if folder == "rematplan" or isinstance(node, ast.ClassDef) else ()
            ):
                homes.setdefault(name, []).append(str(file.relative_to(ROOT)))
    shared = {
        name: files
        for name, files in homes.items()
        if len(files) > kinds.get(name, 1) and not name.startswith("_")
    }
    assert not shared


def types_named_by(node: ast.stmt) -> Iterator[str]:
    """The names of classes and type aliases that a statement of a module defines. Type variables have none."""
    if isinstance(node, ast.ClassDef):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        calls = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "TypeVar"
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if (
                isinstance(target, ast.Name)
                and re.fullmatch("[A-Z][a-z]+([A-Z][a-z]*)*", target.id)
                and not calls
            ):
                yield target.id


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name that a file gives to a class, function, argument, variable or attribute."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> set[str]:
    """The words of an identifier, in lower case."""
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


def test_an_abolished_word_is_found() -> None:
    source = '"""What the plan brings\nback, beside the rest."""\nx = 1  # where it lies\n'
    found = [
        match[0]
        for _, text in texts(source)
        for word in ABOLISHED
        for match in re.finditer(rf"\b({word})\b", " ".join(text.split()), re.IGNORECASE)
    ]
    assert sorted(found) == ["beside", "brings back", "lies"]


def test_an_abolished_identifier_is_found() -> None:
    source = "class LossTurn:\n    def __init__(self, ways): self.parted_at = [way for way in ways]\n"
    found = {word for name in identifiers(ast.parse(source)) for word in words(name)}
    assert found & ABOLISHED_IDENTIFIERS.keys() == {"turn", "ways", "way", "parted"}
