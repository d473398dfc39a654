"""Every public format as an independent writer lays it out: read tensor by tensor, computed as a naive reference does,
written in every format that can hold it and read back bit for bit, and refused in one line where something is wrong."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import naive_drafter as naive
import public_checkpoints as public
from data.options import RunConfig
from eval.decoding.tree import Draft, chain
from models.checkpoint import finished_drafter, load_drafter, read_config
from models.configuration import DrafterSpec, spec_difference
from models.drafter import DFlashDraftModel
from models.fitting import fit_to_target
from models.formats.detect import FORMATS
from models.formats.writing import write_checkpoint
from public_checkpoints import CASES
from tiny import tiny_target
from training.warm_start import read_start

PUBLIC = ("zlab", "deepspec", "speculators", "modelopt")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


class Words:
    """As much of a tokenizer as `fit_to_target` asks for."""

    def __init__(self, count, mask_token_id=None):
        self.count, self.mask_token_id = count, mask_token_id

    def __len__(self):
        return self.count


def load(folder, made, **kwargs):
    return load_drafter(made.save(Path(folder)), dtype=None, **kwargs)


def refusal(folder, made, **kwargs):
    with pytest.raises(ValueError) as caught:
        load(folder, made, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
FULL = {"zlab": "zlab domino shifted", "deepspec": "deepspec vanilla", "speculators": "speculators vanilla",
        "modelopt": "modelopt vanilla"}  # fmt: skip


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


# ---- drafter and target ----


def with_target_tables(made, target, dtype=torch.float32):
    rows = made.draft_ids if made.draft_ids else slice(None)
    if "lm_head.weight" in made.tensors:
        embedding, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
        made.tensors["embed_tokens.weight"] = embedding.detach().clone().to(dtype)
        made.tensors["lm_head.weight"] = head.detach()[rows].clone().to(dtype)
    return made


@pytest.mark.parametrize("name", ["deepspec vanilla", "speculators dflash reduced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_the_targets_tables_are_dropped_and_others_used(tmp_path, target, name, dtype):
    copied = load(tmp_path / "a", with_target_tables(CASES[name](), target, dtype))
    assert copied.own_tables and not fit_to_target(copied, target).own_tables
    made = with_target_tables(CASES[name](), target, dtype)
    made.tensors["lm_head.weight"][3, 3] += 1
    other = fit_to_target(load(tmp_path / "b", made), target)
    assert other.embedding_VD is None and torch.equal(other.head_VD, made.tensors["lm_head.weight"])


def test_a_drafters_own_head_loses_the_rows_that_cannot_be_emitted(tmp_path, target):
    """TRAP 18, for a head that is not the target's."""
    made = CASES["speculators dflash reduced"]()
    narrow = tiny_target()
    narrow.tokenizer = Words(40)
    fitted = fit_to_target(load(tmp_path, made), narrow)
    kept = [token for token in made.draft_ids if token < 40]
    assert fitted.draft_ids.tolist() == kept
    hidden = public.draw(3, 2, 32)
    expected = hidden @ made.tensors["lm_head.weight"][: len(kept)].T
    torch.testing.assert_close(fitted.tables(narrow).logits(hidden, fitted.draft_ids), expected)


def test_own_tables_get_the_familys_scale_and_cap(tmp_path):
    """TRAP 21: Gemma multiplies what it looks up, and caps its logits."""
    gemma = tiny_target("gemma3")
    made = CASES["deepspec dflash"]()
    tables = fit_to_target(load(tmp_path, made), gemma).tables(gemma)
    ids, hidden = torch.tensor([[5, 9]]), public.draw(3, 1, 2, 32, scale=9.0)
    torch.testing.assert_close(tables.embed(ids), made.tensors["embed_tokens.weight"][ids] * 32**0.5)
    torch.testing.assert_close(
        tables.logits(hidden), torch.tanh(hidden @ made.tensors["lm_head.weight"].T / 30.0) * 30.0
    )


def test_training_goes_on_from_copied_tables_and_refuses_others(tmp_path, target):
    """Training embeds and scores through the target."""
    for name, made in (("own", CASES["deepspec dflash"]()), ("copy", with_target_tables(public.speculators(), target))):
        config = RunConfig(init_drafter=made.save(tmp_path / name))
        if name == "own":
            with pytest.raises(ValueError, match="has an embedding or LM head of its own"):
                read_start(config, target)
        else:
            assert not read_start(config, target).own_tables


@pytest.mark.parametrize("form", PUBLIC)
def test_a_drafter_of_another_target_is_refused_before_anything_runs(tmp_path, form):
    made = CASES[FULL[form]]()
    drafter = load(tmp_path, made)
    if form != "speculators":  # it does not say how many layers its target has
        with pytest.raises(ValueError, match="target of 4 layers, this one has 6"):
            fit_to_target(drafter, tiny_target(layers=6))
    with pytest.raises(ValueError, match="hidden_size 32, target 64"):
        fit_to_target(drafter, tiny_target(hidden_size=64))
    if form != "zlab":  # Markov heads look every token up
        with pytest.raises(ValueError, match="vocab_size 64, but the target emits 80 tokens"):
            fit_to_target(drafter, tiny_target(vocab=80))


