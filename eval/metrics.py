"""Figures computed from decoded requests: acceptance length, speed, time split, and bootstrap intervals.

Definitions (METHODS section 4):

- tau of a response: mean over its rounds of accepted + 1, the bonus token included and the last round untrimmed (as
  published). `tau_mean` averages over responses (DFlash, DDTree, Domino, DARTree), `tau_rounds` over rounds (DSpark).
- Tokens for speed are those after the prefill's token, which belongs to no round.
- Speed-up: AR time per token / method time per token on the same prompts, as a ratio of sums (DARTree) and as a mean of
  per-response ratios (the others).

Responses without a round (eos as the first token, or a limit of one token) have no tau and no speed: they are left out
of those figures and counted. A figure that nothing supports is None, never NaN. Intervals are in eval/bootstrap.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from .records import PARTS, Generation


def with_rounds(generations: Iterable[Generation]) -> list[Generation]:
    return [g for g in generations if g.rounds]


def tau(generation: Generation, trimmed: bool = False) -> float:
    """Tokens emitted for each target forward of one response; it must have a round.

    `trimmed` counts only the tokens really emitted, so that the last round may count less.
    """
    if trimmed:
        return sum(r.emitted for r in generation.rounds) / len(generation.rounds)
    return sum(r.accepted + 1 for r in generation.rounds) / len(generation.rounds)


def tau_mean(generations: Sequence[Generation], trimmed: bool = False) -> float | None:
    """Mean over responses of the per-response tau."""
    taus = [tau(g, trimmed) for g in with_rounds(generations)]
    return sum(taus) / len(taus) if taus else None


def tau_rounds(generations: Sequence[Generation]) -> float | None:
    """Mean over all rounds of all responses."""
    lengths = [r.accepted + 1 for g in generations for r in g.rounds]
    return sum(lengths) / len(lengths) if lengths else None


def tokens_per_second(generations: Sequence[Generation]) -> float | None:
    """Tokens after the prefill's, over the time after the prefill."""
    decoded = with_rounds(generations)
    seconds = sum(g.seconds for g in decoded)
    return sum(len(g.tokens) - 1 for g in decoded) / seconds if seconds > 0 else None


def tokens_per_second_end_to_end(generations: Sequence[Generation]) -> float | None:
    """All tokens, over all time, the target's prefill included."""
    seconds = sum(g.seconds + g.prefill_seconds for g in generations)
    return sum(len(g.tokens) for g in generations) / seconds if seconds > 0 else None


def ms_per_round(generations: Sequence[Generation]) -> dict[str, float] | None:
    """Mean milliseconds of each part of a round."""
    rounds = [r for g in generations for r in g.rounds]
    if not rounds:
        return None
    return {part: 1000 * sum(getattr(r, part) for r in rounds) / len(rounds) for part in PARTS}


def busy_ms_per_round(generations: Sequence[Generation]) -> dict[str, float] | None:
    """Mean milliseconds of processor time of each part; None unless every round tells."""
    rounds = [r for g in generations for r in g.rounds]
    if not rounds or any(r.busy is None for r in rounds):
        return None
    return {part: 1000 * sum(r.busy[i] for r in rounds) / len(rounds) for i, part in enumerate(PARTS)}


def tree_share(generations: Sequence[Generation]) -> float | None:
    """Share of the decoding time spent building trees."""
    seconds = sum(g.seconds for g in with_rounds(generations))
    return sum(r.tree for g in generations for r in g.rounds) / seconds if seconds > 0 else None


def nodes_per_round(generations: Sequence[Generation]) -> float | None:
    """Draft tokens that the target verified in a mean round."""
    nodes = [r.proposed for g in generations for r in g.rounds]
    return sum(nodes) / len(nodes) if nodes else None


def peak_memory(generations: Sequence[Generation]) -> float | None:
    """Largest memory of a process while it decoded these, GB."""
    peaks = [g.peak_memory_gb for g in generations if g.peak_memory_gb is not None]
    return max(peaks) if peaks else None


