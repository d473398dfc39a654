"""Every public format as an independent writer lays it out: read tensor by tensor, computed as a naive reference does,
and refused in one line where something is wrong. tests/test_formats_written.py writes them again."""

import json
from pathlib import Path

import pytest
import torch

import naive_drafter as naive
import public_checkpoints as public
from eval.decoding.tree import Draft, chain
from models.checkpoint import finished_drafter, load_drafter
from models.fitting import fit_to_target
from public_checkpoints import CASES
from reading import FULL, PUBLIC, load, refusal
from tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("name", CASES)
def test_tensors_layout_and_forward_are_those_of_the_reference(tmp_path, target, name):
    made = CASES[name]()
    drafter = load(tmp_path, made)
    own = drafter.model.state_dict()
    assert own.keys() == made.plain.keys()
    assert all(torch.equal(own[n], tensor) for n, tensor in made.plain.items())
    assert {n: getattr(drafter.spec, n) for n in made.expected} == made.expected
    assert (None if drafter.draft_ids is None else drafter.draft_ids.tolist()) == made.draft_ids
    drafter = fit_to_target(drafter, target)
    assert drafter.spec.num_target_layers == public.TARGET_LAYERS

    spec, context, anchor = drafter.spec, 6, 9
    taps = public.draw(7, context, len(spec.target_layer_ids) * public.HIDDEN, scale=1.0)
    embedding = made.tensors.get("embed_tokens.weight", target.model.get_input_embeddings().weight)
    head = made.tensors.get("lm_head.weight", target.model.get_output_embeddings().weight)
    block = [anchor] + [public.MASK] * (spec.block_size - 1)
    expected = naive.hidden_states(made.plain, taps, embedding[block])
    tables = drafter.tables(target)
    with torch.no_grad():
        hidden = drafter.model(tables.embed(torch.tensor([block])), taps[None]).last_hidden_state
        torch.testing.assert_close(hidden[0], expected, atol=2e-5, rtol=1e-4)
        first = 0 if made.expected["shift_label"] else 1
        slots = drafter.model.prediction_slots(hidden)
        assert torch.equal(slots, hidden[:, first:])
        draft = Draft(torch.tensor([anchor]), slots, tables.logits(slots, drafter.draft_ids))
        tree = chain(draft, drafter, tables.embed, use_head=True)
    tokens, logits = naive.chain(
        made.plain, expected[first:], made.expected["head_type"], anchor, embedding, head,
        made.expected["pure_draft_prefix_len"], made.draft_ids,
    )  # fmt: skip
    assert tree.tokens_RN[0].tolist() == tokens
    assert len(tokens) == spec.block_size - first == spec.num_proposals  # TRAP 5
    scores = torch.log_softmax(logits, -1).amax(-1).cumsum(0)
    torch.testing.assert_close(tree.scores_RN[0], scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("sees_previous", "name"), [(True, "deepspec vanilla"), (False, "modelopt gated")])
def test_confidence_is_a_linear_map_of_hidden_state_and_previous_row(tmp_path, sees_previous, name):
    made = CASES[name]()
    model = load(tmp_path, made).model
    hidden, previous = public.draw(8, public.HIDDEN, scale=1.0), public.draw(9, public.RANK)
    inputs = torch.cat([hidden, previous]) if sees_previous else hidden
    expected = made.plain["confidence_head.proj.weight"][0] @ inputs + made.plain["confidence_head.proj.bias"][0]
    torch.testing.assert_close(model.confidence_head(hidden, previous if sees_previous else None), expected)


# ---- the one line that states the layout ----


def test_the_layout_is_stated_in_one_line(tmp_path, target):
    told = load(tmp_path / "a", CASES["zlab domino shifted"]()).describe()
    assert told == (
        "z-lab DFlash/Domino: shifted layout, block 5 -> 5 proposals a round of all tokens, mask id 2, taps 0 2 of 4 "
        "layers, bidirectional blocks, head domino (P=1)"
    )
    told = load(tmp_path / "b", CASES["speculators gated reduced"]()).describe()
    assert told == (
        "speculators (vLLM): shifted layout, block 5 -> 5 proposals a round of 15 tokens, mask id 2, taps 0 2 layers, "
        "bidirectional blocks, head markov_gated + confidence, own embedding and LM head"
    )
    assert "fill-in layout, block 5 -> 4 proposals" in load(tmp_path / "c", CASES["zlab dflash"]()).describe()


# ---- files ----


@pytest.mark.parametrize("name", ["zlab domino shifted", "deepspec rnn", "speculators gated reduced"])
def test_shards_and_the_prefix_of_a_causal_lm_are_read(tmp_path, name):
    made = CASES[name]()
    one = load(tmp_path / "one", made).model.state_dict()
    loaded = load_drafter(made.save(tmp_path / "many", shards=3, prefix="model."), dtype=None).model.state_dict()
    assert loaded.keys() == one.keys() and all(torch.equal(loaded[n], t) for n, t in one.items())
    assert load_drafter(str(tmp_path / "many"), torch.bfloat16).model.dtype == torch.bfloat16
    next((tmp_path / "many").glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="names model-00002-of-00003.safetensors, which is not in its folder"):
        load_drafter(str(tmp_path / "many"))


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    made = public.zlab()
    folder = Path(made.save(tmp_path / "x", shards=2))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["fc.weight"] = "../other.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names ../other.safetensors"):
        load_drafter(str(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_kept(tmp_path, dtype):
    made = public.zlab("domino")
    made.tensors = {n: t.to(dtype) for n, t in made.tensors.items()}
    loaded = load(tmp_path, made).model
    assert loaded.dtype == dtype
    assert all(torch.equal(t, made.tensors[n]) for n, t in loaded.state_dict().items())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "drafter.pt"])
