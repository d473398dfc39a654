"""The round loop: every method emits the target's own tokens; eos, limits, caches, positions, stale state."""

import pytest
import torch

from eval.decoding import loop
from eval.decoding.cache import TreeCache
from eval.decoding.loop import Batch, Request, generate
from eval.decoding.proposals import DraftProposer, NoProposer, TreeOptions, available_methods, make_proposer
from eval.exactness import divergence, pieces_that_pick
from eval.records import Divergence
from models.attention import tree_mask
from tiny import EOS, MASK, ScriptedProposer, ScriptedTarget, tiny_drafter, tiny_target

OPTIONS = TreeOptions(budget=16, width=4, candidates=8)
REQUESTS = [Request([5, 6, 7], 10, 1), Request([9, 8, 7, 6, 5, 4], 16, 2), Request([3], 5, 3)]
HEADS = ("none", "domino", "markov_vanilla", "markov_gated", "markov_rnn")


def tokens(answers):
    return [answer.tokens for answer in answers]


def autoregressive(target, requests, temperature=0.0):
    """Plain decoding without cache, tree or loop: the reference text."""
    texts = []
    for request in requests:
        ids, uniforms = list(request.prompt_ids), loop.uniforms(request)
        for i in range(request.max_new_tokens):
            logits = target.forward(torch.tensor([ids]), ()).logits[:, -1]
            ids.append(int(loop.choose_tokens(logits, temperature, uniforms[i : i + 1])))
            if ids[-1] in target.eos_ids:
                break
        texts.append(ids[len(request.prompt_ids) :])
    return texts


@pytest.mark.parametrize(
    ("head", "temperature"), [*((head, 0.0) for head in HEADS), ("domino", 1.0), ("markov_rnn", 0.7)]
)
@pytest.mark.parametrize(("family", "shift"), [("qwen3", False), ("llama", True)])
def test_every_method_emits_the_targets_tokens(family, shift, head, temperature):
    """A random drafter too: rounds and proposals are counted, so that a fall-back to AR cannot pass (TRAP 39)."""
    target = tiny_target(family)
    drafter = tiny_drafter(target, shift_label=shift, head_type=head)
    expected = autoregressive(target, REQUESTS, temperature)
    assert tokens(generate(target, NoProposer(), REQUESTS, temperature)) == expected
    accepted = 0
    for method in available_methods(head)[1:]:
        proposer = make_proposer(target, drafter, method, OPTIONS)
        together = generate(target, proposer, REQUESTS, temperature)
        alone = generate(target, proposer, [REQUESTS[1]], temperature)
        assert tokens(together) == expected, method
        assert tokens(alone) == expected[1:2], method
        for answer in together + alone:
            assert answer.rounds
            assert all(r.proposed > 0 for r in answer.rounds)
            assert answer.target_forwards == len(answer.rounds) + 1
            assert 1 + sum(r.emitted for r in answer.rounds) == len(answer.tokens)
            accepted += sum(r.accepted for r in answer.rounds)
    assert accepted > 0


def test_a_chain_that_knows_the_script_is_accepted_whole():
    """Four proposals and the bonus token in one round, two target forwards in all."""
    target = ScriptedTarget([(i + 1) % 64 for i in range(64)])
    answer = generate(target, ScriptedProposer([11, 12, 13, 14]), [Request([8, 9], 6)])[0]
    assert answer.tokens == [10, 11, 12, 13, 14, 15]
    assert [(r.proposed, r.accepted, r.emitted) for r in answer.rounds] == [(4, 4, 5)]
    assert target.forwards == 2


