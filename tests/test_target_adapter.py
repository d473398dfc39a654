"""A target with the user's LoRA adapter: merged once, its own identity, answers of the base refused."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from data.answers import target_identity
from data.fetch_target import resolve_target
from data.settings import RunConfig, load_config
from models.target import load_target
from training.checkpoints import write_json
from training.plan import prepare
from training_runs import answer_rows, write_run, write_target


def write_adapter(base: Path, folder: Path, seed: int = 0) -> torch.nn.Module:
    """An adapter on one late layer, with weights that matter. Returns the model with it."""
    torch.manual_seed(seed)
    options = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj"], layers_to_transform=[3], layers_pattern="layers")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), options)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture
def made(tmp_path):
    write_target(tmp_path / "target")
    model = write_adapter(tmp_path / "target", tmp_path / "lora")
    options = dict(
        target=str(tmp_path / "target"), target_adapter=str(tmp_path / "lora"), cache_dir=str(tmp_path / "cache")
    )
    return RunConfig(**options), model, tmp_path


def test_the_merged_target_computes_what_base_and_adapter_compute(made):
    config, model, folder = made
    tokens = torch.arange(3, 20)[None]
    merged, base = load_target(resolve_target(config), torch.float32), load_target(config.target, torch.float32)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    logits = merged.forward(tokens, (0,)).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert (logits - base.forward(tokens, (0,)).logits).abs().max() > 0.1
    assert merged.tokenizer.chat_template == base.tokenizer.chat_template


def test_it_is_merged_once_and_is_another_target_for_everyone(made, monkeypatch):
    config, _, folder = made
    first = resolve_target(config)
    monkeypatch.setattr("data.fetch_target.merge_adapter", lambda *_: pytest.fail("merged again"))
    assert resolve_target(config) == first
    monkeypatch.undo()
    assert target_identity(first) != target_identity(config.target)
    assert json.loads(Path(first, "config.json").read_text())["merged_adapter"]
    write_adapter(folder / "target", folder / "lora", seed=1)
    other = resolve_target(config)
    assert other != first and target_identity(other) != target_identity(first)


def test_answers_of_the_base_are_refused(made):
    config, _, folder = made
    path = write_run(folder, answer_rows(6), target_adapter=config.target_adapter, cache_dir=config.cache_dir)
    manifest = folder / "run" / "answers" / "manifest.json"
    base, merged = target_identity(config.target), target_identity(resolve_target(config))
    write_json(manifest, {"finished": True, "settings": {"target_identity": base}})
    with pytest.raises(ValueError, match=f"those of target {base}, this run has {merged}"):
        prepare(load_config(str(path)))
    write_json(manifest, {"finished": True, "settings": {"target_identity": merged}})
    assert prepare(load_config(str(path))).target.path == resolve_target(config)


def test_a_folder_that_is_no_adapter_or_fits_another_model(made):
    config, _, folder = made
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="target_adapter: .*empty holds no adapter_config.json"):
        resolve_target(RunConfig(**{**vars(config), "target_adapter": str(folder / "empty")}))
    settings = folder / "lora" / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "target_modules": ["nothing_like_this"]}))
    with pytest.raises(ValueError, match="target_adapter: .*lora does not fit the target .*nothing_like_this"):
        resolve_target(config)
    assert not list((folder / "cache").iterdir())
