"""Laws of a budget in `transformers.Trainer`: losses and weights are the same bits as without it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rematplan
from rematplan.ir import UsageError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rematplan.integrations import transformers as budgets  # noqa: E402

QUICK = {"strategy": "approx_dp", "costs": "roofline", "refine": False}
STEPS = 12
has_flag = hasattr(transformers.TrainingArguments, "group_by_length")
BY_LENGTH = {"group_by_length": True} if has_flag else {"train_sampling_strategy": "group_by_length"}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*has hooks on")


@pytest.fixture(autouse=True, scope="module")
def _no_collections() -> Iterator[None]:
    """Each training ends with two collections of all that is loaded, which take longer than its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=int))
        yield


def network() -> nn.Module:
    torch.manual_seed(0)
    size = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def samples(count: int = 64) -> list[dict[str, list[int]]]:
    """Texts of 6 or 9 tokens."""
    made = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 40, (6 + 3 * (at % 8 == 0),), generator=made).tolist() for at in range(count)]
    return [{"input_ids": text, "labels": text} for text in texts]


ONE_LENGTH = {"train_dataset": [one for one in samples(512) if len(one["input_ids"]) == 9]}
"""For tests in which other lengths, and so further captures, show nothing more."""


def padded(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of the length of its longest text."""
    longest = max(len(one["input_ids"]) for one in batch)

    def filled(key: str, by: int) -> Tensor:
        return torch.tensor([one[key] + [by] * (longest - len(one[key])) for one in batch])

    ids = filled("input_ids", 0)
    return {"input_ids": ids, "labels": filled("labels", -100), "attention_mask": (ids > 0).long()}


def trainer(folder: Path, model: nn.Module, callbacks: list[Any], **settings: Any) -> Any:
    given = ("compute_loss_func", "model_init", "train_dataset")
    more = {"train_dataset": samples()} | {key: settings.pop(key) for key in given if key in settings}
    args = transformers.TrainingArguments(
        str(folder),
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        | settings,
    )
    more |= {} if "model_init" in more else {"model": model}
    return transformers.Trainer(
        args=args, eval_dataset=samples(8), data_collator=padded, callbacks=callbacks, **more
    )


def results(trained: Any) -> tuple[list[Any], list[Tensor]]:
    """All losses, norms and evaluations, and the weights."""
    wanted = ("loss", "grad_norm", "eval_loss")
    logs = [{key: log[key] for key in wanted if key in log} for log in trained.state.log_history]
    return [log for log in logs if log], [t.clone() for t in trained.model.state_dict().values()]


def same(one: tuple[list[Any], list[Tensor]], other: tuple[list[Any], list[Tensor]]) -> bool:
    return len(one[0]) >= STEPS and one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def run(folder: Path, model: nn.Module, callbacks: list[Any], **settings: Any) -> Any:
    made = trainer(folder, model, callbacks, **settings)
    made.train()
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of a training on texts of one length without a budget, and its weights by name."""
    trained = run(tmp_path_factory.mktemp("plain"), network(), [], **ONE_LENGTH)
    return results(trained), trained.model.state_dict()


def callback(budget: str = "85%", **options: Any) -> Any:
    return budgets.RematplanCallback(budget, **QUICK | options)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    logits = outputs["logits"][:, :-1].transpose(1, 2)
    loss = nn.functional.cross_entropy(logits, labels[:, 1:], reduction="sum")
    return loss / (1 if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
        {"compute_loss_func": summed},
        {"eval_strategy": "steps", "eval_steps": 9},
        {"neftune_noise_alpha": 5.0},
        BY_LENGTH,
    ],
    ids=lambda settings: next(iter(settings), "nothing"),
)
def test_losses_and_weights_are_those_without_a_budget(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = run(tmp_path, network(), [], **settings)
    planned = run(tmp_path, network(), [callback()], **settings)
    assert same(results(planned), results(plain))
    plans = rematplan.planning(planned.model).plans
    assert len(plans) >= 2
    assert any(plan.estimate.reruns for plan in plans)
    assert all(plan.peak <= (plan.budget or 0) for plan in plans)


def test_evaluation_may_generate(tmp_path: Path) -> None:
    size = {"vocab_size": 40, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    generating = {
        "predict_with_generate": True,
        "generation_max_length": 4,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    found = []
    for callbacks in ([], [callback()]):
        torch.manual_seed(0)
        config = transformers.T5Config(**size, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
        args = transformers.Seq2SeqTrainingArguments(
            str(tmp_path),
            max_steps=6,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            **generating,
        )
        trained = transformers.Seq2SeqTrainer(
            transformers.T5ForConditionalGeneration(config),
            args,
            **ONE_LENGTH,
            eval_dataset=samples(8),
            data_collator=padded,
            callbacks=callbacks,
        )
        trained.train()
        found.append((*results(trained), torch.from_numpy(trained.predict(samples(8)).predictions)))
    (logs, weights, made), (plain_logs, plain_weights, plain_made) = found
    assert logs == plain_logs
    assert all(map(torch.equal, weights, plain_weights))
    assert torch.equal(made, plain_made)


def test_the_trainers_optimizer_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgets_ = [
        rematplan.planning(run(tmp_path, network(), [one], max_steps=1).model).plan.budget
        for one in (callback("100%"), callback("100%", reserved=[]))
    ]
    states = 2 * sum(p.nbytes for p in network().parameters())
    assert (budgets_[0] or 0) - (budgets_[1] or 0) >= states
    assert capsys.readouterr().err.count("rematplan: GPT2LMHeadModel trains with a peak of") == 2


def test_training_resumes_and_saved_names_are_the_models(plain: Any, tmp_path: Path) -> None:
    half = {"save_strategy": "steps", "save_steps": STEPS // 2, **ONE_LENGTH}
    run(tmp_path / "planned", network(), [callback()], **half)
    resumed = trainer(tmp_path / "planned", network(), [callback()], **half)
    resumed.train(resume_from_checkpoint=str(tmp_path / "planned" / f"checkpoint-{STEPS // 2}"))
    assert same(results(resumed), plain[0])
    resumed.save_model(str(tmp_path / "saved"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert all(map(torch.equal, loaded.state_dict().values(), plain[1].values()))


def test_what_is_pushed_to_the_hub_has_the_models_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []

    class Hub:
        def create_repo(self, name: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, *, folder_path: str, **_: Any) -> None:
            pushed.append(folder_path)

    monkeypatch.setattr(budgets.trainer, "hf_api", Hub)
    once = {"max_steps": 2, "hub_model_id": "someone/model", **ONE_LENGTH}
    run(tmp_path, network(), [callback()], **once).push_to_hub()
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(pushed[0], output_loading_info=True)
    assert list(loaded.state_dict()) == list(network().state_dict())
    assert not info["unexpected_keys"]


def test_adapters_on_a_frozen_base_are_planned(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM")
        model: nn.Module = peft.get_peft_model(network(), lora)
        return model

    plain, planned = (run(tmp_path, adapted(), found, **ONE_LENGTH) for found in ([], [callback()]))
    assert same(results(planned), results(plain))
    assert any(plan.estimate.reruns for plan in rematplan.planning(planned.model).plans)


def test_a_smaller_batch_is_planned_again(tmp_path: Path) -> None:
    def short_of_memory(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        sizes.append(len(labels))
        if len(labels) == 8:
            raise RuntimeError("CUDA out of memory.")
        return summed(outputs, labels, num_items_in_batch)

    settings = {"per_device_train_batch_size": 8, "auto_find_batch_size": True, **ONE_LENGTH}
    sizes: list[int] = []
    plain, planned = (
        run(tmp_path, network(), callbacks, **settings, compute_loss_func=short_of_memory)
        for callbacks in ([], [callback()])
    )
    assert same(results(planned), results(plain))
    assert sizes.count(8) == 2
    assert planned.state.train_batch_size < 8
    assert any(plan.estimate.reruns for plan in rematplan.planning(planned.model).plans)


@pytest.fixture
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in budgets.ENABLING:
        method = getattr(transformers.PreTrainedModel, name, None)
        if method is not None:
            monkeypatch.setattr(transformers.PreTrainedModel, name, method)
    monkeypatch.setattr(budgets.trainer, "DEFAULT_CALLBACKS", list(budgets.trainer.DEFAULT_CALLBACKS))
    budgets.enable()
    budgets.enable()


SPELLINGS = ("activation_checkpointing", "gradient_checkpointing")


def checkpointing(spelling: str, keywords: dict[str, Any]) -> dict[str, Any]:
    return {spelling: True, f"{spelling}_kwargs": keywords}


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_budget_may_stand_for_checkpointing(spelling: str, plain: Any, tmp_path: Path) -> None:
    keywords = {"budget": "85%", "use_reentrant": False, **QUICK}
    planned = run(tmp_path, network(), [], **checkpointing(spelling, keywords), **ONE_LENGTH)
    assert same(results(planned), plain[0])
    assert rematplan.planning(planned.model).plans
    assert planned.model.forward.asked.options.reserved.items == (planned.optimizer.optimizer,)


@pytest.mark.usefixtures("_enabled")
def test_each_model_that_a_trainer_makes_has_its_budget(tmp_path: Path) -> None:
    keywords = checkpointing(SPELLINGS[0], {"budget": "95%", **QUICK})
    planned = run(tmp_path, network(), [], model_init=network, max_steps=2, **keywords)
    assert rematplan.planning(planned.model).plans


@pytest.mark.usefixtures("_enabled")
def test_checkpointing_without_a_budget_is_as_before(tmp_path: Path) -> None:
    trained = run(tmp_path, network(), [], max_steps=1, **checkpointing(SPELLINGS[0], {}))
    assert trained.model.is_gradient_checkpointing
    with pytest.raises(UsageError, match="not planned"):
        rematplan.planning(trained.model)


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"budget": "85%", "every_n_layers": 2}, "replaces every_n_layers"),
        ({"budget": "85%", "tme_limit": 2}, "unknown option tme_limit"),
        ({"budget": "much"}, "not understood"),
    ],
)
def test_wrong_keywords_are_refused(keywords: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        run(tmp_path, network(), [], **checkpointing(SPELLINGS[0], keywords))


def test_a_part_is_planned_by_its_name(plain: Any, tmp_path: Path) -> None:
    planned = run(tmp_path, network(), [callback(module="transformer")], **ONE_LENGTH)
    assert same(results(planned), plain[0])
    assert "forward" in vars(planned.model.transformer)
    with pytest.raises(UsageError, match="has no module 'layers'; it has transformer, lm_head"):
        run(tmp_path, network(), [callback(module="layers")])


def test_several_modules_are_planned_under_one_budget(plain: Any, tmp_path: Path) -> None:
    planned = run(tmp_path, network(), [callback("8MiB", modules="transformer.h.*")], **ONE_LENGTH)
    assert same(results(planned), plain[0])
    assert rematplan.planning(planned.model).plans


def test_the_backbone_is_planned_if_trl_has_fused_the_head(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl.trainer.utils")

    def fused() -> nn.Module:
        model = network()
        trl.add_fused_lm_head(model)
        return model

    class Fused(transformers.Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **more: Any) -> Tensor:
            loss: Tensor = model(**inputs, fused_lm_head=True).loss
            return loss

    def trained(callbacks: list[Any]) -> Any:
        args = trainer(tmp_path, network(), []).args
        one = Fused(fused(), args, **ONE_LENGTH, data_collator=padded, callbacks=callbacks)
        one.train()
        return one

    plain, planned = trained([]), trained([callback()])
    assert same(results(planned), results(plain))
    assert "forward" in vars(planned.model.transformer)


def test_a_part_that_no_step_calls_is_told(tmp_path: Path) -> None:
    model = network()
    model.unused = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no training step has called this Linear, so nothing is planned"):
        run(tmp_path, model, [callback(module="unused")], max_steps=2)


def test_a_policy_may_name_modules_that_the_callback_does_not_know_yet() -> None:
    assert callback(policy=[nn.Linear(2, 2)]).options["policy"]


@pytest.mark.parametrize(
    "make", [budgets.RematplanCallback, lambda: callback("much"), lambda: callback(tme_limit=3)]
)
def test_mistakes_are_refused_before_training(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        make()
