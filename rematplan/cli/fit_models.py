"""Models without data for ``rematplan fit``: of the zoo, an ONNX file, a user's function, or Hugging Face."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rematplan.cli.problem_source import TIMM, zoo_errors, zoo_sizes
from rematplan.cli.user_functions import user_function
from rematplan.fitting.question import BATCH, IMAGE, MOST, Question, SizedModel, WithoutData, training, typed
from rematplan.ir import UsageError, first_line
from rematplan.models import ZOO
from rematplan.runtime.capture.fake_weights import without_data
from rematplan.step_loading import Sizes, load_model

Dims = Mapping[str, int]
IMAGE_UNIT = 32
"""Sides of images are tried in multiples of it, as networks halve them several times, or of patches: `_unit`."""
LABELS: Mapping[str, tuple[str, ...]] = {
    "ForCausalLM": ("batch", "tokens"),
    "LMHeadModel": ("batch", "tokens"),
    "ForMaskedLM": ("batch", "tokens"),
    "ForConditionalGeneration": ("batch", "tokens"),
    "ForTokenClassification": ("batch", "tokens"),
    "ForSequenceClassification": ("batch",),
    "ForImageClassification": ("batch",),
}
"""The dimensions of the labels of Hugging Face's models, by how the name of the class ends."""


def sized_model(name: str, vary: str, dims: Dims, asked: Question, loss: str | None) -> SizedModel:
    """Return the model that ``name``, the argument MODEL, names, for any size of the dimension ``vary``. ``dims``: the
    stated sizes. `UsageError` if the model cannot be made, or has no such size."""
    if name.endswith(".json"):
        return _hugging_face(Path(name), vary, dims, asked)
    if ":" in name and not Path(name).exists():
        return _of_function(name, vary, dims, asked, loss)
    if name.startswith(TIMM):
        return _of_timm(name.removeprefix(TIMM), vary, dims, asked, loss)
    return _loaded(name, vary, dims, asked, loss)


def _loaded(name: str, vary: str, dims: Dims, asked: Question, loss: str | None) -> SizedModel:
    """Return a model of the zoo or of a file whose dimension ``vary`` varies; `UsageError` if it has no such dimension
    of known size."""
    known = ZOO[name].sizes if name in ZOO else dims
    if vary not in {**known, **dims}:
        shown = f"its sizes are {', '.join(known)}" if name in ZOO else f"state its size: --dim {vary}=8"
        raise UsageError(f"--vary {vary}: {name} has no such dimension whose size is known; {shown}")
    size = {**known, **dims}[vary]

    def at(stated: int) -> WithoutData:
        here = {**dims, vary: stated}
        with zoo_errors():
            if name in ZOO:
                made = load_model(name, sizes=Sizes(**zoo_sizes(name, here)), loss=loss, weightless=True)
            else:
                made = load_model(name, dims=here, loss=loss, weightless=True)
        return typed(WithoutData(made.module, made.batch, made.mode), asked)

    return SizedModel(
        Path(name).stem, vary, size, at, _unit(name, vary, size), samples={**known, **dims}.get(BATCH)
    )


