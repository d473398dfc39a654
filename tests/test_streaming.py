"""Targets whose layers stay in their files: the same numbers, and what is read of them."""

import json
from dataclasses import replace

import pytest
import torch
from accelerate.utils.offload import OffloadedWeightsLoader
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Qwen3MoeConfig, Qwen3MoeForCausalLM

from data import make_features
from data.batches import collate
from data.feature_cache import cache_settings
from data.features import FeatureWriter
from data.settings import load_config
from models.streaming import stream_target
from models.target import load_target
from tiny import FAMILIES, MASK, tiny_target
from tiny_tokenizer import tiny_tokenizer
from training import plan as plans
from training import train_drafter
from training.forward import block_loss
from training.objective import Objective, Terms
from training.plan import prepare
from training.session import build_model
from training_runs import answer_rows, write_run

ROWS = answer_rows(5)


def saved(folder, family, **options) -> str:
    target = tiny_target(family)
    target.model.generation_config.eos_token_id = [1, 9]
    target.model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Names of the tensors that were read through the files' index, in order."""
    names, get = [], OffloadedWeightsLoader.__getitem__
    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", lambda self, key: names.append(key) or get(self, key))
    return names


def layer_parameters(target):
    return list(target.decoder.layers.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_it_computes_is_what_the_whole_target_computes(tmp_path, family, dtype, read):
    path = saved(tmp_path, family, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    whole, target = load_target(path, dtype), stream_target(path, dtype)
    assert read and not [name for name in read if ".layers." in name]
    assert all(p.is_meta for p in layer_parameters(target)) and target.streams and not whole.streams
    own = {name: p for name, p in target.model.named_parameters() if ".layers." not in name}
    assert all(torch.equal(p, whole.model.get_parameter(name)) and p.dtype == dtype for name, p in own.items())
    assert target.eos_ids == whole.eos_ids == (1, 9) and target.vocab_size == whole.vocab_size
    assert target.device == torch.device("cpu") and target.layer_devices == [target.device] * 4
    ids, chosen = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0)), torch.tensor([3, 9, 20])
    before = len(read)
    ours, theirs = (t.forward(ids, (0, 2), with_final=True) for t in (target, whole))
    for name in ("logits", "taps", "final"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert torch.equal(target.embed(ids), whole.embed(ids))
    assert torch.equal(target.logits(ours.final, chosen), whole.logits(ours.final, chosen))
    # Each tensor of the layers once, and none of them stays.
    assert len(read) - before == len(layer_parameters(whole)) and all(p.is_meta for p in layer_parameters(target))


def test_the_text_model_of_a_multi_modal_target_streams_under_its_older_names(tmp_path):
    text = tiny_target("gemma3", final_logit_softcapping=None).config
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8)
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision | {"patch_size": 4}, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    whole, target = load_target(str(tmp_path), torch.float32), stream_target(str(tmp_path), torch.float32)
    names = {name for name, p in target.model.named_parameters() if p.is_meta}
    assert names and all("language_model.layers" in name for name in names)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(target.forward(ids, ()).logits, whole.forward(ids, ()).logits)


def test_files_that_hold_other_tensors_than_the_model_are_left_to_transformers(tmp_path):
    """A mixture of experts is stored expert by expert, and transformers fuses them."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, **sizes, **experts)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert stream_target(str(tmp_path), torch.float32) is None


def trained(config, **options):
    """The plan of a run, its drafter's first weights, and the losses of some plain gradient steps."""
    config = load_config(str(config), options)
    plan = prepare(config)
    model = build_model(plan, fresh=True)
    first = {name: p.clone() for name, p in model.state_dict().items()}
    objective = Objective(plan.target, None, 32, Terms.of(config))
    optimizer, seen = torch.optim.SGD(model.parameters(), 1e-2), []
    for step in range(3):
        rows = [plan.data[i] for i in (step, step + 1)]
        batch = collate(rows, 4, 3, MASK, 4.0, teacher=objective.needs_teacher, **plan.data.collate_options())
        optimizer.zero_grad()
        loss = block_loss(model, model, objective, batch, 0.3, plan.data.source).numerator
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return plan, first, seen


