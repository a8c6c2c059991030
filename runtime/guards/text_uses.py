"""What a forward does with the text of an unknown tensor or number: one that is only printed, logged or raised
decides nothing.

The statement that makes the text is found in the source by the instruction's position.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType

from rematplan.runtime.guards.assertions import TRACERS

TEXT = "<a tensor of a step that is being planned>"
"""The text of a traced tensor, or of a number in one, whose value is not known."""
LOGGERS = ("logging", "warnings", "loguru")
"""The modules that format texts only to write them."""
LOG_METHODS = ("debug", "info", "warning", "warn", "error", "critical", "exception", "log")
PROGRESS = ("set_description", "set_postfix_str")
WRITERS = frozenset((*LOG_METHODS, *PROGRESS, "print", "write", "echo", "secho", "_assert"))
"""Functions and methods that write a text for people, if their result is dropped."""
MAKERS = frozenset({"str", "repr", "format", "ascii", "join"})
"""Functions and methods whose result is a text of their arguments."""
_PARTS = (
    ast.JoinedStr,
    ast.FormattedValue,
    ast.Tuple,
    ast.List,
    ast.Starred,
    ast.keyword,
    ast.ListComp,
    ast.GeneratorExp,
)
"""Expressions that only contain a text."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)


def leaves(frame: FrameType | None) -> bool:
    """Return whether a text is only written for people. ``frame``: the one whose present instruction makes the text."""
    if frame is None:
        return False
    if f"{frame.f_globals.get('__name__')}".startswith(TRACERS):
        return True  # an error or a log of the tracer
    outer: FrameType | None = frame
    while outer is not None:
        if f"{outer.f_globals.get('__name__')}".partition(".")[0] in LOGGERS:
            return True
        outer = outer.f_back
    return _leaves(frame.f_code, frame.f_lasti)


@cache
def _leaves(code: CodeType, instruction: int) -> bool:
    position = tuple(code.co_positions())[instruction // 2]
    source = _Source.of(code.co_filename)
    return source is not None and any(
        _makes_text(node) and source.leaves(node) for node in source.at.get(position, ())
    )


class _Source:
    """The syntax tree of a file."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.at: dict[tuple[int | None, ...], list[ast.AST]] = {}
        """The expressions by their first and last line, and first and last column."""
        for node in ast.walk(tree):
            self.parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            if isinstance(node, ast.expr):
                position = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
                self.at.setdefault(position, []).append(node)

    @staticmethod
    @cache
    def of(file: str) -> _Source | None:
        """Return the syntax tree of a file, or of a notebook's cell; None if its source is not known."""
        try:
            return _Source(ast.parse("".join(linecache.getlines(file))))
        except SyntaxError:
            return None

    def leaves(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Return whether the value of an expression is only written for people. ``seen``: the assignments to variables
        that have led here."""
        if node in seen:
            return True
        above = self.parents.get(node)
        if isinstance(node, ast.Call) and _name(node.func) in WRITERS:
            return isinstance(above, ast.Expr)
        match above:
            case ast.Raise() | ast.Expr():
                return True
            case ast.Assert():
                return node is above.msg
            case ast.Call():
                raised = isinstance(self.parents[above], ast.Raise)
                return (raised or _name(above.func) in WRITERS | MAKERS) and self.leaves(above, seen)
            case ast.BinOp(op=ast.Add() | ast.Mod()):
                return self.leaves(above, seen)
            case ast.IfExp():
                return node is not above.test and self.leaves(above, seen)
            case ast.Subscript():
                return node is above.value and self.leaves(above, seen)
            case (
                ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
                | ast.AugAssign(target=ast.Name(id=name), op=ast.Add())
            ):
                return all(self.leaves(one, seen | {node}) for one in self._loads(above, name))
            case _:
                return isinstance(above, _PARTS) and self.leaves(above, seen)

    def _loads(self, node: ast.AST, name: str) -> Iterator[ast.AST]:
        """Yield the reads of a local variable in the function around ``node``. If it is no local variable, yield its
        scope, which `leaves` rejects: it may be read anywhere."""
        while not isinstance(node, (*_SCOPES, ast.Module, ast.Lambda, ast.ClassDef)):
            node = self.parents[node]
        shared = (one for one in ast.walk(node) if isinstance(one, (ast.Global, ast.Nonlocal)))
        if not isinstance(node, _SCOPES) or any(name in one.names for one in shared):
            yield node
        else:
            yield from (
                one
                for one in ast.walk(node)
                if isinstance(one, ast.Name) and one.id == name and _is_read(one)
            )


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _makes_text(node: ast.AST) -> bool:
    """Return whether an expression is one whose value is a text, or that writes one."""
    if isinstance(node, ast.Call):
        return _name(node.func) in WRITERS | MAKERS
    return isinstance(node, (ast.JoinedStr, ast.FormattedValue)) or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    )


def _name(function: ast.expr) -> str:
    return getattr(function, "id", "") or getattr(function, "attr", "")