def test_pickles_are_refused_with_a_command_that_converts_them(tmp_path, name):
    made = public.zlab()
    folder = Path(made.save(tmp_path))
    (folder / "model.safetensors").unlink()
    torch.save(made.tensors, folder / name)
    with pytest.raises(ValueError, match="pickled weights are not loaded") as caught:
        load_drafter(str(folder))
    # The command is run as it stands, but for its interpreter.
    code = str(caught.value).split('python -c "')[1].rstrip('"')
    exec(code.replace(f"'{name}'", repr(str(folder / name))).replace("'model.", f"'{folder}/model."), {})
    assert torch.equal(load_drafter(str(folder)).model.fc.weight, made.plain["fc.weight"])


def test_a_hub_id_is_fetched_without_code_or_pickles(tmp_path, monkeypatch):
    asked = {}

    def snapshot(repo, allow_patterns):
        asked.update(repo=repo, patterns=allow_patterns)
        return public.zlab().save(tmp_path)

    monkeypatch.setattr("models.formats.folder.snapshot_download", snapshot)
    assert finished_drafter("runs/none", "z-lab/Some-DFlash") == str(tmp_path)
    assert asked["repo"] == "z-lab/Some-DFlash"
    assert not [p for p in asked["patterns"] if p.endswith(("py", "bin", "pt", "*"))]


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def snapshot(repo, allow_patterns):
        raise OSError("no route\nmore words")

    monkeypatch.setattr("models.formats.folder.snapshot_download", snapshot)
    with pytest.raises(ValueError, match="owner/name is no folder here and cannot be had from the Hub: no route$"):
        load_drafter("owner/name")


# ---- what is not known is refused ----


@pytest.mark.parametrize("name", ["zlab domino shifted", "deepspec vanilla", "speculators vanilla", "modelopt vanilla"])
def test_unknown_keys_and_tensors_need_allow_extra(tmp_path, name):
    made = CASES[name]()
    made.config["new_attention"] = 3
    assert "unknown keys ['new_attention']; --allow_extra goes on" in refusal(tmp_path, made)
    del made.config["new_attention"]
    made.tensors["layers.0.self_attn.extra.weight"] = torch.zeros(1)
    assert "unexpected ['layers.0.self_attn.extra.weight']; --allow_extra" in refusal(tmp_path, made)
    made.config["new_attention"] = 3
    assert load(tmp_path, made, allow_extra=True).spec.block_size == made.config["block_size"]
    del made.tensors["fc.weight"]
    assert "missing tensors ['fc.weight']" in refusal(tmp_path, made, allow_extra=True)


@pytest.mark.parametrize(
    ("made", "found"),
    [(public.zlab(new=1), "dflash_config.new"), (public.speculators(), "transformer_layer_config.router")],
)
def test_unknown_keys_inside_are_named(tmp_path, made, found):
    if "transformer_layer_config" in made.config:
        made.config["transformer_layer_config"]["router"] = 4
    assert f"unknown keys ['{found}']" in refusal(tmp_path, made)


NEEDED = {
    "zlab": ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "emb_dim", "gru_hidden_dim",
             "shift_label", "hidden_size", "head_dim", "rope_theta"],
    "deepspec": ["block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank",
                 "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "rope_parameters"],
    "speculators": ["block_size", "mask_token_id", "aux_hidden_state_layer_ids", "markov_rank", "markov_head_type"],
    "modelopt": ["block_size", "mask_token_id", "target_layer_ids", "shift_label", "markov_rank", "markov_head_type",
                 "use_confidence_head"],
}  # fmt: skip


@pytest.mark.parametrize(("form", "key"), [(f, key) for f in PUBLIC for key in NEEDED[f]])
def test_a_missing_key_without_a_documented_default_is_named(tmp_path, form, key):
    """TRAP 23: taps above all are never recomputed."""
    made = CASES[FULL[form]]()
    for part in (made.config, made.config.get("dflash_config") or {}):
        part.pop(key, None)
    if key == "rope_theta":
        made.config.pop("rope_parameters", None)
    shown = "rope_theta" if key == "rope_parameters" else key
    assert shown in refusal(tmp_path, made)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (public.deepspec(), "Gemma 4"),
        (public.speculators(), "speculators_model_type 'eagle3'"),
        (public.zlab(), "is no drafter's that is known here"),
    ],
)
def test_formats_that_are_not_known_are_named(tmp_path, made, words):
    if "Gemma" in words:
        made.config["architectures"] = ["Gemma4DSparkModel"]
    elif "eagle3" in words:
        made.config["speculators_model_type"] = "eagle3"
    else:
        made.config["architectures"] = ["Qwen3ForCausalLM"]
        del made.config["dflash_config"]
    assert words in refusal(tmp_path, made)


def test_contradictions_are_refused(tmp_path):
    made = public.speculators(draft_ids=list(range(3, 63, 4)))
    made.tensors["t2d"][4] = True
    assert "d2t and t2d" in refusal(tmp_path / "a", made)
    made = public.deepspec()
    made.config["dflash_config"] = {"shift_label": False}
    assert "always shifted" in refusal(tmp_path / "b", made)
    made.config["dflash_config"] = {"block_size": 9}
    assert "'block_size' twice" in refusal(tmp_path / "c", made)
    made = public.speculators()
    made.config["target_hidden_size"] = 64
    assert "target_hidden_size 64, but hidden_size 32" in refusal(tmp_path / "d", made)
    made = public.deepspec()
    made.tensors["lm_head.weight"] = torch.zeros(60, 32)
    assert "lm_head.weight has shape (60, 32), its config needs (64, 32)" in refusal(tmp_path / "e", made)
