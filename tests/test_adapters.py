"""Training a part of a drafter: the head on a frozen backbone, LoRA, and what a start from a checkpoint may change."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from data.settings import RunConfig
from eval.decoding.loop import Request, generate
from eval.session import Session
from models.checkpoint import load_drafter, save_draft_ids
from models.configuration import DrafterSpec
from tiny import MASK, tiny_drafter, tiny_target
from trainers import logged, make_trainer
from training.adapters import FOLDER, HEAD, choose_trainable, full_weights, head_names, lora_layers
from training.evaluation import decoding_copy
from training.initialise import zero_correction
from training.warm_start import agree_with_start, read_start, start_config, start_from

SHARED = dict(block_size=4, target_layer_ids=(0, 2), head_rank=8, gru_hidden_dim=16)


@pytest.fixture
def target():
    return tiny_target()


def saved(folder, target, draft_ids=None, **spec):
    """A drafter checkpoint on disk, as another run or project left it."""
    size = None if draft_ids is None else len(draft_ids)
    drafter = tiny_drafter(target, seed=7, **{**SHARED, **spec}, draft_vocab_size=size)
    drafter.model.save_pretrained(folder)
    if draft_ids is not None:
        save_draft_ids(folder, draft_ids)
    return str(folder)


def partly_trained(tmp_path, target, start, trainable, steps=8, **options):
    trainer = make_trainer(
        tmp_path, target=target, max_steps=steps, learning_rate=1e-2, save_strategy="steps", save_steps=steps,
        options={"trainable": trainable, "init_drafter": start, **options},
    )  # fmt: skip
    if not start_from(trainer.model, load_drafter(start), None):
        zero_correction(trainer.model)
    choose_trainable(trainer.model, trainer.config)
    return trainer


def hidden(model, seed=3):
    """Outputs for a random block over a random context."""
    source = torch.Generator().manual_seed(seed)
    block, context = torch.randn(1, 4, 32, generator=source), torch.randn(1, 6, 64, generator=source)
    with torch.no_grad():
        return model(noise_embeds=block, context_hidden_states=context).last_hidden_state


def test_head_only_training_leaves_the_backbone_bit_identical(tmp_path, target):
    """From a plain DFlash checkpoint: the head is new, learns, and nothing else moves."""
    start = saved(tmp_path / "start", target, head_type="none")
    trainer = partly_trained(tmp_path, target, start, "head", steps=20)
    heads = head_names(trainer.model)
    assert {name.split(".")[0] for name in heads} == {"prefix_gru", "embed_proj"}
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    public = load_drafter(start).model.state_dict()
    own = load_drafter(str(tmp_path / "checkpoints" / "checkpoint-20")).model.state_dict()
    assert public.keys() == own.keys() - heads
    assert all(torch.equal(own[name], value) for name, value in public.items())
    assert all(not torch.equal(own[name], before[name]) for name in heads)
    # The curriculum has no part in it: the base loss trains nothing.
    assert set(logged(trainer, "distill_lambda")) == {0.0}
    assert logged(trainer, "final_loss")[-1] < logged(trainer, "base_loss")[-1] - 0.1


def test_lora_is_trained_merged_and_decodes(tmp_path, target):
    start = saved(tmp_path / "start", target)
    trainer = partly_trained(tmp_path, target, start, "lora", lora_rank=4, lora_dropout=0.1)
    model, base = trainer.model, load_drafter(start).model
    assert len(lora_layers(model)) == 2 * 7 + 1
    torch.testing.assert_close(hidden(model), hidden(base))  # B starts at zero
    trainer.train()
    model.eval()
    checkpoint = tmp_path / "checkpoints" / "checkpoint-8"
    merged = load_drafter(str(checkpoint))
    assert (hidden(model) - hidden(base)).abs().max() > 1e-2
    torch.testing.assert_close(hidden(merged.model), hidden(model), atol=1e-5, rtol=1e-5)
    # Frozen parts are the checkpoint's own; the head was trained in full.
    own, theirs, heads = merged.model.state_dict(), base.state_dict(), head_names(base)
    assert all(torch.equal(own[name], theirs[name]) for name in own if "norm" in name)
    assert heads and all(not torch.equal(own[name], theirs[name]) for name in heads)
    # The adapter alone: peft puts it onto the drafter that it started from.
    adapter = checkpoint / FOLDER
    assert sorted(p.name for p in adapter.glob("*.safetensors")) == ["adapter_model.safetensors", HEAD]
    assert len(load_file(adapter / "adapter_model.safetensors")) == 2 * len(lora_layers(model))
    assert load_file(adapter / HEAD).keys() == heads
    by_peft = PeftModel.from_pretrained(load_drafter(start).model, adapter).merge_and_unload()
    torch.testing.assert_close(hidden(by_peft.eval()), hidden(model), atol=1e-5, rtol=1e-5)
    session = Session(RunConfig(budget=8, width=3, candidates=8), target, merged, "")
    requests = [Request([5, 6, 7], 12)]
    texts = [
        generate(target, session.proposer(m), requests)[0].tokens for m in ("ar", "dartree_pruned", "domino_chain")
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_small_update_of_bf16_weights_survives_the_merge(tmp_path, target):
    """One of .3 % of the weights: in bf16 half of it is rounding. Loading for decoding rounds, and only once."""
    model = tiny_drafter(target, **SHARED).model.bfloat16()
    choose_trainable(model, RunConfig(trainable="lora", init_drafter="x", lora_rank=4))
    updates = {}
    for name, layer in lora_layers(model).items():
        up, down, weight = layer.lora_B["default"].weight, layer.lora_A["default"].weight, layer.base_layer.weight
        up.data.normal_()
        size = layer.scaling["default"] * (up.float() @ down.float()).norm() / weight.float().norm()
        up.data.mul_(0.003 / size)
        update = layer.scaling["default"] * (up.double() @ down.double())
        updates[f"{name}.weight"] = update, weight.double() + update
    full = full_weights(model)
    assert len(updates) == 2 * 7 + 1
    for name, (update, exact) in updates.items():
        assert full[name].dtype == torch.float32
        assert (full[name] - exact).norm() / update.norm() < 1e-4
        assert (exact.bfloat16() - exact).norm() / update.norm() > 0.3  # what saving in bf16 would lose
    rest = model.state_dict()
    assert all(torch.equal(value, rest[name]) and value.dtype == torch.bfloat16
               for name, value in full.items() if name not in updates)  # fmt: skip
    model.save_pretrained(tmp_path, state_dict=full)
    stored, decoding = load_drafter(str(tmp_path), None).model, load_drafter(str(tmp_path), torch.bfloat16).model
    assert {p.dtype for p in decoding.parameters()} == {torch.bfloat16} and stored.dtype == torch.float32
    for name, value in full.items():
        assert torch.equal(stored.state_dict()[name], value.float())
        assert torch.equal(decoding.state_dict()[name], value.bfloat16())
    copied = decoding_copy(model, None, tiny_target(dtype=torch.bfloat16)).model.state_dict()
    assert all(torch.equal(copied[name], value) for name, value in decoding.state_dict().items())


def test_full_weights_of_a_whole_drafter_are_its_own(target):
    model = tiny_drafter(target).model
    full = full_weights(model)
    assert full.keys() == model.state_dict().keys() and all(
        torch.equal(full[k], v) for k, v in model.state_dict().items()
    )


def test_lora_on_a_layer_that_does_not_exist_is_refused(target):
    config = RunConfig(trainable="lora", init_drafter="x", lora_targets=["q_proj", "query"])
    with pytest.raises(ValueError, match="lora_targets: 'query' is no linear layer of the drafter: down_proj, fc"):
        choose_trainable(tiny_drafter(target).model, config)


def agreed(start, target, draft_ids=None, layers=2, **spec):
    config = RunConfig(
        init_drafter=start, num_draft_layers=layers, **({"draft_vocab_size": 9} if spec.pop("small", 0) else {})
    )
    wanted = DrafterSpec(**{**SHARED, "mask_token_id": MASK, "num_target_layers": 4, **spec})
    drafter = read_start(config, target)
    return drafter, *agree_with_start(drafter, wanted, draft_ids, config)


def test_a_start_keeps_its_backbone_and_takes_the_runs_head(tmp_path, target):
    start = saved(tmp_path / "start", target, head_type="none", shift_label=True)
    drafter, ids, spec = agreed(start, target, shift_label=True, head_type="markov_gated", pure_draft_prefix_len=0)
    assert ids is None and (spec.shift_label, spec.head_type, spec.head_rank) == (True, "markov_gated", 8)
    config = start_config(drafter, spec)
    assert (
        DrafterSpec.from_config(config) == spec and config.intermediate_size == drafter.model.config.intermediate_size
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(block_size=5), "block_size is 4 there, 5 here"),
        (dict(shift_label=True), "shift_label is False there, True here"),
        (dict(target_layer_ids=(0, 1)), r"target_layer_ids is \(0, 2\) there, \(0, 1\) here"),
        (dict(mask_token_id=3), "mask_token_id is 2 there, 3 here"),
        (dict(layers=3), "num_draft_layers is 2 there, 3 here"),
    ],
)
def test_a_start_of_another_backbone_is_refused(tmp_path, target, options, message):
    start = saved(tmp_path / "start", target)
    with pytest.raises(ValueError, match=f"init_drafter: .*start does not fit this run: {message}"):
        agreed(start, target, **options)


def test_a_start_with_a_draft_vocabulary_brings_it(tmp_path, target):
    ids = torch.tensor([1, *range(10, 30)])
    start = saved(tmp_path / "start", target, draft_ids=ids)
    _, found, spec = agreed(start, target, draft_ids=torch.arange(5))
    assert found.tolist() == ids.tolist() and spec.draft_vocab_size == 21
    with pytest.raises(ValueError, match="draft_vocab_size is 21 there, 9 here"):
        agreed(start, target, small=True)


def test_the_head_comes_along_where_its_options_agree(tmp_path, target):
    """A run with a draft vocabulary takes the rows of W2 that it keeps."""
    start, ids = saved(tmp_path / "start", target), torch.tensor([1, *range(10, 30)])
    public = load_drafter(start)
    model = tiny_drafter(target, seed=2, **SHARED, draft_vocab_size=len(ids)).model
    assert start_from(model, public, ids)
    own, theirs = model.state_dict(), public.model.state_dict()
    assert torch.equal(own["embed_proj.2.weight"], theirs["embed_proj.2.weight"][ids])
    assert all(torch.equal(own[k], v) for k, v in theirs.items() if k != "embed_proj.2.weight")
    other = tiny_drafter(target, seed=2, **{**SHARED, "head_rank": 4}).model
    before = other.head.output.weight.clone()
    assert not start_from(other, public, None)
    assert torch.equal(other.head.output.weight, before) and torch.equal(other.fc.weight, public.model.fc.weight)


@pytest.mark.parametrize("there, here", [(False, True), (True, False)])
def test_a_confidence_head_that_differs_takes_no_correction_head_away(tmp_path, target, caplog, there, here):
    """A run adds a confidence head to a trained drafter, or leaves it out."""
    start = load_drafter(saved(tmp_path / "start", target, confidence_head=there))
    model = tiny_drafter(target, seed=2, **SHARED, confidence_head=here).model
    confidence = {name: value.clone() for name, value in model.state_dict().items() if "confidence" in name}
    assert start_from(model, start, None)
    own, theirs = model.state_dict(), start.model.state_dict()
    assert len(confidence) == 2 * here and all(torch.equal(own[name], value) for name, value in confidence.items())
    rest = own.keys() - confidence.keys()
    assert "embed_proj.2.weight" in rest and all(torch.equal(own[name], theirs[name]) for name in rest)
    assert ("the confidence head is new" in caplog.text) is here and "the head is new" not in caplog.text


@pytest.mark.parametrize("with_markov", [False, True])
def test_a_confidence_head_comes_along_beside_a_new_correction_head(tmp_path, target, with_markov):
    """Unless it looks at that head's rows."""
    shared = {**SHARED, "confidence_head": True, "confidence_with_markov": with_markov, "pure_draft_prefix_len": 0}
    start = load_drafter(saved(tmp_path / "start", target, **shared, head_type="markov_vanilla"))
    model = tiny_drafter(target, seed=2, **shared, head_type="markov_gated").model
    output = model.head.output.weight.clone()
    assert not start_from(model, start, None)
    own, theirs = model.confidence_head.proj.weight, start.model.confidence_head.proj.weight
    assert torch.equal(own, theirs) is not with_markov and torch.equal(model.head.output.weight, output)


