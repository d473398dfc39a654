"""Drafter folders: exact round trips, and a one-line refusal of everything that does not fit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import (
    check_same_spec,
    finished_drafter,
    load_drafter,
    save_draft_ids,
)
from models.configuration import DrafterSpec, build_drafter_config
from models.drafter import DFlashDraftModel
from tiny import MASK, VOCAB, tiny_drafter, tiny_target

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 50000.0}


def save(folder, drafter):
    drafter.model.save_pretrained(folder)
    if drafter.draft_ids is not None:
        save_draft_ids(folder, drafter.draft_ids)
    return str(folder)


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "drafter", tiny_drafter(tiny_target()))


def edit_config(folder, remove=(), **keys):
    path = Path(folder, "config.json")
    config = json.loads(path.read_text())
    nested = config["dflash_config"]
    for name in remove:
        config.pop(name, None)
        nested.pop(name, None)
    path.write_text(json.dumps(config | keys))


def edit_tensors(folder, **tensors):
    path = f"{folder}/model.safetensors"
    kept = {k: v for k, v in (load_file(path) | tensors).items() if v is not None}
    save_file(kept, path, metadata={"format": "pt"})


def refusal(folder, **kwargs):
    with pytest.raises(ValueError) as caught:
        load_drafter(folder, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("head", ["none", "domino", "markov_vanilla", "markov_gated", "markov_rnn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact_for_every_head(tmp_path, head, dtype):
    drafter = tiny_drafter(tiny_target(dtype=dtype), head_type=head, shift_label=head == "markov_gated")
    loaded = load_drafter(save(tmp_path, drafter), dtype=None)
    assert loaded.spec == drafter.spec
    own, theirs = drafter.model.state_dict(), loaded.model.state_dict()
    assert own.keys() == theirs.keys()
    for name, tensor in own.items():
        assert theirs[name].dtype == dtype and torch.equal(tensor, theirs[name]), name


def test_every_trained_parameter_is_in_the_checkpoint(tmp_path):
    drafter = tiny_drafter(tiny_target())
    model = drafter.model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    hidden = model(torch.randn(1, 5, 32), torch.randn(1, 3, 64)).last_hidden_state
    anchor, tokens = torch.tensor([3]), torch.tensor([[4, 5, 6, 7]])
    embed = torch.nn.Embedding(VOCAB, 32)
    codes = model.head.teacher_forced_codes(anchor, tokens, embed, model.prediction_slots(hidden))
    (hidden.square().sum() + (codes @ model.head.rows().T).square().sum()).backward()
    optimizer.step()
    assert [n for n, p in model.named_parameters() if torch.equal(before[n], p)] == []
    loaded = load_drafter(save(tmp_path, drafter)).model.state_dict()
    assert loaded.keys() == before.keys()
    assert all(torch.equal(p, loaded[n]) for n, p in model.named_parameters())


def test_draft_vocabulary_round_trip(tmp_path):
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=10)
    drafter.draft_ids = torch.arange(3, 53, 5)
    loaded = load_drafter(save(tmp_path, drafter))
    assert loaded.spec.draft_vocab_size == 10
    assert loaded.model.head.rows().shape == (10, 8)
    assert loaded.to_target_ids(torch.tensor([0, 9])).tolist() == [3, 48]
    (tmp_path / "draft_vocabulary.safetensors").unlink()
    assert "draft_vocabulary.safetensors" in refusal(str(tmp_path))


@pytest.mark.parametrize("ids", [[3, 2], [3, 3], [-1, 2], [3, VOCAB], []])
def test_draft_vocabulary_must_be_ascending_ids_of_the_vocabulary(saved, ids):
    save_draft_ids(saved, torch.tensor(ids, dtype=torch.long))
    assert "draft_vocabulary.safetensors" in refusal(saved)


def test_missing_files_are_named(saved, tmp_path):
    assert "holds no config.json" in refusal(str(tmp_path / "nowhere"))
    shutil.move(f"{saved}/model.safetensors", f"{saved}/pytorch_model.bin")
    assert "holds no model.safetensors (pickled weights are not loaded)" in refusal(saved)


def test_a_pickle_under_the_right_name_is_refused(saved):
    torch.save({"fc.weight": torch.zeros(1)}, f"{saved}/model.safetensors")
    assert "model.safetensors is not a whole safetensors file" in refusal(saved)


def test_a_cut_file_and_a_broken_config_are_refused(saved):
    weights = Path(saved, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "not a whole safetensors file" in refusal(saved)
    Path(saved, "config.json").write_text("{half")
    assert "config.json is not valid JSON" in refusal(saved)


def test_tensors_must_fit(saved):
    edit_tensors(saved, **{"fc.weight": None, "layers.0.mlp.extra": torch.zeros(1)})
    message = refusal(saved)
    assert "missing tensors ['fc.weight']" in message and "unexpected ['layers.0.mlp.extra']" in message


def test_misshapen_and_non_finite_tensors_are_named(saved):
    edit_tensors(saved, **{"norm.weight": torch.ones(31)})
    assert "norm.weight has shape (31,), its config needs (32,)" in refusal(saved)
    edit_tensors(saved, **{"norm.weight": torch.full((32,), float("nan"))})
    assert "norm.weight" in refusal(saved) and "NaN" in refusal(saved)


@pytest.mark.parametrize(
    "name", ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "gru_hidden_dim"]
)
def test_a_missing_key_is_refused_and_never_guessed(saved, name):
    edit_config(saved, remove=[name])
    assert repr(name) in refusal(saved)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mask_token_id": 7}, "'mask_token_id' twice with different values: 7 and 2"),
        ({"is_causal": True}, "contradicts itself about causal blocks: {'causal': False, 'is_causal': True}"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is None"),
        (
            {"target_layer_ids": [0, 3], "dflash_config": {"target_layer_ids": [0, 3], "projector_type": None}},
            "layer 3",
        ),
        ({"dflash_config": {"projector_type": "new"}}, "'new'"),
        ({"dflash_config": {"projector_type": "domino", "gru_hidden_dim": 16}}, "shift_label"),
    ],
)
def test_keys_with_another_meaning_are_refused(saved, keys, words):
    edit_config(saved, **keys)
    assert words in refusal(saved)


def yarn_drafter():
    target = tiny_target()
    target.config.rope_parameters = dict(YARN)
    return tiny_drafter(target)


def test_yarn_frequencies_survive_a_round_trip(tmp_path):
    drafter = yarn_drafter()
    plain = tiny_drafter(tiny_target())
    assert not torch.equal(drafter.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    loaded = load_drafter(save(tmp_path, drafter)).model.rotary_emb
    assert torch.equal(loaded.inv_freq, drafter.model.rotary_emb.inv_freq)
    assert loaded.attention_scaling == drafter.model.rotary_emb.attention_scaling != 1.0


SCALING = {key: value for key, value in YARN.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "yarn"} | SCALING, "rope_theta": 50000.0},
        {"rope_scaling": SCALING, "rope_parameters": {"rope_theta": 50000.0}},
        {"rope_scaling": None, "rope_parameters": SCALING, "rope_theta": 50000.0},
        {"rope_scaling": SCALING, "rope_parameters": YARN, "rope_theta": 50000.0},
    ],
)
def test_theta_and_scaling_are_found_wherever_they_stand(tmp_path, keys):
    drafter = yarn_drafter()
    folder = save(tmp_path, drafter)
    edit_config(folder, remove=["rope_parameters", "rope_scaling", "rope_theta"], **keys)
    assert torch.equal(load_drafter(folder).model.rotary_emb.inv_freq, drafter.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_parameters": YARN, "rope_theta": 10000.0}, "'rope_theta' twice"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": SCALING},
            "'rope_type' twice",
        ),
        ({"rope_parameters": None}, "lacks 'rope_theta'"),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "'partial_rotary_factor' twice",
        ),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 rotates an odd part"),
    ],
)
def test_contradicting_or_missing_rope_options_are_refused(saved, keys, words):
    edit_config(saved, remove=["rope_parameters", "rope_scaling", "rope_theta"], **keys)
    assert words in refusal(saved)


def test_drafter_of_a_target_with_nested_or_partial_rope_rotates_whole_heads():
    target = tiny_target()
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert tiny_drafter(target).model.rotary_emb.inv_freq.shape == (4,)
    target.config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {},
    }
    assert tiny_drafter(target).model.config.rope_parameters["rope_theta"] == 1e6


def test_specs_that_differ_are_listed():
    drafter = tiny_drafter(tiny_target())
    other = tiny_drafter(tiny_target(), block_size=6, shift_label=True).spec
    check_same_spec(drafter.spec, drafter.spec, "resume")
    with pytest.raises(ValueError, match="resume: block_size is 5, not 6, shift_label is False, not True"):
        check_same_spec(drafter.spec, other, "resume")


def test_finished_drafter_of_a_run(tmp_path, saved):
    with pytest.raises(ValueError, match="launch.sh train"):
        finished_drafter(str(tmp_path / "other"))
    assert finished_drafter(str(tmp_path)) == saved
    with pytest.raises(ValueError, match="holds no config.json"):
        finished_drafter(str(tmp_path), str(tmp_path))


def test_output_has_the_dtype_of_the_blocks_embeddings():
    # transformers' loop hands the output to the target's LM head, whose dtype may differ from the drafter's.
    model = tiny_drafter(tiny_target()).model
    block, context = torch.randn(1, 5, 32, dtype=torch.bfloat16), torch.randn(1, 3, 64, dtype=torch.bfloat16)
    assert model(block, context).last_hidden_state.dtype == torch.bfloat16
    assert model(block.float(), context).last_hidden_state.dtype == torch.float32


def test_config_holds_the_public_keys(saved):
    config = json.loads(Path(saved, "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    for keys in (config, config["dflash_config"]):
        assert keys["block_size"] == 5 and keys["mask_token_id"] == MASK and keys["target_layer_ids"] == [0, 2]
    assert config["dflash_config"]["projector_type"] == "domino" and config["emb_dim"] == 8
    assert config["tie_word_embeddings"] is False
    names = set(load_file(f"{saved}/model.safetensors"))
    assert {"embed_proj.0.weight", "embed_proj.2.weight", "prefix_gru.weight_hh_l0", "hidden_norm.weight"} <= names
    assert (
        DFlashDraftModel(build_drafter_config(tiny_target().config, DrafterSpec(5, 2, (0, 2), 4), 2)).head is not None
    )
