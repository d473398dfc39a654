"""Causal blocks and sliding windows as each format means them, against the naive reference: one block, batches over the
cache, and training rows."""

from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DFlashCache

import naive_drafter as naive
import public_checkpoints as public
from eval.decoding.policy import TreeOptions
from eval.decoding.proposals import DraftProposer
from models.checkpoint import load_drafter
from models.fitting import fit_to_target
from models.formats.writing import write_checkpoint
from tiny import tiny_drafter, tiny_target
from training.attention import dense_mask, flex_mask

SLIDING = ["sliding_attention", "full_attention"]
WINDOW = 4


def causal(layer, slot, anchor, position):
    return position <= anchor + slot


def from_slot(layer, slot, anchor, position):
    """SGLang and SpecForge: a+j-(w-1) and causal inside the block, in the sliding layer (the first) only."""
    return layer == 1 or anchor + slot - (WINDOW - 1) <= position <= anchor + slot


def from_anchor(layer, slot, anchor, position):
    """speculators: a-w for the whole block, causal unless told otherwise."""
    return layer == 1 or anchor - WINDOW <= position <= anchor + slot


def from_anchor_both_ways(layer, slot, anchor, position):
    return layer == 1 or anchor - WINDOW <= position


def sliding_zlab():
    made = public.zlab()
    made.config |= {"layer_types": SLIDING, "sliding_window": WINDOW}
    del made.config["use_sliding_window"]  # not every writer has it
    return made


def sliding_speculators(non_causal):
    made = public.speculators()
    layers = {"layer_types": SLIDING, "sliding_window": WINDOW, "use_sliding_window": True}
    made.config["transformer_layer_config"] |= layers
    made.config["sliding_window_non_causal"] = non_causal
    return made


def top_level_causal():
    made = public.zlab("domino", shift=True)
    made.config["is_causal"] = True
    return made


VARIANTS = {
    "bidirectional": (public.zlab, naive.sees_block),
    "dflash_config.causal": (lambda: public.zlab(causal=True), causal),
    "causal_head (JetSpec)": (lambda: public.zlab(causal_head=True), causal),
    "is_causal": (top_level_causal, causal),
    "window from the slot": (sliding_zlab, from_slot),
    "window from the anchor": (lambda: sliding_speculators(False), from_anchor),
    "window, non-causal": (lambda: sliding_speculators(True), from_anchor_both_ways),
}


def read(folder, name, target):
    make, sees = VARIANTS[name]
    made = make()
    if "lm_head.weight" in made.tensors:
        made.tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().clone()
        made.tensors["lm_head.weight"] = target.model.get_output_embeddings().weight.detach().clone()
    return made.plain, fit_to_target(load_drafter(made.save(Path(folder))), target), sees


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def block_embeds(target, spec, anchor):
    return target.embed(torch.tensor([anchor] + [public.MASK] * (spec.block_size - 1)))


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_alone_and_requests_together_over_the_cache(tmp_path, target, name):
    """Two requests of different lengths, two rounds: what the second round reads of the first comes from the cache."""
    plain, drafter, sees = read(tmp_path, name, target)
    spec = drafter.spec
    taps = [public.draw(20 + r, length, 64, scale=1.0) for r, length in enumerate((9, 5))]
    anchors = torch.tensor([5, 9])
    expected = [
        naive.hidden_states(plain, rows, block_embeds(target, spec, int(a)), sees=sees)
        for rows, a in zip(taps, anchors, strict=True)
    ]
    with torch.no_grad():
        alone = drafter.model(block_embeds(target, spec, 5)[None], taps[0][None]).last_hidden_state[0]
    close(alone, expected[0])

    proposer = DraftProposer(target, drafter, "dflash_chain", TreeOptions())
    proposer.begin(2, 64)
    first = torch.zeros(2, 6, 64)
    first[0], first[1, :3] = taps[0][:6], taps[1][:3]
    proposer.join(first, [6, 3])
    proposer.draft(anchors)
    second = torch.zeros(2, 3, 64)
    second[0], second[1, :2] = taps[0][6:], taps[1][3:]
    proposer.commit(second, [3, 2])
    found = proposer.draft(anchors).hidden_RTD
    for r in range(2):
        close(found[r], expected[r][spec.first_slot :])


@pytest.mark.parametrize("name", VARIANTS)
def test_training_rows_see_what_decoding_sees(tmp_path, target, name):
    """TRAPS 1 and 2: blocks of one row, each as if it were alone."""
    plain, drafter, sees = read(tmp_path, name, target)
    spec, context = drafter.spec, 11
    taps, anchors = public.draw(30, context, 64, scale=1.0), torch.tensor([[3, 7, 9]])
    tokens = torch.tensor([5, 9, 12])
    embeds = torch.cat([block_embeds(target, spec, int(t)) for t in tokens])[None]
    slots = (anchors[..., None] + torch.arange(spec.block_size)).flatten(1)
    positions = torch.cat([torch.arange(context)[None], slots], dim=1)
    mask = dense_mask(anchors, torch.zeros_like(anchors), context, spec.block_size)
    with torch.no_grad():
        hidden = drafter.model(embeds, taps[None], mask, positions).last_hidden_state[0]
    for n, anchor in enumerate(anchors[0].tolist()):
        part = slice(n * spec.block_size, (n + 1) * spec.block_size)
        close(hidden[part], naive.hidden_states(plain, taps[:anchor], embeds[0, part], sees=sees))


