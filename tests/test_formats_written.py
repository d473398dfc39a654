"""Public checkpoints with a target: what must fit, rope in every spelling, and every pair of formats written and read
back bit for bit."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

import naive_drafter as naive
import public_checkpoints as public
from data.options import RunConfig
from eval.decoding.proposals import TreeOptions, available_methods, make_proposer
from models.checkpoint import load_drafter, read_config
from models.configuration import DrafterSpec, spec_difference
from models.drafter import DFlashDraftModel
from models.fitting import fit_to_target
from models.formats.detect import FORMATS
from models.formats.writing import write_checkpoint
from public_checkpoints import CASES
from reading import FULL, PUBLIC, Words, load
from tiny import tiny_target
from training.warm_start import read_start


@pytest.fixture(scope="module")
def target():
    return tiny_target()


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


def lure(head_VD, known):
    """Rows beyond the tokenizer that win every argmax: one of the two, whatever the sign of the first feature."""
    with torch.no_grad():
        head_VD[known:] = 0.0
        head_VD[known, 0], head_VD[known + 1, 0] = 1e4, -1e4


@pytest.mark.parametrize("rows", [60, 64, 70])
@pytest.mark.parametrize("form", ["zlab", "deepspec", "modelopt"])
def test_rows_that_the_tokenizer_cannot_decode_are_never_proposed(tmp_path, form, rows):
    """TRAPS 18: the drafter has 64 rows, the target fewer, as many or more, the tokenizer 58 tokens."""
    made, wide, known = CASES[FULL[form]](), tiny_target(vocab=rows), 58
    wide.tokenizer = Words(known)
    heads = [wide.model.lm_head.weight, *(t for name, t in made.tensors.items() if name == "lm_head.weight")]
    for head in heads:
        lure(head, known)
    drafter = fit_to_target(load(tmp_path, made), wide)
    assert drafter.draft_ids.tolist() == list(range(known)) and drafter.spec.draft_vocab_size == known
    taps = public.draw(7, 1, 6, 2 * public.HIDDEN, scale=1.0)
    for method in available_methods(drafter.spec.head_type)[1:]:
        proposer = make_proposer(wide, drafter, method, TreeOptions(budget=12, width=4, candidates=8))
        proposer.begin(1, 64)
        proposer.join(taps, [6])
        draft = proposer.draft(torch.tensor([9]))
        assert ((draft.hidden_RTD @ heads[-1].T).argmax(-1) >= known).all()
        tree = proposer.build(draft)
        assert tree.sizes[0] >= 4 and int(tree.tokens_RN.max()) < known


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
