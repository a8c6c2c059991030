"""Trainers as users have them, planned at the peaks of activation checkpointing.

usage: python benchmarks/trainers.py [NAME ...] [--steps 50] [--time-limit 10]

GPT-2, Llama, BERT and ViT of `transformers` in its ``Trainer``, a U-Net in Lightning's ``Trainer``, and a ResNet of
`timm` in a loop; small, with random weights, AdamW, and batches of two sizes. Each trains in eager mode, with
checkpoints around every layer, every second and every fourth, and with selective checkpoints around every layer. These
keep what torchtitan's keep: the results of attention, of convolutions and of every second product. Each of these
measured peaks is then the budget of a plan.

All train in one process, in turn, step by step. It prints the measured peak of whole training steps, with the
optimizer's, parameters and batch included; the CPU time of a step as a ratio to eager mode's; and whether all losses
and the weights equal eager mode's bit by bit. A case whose library is missing is skipped by name.

Exit status 1 if a peak exceeds its budget, a budget is refused, or bits differ.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from promise import of_hugging_face
from torch import Tensor, nn
from torch.utils import checkpoint

import rematplan
from rematplan.ir import show_bytes
from rematplan.models import build
from rematplan.runtime.costs.measure import _allocations, bytes_of

MEASURED = (2, 3)
"""The steps, one of each size of a batch, whose peaks are measured and whose time is not. The step before is recorded,
too: what it leaves is then known when it is freed."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
KEPT = (
    *PRODUCTS,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def selective() -> Any:
    """Return the two contexts of a selective checkpoint."""
    products: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *_args: Any, **_more: Any) -> checkpoint.CheckpointPolicy:
        products[context.is_recompute] += op in PRODUCTS
        is_second = op in PRODUCTS and products[context.is_recompute] % 2 == 0
        kept = op in KEPT and not is_second
        return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(policy)


RIVALS: Mapping[str, dict[str, Any]] = {
    "every layer": {},
    "every 2nd": {"every": 2},
    "every 4th": {"every": 4},
    "selective": {"context_fn": selective},
}


@dataclass
class OneAtATime:
    """Lets one thread of several run at a time, each with its own random numbers."""

    order: list[str]
    random: dict[str, Tensor] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, name: str) -> None:
        """Wait until ``name`` may run."""
        with self.changed:
            self.changed.wait_for(lambda: self.order[0] == name)
        if name in self.random:
            torch.set_rng_state(self.random[name])

    def end(self, name: str, *, last: bool = False) -> None:
        """Let the next thread run."""
        self.random[name] = torch.get_rng_state()
        with self.changed:
            self.order.append(self.order.pop(0))
            if last:
                self.order.remove(name)
            self.changed.notify_all()


Batches = Sequence[Any]


@dataclass
class Steps:
    """What is known of the steps of one kind of training."""

    name: str
    order: OneAtATime
    fixed: int
    """The bytes of parameters and buffers."""
    batches: Batches
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    error: str = ""
    _since: float = 0.0
    _held: int = 0
    _record: Any = None

    def begin(self) -> None:
        """Begin a training step."""
        if MEASURED[0] - 1 <= len(self.seconds) <= MEASURED[-1]:
            self._record = _allocations()
            self._sizes = self._record.__enter__()
        self._since = time.process_time()

    def end(self, optimizer: Any) -> None:
        """End a training step, and let the others run theirs."""
        self.seconds.append(time.process_time() - self._since)
        if self._record is not None:
            self._record.__exit__(None, None, None)
            self._record = None
            resident = self.fixed + self._held + bytes_of(self.batches[len(self.seconds) - 1])
            if len(self.seconds) > MEASURED[0]:
                self.peak = max(self.peak, resident + max(0, *accumulate(self._sizes)))
        states = [state for one in optimizer.state.values() for state in one.values()]
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"]]
        self._held = bytes_of([*states, *gradients])
        self.order.end(self.name)
        self.order.begin(self.name)


Train = Callable[[nn.Module, Batches, Steps, "Plan | None"], None]


