"""Load one of the networks that rematplan provides (the zoo), or an ONNX file, and capture its training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from rematplan.ir import UsageError
from rematplan.ir.onnx.graph import Graph, Value
from rematplan.ir.onnx.load import load_onnx
from rematplan.ir.onnx.training_form import Forms
from rematplan.models import ZOO, build, example_inputs
from rematplan.module.captures import ReadyCapture, capture_call
from rematplan.runtime.capture.fake_weights import is_weightless, without_data
from rematplan.runtime.capture.with_loss import WithLoss, with_loss
from rematplan.runtime.costs.measure import check_fits
from rematplan.runtime.execute.compile import tensors_in_step
from rematplan.runtime.graph.captured_step import CapturedStep
from rematplan.runtime.inversion.find_inverses import is_exact, with_exact_inverses, with_inverses
from rematplan.runtime.onnx.module import OnnxModule
from rematplan.runtime.onnx.ops.values import torch_dtype
from rematplan.runtime.onnx.rebatch import rebatched

MOST_REFUSALS = 5
"""The largest number of notes that say why a tensor cannot be recovered by an inverse."""
Made = tuple[nn.Module, tuple[torch.Tensor, ...], AbstractContextManager[object]]
"""A model, its inputs, and the context in which it runs (`LoadedModel.mode`)."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its loss and a batch, not captured."""

    module: WithLoss
    """The model with its loss."""
    batch: tuple[torch.Tensor, ...]
    """The model's inputs and the targets."""
    name: str
    """The name of the network or the file."""
    notes: tuple[str, ...]
    """What the loader changed or noticed, as sentences for the user."""
    mode: AbstractContextManager[object]
    """The context in which the module runs: for a model without data the fake mode of its tensors."""


@dataclass(frozen=True)
class LoadedStep:
    """A model with its loss, a batch, and the captured forward and backward of the model and the loss.

    ``module``: the model with its loss. ``batch``: the inputs of ``module``: the model's inputs and the targets.
    ``step``: the captured step, possibly with inverses: ops that compute an input of an op from its output. ``notes``:
    what the loader changed or noticed, as sentences for the user. ``inexact``: whether ``step`` has inverses that
    round, splits or fused kernels, so that gradients may differ from plain autograd's by rounding errors.

    ``bare``: the same step as captured, without any inverse. ``capture``: that from which it was made, with which a
    planned module can begin.
    """

    module: WithLoss
    batch: tuple[torch.Tensor, ...]
    step: CapturedStep
    bare: CapturedStep
    capture: ReadyCapture
    notes: tuple[str, ...] = ()
    inexact: bool = False

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers by their names in the step; empty without weights."""
        if is_weightless(self.batch):
            return {}
        return tensors_in_step(self.module)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a network that rematplan provides (a network of the zoo). None selects the network's default; each
    network has only some of these sizes.

    ``batch``: samples. ``image``: height and width of the image in pixels. ``width``: channels, or features of a token.
    ``tokens``: length of the sequence. ``depth``: number of layers. ``classes``: number of scores of a classifier.
    ``vocabulary``: number of distinct tokens.
    """

    batch: int | None = None
    image: int | None = None
    width: int | None = None
    tokens: int | None = None
    depth: int | None = None
    classes: int | None = None
    vocabulary: int | None = None


def load_step(
    model: str | Path,
    *,
    sizes: Sizes = Sizes(),
    dims: Mapping[str, int] | None = None,
    loss: str | None = None,
    seed: int = 0,
    bn: str = "as-is",
    dropout: str = "as-is",
    weightless: bool = False,
    inverses: bool = False,
    device: str = "cpu",
) -> LoadedStep:
    """Load a network that rematplan provides (a network of the zoo) or an ONNX file, and capture its training step for
    a random batch.

    An ONNX file's weights are used. Weights that the file does not contain, weights of the zoo's networks, inputs and
    targets are random, drawn from ``seed``.

    Args:
        model: the name of a network of the zoo, or the path of an ONNX file.
        sizes: sizes of a network of the zoo.
        dims: sizes of an ONNX file's symbolic dimensions, by name.
        loss: ``cross_entropy``, ``mse`` or ``output`` (the model's output is the loss). None: the loss that fits the
            output.
        seed: for random weights, inputs and targets. They are drawn on the CPU, so they are the same for every device.
        bn: how the batch norms of an ONNX file's model run: ``as-is`` (unchanged), ``train`` (batch statistics) or
            ``frozen`` (stored statistics).
        dropout: how the dropouts of an ONNX file's model run: ``as-is`` (unchanged), ``on`` or ``off``.
        weightless: capture without data. A network of any size then takes no memory, and external weights are not read.
            The step can be planned, but not run.
        inverses: find all inverses (ops that compute an input from an output), including inverses that round, so that
            gradients may differ by rounding errors. Otherwise find only exact inverses, which copy, move or negate
            numbers.
        device: where the step is captured, measured and run: ``cpu``, ``cuda`` or, for example, ``cuda:1``.

    Raises:
        UsageError: an unknown name; sizes for a file; ``dims``, ``bn`` or ``dropout`` for a network of the zoo; a loss
            that does not fit the output; a device that this machine does not have.
        ModelError: the file cannot be read, or its training step cannot be captured.
        ZooError: sizes that the network cannot have.
    """
    return _open(
        captured(
            load_model(
                model,
                sizes=sizes,
                dims=dims,
                loss=loss,
                seed=seed,
                bn=bn,
                dropout=dropout,
                weightless=weightless,
                device=device,
            )
        ),
        inverses,
    )


