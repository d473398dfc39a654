"""Rejection sampling of chains: exact joint distributions, the known acceptance rate, and planted faults (TRAP 37)."""

from types import SimpleNamespace

import pytest
import torch

from eval.decoding.loop import Request, generate
from eval.decoding.proposals import NoProposer, TreeOptions, make_proposer
from eval.decoding.rejection import sampled_chain, verify_rejection
from eval.decoding.tree import Draft
from test_verification import chi_square_p, joint, total_variation
from tiny import tiny_drafter, tiny_target

V, DRAWS = 4, 100_000


def tables():
    """Target logits after no token [4], one [4, 4] and two [4, 4, 4]; drafter logits of two depths."""
    generator = torch.Generator().manual_seed(3)
    target = [1.3 * torch.randn(*[V] * n, generator=generator) for n in (1, 2, 3)]
    return target, torch.randn(2, V, generator=generator)


def exact(target, temperature):
    p = [torch.softmax(t.double() / temperature, -1) for t in target]
    return (p[0][:, None] * p[1]).flatten()


def toy_drafter(ids):
    model = SimpleNamespace(head=None, corrected_depths=lambda: torch.zeros(2, dtype=torch.bool))
    return SimpleNamespace(model=model, draft_ids=ids, to_target_ids=lambda x: x if ids is None else ids[x])


def simulate(temperature, ids=None, draws=DRAWS, shared=False, blurred=False):
    """Joint distribution of the first two tokens, and the share of first drafts that were accepted.

    Planted faults: `shared` tests a draft with the uniform that drew it; `blurred` draws it from another q than tested.
    """
    target, logits = tables()
    logits = logits if ids is None else logits[:, : len(ids)]
    generator = torch.Generator().manual_seed(5)
    draw, accept, draft_draw = torch.rand(3, draws, 4, generator=generator, dtype=torch.float64)
    if shared:
        accept = draft_draw
    counts, accepted = torch.zeros(V * V), 0.0
    groups = {(): torch.arange(draws)}
    while groups:
        prefix, rows = groups.popitem()
        if len(prefix) == 2:
            counts[prefix[0] * V + prefix[1]] += len(rows)
            continue
        done = len(prefix)
        batch = logits.expand(len(rows), -1, -1)
        draft = Draft(torch.zeros(len(rows)), batch[..., :0], batch, temperature, draft_draw[rows, done : done + 2])
        tree = sampled_chain(draft, toy_drafter(ids), None, TreeOptions(), None, use_head=False)
        if blurred:
            tree.drawn_from.probs_RTV = torch.softmax(2 * batch / temperature, -1)
        x, y = tree.tokens_RN.unbind(1)
        if done == 0:
            logits_RMV = torch.stack([target[0].expand(len(rows), -1), target[1][x], target[2][x, y]], 1)
        else:
            after = target[2][prefix[0], x]  # what follows a third token is not looked at
            logits_RMV = torch.stack([target[1][prefix[0]].expand(len(rows), -1), after, after], 1)
        window = slice(done, done + 3)
        verdict = verify_rejection(logits_RMV, tree, temperature, accept[rows, window], draw[rows, window])
        if done == 0:
            accepted = sum(bool(path) for path in verdict.paths) / draws
        members = {}
        for i, tokens in enumerate(verdict.emitted):
            members.setdefault((*prefix, *tokens)[:2], []).append(i)
        for key, found in members.items():
            more = rows[torch.tensor(found)]
            groups[key] = torch.cat([groups[key], more]) if key in groups else more
    return counts.double() / draws, accepted


@pytest.mark.parametrize(("temperature", "ids"), [(1.0, None), (0.6, None), (1.0, torch.tensor([1, 3]))])
def test_two_tokens_are_the_targets_and_as_many_are_accepted_as_can_be(temperature, ids):
    target, logits = tables()
    observed, accepted = simulate(temperature, ids)
    assert total_variation(observed, exact(target, temperature)) < 0.01
    p = torch.softmax(target[0].double() / temperature, -1)
    q = torch.softmax((logits[0] if ids is None else logits[0, :2]).double() / temperature, -1)
    q = q if ids is None else torch.zeros(V, dtype=torch.float64).index_copy(0, ids, q)
    assert accepted == pytest.approx(1 - total_variation(p, q), abs=0.01)
    assert accepted > float((p * q).sum()) + 0.05  # sampling apart and matching accepts less


@pytest.mark.parametrize("fault", ["shared", "blurred"])
def test_planted_faults_are_caught(fault):
    observed, _ = simulate(1.0, draws=20_000, **{fault: True})
    assert total_variation(observed, exact(tables()[0], 1.0)) > 0.03


@pytest.fixture(scope="module")
def small():
    target = tiny_target(vocab=3)
    target.eos_ids = ()
    prompt = [0, 1, 0]
    expected = joint(lambda prefix: target.forward(torch.tensor([prompt + list(prefix)]), ()).logits[0, -1])
    return target, prompt, expected


@pytest.mark.parametrize(
    ("method", "head"), [("dflash_chain", "domino"), ("domino_chain", "domino"), ("markov_chain", "markov_rnn")]
)
def test_joint_distribution_through_the_loop(small, method, head):
    """Three tokens, requests that join and leave; drafter and target in fp32."""
    target, prompt, expected = small
    drafter = tiny_drafter(target, block_size=3, mask_token_id=2, head_type=head)
    proposer = make_proposer(target, drafter, method, TreeOptions(), acceptance="rejection")
    counts, accepted = torch.zeros(27, dtype=torch.float64), 0
    requests = [Request(prompt, 3, f"draw {i}") for i in range(2500)]
    for answer in generate(target, proposer, requests, temperature=1.0, slots=500):
        a, b, c = answer.tokens
        counts[a * 9 + b * 3 + c] += 1
        accepted += any(r.accepted for r in answer.rounds)
    assert accepted > 0.3 * len(requests)
    assert chi_square_p(counts, expected) > 1e-4


def test_an_answer_does_not_depend_on_its_neighbours():
    target = tiny_target()
    drafter = tiny_drafter(target)
    proposer = make_proposer(target, drafter, "domino_chain", TreeOptions(), acceptance="rejection")
    requests = [Request([5, 6, 7], 9, "a"), Request([9, 8], 14, "b"), Request([3, 4, 5, 6], 7, "c")]
    alone = [generate(target, proposer, [request], 0.9)[0] for request in requests]
    together = generate(target, proposer, requests, 0.9, slots=2)
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert [[r.accepted for r in a.rounds] for a in together] == [[r.accepted for r in a.rounds] for a in alone]
    assert sum(r.accepted for a in alone for r in a.rounds) > 0


def test_greedy_decoding_has_one_rule():
    target = tiny_target()
    drafter = tiny_drafter(target)
    requests = [Request([5, 6, 7], 9, "a")]
    answers = [
        generate(target, make_proposer(target, drafter, "domino_chain", TreeOptions(), acceptance=rule), requests)[0]
        for rule in ("sample-match", "rejection")
    ]
    assert answers[0].tokens == answers[1].tokens == generate(target, NoProposer(), requests)[0].tokens
    assert [r.accepted for r in answers[0].rounds] == [r.accepted for r in answers[1].rounds]


def test_trees_cannot_be_tested_by_rejection():
    target = tiny_target()
    with pytest.raises(ValueError, match="rejection for chains; got 'rejection' for ddtree"):
        make_proposer(target, tiny_drafter(target), "ddtree", TreeOptions(), acceptance="rejection")
