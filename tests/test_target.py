"""Target folders, and what a drafter must share with its target: taps, mask token, vocabulary."""

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.configuration import DrafterSpec
from models.fitting import check_against_target, check_mask_token, fit_to_target
from models.target import Target, load_target
from tiny import MASK, VOCAB, tiny_drafter, tiny_target


@pytest.mark.parametrize(
    ("mask", "words"),
    [(None, "--mask_token_id"), (VOCAB, f"{VOCAB} embeddings"), (-1, "embeddings"), (1, "eos"), (0, "pad")],
)
def test_mask_token_must_be_a_free_row_of_the_table(mask, words):
    with pytest.raises(ValueError, match=words):
        check_mask_token(mask, tiny_target())


def test_drafter_must_belong_to_the_target(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target)
    check_against_target(drafter.spec, drafter.model.config, target)
    with pytest.raises(ValueError, match="4 layers, this one has 5"):
        check_against_target(drafter.spec, drafter.model.config, tiny_target(layers=5))
    drafter.model.config.hidden_size = 48
    with pytest.raises(ValueError, match="hidden_size 48, target 32"):
        check_against_target(drafter.spec, drafter.model.config, target)


def tokenizer(mask_token="w2", words=VOCAB):
    words = {f"w{i}": i for i in range(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), mask_token=mask_token, eos_token="w1"
    )


def test_the_drafters_mask_token_wins_over_the_tokenizers_with_a_warning(recwarn):
    target = tiny_target()
    drafter = tiny_drafter(target)
    target.tokenizer = tokenizer()
    check_against_target(drafter.spec, drafter.model.config, target)
    assert not [w for w in recwarn if "mask token" in str(w.message)]
    target.tokenizer = tokenizer("w9")
    with pytest.warns(UserWarning, match=f"mask token is 9, the drafter was trained with {MASK}"):
        check_against_target(drafter.spec, drafter.model.config, target)


def draft_logits(drafter, target):
    torch.manual_seed(3)
    hidden = drafter.model.prediction_slots(
        drafter.model(torch.randn(1, 5, 32), torch.randn(1, 3, 64)).last_hidden_state
    )
    tokens = torch.tensor([[5, 6, 7, 8]])
    codes = drafter.model.head.teacher_forced_codes(torch.tensor([3]), tokens, target.embed, hidden)
    return target.logits(hidden, drafter.draft_ids) + codes @ drafter.model.head.rows().T


def test_drafter_that_fits_is_left_as_it_is():
    target = tiny_target()
    drafter = tiny_drafter(target)
    target.tokenizer = tokenizer()
    assert fit_to_target(drafter, target) is drafter


@pytest.mark.parametrize(("drafter_rows", "words"), [(VOCAB, 60), (60, VOCAB), (70, 60), (60, None)])
def test_rows_that_the_tokenizer_cannot_decode_are_never_proposed(drafter_rows, words):
    target, sized = tiny_target(), tiny_target(vocab=drafter_rows)
    drafter = tiny_drafter(sized)
    target.tokenizer = tokenizer(words=words) if words else None
    rows = drafter.model.head.rows()[:60].clone()
    fitted = fit_to_target(drafter, target)
    assert fitted.draft_ids.tolist() == list(range(60)) and fitted.spec.draft_vocab_size == 60
    assert torch.equal(fitted.model.head.rows(), rows)
    assert draft_logits(fitted, target).shape == (1, 4, 60)


def test_draft_vocabulary_loses_only_tokens_that_cannot_be_decoded():
    target = tiny_target()
    target.tokenizer = tokenizer(words=60)
    drafter = tiny_drafter(target, draft_vocab_size=4)
    drafter.draft_ids = torch.tensor([3, 9, 59, 61])
    before = draft_logits(drafter, target)
    fitted = fit_to_target(drafter, target)
    assert fitted.draft_ids.tolist() == [3, 9, 59]
    torch.testing.assert_close(draft_logits(fitted, target), before[..., :3])


def test_target_with_a_tied_head_gives_equal_logits_after_a_reload(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=[1, 5], initializer_range=0.3,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config), tokenizer())
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_target(str(tmp_path), torch.float32)
    ids = torch.randint(0, VOCAB, (1, 7))
    assert torch.equal(loaded.forward(ids, (0,)).logits, target.forward(ids, (0,)).logits)
    assert loaded.eos_ids == (1, 5)
    chosen = torch.tensor([3, 9])
    full = target.logits(target.embed(ids))[..., chosen]
    torch.testing.assert_close(loaded.logits(target.embed(ids), chosen), full, atol=1e-6, rtol=1e-5)


def test_target_folders_that_cannot_be_loaded_are_refused_in_one_line(tmp_path):
    for path, words in (
        (str(tmp_path / "nowhere"), "no such folder"),
        (str(tmp_path / "x.gguf"), "no such GGUF file"),
        (str(tmp_path), "holds no config.json"),
    ):
        with pytest.raises(ValueError, match=words):
            load_target(path, torch.float32)
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights are not loaded"):
        load_target(str(tmp_path), torch.float32)


def test_tap_ids_are_those_of_the_layers_outputs():
    target = tiny_target()
    ids = torch.randint(0, VOCAB, (1, 6))
    states = target.model(ids, output_hidden_states=True).hidden_states
    taps = target.forward(ids, (0, 2)).taps
    assert torch.equal(taps, torch.cat([states[1], states[3]], dim=-1))


def test_taps_outside_the_target_are_refused():
    for taps, words in (
        ((-2, 2), "start at -1"),
        ((0, 4), "in -1..2"),
        ((0, 3), "the target's last"),
        ((2, 0), "ascending"),
        ((), "distinct"),
    ):
        with pytest.raises(ValueError, match=words):
            DrafterSpec(block_size=4, mask_token_id=2, target_layer_ids=taps, num_target_layers=4)
