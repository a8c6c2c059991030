"""Notes about weights that the loader trains, or does not, by a rule where the file does not say it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rematplan.ir.onnx import weight_roles as roles
from rematplan.ir.onnx.draft import Draft, Origin
from rematplan.ir.onnx.graph import Weight
from rematplan.ir.onnx.weights_or_buffers import GENERATED

SAMPLE = 16  # elements that are compared before whole tensors are
MAX_NAMED = 4  # names that a note lists


def weight_notes(draft: Draft, weights: Sequence[Weight], reached: Iterable[str]) -> tuple[str, ...]:
    """Return notes about trained weights that the network may have tied, and about tensors that are not trained
    although gradients reach them. ``reached``: the names of the values that gradients reach."""
    trained = {w.name: w for w in weights if w.role == "parameter" and not w.generated}
    equal = () if draft.producer == "pytorch" else _equal(list(trained.values()))
    derived = _derived(draft.origins, trained)
    tells = any(o.kind for o in draft.origins.values())
    untrained = {w.name for w in weights if w.role == "constant" and w.shape and w.dtype in roles.FLOATS}
    untrained &= {n for n in draft.initialisers if not GENERATED.match(n)} & set(reached)
    said = (
        equal
        and f"weights with equal values are trained separately ({named(equal)}); if the network ties them, let its "
        "nodes read one initialiser",
        derived
        and f"weights that the export computed from other weights are trained separately from these "
        f"({named(derived)})",
        untrained
        and not tells
        and f"float initialisers with names or values of masks and tables are not trained "
        f"({named(sorted(untrained))})",
    )
    return tuple(text for text in said if text)


def named(names: Sequence[str]) -> str:
    """Return the first names of a list in a row, and how many there are more."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _derived(origins: Mapping[str, Origin], trained: Mapping[str, Weight]) -> list[str]:
    """Return the trained weights that the exporter computed from a trained tensor, or from one that other
    weights share.
    """
    users: dict[str, list[str]] = defaultdict(list)
    for name in trained:
        for source in origins.get(name, Origin()).folded_from:
            if source != name and origins.get(source, Origin()).kind == "PARAMETER":
                users[source].append(name)
    shared = (names for source, names in users.items() if source in trained or len(names) > 1)
    return list(dict.fromkeys(name for names in shared for name in names))


def _equal(weights: Sequence[Weight]) -> list[str]:
    """Return the names of the weights that equal another one. Weights whose values are all one number do not count."""
    alike: dict[object, list[Weight]] = defaultdict(list)
    for weight in weights:
        alike[weight.dtype, weight.shape].append(weight)
    groups: dict[object, list[Weight]] = defaultdict(list)
    for kind, same in alike.items():
        for weight in same if len(same) > 1 else ():
            values = weight.load().ravel()
            sample = values[:: max(1, math.ceil(values.size / SAMPLE))]
            if values.size > 1 and (sample != sample[0]).any():
                groups[kind, sample.tobytes()].append(weight)
    found = []
    for same in groups.values():
        first = same[0].load()
        equal = [w.name for w in same[1:] if np.array_equal(w.load(), first)]
        found.extend([same[0].name, *equal] if equal else [])
    return found