def _unit(name: str, vary: str, size: int) -> int:
    """Return the number of which sizes are multiples. A model's ``name`` may state the side of its patches."""
    patch = re.search(r"_patch([1-9]|[12][0-9]|3[0-2])(?![0-9])", name)
    side = int(patch[1]) if patch else 1
    return math.gcd(size, IMAGE_UNIT // side * side) if vary == IMAGE else 1


def _of_function(name: str, vary: str, dims: Dims, asked: Question, loss: str | None) -> SizedModel:
    """Return the model that a function of the user makes, for any size of ``vary``. `UsageError` if a stated size is
    none of its parameters, the size of ``vary`` is not known, or the function fails."""
    function = user_function(name)
    parameters = inspect.signature(function).parameters
    if unknown := [d for d in (vary, *dims) if d not in parameters and d != BATCH]:
        raise UsageError(
            f"{name} has no parameter {unknown[0]!r}; give it one to state the size {unknown[0]}"
        )
    batch = None if BATCH in parameters else dims.get(BATCH)

    def made(stated: Dims, batch: int | None) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
        """Return what `without_data` makes of the user's function at the ``stated`` sizes. ``batch``: replaces the
        first size of inputs, if not None."""
        inputs: list[torch.Tensor] = []

        def make() -> nn.Module:
            model, given = _called(name, function, {k: v for k, v in stated.items() if k in parameters})
            module, tensors = _positional(model, given)
            inputs.extend(tensors)
            return module

        return without_data(make, lambda: [_like(t, inputs[0].shape[:1], batch) for t in inputs])

    size = dims.get(vary)
    if size is None and vary in parameters and isinstance(parameters[vary].default, int):
        size = parameters[vary].default
    if size is None and vary in parameters:
        raise UsageError(f"{name}: state the size of {vary}, such as --dim {vary}=8")
    if size is None:
        shape = made(dims, None)[1][0].shape
        if not shape:
            raise UsageError(f"{name}: the first input is a scalar; its first dimension must be the batch")
        size = int(shape[0])

    def at(stated: int) -> WithoutData:
        resized = stated if vary == BATCH and BATCH not in parameters else batch
        return training(*made({**dims, vary: stated}, resized), asked, loss)

    return SizedModel(name, vary, size, at, _unit(name, vary, size), samples=dims.get(BATCH))


def _of_timm(name: str, vary: str, dims: Dims, asked: Question, loss: str | None) -> SizedModel:
    """Return a model of timm for any size of ``vary``, the batch or the image. `UsageError` for another size, a name
    that timm does not know, or without timm."""
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError:
        raise UsageError(f"{TIMM}{name} needs the package timm") from None
    if not timm.is_model(name):
        alike = ", ".join(f"{TIMM}{other}" for other in timm.list_models(f"*{name}*")[:3])
        raise UsageError(f"timm has no model {name!r}{f'; it has {alike}' if alike else ''}")
    channels, side, _ = timm.get_pretrained_cfg(name, allow_unregistered=False).input_size
    sizes = {BATCH: 1, IMAGE: side, **dims}
    if unknown := [d for d in (vary, *dims) if d not in (BATCH, IMAGE)]:
        raise UsageError(f"{TIMM}{name} has no size {unknown[0]!r} to state; known: batch, image")

    def at(stated: int) -> WithoutData:
        """Return the training of the model at the size ``stated``, without data. `UsageError` if timm cannot make
        it."""
        here = {**sizes, vary: stated}
        image = (here[IMAGE], here[IMAGE])

        def make() -> nn.Module:
            try:
                return cast(nn.Module, timm.create_model(name, img_size=image).train())
            except TypeError:  # this model takes images of any size
                return cast(nn.Module, timm.create_model(name).train())
            except Exception as error:  # of any kind: a model may refuse a size
                raise UsageError(f"{TIMM}{name} cannot be made: {first_line(error)}") from error

        made = without_data(make, lambda: [torch.empty(here[BATCH], channels, *image)])
        return training(*made, asked, loss)

    return SizedModel(name, vary, sizes[vary], at, _unit(name, vary, sizes[vary]), samples=sizes[BATCH])


def _called(name: str, function: Callable[..., Any], sizes: Dims) -> tuple[nn.Module, Any]:
    """Return the module and the inputs that a user's ``function`` makes for ``sizes``; `UsageError` if it fails or
    returns something else."""
    try:
        made = function(**sizes)
    except (Exception, SystemExit) as error:  # of any kind, in the user's code
        raise UsageError(
            f"{name} fails on the meta device, on which tensors have no data: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"{name} must return a pair: the module, and the inputs of its forward")
    return made


class _ByName(nn.Module):
    """A model whose inputs have names, called with the same inputs by position."""

    def __init__(self, model: nn.Module, names: Sequence[str], others: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.others = model, names, others

    def forward(self, *batch: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.names, batch, strict=True)), **self.others)


def _positional(model: nn.Module, given: Any) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return a model and its inputs by position, from a tensor, a sequence or a mapping of tensors; else
    `UsageError`."""
    if isinstance(given, torch.Tensor):
        return model, [given]
    found = given.values() if isinstance(given, Mapping) else given
    tensors = list(found) if isinstance(found, Iterable) else []
    if not tensors or not all(isinstance(t, torch.Tensor) for t in tensors):
        raise UsageError("the inputs must be tensors: one, a sequence of them, or a mapping of names to them")
    return (_ByName(model, list(given), {}) if isinstance(given, Mapping) else model), tensors


def _like(t: torch.Tensor, leading: Sequence[int], batch: int | None) -> torch.Tensor:
    """Return a new tensor like ``t``, whose first dimension is ``batch`` if it was that of the first input."""
    shape = (batch, *t.shape[1:]) if batch and t.shape[:1] == tuple(leading) else t.shape
    return torch.empty(shape, dtype=t.dtype)


def _hugging_face(path: Path, vary: str, dims: Dims, asked: Question) -> SizedModel:
    """Return the model that a configuration file of transformers describes, for any size of ``vary``. `UsageError` for
    an unknown architecture or size, a malformed file, or without transformers."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise UsageError(f"{path}: a configuration file needs the package transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # of any kind: each model checks its configuration in its own way
        raise UsageError(f"{path} is no configuration file of a model: {first_line(error)}") from error
    name = str(next(iter(getattr(config, "architectures", None) or ()), ""))
    labels = next((dims_ for ending, dims_ in LABELS.items() if name.endswith(ending)), None)
    if labels is None or not hasattr(transformers, name):
        raise UsageError(
            f"{path}: its architecture is {name or 'not stated'}; known are those of transformers whose names end with "
            f"{', '.join(LABELS)}"
        )
    images = name.endswith("ForImageClassification")
    longest = int(getattr(config, "max_position_embeddings", None) or MOST)
    sizes = {BATCH: 1, "depth": int(getattr(config, "num_hidden_layers", 0) or 0)}
    side = getattr(config, "image_size", 224)
    sizes |= {IMAGE: side if isinstance(side, int) else side[0]} if images else {"tokens": min(longest, 1024)}
    if unknown := [d for d in (vary, *dims) if d not in sizes or not sizes[d] or (images and d == IMAGE)]:
        raise UsageError(f"{path}: {name} has no size {unknown[0]!r} to state; known: {', '.join(sizes)}")
    stated = {**sizes, **dims}
    if stated.get("tokens", 0) > longest:
        raise UsageError(
            f"{path}: the longest sequence of the model has {longest} tokens (max_position_embeddings)"
        )

    def at(size: int) -> WithoutData:
        here = {**stated, vary: size}
        module, inputs, mode = _transformer(transformers, name, config, here, labels)
        return training(module, inputs, mode, asked, "output")

    most = longest if vary == "tokens" else MOST
    return SizedModel(name, vary, stated[vary], at, 1, most, stated[BATCH])


def _transformer(
    transformers: Any, name: str, config: Any, sizes: Dims, labels: Sequence[str]
) -> tuple[nn.Module, tuple[torch.Tensor, ...], AbstractContextManager[object]]:
    """Return a model of Hugging Face with labels, so that its first output is its loss, and a batch of it, both without
    data. `UsageError` if the configuration makes no such model."""
    changed = type(config).from_dict(config.to_dict())
    if sizes["depth"]:
        changed.num_hidden_layers = sizes["depth"]
    by_name = ["pixel_values" if IMAGE in sizes else "input_ids", "labels"]

    def make() -> nn.Module:
        others = {} if IMAGE in sizes else {"use_cache": False}
        try:
            return _ByName(getattr(transformers, name)(changed).train(), by_name, others)
        except Exception as error:  # of any kind: the configuration may be that of another architecture
            why = f"{type(error).__name__}: {first_line(error)}"
            raise UsageError(f"{name} cannot be made from this configuration: {why}") from error

    def batch() -> list[torch.Tensor]:
        if IMAGE in sizes:
            side = sizes[IMAGE]
            first = torch.empty(sizes[BATCH], changed.num_channels, side, side)
        else:
            first = torch.empty(sizes[BATCH], sizes["tokens"], dtype=torch.long)
        return [first, torch.empty([sizes[d] for d in labels], dtype=torch.long)]

    return without_data(make, batch)