@pytest.mark.parametrize("form", PUBLIC)
@pytest.mark.parametrize(("mask", "words"), [(1, "eos"), (0, "pad"), (64, "outside"), (-1, "outside")])
def test_the_mask_id_is_a_token_that_is_never_said(tmp_path, target, form, mask, words):
    """TRAPS 15 and 16."""
    made = CASES[FULL[form]]()
    for part in (made.config, made.config.get("dflash_config") or {}):
        if "mask_token_id" in part:
            part["mask_token_id"] = mask
    with pytest.raises(ValueError, match=words):
        fit_to_target(load(tmp_path, made), target)


@pytest.mark.parametrize("form", PUBLIC)
def test_the_checkpoints_mask_id_wins_over_the_tokenizers(tmp_path, form):
    """TRAP 17."""
    own = tiny_target()
    own.tokenizer = Words(64, mask_token_id=7)
    with pytest.warns(UserWarning, match="mask token is 7, the drafter was trained with 2"):
        assert fit_to_target(load(tmp_path, CASES[FULL[form]]()), own).spec.mask_token_id == 2


@pytest.mark.parametrize("form", PUBLIC)
def test_the_last_layer_as_a_tap_is_refused(tmp_path, target, form):
    """TRAP 22. speculators do not say how many layers the target has: there the target tells."""
    made = CASES[FULL[form]]()
    for part, key, ids in (
        (made.config, "target_layer_ids", [0, 3]),
        (made.config, "aux_hidden_state_layer_ids", [1, 4]),
        (made.config.get("dflash_config") or {}, "target_layer_ids", [0, 3]),
    ):
        if key in part:
            part[key] = ids
    with pytest.raises(ValueError, match="taps layer 3, the target's last"):
        fit_to_target(load(tmp_path, made), target)


def test_layer_minus_one_is_the_embeddings_output(target):
    """TRAP 22: DeepSpec's -1 is index 0 of hidden_states, speculators' aux id 0."""
    ids = torch.tensor([[5, 9, 12]])
    taps = target.forward(ids, (-1, 1)).taps
    assert torch.equal(taps[..., :32], target.embed(ids))
    assert torch.equal(taps[..., 32:], target.model(ids, output_hidden_states=True).hidden_states[2])
    made = public.speculators()
    made.config["aux_hidden_state_layer_ids"] = [0, 2]
    assert FORMATS["speculators"].read(made.config, {}).target_layer_ids == [-1, 1]


# ---- rope ----

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("name", [FULL[f] for f in PUBLIC])
@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5000.0}, naive.plain_frequencies(8, 5000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5}},
         naive.plain_frequencies(4, 5000.0)),
        ({"rope_theta": 5000.0, "rope_scaling": {"type": "yarn", **YARN}}, None),
        ({"rope_parameters": {"rope_theta": 5000.0, **YARN}}, None),
    ],
)  # fmt: skip
def test_rope_in_either_place_and_after_a_round_trip(tmp_path, target, name, rope, expected):
    """TRAP 24."""
    made = with_target_tables(CASES[name](), target)
    layers = made.config.get("transformer_layer_config", made.config)
    for key in ("rope_theta", "rope_parameters", "rope_scaling"):
        layers.pop(key, None)
    layers |= rope
    drafter = load(tmp_path / "in", made)
    found, scale = drafter.model.rotary_emb.inv_freq, drafter.model.rotary_emb.attention_scaling
    if expected is None:
        assert scale != 1.0 and not torch.allclose(found, naive.plain_frequencies(8, 5000.0))
    else:
        torch.testing.assert_close(found, expected)
    for form in PUBLIC:
        if holds(form, made.expected):
            written = rewrite(tmp_path / form, drafter, target, form)
            assert torch.equal(written.model.rotary_emb.inv_freq, found)
            assert written.model.rotary_emb.attention_scaling == scale