def ms_per_round_total(generations: Sequence[Generation]) -> float | None:
    """All decoding time over the number of rounds; above the sum of the parts by the loop.

    The drafter's prefill of a request decoded alone lies in its first draft, and so in the part `draft`.
    """
    decoded = with_rounds(generations)
    rounds = sum(len(g.rounds) for g in decoded)
    return 1000 * sum(g.seconds for g in decoded) / rounds if rounds else None


def acceptance_by_position(generations: Sequence[Generation]) -> list[dict]:
    """For depth d = 1, 2, ...: {depth, trials, conditional, survival}.

    `conditional` is P(depth d accepted | depth d-1 accepted and depth d proposed) over `trials` rounds; `survival` is
    the share of all rounds that accepted at least d tokens. The list ends where no round got the chance.
    """
    rounds = [r for g in generations for r in g.rounds]
    rows: list[dict] = []
    for depth in range(1, max((r.max_depth for r in rounds), default=0) + 1):
        trials = [r for r in rounds if r.max_depth >= depth and r.accepted >= depth - 1]
        accepted = sum(r.accepted >= depth for r in trials)
        if not trials:
            break
        rows.append(
            {
                "depth": depth,
                "trials": len(trials),
                "conditional": accepted / len(trials),
                "survival": accepted / len(rounds),
            }
        )
    return rows


def accepted_histogram(generations: Sequence[Generation]) -> list[int]:
    """Number of rounds that accepted exactly 0, 1, 2, ... draft tokens."""
    lengths = [r.accepted for g in generations for r in g.rounds]
    return np.bincount(lengths).tolist() if lengths else []


def whole_block_share(generations: Sequence[Generation], depth: int) -> float | None:
    """Share of rounds that accepted as many draft tokens as the block proposes, `depth`. None for AR's depth 0."""
    lengths = [r.accepted for g in generations for r in g.rounds]
    return sum(length >= depth for length in lengths) / len(lengths) if lengths and depth else None


def eos_share(generations: Sequence[Generation]) -> float | None:
    """Share of answers that end in an eos token rather than at the length limit."""
    return sum(g.stop == "eos" for g in generations) / len(generations) if generations else None


def distinct_ngram_ratio(answers: Iterable[Sequence[int]], n: int = 4) -> float | None:
    """Distinct n-grams within an answer over all of them, pooled over answers: low when a model repeats itself."""
    distinct = total = 0
    for tokens in answers:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        distinct, total = distinct + len(set(grams)), total + len(grams)
    return distinct / total if total else None


def speedup(generations: Sequence[Generation], ar: Sequence[Generation]) -> float | None:
    """Ratio of sums on the answers that both decoded; None without a common one."""
    own, base = _common(generations, ar)
    if not own:
        return None
    return sum(g.seconds for g in base) / _decoded(base) / (sum(g.seconds for g in own) / _decoded(own))


def speedup_mean_of_ratios(generations: Sequence[Generation], ar: Sequence[Generation]) -> float | None:
    """Mean over answers of (AR time per token / the method's time per token)."""
    own, base = _common(generations, ar)
    ratios = [
        (b.seconds / (len(b.tokens) - 1)) / (g.seconds / (len(g.tokens) - 1)) for g, b in zip(own, base, strict=True)
    ]
    return sum(ratios) / len(ratios) if ratios else None


def _common(generations: Sequence[Generation], ar: Sequence[Generation]) -> tuple[list[Generation], list[Generation]]:
    """The answers with rounds in both, paired."""
    base = {g.answer: g for g in with_rounds(ar)}
    own = [g for g in with_rounds(generations) if g.answer in base]
    return own, [base[g.answer] for g in own]


def _decoded(generations: Sequence[Generation]) -> int:
    return sum(len(g.tokens) - 1 for g in generations)


def after_first_draft(generations: Iterable[Generation]) -> list[Generation]:
    """The same answers with the clock that published tables use: started after the first draft."""
    return [replace(g, seconds=g.seconds - g.rounds[0].draft) for g in with_rounds(generations)]
