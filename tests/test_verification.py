"""Sampling is lossless: exact joint distributions, and planted faults that must be caught."""

import pytest
import torch

from eval.decoding import loop
from eval.decoding.loop import Request, generate
from eval.decoding.proposals import TreeOptions, available_methods, make_proposer
from eval.decoding.tree import Tree
from eval.decoding.verification import Verification, choose_tokens, verify
from tiny import tiny_drafter, tiny_target

V = 3


def language(seed=0):
    """A random conditional distribution over V = 3 tokens for every prefix of up to three tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [()]
    for prefix in prefixes:
        if len(prefix) < 5:
            prefixes += [(*prefix, token) for token in range(V)]
    return {prefix: torch.randn(V, generator=generator) * 1.5 for prefix in prefixes}


def joint(conditional) -> torch.Tensor:
    """Exact probabilities of the 27 possible first three tokens."""
    table = torch.zeros(V, V, V, dtype=torch.float64)
    for a in range(V):
        for b in range(V):
            for c in range(V):
                parts = [((), a), ((a,), b), ((a, b), c)]
                table[a, b, c] = torch.stack([torch.softmax(conditional(p).double(), -1)[x] for p, x in parts]).prod()
    return table.flatten()


def chain_tree(rows, logits_TV):
    """The drafter's argmax chain of depth 2, as every row's tree; `scores` are the drafter's path log probabilities."""
    q = torch.log_softmax(logits_TV, -1)
    tokens = q.argmax(-1)
    order = torch.arange(2).expand(rows, -1)
    scores = q.gather(-1, tokens[:, None]).squeeze(-1).cumsum(0)
    return Tree(tokens.expand(rows, -1), order, order + 1, scores.expand(rows, -1), order, [2] * rows)


def branching_tree(rows):
    """Nodes 0 and 1 under the root, 2 and 0 under the first of them."""
    tokens, parents, depths = [0, 1, 2, 0], [0, 0, 1, 1], [1, 1, 2, 2]
    row = lambda values: torch.tensor(values).expand(rows, -1)  # noqa: E731
    return Tree(row(tokens), row(parents), row(depths), torch.zeros(rows, 4), row([0, 1, 2, 3]), [4] * rows)


def simulate(verify_function, shape, draws=400_000):
    """Distribution of the first three tokens through the pure function, and the share that accepted a draft."""
    table = language()
    draft_logits = torch.tensor([[2.0, 0.5, 0.0], [0.0, 1.5, 1.0]])
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(draws, 8, generator=generator, dtype=torch.float64)
    done = {(): torch.arange(draws)}
    counts, accepted = torch.zeros(V**3), 0
    while done:
        prefix, rows = done.popitem()
        if len(prefix) >= 3:
            counts[prefix[0] * 9 + prefix[1] * 3 + prefix[2]] += len(rows)
            continue
        tree = chain_tree(len(rows), draft_logits) if shape == "chain" else branching_tree(len(rows))
        paths = [prefix]
        for i in range(tree.width):
            paths.append((*paths[int(tree.parents_RN[0, i])], int(tree.tokens_RN[0, i])))
        logits = torch.stack([table[p] for p in paths]).expand(len(rows), -1, -1)
        verdict = verify_function(logits, tree, 1.0, uniforms[rows][:, len(prefix) :])
        accepted += sum(bool(path) for path in verdict.paths) if not prefix else 0
        groups: dict[tuple, list[int]] = {}
        for i, emitted in enumerate(verdict.emitted):
            groups.setdefault((*prefix, *emitted)[:3], []).append(i)
        for key, members in groups.items():
            more = rows[torch.tensor(members)]
            done[key] = torch.cat([done[key], more]) if key in done else more
    return counts.double() / draws, accepted / draws


def total_variation(a, b):
    return 0.5 * float((a - b).abs().sum())


_FAULTY_STREAM = torch.Generator().manual_seed(7)  # one stream for all rounds: the p/q test is the only fault


