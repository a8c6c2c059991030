"""Laws of a budget in TRL's trainers: losses and weights are the same bits as without it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import rematplan

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from rematplan.integrations import transformers as budgets  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 10
WORDS = [f"w{at}" for at in range(60)]


@pytest.fixture(autouse=True)
def _without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data sets are small and made anew; a key for a cache on disk would pickle the tokenizer."""
    count = itertools.count()
    hasher = datasets.fingerprint.Hasher
    monkeypatch.setattr(hasher, "hash", classmethod(lambda _kind, _value: f"{next(count):016x}"))


def tokenizer() -> Any:
    names = {word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def llama(folder: Path) -> Any:
    """A small model from a folder, from which a trainer may load its reference model."""
    if not folder.exists():
        torch.manual_seed(0)
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=64, **size, **special)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def text(at: int) -> str:
    """A text of 6 or 9 words."""
    return " ".join(WORDS[(at * 7 + k * k) % len(WORDS)] for k in range(6 + 3 * (at % 8 == 0)))


def supervised(folder: Path, callbacks: list[Any], settings: dict[str, Any]) -> Any:
    data = datasets.Dataset.from_list([{"text": text(at)} for at in range(32)])
    config = trl.SFTConfig(str(folder / "run"), **settings)
    return trl.SFTTrainer(
        llama(folder / "model"), config, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks
    )


def preferring(folder: Path, callbacks: list[Any], settings: dict[str, Any]) -> Any:
    samples = (
        {"prompt": text(at), "chosen": f" {text(at + 1)}", "rejected": f" {text(at + 2)}"} for at in range(32)
    )
    data = datasets.Dataset.from_list([*samples])
    config = trl.DPOConfig(str(folder / "run"), **settings)
    return trl.DPOTrainer(
        llama(folder / "model"),
        args=config,
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize(
    ("make", "spelling"),
    [(supervised, ""), (supervised, "gradient_checkpointing"), (preferring, "activation_checkpointing")],
)
def test_losses_and_weights_are_those_without_a_budget(
    make: Any, spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``spelling``: of the arguments that have the budget; empty for a callback."""
    for name in budgets.ENABLING:
        monkeypatch.setattr(
            transformers.PreTrainedModel,
            name,
            getattr(transformers.PreTrainedModel, name, None),
            raising=False,
        )
    monkeypatch.setattr(budgets.trainer, "DEFAULT_CALLBACKS", list(budgets.trainer.DEFAULT_CALLBACKS))
    budgets.enable()
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    without = {"activation_checkpointing": False}
    quick = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
    callbacks = [] if spelling else [budgets.RematplanCallback("85%", **quick)]
    stated = {spelling: True, f"{spelling}_kwargs": {"budget": "85%", **quick}} if spelling else without
    plain = make(tmp_path, [], settings | without)
    planned = make(tmp_path, callbacks, settings | stated)
    for one in (plain, planned):
        one.train()
    losses = [
        [(log["loss"], log["grad_norm"]) for log in one.state.log_history if "loss" in log]
        for one in (plain, planned)
    ]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
    assert all(map(torch.equal, planned.model.state_dict().values(), plain.model.state_dict().values()))
    assert any(plan.estimate.reruns for plan in rematplan.planning(planned.model).plans)