# Script: 4 -> 5 -> 6 -> EOS -> 7 -> 8 -> 8 ...
SCRIPT = [0, 7, 2, 3, 5, 6, EOS, 8, 8]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 8])
def test_eos_inside_a_block_and_length_limits(limit):
    """TRAP 33: nothing after eos, nothing beyond the limit, and both counted right."""
    target = ScriptedTarget(SCRIPT, eos_ids=(EOS,))
    answer = generate(target, ScriptedProposer([6, EOS, 7, 8]), [Request([4], limit)])[0]
    assert answer.tokens == [5, 6, EOS][:limit]
    assert answer.stop == ("eos" if limit >= 3 else "length")
    assert 1 + sum(r.emitted for r in answer.rounds) == len(answer.tokens)
    if limit > 1:
        assert answer.rounds[0].accepted == 4  # untrimmed, as published taus count


def test_a_hidden_forward_of_the_target_is_caught():
    """Target forwards == rounds + 1 is counted at the target, so that no method can hide one."""
    target = tiny_target()
    proposer = DraftProposer(target, tiny_drafter(target), "ddtree", OPTIONS)
    build = proposer.build
    proposer.build = lambda draft: target.forward(torch.tensor([[3]]), ()) and build(draft)
    with pytest.raises(AssertionError):
        generate(target, proposer, [REQUESTS[0]])


def test_eos_as_the_very_first_token_runs_no_round():
    target = ScriptedTarget(SCRIPT, eos_ids=(EOS,))
    answer = generate(target, ScriptedProposer([7]), [Request([6], 5)])[0]
    assert (answer.tokens, answer.stop, answer.rounds, target.forwards) == ([EOS], "eos", [], 1)


@pytest.mark.parametrize("eos", [EOS, 6])
def test_each_of_several_eos_ids_stops(eos):
    target = ScriptedTarget([0, 7, 2, 3, eos, 5, 5, 5, 5], eos_ids=(EOS, 6))
    answer = generate(target, ScriptedProposer([5, 5]), [Request([4], 8)])[0]
    assert (answer.tokens, answer.stop) == ([eos], "eos")


def test_an_emitted_mask_token_is_kept():
    """TRAP 20: the target may really say the mask token."""
    target = ScriptedTarget([0, 0, 3, 4, MASK, 0, 0, 0, 0])
    answer = generate(target, ScriptedProposer([3, 4]), [Request([4], 7)])[0]
    assert answer.tokens == [MASK, 3, 4, MASK, 3, 4, MASK]