def test_a_start_comes_from_the_hub_and_may_hold_what_is_not_known_here(tmp_path, target, monkeypatch):
    folder = saved(tmp_path / "start", target)
    path = tmp_path / "start" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new_attention": 3}))
    asked = []
    monkeypatch.setattr(
        "models.formats.folder.snapshot_download", lambda repo, allow_patterns: asked.append(repo) or folder
    )
    with pytest.raises(ValueError, match=r"unknown keys \['new_attention'\]; --allow_extra goes on"):
        read_start(RunConfig(init_drafter="owner/name"), target)
    start = read_start(RunConfig(init_drafter="owner/name", allow_extra=True), target)
    assert set(asked) == {"owner/name"}
    own, there = start.model.state_dict(), load_file(tmp_path / "start" / "model.safetensors")
    assert own.keys() == there.keys() and all(torch.equal(own[name], there[name]) for name in own)


def test_a_start_that_the_hub_does_not_give_is_one_line(target, monkeypatch):
    def snapshot(repo, allow_patterns):
        raise OSError("no route")

    monkeypatch.setattr("models.formats.folder.snapshot_download", snapshot)
    with pytest.raises(ValueError, match="init_drafter: owner/name is no folder here and cannot be had from the Hub"):
        read_start(RunConfig(init_drafter="owner/name"), target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(trainable="lora"), "trainable is lora: give --init_drafter"),
        (dict(trainable="head", head="none", init_drafter="x"), "trainable is head, but head is none"),
        (dict(init_drafter="/nowhere"), "init_drafter: no such folder: /nowhere"),
    ],
)
def test_mistakes_in_what_is_trained(target, options, message):
    with pytest.raises(ValueError, match=message):
        read_start(RunConfig(**options), target)