@pytest.mark.parametrize(("name", "floor"), [("window from the slot", 12 - 3), ("window from the anchor", 12 - 4)])
def test_output_depends_on_the_window_alone(tmp_path, target, name, floor):
    """TRAP 44, all layers sliding: context below the floor of the first slot changes nothing, the floor itself does."""
    make, _ = VARIANTS[name]
    made = make()
    layers = made.config.get("transformer_layer_config", made.config)
    layers["layer_types"] = ["sliding_attention"] * 2
    model = load_drafter(made.save(Path(tmp_path))).model
    taps, embeds = public.draw(40, 1, 12, 64, scale=1.0), public.draw(41, 1, 5, 32, scale=1.0)
    with torch.no_grad():
        before = model(embeds, taps).last_hidden_state
        for position, moved in ((floor - 1, False), (floor, True)):
            other = taps.clone()
            other[:, position] += 1
            assert torch.equal(model(embeds, other).last_hidden_state[:, 0], before[:, 0]) != moved


def test_a_causal_block_hides_later_slots_and_a_plain_one_does_not(tmp_path, target):
    """TRAP 2."""
    taps, embeds = public.draw(50, 1, 6, 64, scale=1.0), public.draw(51, 1, 5, 32, scale=1.0)
    other = embeds.clone()
    other[:, 4] += 1
    for name, moved in (("bidirectional", True), ("is_causal", False)):
        model = read(tmp_path / name, name, target)[1].model
        with torch.no_grad():
            same = torch.equal(model(other, taps).last_hidden_state[:, 2], model(embeds, taps).last_hidden_state[:, 2])
        assert same != moved


@pytest.mark.parametrize("name", ["is_causal", "bidirectional"])
def test_transformers_cache_and_padding_mask_change_nothing(tmp_path, target, name):
    """How `generate(speculation_type="dflash")` calls the drafter: two-dimensional mask, its own cache, positions."""
    model = read(tmp_path, name, target)[1].model
    taps, embeds = public.draw(60, 1, 9, 64, scale=1.0), public.draw(61, 1, 5, 32, scale=1.0)
    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        expected = model(embeds, taps).last_hidden_state
        model(embeds, taps[:, :6], torch.ones(1, 11), torch.arange(11)[None], cache)
        cache.crop(-5)
        found = model(embeds, taps[:, 6:], torch.ones(1, 14), torch.arange(6, 14)[None], cache).last_hidden_state
    close(found, expected)


def test_flex_masks_are_refused_where_a_slot_sees_less_than_its_block(tmp_path, target):
    model = read(tmp_path, "is_causal", target)[1].model
    anchors = torch.tensor([[3, 7]])
    mask = flex_mask(anchors, torch.zeros_like(anchors), 8, 5)
    positions = torch.cat([torch.arange(8)[None], (anchors[..., None] + torch.arange(5)).flatten(1)], dim=1)
    with pytest.raises(ValueError, match="--attention sdpa"):
        model(torch.zeros(1, 10, 32), torch.zeros(1, 8, 64), mask, positions)


def test_attention_options_survive_every_format_that_has_words_for_them(tmp_path, target):
    places = {
        "is_causal": {"transformers", "zlab"},
        "window from the slot": {"transformers", "zlab"},
        "window from the anchor": {"transformers", "speculators"},
        "window, non-causal": {"transformers", "speculators"},
    }
    for name, able in places.items():
        drafter = read(tmp_path / name, name, target)[1]
        for form in ("transformers", "zlab", "speculators", "deepspec"):
            folder = tmp_path / f"{name}-{form}"
            folder.mkdir()
            if form in able:
                write_checkpoint(drafter, target, form, folder)
                assert load_drafter(str(folder)).spec == drafter.spec
            else:
                with pytest.raises(ValueError, match=f"format {form} "):
                    write_checkpoint(drafter, target, form, folder)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}])
def test_frequencies_stay_fp32_in_a_bf16_drafter(tmp_path, rope):
    """Rounded ones would turn keys and queries by other angles than training, which keeps its buffers fp32."""
    target = tiny_target()
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 50000.0} | rope
    model = tiny_drafter(target).model
    exact = model.rotary_emb.inv_freq.clone()
    assert exact.dtype == torch.float32 and not torch.equal(exact, exact.bfloat16().float())
    model.save_pretrained(tmp_path)
    loaded = load_drafter(str(tmp_path), torch.bfloat16).model
    for cast in (loaded, model.to(torch.bfloat16), model.bfloat16()):
        assert cast.dtype == torch.bfloat16 and torch.equal(cast.rotary_emb.inv_freq, exact)
    assert model.to("meta").rotary_emb.inv_freq.is_meta


def test_a_boolean_mask_under_flex_attention_is_an_error(target):
    """It would be added to the scores, and hide nothing (TRAPS 11)."""
    model = tiny_drafter(target).model
    model.config._attn_implementation = "flex_attention"
    mask = torch.ones(1, 1, 5, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="flex takes a BlockMask"):
        model(torch.randn(1, 5, 32), torch.randn(1, 3, 64), attention_mask=mask)
