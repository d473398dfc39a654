"""Target families by configuration alone: tied heads, embedding scale, caps, q/k norms, sliding windows, refusals.

Each family must decode with our loop as transformers does, and verify a tree as it would verify each path alone.
"""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3nTextConfig,
    JambaConfig,
    Lfm2Config,
    LlamaForCausalLM,
    MambaConfig,
    Qwen3NextConfig,
)

from data.engine_local import answer_batch
from data.engines import Question
from data.options import RunConfig
from eval.decoding.cache import TreeCache
from eval.decoding.loop import Request, generate
from eval.decoding.proposals import TreeOptions, make_proposer
from models import quantization
from models.checkpoint import load_drafter
from models.families import refuse_unsupported
from models.fitting import fit_to_target
from models.target import Target, load_target
from tiny import FAMILIES, VOCAB, WINDOW, tiny_drafter, tiny_target
from tiny_tokenizer import TEMPLATE, tiny_tokenizer
from training.forward import capture_taps
from training.initialise import initialise_from_target

WINDOWED = [name for name in FAMILIES if tiny_target(name).window]
CONTEXT = 3 * WINDOW + 2


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_logits(target, tokens):
    """Of the family's own forward over one row, without a cache or a mask of ours."""
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([tokens])).logits[0]


def close(actual, expected):
    """Equal to 1e-5 of the largest value: random layers without training give activations in the tens."""
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_the_tested_families_slide_as_they_say():
    assert set(WINDOWED) == {"qwen2-window", "qwen3-window", "mistral", "gemma3", "gemma2"}
    assert tiny_target("qwen2", sliding_window=WINDOW).window is None  # use_sliding_window is off
    assert tiny_target("mistral", sliding_window=None).window is None
    # Mistral's file may say layer_types, its model does not read them: every layer slides.
    masks = tiny_target("mistral", layer_types=["full_attention"] * 4).causal_masks(torch.tensor([9]), 9)
    assert masks.shape == (1, 1, 9, 9) and int(masks[0, 0, 8].sum()) == WINDOW


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_gives_the_text_of_transformers(family):
    """Prompts of two lengths beyond the window decoded together, in fp32; the drafter is random (TRAPS 39)."""
    target = tiny_target(family)
    target.eos_ids = ()
    prompts, new = [prompt(CONTEXT), prompt(5, seed=1)], 24
    expected = [
        target.model.generate(
            torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]
    assert len(set(expected[0])) > 5
    drafter = tiny_drafter(target)
    accepted = 0
    for method in ("ar", "domino_chain", "ddtree", "dartree_pruned"):
        proposer = make_proposer(target, drafter, method, TreeOptions(budget=20, width=8, candidates=32))
        answers = generate(target, proposer, [Request(ids, new) for ids in prompts])
        assert [answer.tokens for answer in answers] == expected, method
        rounds = [record for answer in answers for record in answer.rounds]
        assert rounds and (method == "ar" or all(record.proposed > 0 for record in rounds))
        accepted += sum(record.accepted for record in rounds)
    assert accepted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trees_logits_are_those_of_its_paths_decoded_alone(family):
    """Two requests of different lengths; one branch is longer than the window, so that ancestors leave it too."""
    target = tiny_target(family)
    contexts, depth = [prompt(CONTEXT), prompt(7, seed=1)], WINDOW + 3
    # A long chain 1..depth, a child of the root, and children half-way down and at the end of the chain.
    parents = [0, *range(depth), 0, depth // 2, depth, depth + 3]
    depths = [0, *range(1, depth + 1), 1, depth // 2 + 1, depth + 1, depth + 2]
    tokens = prompt(len(parents), seed=2)
    logits = tree_logits(target, contexts, tokens, parents, depths)
    for row, context in zip(logits, contexts, strict=True):
        for node in range(len(parents)):
            path = path_to(node, parents)
            alone = plain_logits(target, context + [tokens[i] for i in path])
            assert close(row[path], alone[len(context) :]), node


def path_to(node, parents):
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


@torch.inference_mode()
def tree_logits(target, contexts, tokens, parents, depths):
    """[R, M, V]: prefill of the contexts together, then the same tree after each of them."""
    rows, width = len(contexts), max(map(len, contexts))
    lengths = torch.tensor([len(c) for c in contexts])
    cache = TreeCache.for_config(target.config, rows, width + len(tokens), target.dtype, target.device)
    positions = torch.arange(width).expand(rows, -1)
    cache.place(positions)
    ids = torch.tensor([c + [0] * (width - len(c)) for c in contexts])
    target.forward(ids, (), position_ids=positions, mask=target.causal_masks(lengths, width), cache=cache)
    parents, depths = (torch.tensor([values] * rows) for values in (parents, depths))
    columns = cache.place(lengths[:, None] + torch.arange(len(tokens)))
    masks = target.tree_masks(parents, depths, lengths, columns)
    ids = torch.tensor([tokens] * rows)
    return target.forward(ids, (), position_ids=lengths[:, None] + depths, mask=masks, cache=cache).logits


def test_the_output_depends_on_the_windows_only():
    """Mistral slides in every layer: four layers of window 6 see 4 * 5 tokens back, the current one not counted."""
    target, context = tiny_target("mistral"), prompt(40)
    reach = 4 * (WINDOW - 1)
    parents, depths = [0, 0, 1, 1], [0, 1, 2, 2]
    tree = prompt(4, seed=2)
    base = tree_logits(target, [context], tree, parents, depths)
    # The last node has position 42, so that it sees tokens 22 and later; the root sees from 20 on.
    unseen = [t if i >= 40 - reach else (t + 1) % VOCAB for i, t in enumerate(context)]
    assert torch.equal(tree_logits(target, [unseen], tree, parents, depths), base)
    seen = [t if i != 40 - reach else (t + 1) % VOCAB for i, t in enumerate(context)]
    changed = (tree_logits(target, [seen], tree, parents, depths) != base).any(-1)
    assert changed[0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("family", WINDOWED)
def test_taps_of_regeneration_and_of_training_are_those_of_one_row_alone(family):
    """Regeneration pads on the left and caches its windows, training pads on the right: the same taps either way."""
    target = tiny_target(family)
    target.eos_ids, target.tokenizer = (), SimpleNamespace(pad_token_id=0)
    questions = [Question(str(n), "d", prompt(n)) for n in (CONTEXT, 4)]
    rows, features = answer_batch(target, questions, (0, 2), RunConfig(max_answer_length=WINDOW + 4))
    width = max(len(row.prompt_ids + row.answer_ids) for row in rows)
    texts = [row.prompt_ids + row.answer_ids for row in rows]
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in texts])
    together = capture_taps(target, padded, (0, 2))
    for index, (row, ids) in enumerate(zip(rows, texts, strict=True)):
        alone = target.forward(torch.tensor([ids]), (0, 2)).taps[0]
        assert close(together[index, : len(ids)], alone)
        stored = features[row.id].float()
        torch.testing.assert_close(stored, alone[:-1], atol=0.02, rtol=0.02)
        assert row.answer_ids == plain_logits(target, ids)[len(row.prompt_ids) - 1 : -1].argmax(-1).tolist()


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}


@pytest.mark.parametrize("rope", [None, YARN])
@pytest.mark.parametrize("name", ["domino_chain", "dartree_pruned"])
def test_contexts_longer_than_the_drafters_positions_degrade_and_do_not_crash(tmp_path, name, rope):
    """TRAPS 47: 16 positions by the drafter's config, 60 in use; read from a folder, as public drafters are."""
    target = tiny_target("mistral")
    target.eos_ids = ()
    short = tiny_target("mistral", max_position_embeddings=16, **({"rope_parameters": rope} if rope else {}))
    tiny_drafter(short).model.save_pretrained(tmp_path)
    drafter = fit_to_target(load_drafter(str(tmp_path)), target)
    config = drafter.model.config
    assert (config.max_position_embeddings, config.rope_parameters["rope_type"]) == (16, "yarn" if rope else "default")
    requests, options = [Request(prompt(40), 20)], TreeOptions(budget=8, width=4)
    expected = generate(target, make_proposer(target, None, "ar", options), requests)
    (answer,) = generate(target, make_proposer(target, drafter, name, options), requests)
    assert answer.tokens == expected[0].tokens and len(answer.tokens) == 20
    whole = drafter.spec.num_proposals if name == "domino_chain" else 8
    assert answer.rounds and all(record.proposed == whole for record in answer.rounds)


def test_embedding_scale_and_cap_are_the_targets_own():
    target = tiny_target("gemma3")
    ids = torch.tensor([[3, 9]])
    table = target.model.get_input_embeddings().weight
    torch.testing.assert_close(target.embed(ids), table[ids] * 32**0.5)
    hidden = 100 * torch.randn(5, 32)
    raw = hidden @ table.T
    torch.testing.assert_close(target.logits(hidden), 30 * torch.tanh(raw / 30))
    torch.testing.assert_close(target.logits(hidden, torch.tensor([3, 9])), 30 * torch.tanh(raw[:, [3, 9]] / 30))


def test_scaled_logits_are_the_families_own():
    target = tiny_target("granite")
    hidden = torch.randn(2, 3, 32)
    raw = target.model.lm_head(hidden)
    torch.testing.assert_close(target.logits(hidden), raw / 8)
    target.check()


class LoudLlama(LlamaForCausalLM):
    """Scales its logits in a way that no configuration tells."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 1.5 * output.logits
        return output


def test_a_family_that_scales_its_logits_in_an_unknown_way_is_refused():
    target = Target(LoudLlama(tiny_target("llama").config))
    with pytest.raises(ValueError, match="way that is not supported"):
        target.check()


def test_a_family_that_ignores_the_mask_or_the_positions_is_refused():
    for ignored in ("attention_mask", "position_ids"):
        target = tiny_target("llama")
        target.check()
        decoder = target.decoder
        target.decoder = lambda ignored=ignored, decoder=decoder, **kwargs: decoder(**{**kwargs, ignored: None})
        with pytest.raises(ValueError, match="way that is not supported"):
            target.check()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MambaConfig(num_hidden_layers=2), "recurrent layers"),
        (JambaConfig(), "recurrent layers"),
        (Qwen3NextConfig(), "recurrent layers"),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "recurrent layers"),
        (SimpleNamespace(model_type="new", layers_block_type=["attention", "mamba"]), "recurrent layers"),
        (DeepseekV3Config(), "latent attention"),
        (Gemma3nTextConfig(), "share keys and values"),
    ],
)
def test_targets_that_cannot_be_verified_are_refused_in_one_line(config, words):
    with pytest.raises(ValueError, match=words) as error:
        refuse_unsupported(config)
    assert config.model_type in str(error.value) and "\n" not in str(error.value)


def test_a_recurrent_target_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    """TRAP 46: saved whole, with a tokenizer and weights that transformers loads."""
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=VOCAB)
    config = Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"], **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 0
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(
        ValueError, match="'lfm2' has recurrent layers .conv.: its state cannot be rolled back"
    ) as error:
        load_target(str(tmp_path), torch.float32)
    assert "\n" not in str(error.value)


def test_the_text_model_of_a_multi_modal_target_is_used(tmp_path):
    text = tiny_target("gemma3", final_logit_softcapping=None).config  # as published; this class has no cap
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path), torch.float32)
    assert target.config.model_type == "gemma3_text" and target.num_layers == 4 and target.window == WINDOW
    ids = torch.tensor([prompt(CONTEXT)])
    with torch.inference_mode():
        theirs = target.model(input_ids=ids)
    assert close(target.forward(ids, (0,)).logits, theirs.logits)
    assert target.forward(ids, (0, 2)).taps.shape == (1, CONTEXT, 64)


def test_a_multi_modal_target_without_a_text_form_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="(?i)cannot load.*llava") as error:
        load_target(str(tmp_path), torch.float32)
    assert "\n" not in str(error.value)


def test_quantised_loading_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    for name, words in (("bnb-nf4", "pip install bitsandbytes"), ("torchao-int8", "pip install torchao")):
        with pytest.raises(ValueError, match=words):
            quantization.quantization_config(name, torch.float32)
    with pytest.raises(ValueError, match="quantization must be one of none, .* got 'int3'"):
        quantization.quantization_config("int3", torch.float32)
    assert quantization.quantization_config("none", torch.float32) is None
    assert quantization.precision_name(torch.bfloat16) == "bfloat16"
    assert quantization.precision_name(torch.bfloat16, "bnb-nf4") == "bfloat16 with bnb-nf4 weights"


@pytest.mark.parametrize(("name", "error"), [("torchao-int8", 0.1), ("bnb-int8", 0.1), ("bnb-nf4", 0.6)])
def test_a_quantised_target_is_decoded_without_loss(tmp_path, name, error):
    if not os.environ.get("REQUIRE_QUANTIZED"):
        pytest.importorskip("torchao" if name.startswith("torchao") else "bitsandbytes")
    # NF4 wants rows of at least 64 numbers.
    tiny_target(hidden_size=64, head_dim=16).model.save_pretrained(tmp_path)
    tiny_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    target = load_target(str(tmp_path), torch.float32, quantization=name)
    full = load_target(str(tmp_path), torch.float32)
    assert target.quantized and not full.quantized and target.dtype == torch.float32
    ids = torch.tensor([prompt(9)])
    ours, exact = target.forward(ids, ()).logits, full.forward(ids, ()).logits
    assert 0 < (ours - exact).norm() / exact.norm() < error
    requests, drafter = [Request(prompt(9), 16)], tiny_drafter(target)
    answers = [
        generate(target, make_proposer(target, drafter, method, TreeOptions(budget=12, width=6)), requests)[0].tokens
        for method in ("ar", "dartree_pruned")
    ]
    assert answers[0] == answers[1]
    with pytest.raises(ValueError, match="init_from_target"):
        initialise_from_target(drafter.model, target, ids)
