"""One of two processes of `test_sharded_layers`: trains models whose layers FSDP2 shards one by one, plainly and
planned under one budget, and compares.

usage: sharded_layers_worker.py RANK RENDEZVOUS_FILE
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from forks import gloo_rank
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import rematplan
from rematplan.ir import ModelError
from rematplan.module.plan_access import runner_of
from rematplan.planner.pipeline import rank_search
from rematplan.runtime.costs.measure import peak_above_entry
from rematplan.runtime.costs.optimizer_memory import optimizer_memory

WORDS, WIDTH, ROWS, STEPS = 20, 64, 512, 3
SETTINGS: dict[str, Any] = {"budget": "90%", "strategy": "approx_dp", "costs": "roofline", "refine": False}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POOL = ThreadPoolExecutor(1)
COLLECTIVES = (
    *("all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_gather_single", "reduce_scatter_single"),  # from PyTorch 2.15 on
)
communicated: list[str] = []
"""The names of the collectives that were called."""


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Network(nn.Module):
    """An embedding, layers and a head. Its weights have sizes that two processes do not divide evenly, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS + 1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float()


def layer_by_layer(model: Network, **options: Any) -> Network:
    """As the documentation of FSDP2 shards."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def group_by_group(model: Network, **options: Any) -> Network:
    """As torchtitan shards: the embedding apart, norm and head together; layers are gathered ahead."""
    fully_shard(model.embed, **options)
    fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    layers: list[Any] = [fully_shard(layer, **options) for layer in model.layers]
    for one, following in itertools.pairwise(layers):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    return fully_shard(model, **options)


def micro_batch(model: nn.Module, rank: int, at: int, rows: int = ROWS) -> Tensor:
    """Add the gradients of one batch, and return its loss."""
    words = torch.randint(WORDS, (rows,), generator=torch.Generator().manual_seed(2 * at + rank))
    torch.manual_seed(at)
    loss = nn.functional.cross_entropy(model(words), words.roll(1))
    loss.backward()
    return loss.detach()


def two_micro_batches(model: Any, rank: int, at: int) -> Tensor:
    """Add the gradients of two batches, and reduce their sum."""
    model.set_requires_gradient_sync(False)
    first = micro_batch(model, rank, 2 * at)
    model.set_requires_gradient_sync(True)
    return first + micro_batch(model, rank, 2 * at + 1)


def other_lengths(model: nn.Module, rank: int, at: int) -> Tensor:
    """The first process gets a longer batch than before in one step, and the second one in another."""
    return micro_batch(model, rank, at, 600 if at == 1 + rank else ROWS)


@dataclass(frozen=True)
class Case:
    """A way of training."""

    shard: Callable[[Network], Network]
    step: Callable[[nn.Module, int, int], Tensor] = micro_batch
    before: Callable[[Network], Network] | None = None
    """Plans a model before it is sharded; None if `rematplan.apply` follows."""
    measured: bool = True
    """Whether all steps keep within the first budget."""


def applied(model: Network) -> Network:
    """A model that is planned in place."""
    return rematplan.apply(model, **SETTINGS)


def as_planned_module(model: Network) -> Network:
    """A model whose plan is made before it is sharded."""
    example = torch.zeros(ROWS, dtype=torch.int64)
    return rematplan.plan_module(model, (example,), **SETTINGS)


CASES = {
    "layers": Case(layer_by_layer),
    "planned before": Case(layer_by_layer, before=applied),
    "kept": Case(partial(layer_by_layer, reshard_after_forward=False, mp_policy=BF16)),
    "groups": Case(partial(group_by_group, mp_policy=BF16), before=applied),
    "accumulated": Case(partial(layer_by_layer, mp_policy=BF16), two_micro_batches),
    "a planned module": Case(layer_by_layer, before=as_planned_module),
    "lengths": Case(layer_by_layer, other_lengths, measured=False),
}


def made() -> Network:
    """The same network in all processes."""
    torch.manual_seed(0)
    return Network()


def local(tensors: Any) -> Iterator[Tensor]:
    """What this process has of tensors."""
    return (getattr(t, "_local_tensor", t) for t in tensors)


def train(model: nn.Module, case: Case, rank: int) -> tuple[list[Tensor], list[int]]:
    """Return the losses, the state and the optimizer's state of some steps, and each step's peak."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    held = sum(t.nbytes for t in local(model.parameters()))
    found, peaks = [], []
    for at in range(STEPS):
        optimizer.zero_grad()
        peak, loss = peak_above_entry(partial(case.step, model, rank, at), torch.device("cpu"))
        peaks.append(peak + held)
        found += [loss, nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(model(torch.arange(WORDS)))
        model.train()
    states = (t for p in model.parameters() for _, t in sorted(optimizer.state[p].items()))
    return [*local((*found, *model.state_dict().values(), *states))], peaks


def check(case: Case, rank: int) -> None:
    """Train plainly and planned; compare."""
    plain = case.shard(made())
    communicated.clear()
    expected, eager = train(plain, case, rank)
    calls = [*communicated]
    planned = case.shard(case.before(made())) if case.before else applied(case.shard(made()))
    communicated.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error" if case.measured else "ignore")
        found, peaks = train(planned, case, rank)
    assert all(map(torch.equal, expected, found))
    assert communicated == calls  # recomputation gathers nothing
    plan = runner_of(planned).parts.last.plan
    assert [len(group.names) for group in plan.parts] == [3]
    assert all(part.made.plan.estimate.reruns for part in plan.parts.values())
    if case.measured:
        assert max(peaks) <= plan.peak <= plan.budget
        assert plan.peak < max(eager)


def check_optimizer() -> None:
    """The budget counts what this process has of an optimizer's state."""
    model = layer_by_layer(made())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = optimizer_memory(optimizer, torch.device("cpu"))
    micro_batch(model, 0, 0)
    optimizer.step()
    states = sum(t.nbytes for of in optimizer.state.values() for t in local(of.values()))
    assert states <= before.to_come <= 1.01 * states


def refusal(call: Callable[..., object], *given: Any) -> str:
    """Return why a call is refused."""
    try:
        call(*given)
    except ModelError as error:
        return str(error)
    return ""


def check_refusals() -> None:
    """What cannot have a plan says so."""
    words = torch.arange(WORDS)
    nested = made()
    for layer in nested.layers:
        fully_shard(layer.up)
    nested = rematplan.apply(layer_by_layer(nested), modules="layers.*", **SETTINGS)
    assert "gathers the weights of layers.0.up inside of it apart" in refusal(nested, words)
    early = applied(layer_by_layer(made()))
    assert "only while it is called" in refusal(rematplan.planning(early).prepare, words)
    mesh, divided = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor")), made()
    for layer in divided.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel()})
    divided = applied(layer_by_layer(divided, mesh=mesh["data"]))
    assert "weight of a Linear is divided by tensor parallelism" in refusal(divided, words)