def load_model(
    model: str | Path,
    *,
    sizes: Sizes = Sizes(),
    dims: Mapping[str, int] | None = None,
    loss: str | None = None,
    seed: int = 0,
    bn: str = "as-is",
    dropout: str = "as-is",
    weightless: bool = False,
    device: str = "cpu",
) -> LoadedModel:
    """Load a network of the zoo or an ONNX file with a loss and a random batch, not captured; arguments and errors as
    of `load_step`."""
    forms, place = Forms(bn, dropout), _device(device)
    notes: tuple[str, ...] = ()
    if isinstance(model, str) and model in ZOO:
        if forms != Forms():
            raise UsageError(f"{model}: --bn and --dropout can only be used with ONNX files")
        if dims:
            raise UsageError(
                f"{model}: dims are those of ONNX files; for a network of the zoo state sizes=Sizes(batch=8)"
            )
        name, loss = model, loss or ZOO[model].loss
        module, inputs, mode = _of_zoo(name, sizes, seed, weightless, place)
    else:
        path = Path(model)
        if isinstance(model, str) and path.suffix != ".onnx" and not path.exists():
            raise UsageError(f"{model!r} is neither an ONNX file nor a network of the zoo ({', '.join(ZOO)})")
        if sizes != Sizes():
            raise UsageError(
                f"{path.name}: sizes are those of networks of the zoo; state a file's dimensions with dims"
            )
        graph = rebatched(load_onnx(path, dims or {}, forms))
        name, notes = path.stem, graph.notes
        module, inputs, mode = _of_file(graph, seed, weightless, place)
    with mode:
        return LoadedModel(*with_loss(module, inputs, loss, seed), name, notes, mode)


def _device(name: str) -> torch.device:
    """Return the torch device called ``name``; `UsageError` if there is none here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    there = torch.cuda.device_count() if device.type == "cuda" else int(device.type == "cpu")
    if (device.index or 0) >= there:
        raise UsageError(f"there is no device {name!r} here; write cpu, cuda or cuda:1")
    return device


def _open(loaded: LoadedStep, inverses: bool) -> LoadedStep:
    """Return the step with exact inverses only. With ``inverses``, return it with all inverses and notes on tensors
    that no inverse recovers."""
    if not inverses:
        return replace(loaded, step=with_exact_inverses(loaded.step))
    blind = is_weightless(loaded.batch)
    found = with_inverses(loaded.step, loaded.named, renormalise=True)
    notes = list(found.refused[:MOST_REFUSALS])
    if len(found.refused) > len(notes):
        notes.append(f"{len(found.refused) - len(notes)} more are not recovered for such reasons")
    if blind:
        notes.append("the model was loaded without weights, so inverses that divide by a scale are not used")
    inexact = not all(map(is_exact, found.step.inverses))
    return replace(loaded, step=found.step, notes=(*loaded.notes, *notes), inexact=inexact)


def _of_file(graph: Graph, seed: int, weightless: bool, device: torch.device) -> Made:
    """Return an ONNX graph as a module, random inputs, and the context in which both are used. ``weightless``: without
    data."""
    if weightless:
        return without_data(
            lambda: OnnxModule(graph, device="meta").train(),
            lambda: tuple(map(_empty_input, graph.inputs)),
            device,
        )
    module = OnnxModule(graph, seed=seed).train().to(device)
    generator = torch.Generator().manual_seed(seed)
    return module, tuple(_random_input(v, generator).to(device) for v in graph.inputs), nullcontext()


def _of_zoo(name: str, sizes: Sizes, seed: int, weightless: bool, device: torch.device) -> Made:
    """Return a network of the zoo, example inputs, and the context in which both are used. ``weightless``: without
    data."""
    stated = asdict(sizes)
    if weightless:
        return without_data(
            lambda: build(name, **stated), lambda: example_inputs(name, seed=seed, **stated), device
        )
    inputs = tuple(x.to(device) for x in example_inputs(name, seed=seed, **stated))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(name, **stated).to(device), inputs, nullcontext()


def captured(loaded: LoadedModel) -> LoadedStep:
    """Return a loaded model with its captured training step, and a note if some trained parameters get no gradient.
    `ModelError` if the step cannot be captured."""
    module, batch, notes = loaded.module, loaded.batch, loaded.notes
    with loaded.mode:
        ready, step = capture_call(module, tuple(batch), {}, loaded.name)
    parameters = sum(1 for p in module.parameters() if p.requires_grad)
    idle = parameters - sum(1 for output in step.outputs if output.kind == "gradient")
    if idle:
        why = "the loss is of one output alone, the first that depends on any"
        notes = (*notes, f"{idle} of {parameters} parameters get no gradient: {why}")
    return LoadedStep(module, batch, step, step, ready, notes)


def _empty_input(value: Value) -> torch.Tensor:
    return torch.empty(value.shape or (), dtype=torch_dtype(value.dtype, f"the graph input {value.name!r}"))


def _random_input(value: Value, generator: torch.Generator) -> torch.Tensor:
    """Return numbers for a graph's input, by its type: normal random numbers, True, or random integers 0 and 1, which
    are valid indices."""
    dtype = torch_dtype(value.dtype, f"the graph input {value.name!r}")
    shape = value.shape or ()
    check_fits(math.prod(shape) * dtype.itemsize, f"the graph input {value.name!r}'s numbers")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
