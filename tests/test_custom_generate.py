"""`generate(custom_generate=DIR)` takes transformers' usual arguments and returns what transformers would."""

import copy

import pytest
import torch
from transformers import GenerationConfig, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from eval.custom_generate import WarpedTarget, generate, with_draft_vocabulary
from eval.decoding.loop import Request
from eval.decoding.loop import generate as decode
from eval.decoding.policy import TreeOptions
from eval.decoding.proposals import make_proposer
from eval.standalone import own_imports, standalone
from models.checkpoint import Drafter
from tiny import EOS, PAD, VOCAB, tiny_drafter, tiny_target

PROMPTS = torch.tensor([[PAD, PAD, 5, 9, 12], [7, 30, 31, 8, 22]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    return target.model, tiny_drafter(target).model


def test_a_padded_batch_gets_the_targets_own_greedy_text(pair):
    model, drafter = pair
    calls = []
    handle = drafter.register_forward_hook(lambda *_: calls.append(1))
    options = dict(attention_mask=MASK, max_new_tokens=12, do_sample=False, pad_token_id=PAD)
    ours = generate(model, assistant_model=drafter, inputs=PROMPTS, **options)
    handle.remove()
    assert torch.equal(ours, model.generate(PROMPTS, **options))
    assert len(calls) >= 2  # it did draft


@pytest.mark.parametrize("method", ["ddtree", "domino_chain", "dflash_chain", "dartree_fixed"])
def test_every_method_emits_the_same(pair, method):
    model, drafter = pair
    ours = generate(model, assistant_model=drafter, inputs=PROMPTS[1:], max_new_tokens=9, method=method, budget=6)
    assert torch.equal(ours, model.generate(PROMPTS[1:], max_new_tokens=9, do_sample=False))


def test_any_of_several_eos_ids_stops_and_the_rest_is_padding(pair):
    model, drafter = pair
    text = model.generate(PROMPTS[1:], max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    stop = next(token for i, token in enumerate(text) if i >= 3 and token not in text[:i])
    options = dict(attention_mask=MASK, max_new_tokens=12, pad_token_id=PAD, eos_token_id=[EOS, stop])
    ours = generate(model, assistant_model=drafter, inputs=PROMPTS, **options)
    assert torch.equal(ours, model.generate(PROMPTS, do_sample=False, **options))
    assert stop in ours[1].tolist()


def test_samples_follow_the_processed_distribution(pair):
    model, drafter = pair
    options = dict(do_sample=True, temperature=0.7, top_k=3, max_new_tokens=2, num_return_sequences=500)
    torch.manual_seed(0)
    ours = generate(model, assistant_model=drafter, inputs=PROMPTS[1:], **options)
    first = torch.bincount(ours[:, 5], minlength=VOCAB) / 500
    logits = model(PROMPTS[1:]).logits[0, -1] / 0.7
    expected = torch.softmax(logits.masked_fill(logits < logits.topk(3).values[-1], -torch.inf), dim=-1)
    assert 0.5 * (first - expected).abs().sum() < 0.07
    second = {token: ours[ours[:, 5] == token, 6] for token in expected.nonzero().flatten().tolist()}
    for token, drawn in second.items():
        given = torch.tensor([[*PROMPTS[1].tolist(), token]])
        allowed = set(model(given).logits[0, -1].topk(3).indices.tolist())
        assert set(drawn.tolist()) <= allowed
    torch.manual_seed(0)
    again = generate(model, assistant_model=drafter, inputs=PROMPTS[1:], **options)
    assert torch.equal(ours, again)  # torch's seed governs samples, as everywhere in transformers


class Recorder:
    def __init__(self):
        self.seen, self.ended = [], False

    def put(self, tokens):
        self.seen += tokens.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamer_sees_prompt_and_tokens_in_order(pair):
    model, drafter = pair
    streamer = Recorder()
    ours = generate(model, assistant_model=drafter, inputs=PROMPTS[1:], max_new_tokens=7, streamer=streamer)
    assert streamer.seen == ours[0].tolist() and streamer.ended


def test_limits_and_outputs_as_in_generate(pair):
    model, drafter = pair
    config = GenerationConfig(max_length=9, return_dict_in_generate=True, eos_token_id=EOS, pad_token_id=PAD)
    ours = generate(model, assistant_model=drafter, inputs=PROMPTS[1:], generation_config=config)
    assert isinstance(ours, GenerateDecoderOnlyOutput) and ours.sequences.shape == (1, 9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams 2"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1.0)])}, "MaxTimeCriteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"method": "markov_chain"}, "does not fit the drafter's head"),
        ({"assistant_model": None}, "give assistant_model"),
        ({"assistant_model": torch.nn.Linear(2, 2)}, "not a drafter"),
        ({"assistant_model": tiny_drafter(tiny_target(layers=5)).model}, r"\(5, 32\), this one has \(4, 32\)"),
        (
            {"assistant_model": tiny_drafter(tiny_target(dtype=torch.bfloat16)).model},
            r"has dtype torch.bfloat16, the target torch.float32: assistant_model.to\(dtype=target.dtype\)",
        ),
    ],
)
def test_what_trees_cannot_honour_is_refused_by_name(pair, options, words):
    model, drafter = pair
    with pytest.raises(ValueError, match=words):
        generate(model, **{"assistant_model": drafter, "inputs": PROMPTS[1:], "max_new_tokens": 4} | options)


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "token_type_ids"])
def test_inputs_of_other_kinds_are_refused_by_name(pair, name):
    """Pictures in the prompt, say: the target would read them, the trees would not."""
    model, drafter = pair

    class Seeing(type(model)):
        def forward(self, *args, pixel_values=None, image_grid_thw=None, token_type_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

    seeing = copy.copy(model)
    seeing.__class__ = Seeing
    options = dict(assistant_model=drafter, inputs=PROMPTS[1:], max_new_tokens=4)
    value = torch.ones(1, 5, dtype=torch.long)
    for given in (value, [value]):
        with pytest.raises(ValueError, match=f"custom_generate does not support {name}$"):
            generate(seeing, **options, **{name: given})
    plain = generate(seeing, **options)
    assert torch.equal(generate(seeing, **options, token_type_ids=0 * value), plain)  # what tokenizers add unasked
    positions = torch.arange(5)[None]
    assert torch.equal(generate(seeing, **options, position_ids=positions, attention_mask=MASK[1:]), plain)


def test_embeddings_in_the_place_of_tokens_are_refused(pair):
    model, drafter = pair
    embeds = model.get_input_embeddings()(PROMPTS[1:])
    with pytest.raises(ValueError, match="does not support inputs_embeds"):
        generate(model, assistant_model=drafter, inputs_embeds=embeds, max_new_tokens=4)


def test_the_callers_modules_stay_as_they_were(pair):
    model, drafter = pair
    model.train().requires_grad_(True)
    drafter.train()
    try:
        generate(model, assistant_model=drafter, inputs=PROMPTS[1:], max_new_tokens=4)
        assert model.training and drafter.training and all(p.requires_grad for p in model.parameters())
    finally:
        model.eval().requires_grad_(False)
        drafter.eval()


@pytest.mark.parametrize("head", ["domino", "markov_rnn"])
def test_zero_rows_are_outside_the_draft_vocabulary(head):
    target, ids = tiny_target(), torch.arange(4, VOCAB, 3)
    small = tiny_drafter(target, head_type=head, draft_vocab_size=len(ids))
    exported = tiny_drafter(target, head_type=head)
    rows = torch.zeros(VOCAB, 8)
    rows[ids] = small.model.head.rows()
    state = small.model.state_dict() | {small.model.head.output_name: rows}
    exported.model.load_state_dict(state)
    fitted = with_draft_vocabulary(exported.model, VOCAB)
    assert torch.equal(fitted.draft_ids, ids) and torch.equal(fitted.model.head.rows(), small.model.head.rows())
    assert exported.model.head.rows().shape == (VOCAB, 8) and exported.spec.draft_vocab_size is None
    options, requests = TreeOptions(budget=8), [Request([5, 9, 12], 8)]
    answers = [
        decode(target, make_proposer(target, drafter, "dartree_pruned", options), requests)[0]
        for drafter in (fitted, Drafter(small.model, ids))
    ]
    assert [r.accepted for r in answers[0].rounds] == [r.accepted for r in answers[1].rounds]
    assert answers[0].accepted_ranks == answers[1].accepted_ranks


@pytest.mark.parametrize("vocab", [VOCAB - 6, VOCAB + 6])
def test_tables_padded_differently_and_a_head_without_rows(vocab):
    target = tiny_target(vocab=vocab)
    drafter = tiny_drafter(tiny_target()).model
    with torch.no_grad():
        drafter.head.output.weight.zero_()
    ours = generate(target.model, assistant_model=drafter, inputs=PROMPTS[1:], max_new_tokens=8)
    assert torch.equal(ours, target.model.generate(PROMPTS[1:], max_new_tokens=8, do_sample=False))
    ids = with_draft_vocabulary(drafter, vocab).draft_ids
    assert len(ids) == min(vocab, VOCAB)


def test_processors_do_not_touch_what_the_drafter_scores_with(pair):
    model, _ = pair
    warped = WarpedTarget(model, [])
    hidden = torch.randn(1, 2, 32)
    assert torch.equal(warped.logits(hidden), model.get_output_embeddings()(hidden))
    assert warped.model.training is False


def test_flat_files_import_nothing_of_the_project():
    for name, text in standalone("eval.custom_generate", "generate.py").items():
        assert [module for _, module in own_imports("flat.x", text)] == [], name
        compile(text, name, "exec")


def test_imports_that_flat_files_cannot_express_are_refused(tmp_path, monkeypatch):
    package = tmp_path / "models"
    package.mkdir()
    (package / "a.py").write_text("from models import b\n")
    (package / "b.py").write_text("import models.a\n")
    monkeypatch.setattr("eval.standalone.ROOT", tmp_path)
    with pytest.raises(ValueError, match="no single file"):
        standalone("models.a", "a.py")
    with pytest.raises(ValueError, match="not `import models.a`"):
        standalone("models.b", "b.py")