def apart(name: str, collective: Callable[..., None]) -> Callable[..., None]:
    """A collective on copies of its tensors, in a thread whose memory is not measured: gloo's threads free tensors
    when they like."""

    def work(given: tuple[Any, ...], named: dict[str, Any]) -> None:
        pairs = [(t, t.clone() if isinstance(t, Tensor) else t) for t in (*given, *named.values())]
        copies = [copy for _, copy in pairs]
        collective(*copies[: len(given)], **dict(zip(named, copies[len(given) :], strict=True)))
        for tensor, copy in pairs:
            if isinstance(tensor, Tensor):
                tensor.copy_(copy)

    def run(*given: Any, **named: Any) -> None:
        communicated.append(name)
        POOL.submit(work, given, named).result()

    return run


def main() -> None:
    """Check each way of training."""
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    rank_search.LIMITS = rank_search.RankSearchLimits(grid=3, refined=2, lowered=2, cheaper=0)
    with gloo_rank(rank, 2, rendezvous):
        for name in COLLECTIVES:
            if hasattr(distributed, name):
                setattr(distributed, name, apart(name, getattr(distributed, name)))
        for name, case in CASES.items():
            check(case, rank)
            print(f"{name}: equal", flush=True)
        check_optimizer()
        check_refusals()


if __name__ == "__main__":
    main()
