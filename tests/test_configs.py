"""The recipes of configs/: each parses, and holds the published hyper-parameters (METHODS sections 1 and 2)."""

from pathlib import Path

import pytest

from data.settings import load_config
from models.configuration import DrafterSpec, default_taps
from training.arguments import check_training_options
from training.objective import Terms, batch_gamma
from training.slot_loss import Mixture

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml"))
QWEN3 = dict(
    mask_token_id=151669, num_draft_layers=5, target_layer_ids=[1, 9, 17, 25, 33], max_row_length=3072,
    anchors_per_row=512, init_from_target=False, keep_features=False, draft_vocab_size=0, lambda_end=0.0,
    position_weights="exponential", packing=False,
)  # fmt: skip
RECIPES = {
    "dflash": dict(block_size=16, shift_label=False, head="none", loss_gamma=7.0, num_prompts=800_000),
    "domino": dict(
        block_size=16, shift_label=True, head="domino", head_rank=256, gru_hidden_dim=1024, pure_draft_prefix_len=1,
        loss_gamma=7.0, lambda_start=1.0, lambda_horizon=1.0, global_batch_size=16, num_prompts=1_420_000,
    ),
    "dspark": dict(
        block_size=7, shift_label=True, head="markov_vanilla", head_rank=256, pure_draft_prefix_len=0, loss_gamma=4.0,
        lambda_start=0.0, global_batch_size=512, enable_confidence_head=True, confidence_head_with_markov=True,
        confidence_detach=True,
    ),
}  # fmt: skip
EPOCHS = {"dflash": 6, "domino": 3, "dspark": 10}
TERMS = {
    "dflash": Terms(),
    "domino": Terms(),
    "dspark": Terms(Mixture(ce=0.1, kl=0.0, tv=0.9), confidence=1.0),
}


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_parses(path):
    config = load_config(str(ROOT / "configs" / path))
    values = check_training_options(config, "cpu")
    assert values.learning_rate > 0 and (values.max_steps > 0 or values.num_train_epochs > 0)


@pytest.mark.parametrize("size", ["4b", "8b"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_published_recipes(recipe, size):
    config = load_config(str(ROOT / "configs" / f"qwen3-{size}-{recipe}.yaml"))
    wanted = (
        QWEN3 | RECIPES[recipe] | {"target": f"Qwen/Qwen3-{size.upper()}", "run_dir": f"runs/qwen3-{size}-{recipe}"}
    )
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert Terms.of(config) == TERMS[recipe] and batch_gamma(config) == RECIPES[recipe]["loss_gamma"]
    training = dict(
        learning_rate=6e-4, warmup_steps=0.04, lr_scheduler_type="cosine", max_grad_norm=1.0, weight_decay=0.0
    )
    training["num_train_epochs"] = EPOCHS[recipe]
    # tau is measured about 30 to 60 times, where a checkpoint is saved anyway, at an eighth of the reported length.
    training["eval_steps"] = {"dflash": 5000, "domino": 5000, "dspark": 1000}[recipe]
    assert training["eval_steps"] % config.training["save_steps"] == 0
    assert check_training_options(config, "cpu").eval_strategy == "steps"
    assert (config.train_eval_prompts, config.train_eval_tokens, config.max_new_tokens) == (64, 256, 2048)
    assert {name: config.training[name] for name in training} == training
    assert tuple(config.target_layer_ids) == default_taps(36, 5)
    spec = DrafterSpec(
        config.block_size, config.mask_token_id, tuple(config.target_layer_ids), 36, config.shift_label, config.head,
        config.pure_draft_prefix_len, confidence_head=config.enable_confidence_head,
        confidence_with_markov=config.confidence_head_with_markov,
    )  # fmt: skip
    assert spec.num_proposals == {"dflash": 15, "domino": 16, "dspark": 7}[recipe]