@dataclass(frozen=True)
class Plan:
    """A budget in bytes, and the seconds of its search."""

    budget: int
    time_limit: float

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords of `rematplan.apply`."""
        return {
            "budget": self.budget,
            "strategy": rematplan.Auto(time_limit=self.time_limit),
            "refine": False,
        }


def in_hugging_face(model: nn.Module, batches: Batches, steps: Steps, plan: Plan | None) -> None:
    """Train in Hugging Face's ``Trainer``."""
    import transformers

    from rematplan.integrations.transformers import RematplanCallback

    class Told(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_args: Any, **_more: Any) -> None:
            steps.begin()

        def on_step_end(self, *_args: Any, optimizer: Any, **_more: Any) -> None:
            steps.end(optimizer)

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **more: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **more)
            steps.losses.append(loss.clone())
            return loss

        def get_train_dataloader(self) -> Any:
            return batches

    args = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=len(batches),
        logging_steps=10**6,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [] if plan is None else [RematplanCallback(**plan.options)]
    Trainer(model, args, train_dataset=batches, callbacks=[*callbacks, Told()]).train()


def in_lightning(model: nn.Module, batches: Batches, steps: Steps, plan: Plan | None) -> None:
    """Train in Lightning's ``Trainer``."""
    import pytorch_lightning as pl

    from rematplan.integrations.lightning import RematplanCallback

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Told(pl.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_args: Any) -> None:
            steps.begin()

        def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
            steps.end(trainer.optimizers[0])

    class Segmentation(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _at: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            steps.losses.append(loss.detach().clone())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    callbacks = [] if plan is None else [RematplanCallback(**plan.options, loss_memory="3x")]
    pl.Trainer(
        max_steps=len(batches),
        accelerator="cpu",
        callbacks=[*callbacks, Told()],
        **dict.fromkeys(quiet, False),
    ).fit(Segmentation(), torch.utils.data.DataLoader(batches, batch_size=None))


def in_loop(model: nn.Module, batches: Batches, steps: Steps, plan: Plan | None) -> None:
    """Train in a loop, as in `timm`'s script."""
    optimizer = torch.optim.AdamW(model.parameters())
    if plan is not None:
        rematplan.apply(model, reserved=[optimizer], loss_memory="3x", **plan.options)
    for images, labels in batches:
        steps.begin()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.losses.append(loss.detach().clone())
        del loss
        steps.end(optimizer)


def texts(vocabulary: int, rows: int) -> Callable[[int], dict[str, Tensor]]:
    """Return a function that makes the at-th batch: ``rows`` sentences of one of two lengths, which are their own
    labels."""

    def make(at: int) -> dict[str, Tensor]:
        ids = torch.randint(3, vocabulary, (rows, (128, 96)[at % 2]))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    return make


def pictures(at: int) -> dict[str, Tensor]:
    """Return the at-th batch: 8 or 6 images with labels, as keyword arguments."""
    rows = (8, 6)[at % 2]
    return {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": torch.randint(0, 2, (rows,))}


def images(*shape: int, labels: tuple[int, ...] = ()) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that makes the at-th batch: 8 or 6 images (3, ...) and labels of shape ``labels`` each."""

    def make(at: int) -> tuple[Tensor, Tensor]:
        rows = (8, 6)[at % 2]
        return torch.randn(rows, *shape), torch.randint(0, 2, (rows, *labels))

    return make


def of_timm() -> nn.Module:
    """Return a narrow ResNet of `timm`."""
    import timm

    model: nn.Module = timm.create_model("resnet18", channels=(32, 64, 96, 128), num_classes=2)
    return model


@dataclass(frozen=True)
class Case:
    """A model, what it trains on and in which trainer, and the kind of its layers."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    train: Train
    layers: Callable[[nn.Module], Sequence[nn.Module]]
    needs: str


def hugging_face(kind: str, batch: Callable[[int], Any], **config: Any) -> Case:
    """Return the case of a model of `transformers`."""

    def layers(model: nn.Module) -> list[nn.Module]:
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]

    made = of_hugging_face(kind, dict, **config)
    return Case(lambda: made()[0], batch, in_hugging_face, layers, "transformers")


WORDS = 2000
LAYERS = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
SENTENCES = texts(WORDS, 4)
GPT2 = {"n_embd": 256, "n_layer": 8, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
CASES: Mapping[str, Case] = {
    "gpt2": hugging_face("GPT2LMHeadModel", SENTENCES, vocab_size=WORDS, **GPT2),
    "llama": hugging_face(
        "LlamaForCausalLM",
        SENTENCES,
        vocab_size=WORDS,
        intermediate_size=688,
        num_key_value_heads=2,
        **LAYERS,
    ),
    "bert": hugging_face("BertForMaskedLM", SENTENCES, vocab_size=WORDS, intermediate_size=1024, **LAYERS),
    "vit": hugging_face(
        "ViTForImageClassification", pictures, image_size=64, patch_size=8, intermediate_size=1024, **LAYERS
    ),
    "unet": Case(
        partial(build, "unet", width=8),
        images(3, 64, 64, labels=(64, 64)),
        in_lightning,
        lambda model: [*model.down, model.bottom, *model.merge],
        "pytorch_lightning",
    ),
    "resnet": Case(
        of_timm,
        images(3, 160, 160),
        in_loop,
        lambda model: [block for at in range(1, 5) for block in getattr(model, f"layer{at}")],
        "timm",
    ),
}


def checkpointed(model: nn.Module, layers: Sequence[nn.Module], every: int = 1, **keywords: Any) -> nn.Module:
    """Put a checkpoint around every ``every``-th layer of a model."""
    for layer in layers[::every]:
        layer.forward = partial(checkpoint.checkpoint, layer.forward, use_reentrant=False, **keywords)
    return model


def trained(
    case: Case, batches: Batches, kinds: Mapping[str, tuple[nn.Module, Plan | None]]
) -> dict[str, Steps]:
    """Train in several kinds, a step of each in turn, and return what is known of their steps."""
    order = OneAtATime(list(kinds))
    found = {
        name: Steps(name, order, bytes_of([*model.parameters(), *model.buffers()]), batches)
        for name, (model, _) in kinds.items()
    }

    def run(name: str) -> None:
        order.begin(name)
        torch.manual_seed(1)
        try:
            case.train(kinds[name][0], batches, found[name], kinds[name][1])
        except rematplan.ir.RematplanError as error:
            found[name].error = str(error)
        finally:
            order.end(name, last=True)

    threads = [threading.Thread(target=run, args=(name,)) for name in kinds]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


def compare(name: str, steps: int, time_limit: float) -> bool:
    """Train a case in all kinds, and print a table. Return whether plans keep their budgets and the bits."""
    case = CASES[name]
    if find_spec(case.needs) is None:
        print(f"{name}: skipped, {case.needs} is not installed")
        return True
    torch.manual_seed(0)
    batches, first = [case.batch(at) for at in range(steps)], case.make().train()
    rivals = {
        rival: (checkpointed(model, case.layers(model), **keywords), None)
        for rival, keywords in RIVALS.items()
        for model in (copy.deepcopy(first),)
    }
    peaks = {rival: one.peak for rival, one in trained(case, batches[: MEASURED[-1] + 1], rivals).items()}
    kinds: dict[str, tuple[nn.Module, Plan | None]] = {"eager mode": (copy.deepcopy(first), None)}
    for rival, keywords in RIVALS.items():
        model = copy.deepcopy(first)
        kinds[rival] = checkpointed(model, case.layers(model), **keywords), None
        kinds[f"planned as {rival}"] = copy.deepcopy(first), Plan(peaks[rival], time_limit)
    found = trained(case, batches, kinds)
    eager, kept = found["eager mode"], True
    for kind, (model, plan) in kinds.items():
        one = found[kind]
        if one.error:
            print(f"{name:<7}{kind:<24} REFUSED: {one.error}")
            kept = False
            continue
        timed = range(MEASURED[-1] + 1, steps)
        ratios = [one.seconds[at] / eager.seconds[at] for at in timed]
        quarters = statistics.quantiles(ratios, n=4)
        same = all(map(torch.equal, one.losses, eager.losses)) and all(
            map(torch.equal, model.state_dict().values(), kinds["eager mode"][0].state_dict().values())
        )
        over = plan is not None and one.peak > plan.budget
        kept &= plan is None or (same and not over)
        print(
            f"{name:<7}{kind:<24}{show_bytes(one.peak):>12}  {quarters[1]:.3f} ({quarters[0]:.3f} to {quarters[2]:.3f})"
            f"  {'bit-equal' if same else 'DIFFERS'}{'  OVER ITS BUDGET' * over}",
            flush=True,
        )
    return kept


def main() -> int:
    """Run the named cases. Return the exit status: 0 if all plans kept the budget and the bits, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*CASES], metavar="NAME")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--time-limit", type=float, default=10.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'':<7}{'kind':<24}{'peak':>12}  CPU time ÷ eager mode's, median (quartiles)  losses and weights")
    kept = [compare(name, options.steps, options.time_limit) for name in options.names]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
