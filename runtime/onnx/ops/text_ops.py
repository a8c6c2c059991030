"""Rows of the op table: text, which is numpy arrays of Python strings and never becomes a tensor."""

# ruff: noqa: ARG001  (every handler takes the node, whether it reads it or not)
from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from rematplan.ir.onnx.graph import Graph, Node
from rematplan.runtime.onnx.ops.rows import Rows, integer, refuse, text
from rematplan.runtime.onnx.ops.values import TEXT

ROWS = Rows()

# Ops of other themes that take text too, by what they do to it.
ON_TEXT: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"Equal": np.equal}
GIVES_TEXT = frozenset({"StringConcat", "StringNormalizer", "StringSplit"})

CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


def _each(function: Callable[..., object], *arrays: np.ndarray, kind: type = object) -> np.ndarray:
    return np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays)).astype(kind)


@ROWS.add("StringNormalizer", 10, raw=True)
def string_normalizer(node: Node, words: np.ndarray) -> np.ndarray:
    """Words without the stopwords, in lower or upper case; of none left, one empty word."""
    change, exact = text(node, "case_change_action", "NONE"), integer(node, "is_case_sensitive", 0)
    if change not in CASES:
        raise refuse(node, f"case_change_action is {change!r}")
    if words.ndim not in (1, 2) or (words.ndim == 2 and words.shape[0] != 1):
        raise refuse(node, f"words of shape {words.shape}; (words) and (1, words) are allowed")
    alike = str if exact else str.lower
    stopped = {alike(w) for w in node.attributes.get("stopwords", ())}  # type: ignore[union-attr, arg-type]
    kept = [CASES[change](w) for w in words.ravel() if alike(w) not in stopped] or [""]
    return np.asarray(kept, object).reshape((1, -1) if words.ndim == 2 else -1)


@ROWS.add("StringConcat", 20, raw=True)
def string_concat(node: Node, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """One string behind the other, broadcast."""
    return _each(lambda a, b: a + b, first, second)


@ROWS.add("StringSplit", 20, raw=True)
def string_split(node: Node, strings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parts of each string, filled up with empty ones, and how many each has."""
    delimiter, most = text(node, "delimiter", "") or None, integer(node, "maxsplit", -1)
    split = [s.split(delimiter, most) if s else [] for s in strings.ravel()]
    width = max(map(len, split), default=0)
    parts = np.full((len(split), width), "", object)
    for row, found in enumerate(split):
        parts[row, : len(found)] = found
    counts = np.asarray([len(s) for s in split], np.int64)
    return parts.reshape(*strings.shape, width), counts.reshape(strings.shape)


@ROWS.add("RegexFullMatch", 20, raw=True)
def regex_full_match(node: Node, strings: np.ndarray) -> np.ndarray:
    """Whether each string is of the pattern."""
    try:
        pattern = re.compile(text(node, "pattern", ""))
    except re.error as error:
        raise refuse(node, f"its pattern: {error}") from None
    return _each(lambda s: pattern.fullmatch(s) is not None, strings, kind=bool)


def check_text(graph: Graph) -> None:
    """Refuse a node that is given text and does not take it.

    Raises:
        ModelError: names the node.
    """
    takes = {row.op for row in ROWS.rows} | set(ON_TEXT)
    texts = {v.name for v in graph.inputs if v.dtype == TEXT}
    texts.update(w.name for w in graph.weights if w.dtype == TEXT)
    for node in graph.nodes:
        if texts.intersection(node.inputs) and (node.domain or node.op not in takes):
            raise refuse(node, "text cannot be computed with")
        if node.op in GIVES_TEXT and not node.domain:
            texts.add(node.outputs[0])