def own_answers(path: str):
    """The rows with what the target itself answers."""
    model, rows = load_target(path, torch.float32).model, []
    for row in ROWS:
        text = model.generate(torch.tensor([row.prompt_ids]), max_new_tokens=12, do_sample=False)[0].tolist()
        rows.append(replace(row, answer_ids=text[len(row.prompt_ids) :], stop="length"))
    return rows


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return write_run(tmp_path, ROWS)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("weights", [{}, {"kl_weight": 0.3, "tv_weight": 0.5}], ids=["ce", "kl+tv"])
def test_training_from_stored_features_is_the_same_and_reads_only_the_layers_that_it_copies(
    run, family, weights, read, monkeypatch
):
    write_run(run.parent, own_answers(saved(run.parent / "target", family)))
    assert make_features.main([str(run)]) == 0
    plan, first, seen = trained(run, features="offline", **weights)
    assert plan.target.streams and all(p.is_meta for p in layer_parameters(plan.target))
    layers = [name for name in read if ".layers." in name]
    copied = ("model.layers.2.", "model.layers.3.", "model.layers.1.input_layernorm.")
    others = [name for name in layers if not name.startswith(copied)]
    # A Llama has no norms of queries and keys: their scales are measured in one forward, which passes all layers.
    once = {f"model.layers.{layer}." for layer in (0, 1)} if family == "llama" else set()
    assert layers and {name[: len("model.layers.0.")] for name in others} == once and len(others) == len(set(others))
    assert plan.target.forwards == len(once) / 2
    monkeypatch.setattr(plans, "stream_target", lambda *_: None)
    whole, whole_first, whole_seen = trained(run, features="offline", **weights)
    assert not whole.target.streams and whole.agreement == plan.agreement > 0.95
    assert all(torch.equal(first[name], p) for name, p in whole_first.items())
    assert seen == whole_seen and len(set(seen)) == 3


def test_taps_beside_the_answers_suffice_when_every_row_has_them(run, capsys):
    target = load_target(str(run.parent / "target"), torch.float32)
    taps, rows = {}, own_answers(target.path)
    write_run(run.parent, rows)
    for row in rows:
        output = target.forward(torch.tensor([row.prompt_ids + row.answer_ids]), (0, 2))
        taps[row.id] = output.taps[0, :-1].bfloat16()
    answers = run.parent / "run" / "answers"
    settings = cache_settings(target, target.path, (0, 2))
    (answers / "manifest.json").write_text(json.dumps({"finished": True, "settings": settings}))
    writer = FeatureWriter(str(answers), None)
    writer.write({row.id: taps[row.id] for row in rows[:-1]})
    config = load_config(str(run))
    whole = prepare(config)
    assert not whole.target.streams and whole.data.source.name == "answers"
    writer.write({rows[-1].id: taps[rows[-1].id]})
    capsys.readouterr()
    plan = prepare(config)
    assert plan.target.streams and plan.data.source.name == "answers"
    assert "of the target only embeddings, final norm and LM head are in memory" in capsys.readouterr().out
    # Labels are compared with the target's argmax in one forward.
    assert plan.target.forwards == 1 and plan.agreement == whole.agreement == 1.0


def test_runs_that_decode_or_capture_load_the_target_whole(run, capsys):
    assert make_features.main([str(run)]) == 0
    for words, said in (({"features": "online"}, False), ({"overfit_check": True}, True), ({"eval_steps": 2}, True)):
        capsys.readouterr()
        plan = prepare(load_config(str(run), words))
        assert not plan.target.streams and not any(p.is_meta for p in plan.target.model.parameters())
        assert ("loaded whole although features are stored, because the run decodes" in capsys.readouterr().out) == said
    assert prepare(load_config(str(run))).target.streams


def test_dry_run_counts_what_is_loaded(run, capsys):
    def memory(*words) -> str:
        assert train_drafter.main([str(run), "--dry_run", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any("target's layers" in line for line in lines) == (
            "offline" in words and "--overfit_check" not in words
        )
        return next(line for line in lines if "this run" in line)

    target = load_target(str(run.parent / "target"), torch.float32)
    whole, layers = (sum(p.numel() for p in part.parameters()) for part in (target.model, target.decoder.layers))
    assert whole > layers > 0
    assert f"drafter + {4 * whole / 2**30:.2f} GiB target" in memory()
    assert f"drafter + {4 * whole / 2**30:.2f} GiB target" in memory("--features", "offline", "--overfit_check")
    assert f"drafter + {4 * (whole - layers) / 2**30:.2f} GiB target" in memory("--features", "offline")