def test_partial_rotary_turns_the_first_part_of_each_head(tmp_path):
    made = public.zlab()
    made.config |= {"partial_rotary_factor": 0.5}
    drafter = load(tmp_path, made)
    taps, embeds = public.draw(1, 6, 64, scale=1.0), public.draw(2, 5, 32, scale=1.0)
    expected = naive.hidden_states(made.plain, taps, embeds, frequencies=naive.plain_frequencies(4))
    whole = naive.hidden_states(made.plain, taps, embeds)
    hidden = drafter.model(embeds[None], taps[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(hidden, whole, atol=1e-2)


# ---- out ----


def holds(form, spec):
    """Which drafters a format has words for, as METHODS section 5 says."""
    markov, reduced = spec["head_type"].startswith("markov"), spec.get("draft_vocab_size") is not None
    confidence = spec.get("confidence_head", False)
    return {
        "transformers": True,
        "zlab": not (markov or reduced or confidence),
        "deepspec": spec["head_type"] != "domino" and spec["shift_label"] and not reduced,
        "speculators": spec["head_type"] != "domino",
        "modelopt": markov and not reduced,
    }[form]


def rewrite(folder, drafter, target, form):
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(drafter, target, form, folder, "owner/target")
    return load_drafter(str(folder), dtype=None)


@pytest.mark.parametrize("name", CASES)
def test_out_and_in_is_bit_identical_or_refused(tmp_path, target, name):
    """Every pair of formats: read one, write the other, read it, write it again. TRAPS 16, 19, 50."""
    made = CASES[name]()
    made = with_target_tables(made, target)
    first = load(tmp_path / "in", made)
    for form in FORMATS:
        if not holds(form, made.expected):
            with pytest.raises(ValueError, match=f"format {form} ") as caught:
                rewrite(tmp_path / form, first, target, form)
            assert "\n" not in str(caught.value)
            continue
        second = rewrite(tmp_path / form, first, target, form)
        assert {k for k in spec_difference(second.spec, first.spec)} <= {"num_target_layers"}
        assert fit_to_target(second, target).spec == fit_to_target(load(tmp_path / "in", made), target).spec
        state = second.model.state_dict()
        assert state.keys() == made.plain.keys()
        assert all(torch.equal(t, made.plain[n]) and t.dtype == made.plain[n].dtype for n, t in state.items())
        assert (None if second.draft_ids is None else second.draft_ids.tolist()) == made.draft_ids
        assert not second.own_tables or not fit_to_target(second, target).own_tables


def test_files_and_keys_are_those_of_the_format(tmp_path, target):
    """What other programs look for, typed from METHODS section 5."""
    names = {}
    for form, case in (("zlab", "zlab domino fill-in"), ("deepspec", "deepspec rnn"),
                       ("speculators", "speculators gated reduced"), ("modelopt", "modelopt vanilla")):  # fmt: skip
        made = CASES[case]()
        rewrite(tmp_path / form, load(tmp_path / "in", made), target, form)
        names[form] = set(load_file(tmp_path / form / "model.safetensors"))
        assert names[form] == {n for n in made.tensors if not n.startswith("verifier_")}
    config = {form: json.loads((tmp_path / form / "config.json").read_text()) for form in names}
    zlab = config["zlab"]
    assert zlab["architectures"] == ["DFlashDraftModel"] and zlab["model_type"] == "qwen3" and zlab["emb_dim"] == 8
    assert zlab["block_size"] == zlab["dflash_config"]["block_size"] == 5
    assert zlab["rope_theta"] == zlab["rope_parameters"]["rope_theta"] == 10000.0 and zlab["rope_scaling"] is None
    assert zlab["layer_types"] == ["full_attention"] * 2 and zlab["is_causal"] is False
    assert zlab["dflash_config"]["shift_label"] is False and zlab["dflash_config"]["pure_draft_prefix_len"] == 1
    assert zlab["tie_word_embeddings"] is False and zlab["dtype"] == "float32"
    deepspec = config["deepspec"]
    assert deepspec["architectures"] == ["Qwen3DSparkModel"] and "dflash_config" not in deepspec
    assert (deepspec["markov_rank"], deepspec["markov_head_type"]) == (8, "rnn")
    assert deepspec["enable_confidence_head"] is False and "confidence_head_with_markov" not in deepspec
    vllm = config["speculators"]
    assert vllm["speculators_model_type"] == "dspark" and vllm["sample_from_anchor"] is True
    assert vllm["aux_hidden_state_layer_ids"] == [1, 3] and vllm["draft_vocab_size"] == 15
    assert vllm["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0
    assert vllm["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    assert vllm["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    modelopt = config["modelopt"]["dflash_config"]
    assert modelopt["use_confidence_head"] is True and modelopt["projector_type"] == "dspark"
    assert not {"enable_confidence_head", "pure_draft_prefix_len"} & modelopt.keys()


def test_tables_of_their_own_go_where_there_is_a_place_for_them(tmp_path, target):
    made = CASES["deepspec dflash"]()
    drafter = load(tmp_path / "in", made)
    second = rewrite(tmp_path / "out", drafter, target, "speculators")
    assert torch.equal(second.embedding_VD, made.tensors["embed_tokens.weight"])
    assert torch.equal(second.head_VD, made.tensors["lm_head.weight"])
    for form in ("zlab", "transformers"):
        with pytest.raises(ValueError, match=f"format {form} has no place"):
            rewrite(tmp_path / form, drafter, target, form)
    with pytest.raises(ValueError, match="give --target"):
        write_checkpoint(load(tmp_path / "plain", public.zlab(shift=True)), None, "deepspec", tmp_path / "none")


def test_a_model_made_from_a_written_config_has_the_same_spec(tmp_path, target):
    drafter = load(tmp_path / "in", CASES["zlab domino shifted"]())
    rewrite(tmp_path / "out", drafter, target, "zlab")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read_config(tmp_path / "out")
    assert DrafterSpec.from_config(config) == drafter.spec == DFlashDraftModel(config).spec