def test_second_generation_does_not_see_the_first():
    """TRAP 42: one proposer object, a long request then a short one, equals a fresh object in text and rounds."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    reused = DraftProposer(target, drafter, "dartree_pruned", OPTIONS)
    generate(target, reused, [REQUESTS[1]])
    second = generate(target, reused, [REQUESTS[2]])[0]
    fresh = generate(target, DraftProposer(target, drafter, "dartree_pruned", OPTIONS), [REQUESTS[2]])[0]
    assert second.tokens == fresh.tokens
    assert [r.accepted for r in second.rounds] == [r.accepted for r in fresh.rounds]


@pytest.mark.parametrize("method", ["ddtree", "dartree_pruned", "dartree_fixed"])
def test_kept_kv_equals_sequential_decoding(method):
    """TRAP 45: after compaction the cache holds what decoding the same tokens one by one would hold."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    batch = Batch(target, make_proposer(target, drafter, method, OPTIONS), [Request([5, 6, 7], 12, 1)], 0.0)
    batch._free_rows = lambda: None  # the row is looked at after its request has ended
    assert batch.admit()
    while not batch.answers[0].stop:
        batch.round()
    assert sum(r.accepted for r in batch.answers[0].rounds) > 0
    kept = batch.cache.lengths[0]
    ids = ([5, 6, 7] + batch.answers[0].tokens)[:kept]
    cache = TreeCache.for_config(target.config, 1, kept, target.dtype, "cpu")
    for i, token in enumerate(ids):
        position = torch.tensor([[i]])
        width = cache.place(position)
        mask = tree_mask(torch.zeros(1, 1, dtype=torch.long), torch.tensor([i]), width)
        target.forward(torch.tensor([[token]]), (), position_ids=position, mask=mask, cache=cache)
    count = len(ids)
    torch.testing.assert_close(
        batch.cache.stores[0][..., :count, :], cache.stores[0][..., :count, :], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_prefill_in_chunks_gives_the_same_draft(chunk):
    """TRAP 43: the drafter's logits do not depend on how the context reached its cache."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = torch.randint(3, 64, (1, 17))
    taps = target.forward(ids, drafter.spec.target_layer_ids).taps
    whole, chunked = (DraftProposer(target, drafter, "ddtree", OPTIONS) for _ in range(2))
    anchor = torch.tensor([9])
    whole.begin(1, 64)
    whole.join(taps, [17])
    expected = whole.draft(anchor).logits_RTV
    pieces = taps.split(chunk, dim=1)
    chunked.begin(1, 64)
    chunked.join(pieces[0], [pieces[0].shape[1]])
    for piece in pieces[1:]:
        chunked.draft(anchor)
        chunked.commit(piece, [piece.shape[1]])
    torch.testing.assert_close(chunked.draft(anchor).logits_RTV, expected, atol=1e-5, rtol=1e-5)


def test_siblings_share_a_position():
    """TRAP 40: positions follow depth, not the flat slot."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    seen = []
    original = target.forward

    def spy(*args, **kwargs):
        seen.append(kwargs["position_ids"])
        return original(*args, **kwargs)

    target.forward = spy
    proposer = make_proposer(target, drafter, "dartree_pruned", OPTIONS)
    batch = Batch(target, proposer, [Request([5, 6, 7], 3)], 0.0)
    batch.admit()
    trees = []
    build = proposer.build
    proposer.build = lambda draft: trees.append(build(draft)) or trees[-1]
    batch.round()
    depths = [0, *trees[0].depths_RN[0].tolist()]
    assert seen[1][0].tolist() == [3 + depth for depth in depths]
    assert len(set(depths)) < len(depths)


def twin_target():
    """In bf16, with a twin of nearly the same LM head row for every second token, so that near ties are common."""
    target = tiny_target(dtype=torch.bfloat16)
    head = target.model.lm_head.weight.data
    noise = torch.randn(head[32:].shape, generator=torch.Generator().manual_seed(4))
    head[32:] = (head[:32].float() * (1 + 0.005 * noise)).to(torch.bfloat16)
    target.eos_ids = ()
    return target


def bf16_divergences(target):
    """Of 30 short texts decoded by trees and by AR."""
    drafter, found = tiny_drafter(target), []
    for start in range(3, 33):
        request = Request([start, start + 1], 12, start)
        ar = generate(target, NoProposer(), [request])[0]
        tree = generate(target, make_proposer(target, drafter, "dartree_pruned", OPTIONS), [request])[0]
        found.append(divergence(target, request.prompt_ids, ar.tokens, tree.tokens, 1e-4, prompt_id="p", method="m"))
    return [d for d in found if d is not None]


def test_bf16_divergences_are_near_ties():
    """TRAP 38: in bf16 batched verification may leave the AR text, at ties of at most two units in the last place."""
    target = twin_target()
    found = bf16_divergences(target)
    assert 0 < len(found) < 30
    assert all(d.near_tie for d in found), found


def test_a_fault_of_verification_is_no_near_tie(monkeypatch):
    """The same comparison with a planted fault, siblings that see each other: it must not pass for rounding."""
    target = twin_target()
    masks = target.tree_masks
    monkeypatch.setattr(target, "tree_masks", lambda *args: torch.ones_like(masks(*args)))
    assert any(not d.near_tie for d in bf16_divergences(target))


def test_a_tie_of_bf16_logits_is_near_and_a_wide_gap_is_not():
    target = tiny_target(dtype=torch.bfloat16)
    prompt = [5, 6]
    logits = target.forward(torch.tensor([prompt]), (), keep=1).logits[0, -1].float()
    best, worst = int(logits.argmax()), int(logits.argmin())
    wide = divergence(target, prompt, [best], [worst], 1e-4, prompt_id="p", method="m")
    assert (wide.gap, wide.near_tie) == (float(logits.max() - logits.min()), False)
    head = target.model.lm_head.weight.data
    head[worst] = head[best]
    tie = divergence(target, prompt, [best, 3], [worst, 3], 1e-4, prompt_id="p", method="m")
    assert (tie.gap, tie.near_tie) == (0.0, True)
    shorter = divergence(target, prompt, [10, 3], [10], 1e-4, prompt_id="p", method="m")
    assert Divergence.from_dict(shorter.to_dict()) == shorter and shorter.gap is None


@pytest.mark.parametrize(
    ("dtype", "units", "near", "pieces"),
    [
        (torch.bfloat16, 2, True, None),
        (torch.bfloat16, 4, True, 4),
        (torch.bfloat16, 8, True, 4),
        (torch.bfloat16, 9, False, None),
        (torch.float32, 4, False, None),
    ],
)
def test_a_token_that_the_target_picks_in_other_pieces_is_a_near_tie_of_bf16(dtype, units, near, pieces, monkeypatch):
    """A kernel that rounds otherwise for four tokens at once. Around 8 the numbers of bf16 are 1/16 apart."""
    target, prompt = tiny_target(dtype=dtype), [5, 6, 7, 8, 9, 10]
    gap, forward = units / 16, target.forward

    def rounded(input_ids, *args, cache=None, **options):
        output = forward(input_ids, *args, cache=cache, **options)
        if output.logits is not None:
            assert cache is None or cache.get_seq_length() == 6
            output.logits[:] = 0
            output.logits[..., 20], output.logits[..., 30] = 8.0, 9.0 if input_ids.shape[1] == 4 else 8.0 - gap
        return output

    monkeypatch.setattr(target, "forward", rounded)
    ids_1S = torch.tensor([prompt])
    assert [pieces_that_pick(target, ids_1S, token) for token in (20, 30, 40)] == [1, 4, None]
    found = divergence(target, prompt, [20], [30], 1e-4, prompt_id="p", method="m")
    assert (found.gap, found.near_tie, found.pieces) == (gap, near, pieces)


def test_a_real_difference_is_not_called_a_near_tie():
    target = tiny_target()
    ar = generate(target, NoProposer(), [REQUESTS[0]])[0].tokens
    wrong = [*ar[:5], (ar[5] + 1) % 64, *ar[6:]]
    found = divergence(target, REQUESTS[0].prompt_ids, ar, wrong, 1e-4, prompt_id="p", method="m")
    assert (found.position, found.ar_token, found.token, found.near_tie) == (5, ar[5], wrong[5], False)
    shorter = divergence(target, REQUESTS[0].prompt_ids, ar, ar[:7], 1e-4, prompt_id="p", method="m")
    assert (shorter.position, shorter.near_tie) == (7, False)
    assert divergence(target, REQUESTS[0].prompt_ids, ar, list(ar), 1e-4, prompt_id="p", method="m") is None


def test_bad_requests_are_refused():
    target = tiny_target()
    for request, message in (
        (Request([], 4), "at least one token"),
        (Request([5], 0), "max_new_tokens must be at least 1"),
        (Request([5] * 510, 8), "the target has 512"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(target, NoProposer(), [request])
    with pytest.raises(ValueError, match="unknown method 'beam'"):
        make_proposer(target, tiny_drafter(target), "beam", OPTIONS)
    with pytest.raises(ValueError, match="does not fit the drafter's head 'none'"):
        make_proposer(target, tiny_drafter(target, head_type="none"), "domino_chain", OPTIONS)
    with pytest.raises(ValueError, match="needs a drafter"):
        make_proposer(target, None, "ddtree", OPTIONS)


def test_nan_in_the_target_is_an_error():
    target = tiny_target()
    target.model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(ValueError, match="target's logits hold NaN"):
        generate(target, NoProposer(), [REQUESTS[0]])
