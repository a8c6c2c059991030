"""Laws of planning in place beside what people and libraries do to models: many steps have the bits of eager mode."""

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from same_bits import same_leaves
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import rematplan

STEPS = 4
ROWS = 128
pytestmark = pytest.mark.filterwarnings("ignore:.*has hooks on", "ignore:.*fork")


class Layer(nn.Module):
    """A residual layer with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.BatchNorm1d(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.back(torch.tanh(self.wide(self.norm(x)))), 0.2, self.training)


class Net(nn.Module):
    """Tied weights and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        loss = {} if labels is None else {"loss": functional.cross_entropy(logits, labels)}
        return {"logits": logits} | loss


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(at: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(at)
    return torch.randint(11, (rows,), generator=made), torch.randint(11, (rows,), generator=made)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def steps(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[Tensor]:
    """Train a model by its own loss, and yield the losses."""
    optimizer = optimizer or adamw(model)
    for ids, labels in map(batch, range(STEPS)) if batches is None else batches:
        optimizer.zero_grad()
        loss = model(ids, labels)["loss"]
        loss.backward()
        optimizer.step()
        yield loss.detach()


Prepare = Callable[[nn.Module], nn.Module]
Run = Callable[[Prepare], tuple[nn.Module, list[Any]]]
"""Trains a network that was prepared for it, and returns the network with what the steps gave."""


def by_steps(step: Callable[[nn.Module, int], Any]) -> Run:
    def run(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
        model = prepare(net())
        optimizer = adamw(model)
        results = []
        for at in range(STEPS):
            optimizer.zero_grad()
            results.append(step(model, at))
            if any(p.grad is not None for p in model.parameters()):
                optimizer.step()
        return model, results

    return run


def autocast(model: nn.Module, at: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(*batch(at))["loss"]
    loss.backward()
    return loss.detach()


def accumulation(model: nn.Module, at: int) -> list[Tensor]:
    losses = []
    for micro in range(2):
        loss = model(*batch(10 * at + micro))["loss"] / 2
        loss.backward()
        losses.append(loss.detach())
    return losses


def set_grad_enabled(model: nn.Module, at: int) -> tuple[Tensor, Tensor]:
    with torch.set_grad_enabled(at % 2 == 0):
        loss = model(*batch(at))["loss"]
    if loss.requires_grad:
        loss.backward()
    model.eval()
    with torch.no_grad():
        evaluated = model(*batch(at, 7))["logits"]
    model.train()
    return loss.detach(), evaluated


def loss_outside(model: nn.Module, at: int) -> Tensor:
    ids, labels = batch(at)
    loss = functional.cross_entropy(model(ids)["logits"], labels, label_smoothing=0.1)
    loss.backward()
    return loss.detach()


def grad_scaler(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
    """A scale that grows until gradients overflow, so that the scaler leaves out a step."""
    model, results = prepare(net()), []
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**124, growth_interval=1)
    for at in range(STEPS):
        optimizer.zero_grad()
        loss = 16 * model(*batch(at))["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append((loss.detach(), scaler.get_scale()))
    assert min(b / a for (_, a), (_, b) in itertools.pairwise(results)) < 1
    return model, results


def hooks(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
    """Noise on embeddings, as NEFTune adds it, and inputs that require gradients, as PEFT asks for."""

    def noise(module: nn.Module, _: Any, out: Tensor) -> Tensor:
        return out + torch.zeros_like(out).uniform_(-0.1, 0.1) if module.training else out

    def require(_module: nn.Module, _: Any, out: Tensor) -> None:
        out.requires_grad_(True)

    model = net()
    model.embed.register_forward_hook(require)
    model.embed.register_forward_hook(noise)
    return prepare(model), [*steps(model)]


class Scaled(nn.Module):
    """A network whose results are scaled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {name: torch.tanh(self.scale * one) for name, one in self.inner(ids, labels).items()}


def compiled(within: Callable[[nn.Module], nn.Module]) -> Run:
    """``within``: puts the network in what is compiled."""

    def run(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
        torch.compiler.reset()
        model = prepare(net())
        whole = within(model)
        return model, [*steps(torch.compile(whole, backend="aot_eager")), *whole.state_dict().values()]

    return run


def average(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
    """A deep copy whose weights follow the model's, that is evaluated after each step, and then trained."""
    model = prepare(net())
    mean = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    results: list[Any] = []
    for loss in steps(model):
        mean.update_parameters(model)
        mean.eval()
        results.append((loss, mean(*batch(0))))
    mean.train()
    return model, [*results, *steps(mean), *mean.state_dict().values()]


def other_weights(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
    """Calls with weights that are plain tensors, as of a meta-learner: the first call already, leaves, then steps from
    them."""
    model, found = prepare(net()), []
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for ids, labels in map(batch, range(STEPS)):
        loss = torch.func.functional_call(model, weights, (ids, labels))["loss"]
        steps_ = torch.autograd.grad(loss, list(weights.values()))
        inner = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), steps_, strict=True)}
        outer = torch.func.functional_call(model, inner, (ids, labels))["loss"]
        found += [loss, *torch.autograd.grad(outer, list(weights.values()))]
    return model, found


def pickled(model: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(model))
    return found


def goes_on_as(copied: Callable[[nn.Module], nn.Module]) -> Run:
    """Train a copy for some steps, and then its copy for the others; the optimizer's state goes along."""

    def run(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
        model = copied(prepare(net()))
        optimizer = adamw(model)
        first = [*steps(model, map(batch, range(STEPS // 2)), optimizer)]
        twin = copied(model)
        second = adamw(twin)
        second.load_state_dict(optimizer.state_dict())
        rest = [*steps(twin, map(batch, range(STEPS // 2, STEPS)), second)]
        return twin, [*first, *rest, *model.state_dict().values()]

    return run


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batches, the labels of which the model itself makes in the worker."""

    def __init__(self, model: nn.Module) -> None:
        self.teacher = model

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        ids, _ = batch(at)
        torch.manual_seed(at)
        with torch.no_grad():
            return ids, self.teacher(ids)["logits"].argmax(1)


def loader_workers(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
    """Two epochs, so that the second worker starts when the model has plans."""
    model = prepare(net())
    optimizer = adamw(model)
    loader = DataLoader(Batches(model), batch_size=None, num_workers=1, multiprocessing_context="fork")
    return model, [*steps(model, loader, optimizer), *steps(model, loader, optimizer)]


def smaller_batch(prepare: Prepare) -> tuple[nn.Module, list[Any]]:
    """A backward that runs out of memory; training goes on with half the batch, and the gradients left so far."""
    model = prepare(net())
    optimizer = adamw(model)

    def fail(_gradient: Tensor) -> None:
        raise MemoryError

    loss = model(*batch(0, 2 * ROWS))["loss"]
    loss.register_hook(fail)
    with pytest.raises(MemoryError):
        loss.backward()
    del loss
    return model, [*steps(model, optimizer=optimizer)]


RUNS: dict[str, Run] = {
    "autocast": by_steps(autocast),
    "accumulation": by_steps(accumulation),
    "set_grad_enabled": by_steps(set_grad_enabled),
    "a loss outside": by_steps(loss_outside),
    "GradScaler": grad_scaler,
    "hooks": hooks,
    "torch.compile": compiled(lambda model: model),
    "torch.compile of the rest": compiled(Scaled),
    "an average": average,
    "other weights": other_weights,
    "pickles": goes_on_as(pickled),
    "workers of a loader": loader_workers,
    "a smaller batch": smaller_batch,
}
IN_PARTS = ("accumulation", "set_grad_enabled", "hooks", "torch.compile", "an average")
"""Those that are also run with each layer planned as a part."""
in_place = partial(rematplan.apply, strategy="approx_dp", costs="roofline", refine=False)


def whole(model: nn.Module) -> nn.Module:
    return in_place(model, "85%")


def in_parts(model: nn.Module) -> nn.Module:
    return in_place(model, "95%", [name for name, part in model.named_modules() if isinstance(part, Layer)])


def results(run: Run, prepare: Prepare) -> tuple[nn.Module, list[Any]]:
    model, given = run(prepare)
    return model, [*given, model.state_dict(), torch.get_rng_state()]


@cache
def eager_results(run: Run) -> list[Any]:
    return results(run, lambda model: model)[1]


@pytest.mark.parametrize(
    ("name", "prepare"), [*((name, whole) for name in RUNS), *((name, in_parts) for name in IN_PARTS)]
)
def test_steps_are_those_of_eager_mode(name: str, prepare: Prepare) -> None:
    planned, given = results(RUNS[name], prepare)
    assert same_leaves(given, eager_results(RUNS[name]))
    assert any(plan.estimate.reruns for plan in rematplan.planning(planned).plans)