def ratio_test_on_argmax(logits_RMV, tree, temperature, uniforms_RS):
    """Planted fault: rejection sampling's p/q test although the draft was an argmax, not a sample of q."""
    p = torch.softmax(logits_RMV.double() / temperature, -1)
    generator = _FAULTY_STREAM
    step_scores = tree.scores_RN.diff(dim=1, prepend=torch.zeros(len(tree.sizes), 1)).exp().double()
    paths, emitted = [], []
    for r in range(len(tree.sizes)):
        current, path, out = 0, [], []
        while True:
            children = (tree.parents_RN[r] == current).nonzero().flatten().tolist()
            if not children:
                out.append(int(torch.multinomial(p[r, current], 1, generator=generator)))
                break
            node = children[0]
            token = int(tree.tokens_RN[r, node])
            if float(torch.rand((), generator=generator)) < float(p[r, current, token] / step_scores[r, node]):
                path.append(node)
                out.append(token)
                current = node + 1
                continue
            residual = p[r, current].clone()
            residual[token] = 0
            out.append(int(torch.multinomial(residual, 1, generator=generator)))
            break
        paths.append(path)
        emitted.append(out)
    return Verification(paths, emitted)


def shared_stream(logits_RMV, tree, temperature, uniforms_RS):
    """Planted fault: the draft is sampled (uniformly over V) and tested with one and the same uniform."""
    verdict = verify(logits_RMV, tree, temperature, uniforms_RS)
    p = torch.softmax(logits_RMV[:, 0].double() / temperature, -1)
    u = uniforms_RS[:, 0]
    drafted = (u * V).long()
    passes = u < V * p.gather(1, drafted[:, None]).squeeze(1)
    fallback = choose_tokens(logits_RMV[:, 0], temperature, u)
    first = torch.where(passes, drafted, fallback).tolist()
    return Verification([[] if not path else [0] for path in verdict.paths], [[token] for token in first])


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_joint_distribution_of_the_pure_function(shape):
    table = language()
    observed, accepted = simulate(verify, shape)
    assert accepted >= 0.3
    assert total_variation(observed, joint(lambda prefix: table[prefix])) < 0.01


@pytest.mark.parametrize("fault", [ratio_test_on_argmax, shared_stream])
def test_planted_faults_fail_the_pure_test(fault):
    table = language()
    observed, _ = simulate(fault, "chain", draws=20_000)
    assert total_variation(observed, joint(lambda prefix: table[prefix])) > 0.02


@pytest.fixture(scope="module")
def small():
    """A real tiny target over three tokens and its exact joint distribution after a prompt."""
    target = tiny_target(vocab=V)
    target.eos_ids = ()
    prompt = [0, 1, 0]
    exact = joint(lambda prefix: target.forward(torch.tensor([prompt + list(prefix)]), ()).logits[0, -1])
    return target, tiny_drafter(target, block_size=3, mask_token_id=2), prompt, exact


def chi_square_p(counts, exact):
    """p-value of Pearson's test; cells that are expected fewer than five times are pooled."""
    expected = exact * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


def sample_through_the_loop(small, method, draws=5000, batch=1000):
    target, drafter, prompt, _ = small
    proposer = make_proposer(target, drafter, method, TreeOptions(budget=4, width=2, candidates=3))
    counts, accepted = torch.zeros(V**3, dtype=torch.float64), 0
    for start in range(0, draws, batch):
        requests = [Request(prompt, 3, f"draw {start + i}") for i in range(batch)]
        for answer in generate(target, proposer, requests, temperature=1.0):
            a, b, c = answer.tokens
            counts[a * 9 + b * 3 + c] += 1
            accepted += any(r.accepted for r in answer.rounds)
    return counts, accepted / draws


@pytest.mark.parametrize("method", available_methods("domino"))
def test_joint_distribution_through_the_loop(small, method):
    counts, accepted = sample_through_the_loop(small, method)
    assert accepted >= 0.3 or method == "ar"
    assert chi_square_p(counts, small[3]) > 1e-4


@pytest.mark.parametrize("fault", [ratio_test_on_argmax, shared_stream])
def test_planted_faults_fail_the_loop_test(small, fault, monkeypatch):
    monkeypatch.setattr(loop, "verify", fault)
    counts, _ = sample_through_the_loop(small, "domino_chain")
    assert chi_square_p(counts, small[3]) < 1e-4


def test_sampling_never_picks_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).expand(4, -1)
    chosen = choose_tokens(logits, 1.0, torch.tensor([0.0, 1 - 1e-16, 0.2, 0.9999999], dtype=torch.float64))
    assert chosen.tolist() == [1, 3, 1, 3]
