"""Laws of a budget in Lightning's Trainer: losses and weights are the same bits as without it."""

import itertools
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import UsageError
from rematplan.plans.held_by_others import GRADIENTS
from rematplan.runtime.costs.measure import _allocations

pl = pytest.importorskip("pytorch_lightning")

from rematplan.integrations.lightning import RematplanCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 20


class Classifier(pl.LightningModule):
    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(4)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(16, 4))
        if heads > 1:
            self.head = nn.Linear(4, 4)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return self.head(out) if hasattr(self, "head") else out

    def training_step(self, batch: list[Tensor], _at: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], _at: int) -> None:
        self.losses.append(nn.functional.cross_entropy(self(batch[0]), batch[1]).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> torch.utils.data.DataLoader[Any]:
    made = torch.Generator().manual_seed(0)
    data = torch.randn(1280, 16, generator=made), torch.randint(4, (1280,), generator=made)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=256)


def fit(
    folder: Path, model: Any, callbacks: list[Any], *, resume: Path | None = None, **settings: Any
) -> Any:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    checkpoints = {"enable_checkpointing": False}
    trainer = pl.Trainer(
        default_root_dir=folder,
        callbacks=callbacks,
        **{"max_steps": STEPS, "num_sanity_val_steps": 1, **quiet, **checkpoints} | settings,
    )
    torch.manual_seed(1)
    trainer.fit(model, loader(), loader(), ckpt_path=resume, **({"weights_only": False} if resume else {}))
    return trainer


def callback(budget: str = "85%", **options: Any) -> RematplanCallback:
    quick = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    return RematplanCallback(budget, **quick | options)


def equal(one: Classifier, other: Classifier) -> bool:
    weights = all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    return len(one.losses) >= STEPS and one.losses == other.losses and weights


@pytest.mark.parametrize(
    ("settings", "module"),
    [
        ({"precision": "bf16-mixed"}, None),
        ({"accumulate_grad_batches": 2, "max_steps": STEPS // 2}, None),
        ({"strategy": "ddp", "devices": 1}, None),
        ({"gradient_clip_val": 0.1}, ""),
    ],
    ids=str,
)
def test_losses_and_weights_are_those_without_a_budget(
    settings: dict[str, Any], module: str | None, tmp_path: Path
) -> None:
    plain, planned = Classifier(), Classifier()
    fit(tmp_path, plain, [], **settings)
    trainer = fit(tmp_path, planned, [callback(module=module)], **settings)
    assert equal(planned, plain)
    part = planned if module == "" else planned.net
    plan = rematplan.planning(part).plan
    assert plan.estimate.reruns > 0
    assert plan.peak <= (plan.budget or 0)
    assert part.forward.asked.options.reserved.items == (*trainer.optimizers, GRADIENTS)
    assert list(planned.state_dict()) == list(plain.state_dict())


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    plain, first, second = Classifier(), Classifier(), Classifier()
    saving = {"enable_checkpointing": True, "max_steps": STEPS}

    def every() -> Any:
        return pl.callbacks.ModelCheckpoint(tmp_path, "at-{step}", every_n_train_steps=10, save_top_k=-1)

    fit(tmp_path / "plain", plain, [])
    fit(tmp_path, first, [callback(), every()], **saving)
    # Dropout goes on from another state; the weights of the checkpoint are what is compared.
    torch.manual_seed(0)
    saved = torch.load(tmp_path / "at-step=20.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], weight) for name, weight in plain.state_dict().items())
    fit(tmp_path, second, [callback()], resume=tmp_path / "at-step=10.ckpt")
    assert len(second.losses) < len(plain.losses)
    assert rematplan.planning(second).plan.estimate.reruns > 0


def test_several_networks_are_refused_until_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"trains net, head: name the one to plan, such as module='net', or ''"
    ):
        fit(tmp_path, Classifier(2), [callback()])
    plain, planned = Classifier(2), Classifier(2)
    fit(tmp_path, plain, [])
    fit(tmp_path, planned, [callback(module="net")])
    assert equal(planned, plain)


def test_a_forward_that_no_step_calls_is_told(tmp_path: Path) -> None:
    class Bypass(Classifier):
        def training_step(self, batch: list[Tensor], _at: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    with pytest.warns(UserWarning, match="no training step has called this Bypass, so nothing is planned"):
        fit(tmp_path, Bypass(), [callback(module="")], max_steps=2)


def test_several_modules_are_planned_under_one_budget(tmp_path: Path) -> None:
    planned, plain = Classifier(), Classifier()
    fit(tmp_path, planned, [callback("8MiB", modules=["[0-3]"])])
    fit(tmp_path, plain, [])
    assert equal(planned, plain)
    assert rematplan.planning(planned.net).plans


class BatchSizeFinder(pl.Callback):
    """As in the package `lightning`, which has a copy of every class."""


@pytest.mark.parametrize("kind", [pl.callbacks.BatchSizeFinder, BatchSizeFinder])
def test_a_batch_size_finder_is_refused(kind: Any, tmp_path: Path) -> None:
    class Resized(Classifier):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return loader()

    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[callback(), kind()],
    )
    with pytest.raises(UsageError, match="BatchSizeFinder tries batches without callbacks"):
        trainer.fit(Resized())


def test_gradients_that_are_cleared_after_the_forward_are_within_the_budget(tmp_path: Path) -> None:
    class Measured(pl.Callback):
        def __init__(self) -> None:
            self.peaks: list[int] = []
            self.recording = ExitStack()

        def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, _at: int) -> None:
            states = [one for optimizer in trainer.optimizers for one in optimizer.state.values()]
            held = [*model.parameters(), *model.buffers(), *(v for one in states for v in one.values())]
            held += [batch[0], *(p.grad for p in model.parameters() if p.grad is not None)]
            self.held = sum(t.nbytes for t in held)
            self.sizes = self.recording.enter_context(_allocations())

        def on_train_batch_end(self, *_args: Any) -> None:
            self.recording.close()
            self.peaks.append(self.held + max(0, *itertools.accumulate(self.sizes)))

    model, measured = Classifier(), Measured()
    with warnings.catch_warnings(), measured.recording:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="pytorch_lightning|torch")
        fit(tmp_path, model, [callback("75%", costs="profile", loss_memory="3x"), measured], max_steps=4)
    (plan,) = rematplan.planning(model.net).plans
    assert plan.estimate.reruns > 0
    assert max(measured.peaks) <= plan.peak <= (plan.budget or 0)
    assert max(measured.peaks) > 0.9 * plan.peak


def test_the_module_inside_of_a_compiled_one_is_planned(tmp_path: Path) -> None:
    class Compiled(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net, backend="eager")

    plain, planned = Compiled(), Compiled()
    fit(tmp_path, plain, [])
    fit(tmp_path, planned, [callback()])
    assert equal(planned, plain)
    assert rematplan.planning(planned.net._orig_mod).plan.estimate.reruns > 0
