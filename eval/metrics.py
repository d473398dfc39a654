"""Figures computed from decoded requests: acceptance length, speed, time split, and bootstrap intervals.

Definitions (METHODS section 4):

- tau of a response: mean over its rounds of accepted + 1, the bonus token included and the last round untrimmed (as
  published). `tau_mean` averages over responses (DFlash, DDTree, Domino, DARTree), `tau_rounds` over rounds (DSpark).
- Tokens for speed are those after the prefill's token, which belongs to no round.
- Speed-up: AR time per token / method time per token on the same prompts, as a ratio of sums (DARTree) and as a mean of
  per-response ratios (the others).

Responses without a round (eos as the first token, or a limit of one token) have no tau and no speed: they are left out
of those figures and counted. A figure that nothing supports is None, never NaN.

Shape suffixes: P prompts, S bootstrap resamples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .records import Generation

RESAMPLES = 10_000
PARTS = ("draft", "tree", "verify", "commit")


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


def ms_per_round_total(generations: Sequence[Generation]) -> float | None:
    """All decoding time over the number of rounds; above the sum of the parts by the drafter's prefill and the loop."""
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


@dataclass
class PromptSums:
    """Sums over the responses of each prompt, the unit of resampling. All arrays are float64 [P].

    Attributes:
        tau: sum of the responses' taus.
        responses: number of responses.
        tokens, seconds: tokens after the prefill's, and their time.
    """

    tau: np.ndarray
    responses: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray

    def tau_mean(self, weights: np.ndarray) -> np.ndarray:
        """[S] for weights [S, P] (how often each prompt was drawn)."""
        return (weights @ self.tau) / (weights @ self.responses)

    def seconds_per_token(self, weights: np.ndarray) -> np.ndarray:
        return (weights @ self.seconds) / (weights @ self.tokens)


def prompt_sums(generations: Sequence[Generation], prompts: Sequence[str]) -> PromptSums:
    """Sums by prompt, in the order of `prompts`; every prompt must have a response with a round."""
    responses = defaultdict(list)
    for g in with_rounds(generations):
        responses[g.prompt_id].append(g)
    columns = [
        (sum(map(tau, gs)), len(gs), sum(len(g.tokens) - 1 for g in gs), sum(g.seconds for g in gs))
        for gs in (responses[p] for p in prompts)
    ]
    return PromptSums(*np.array(columns, dtype=np.float64).reshape(-1, 4).T)


def common_prompts(*groups: Sequence[Generation]) -> list[str]:
    """Prompts that have a response with a round in every group, sorted: the pairs of a paired comparison."""
    return sorted(set.intersection(*({g.prompt_id for g in with_rounds(group)} for group in groups)))


def speedup(generations: Sequence[Generation], ar: Sequence[Generation]) -> float | None:
    """Ratio of sums on the prompts that both decoded; None without a common prompt."""
    prompts = common_prompts(generations, ar)
    if not prompts:
        return None
    every = np.ones((1, len(prompts)))
    base, own = prompt_sums(ar, prompts), prompt_sums(generations, prompts)
    ratio = base.seconds_per_token(every) / own.seconds_per_token(every)
    return float(ratio[0])


def speedup_mean_of_ratios(generations: Sequence[Generation], ar: Sequence[Generation]) -> float | None:
    """Mean over prompts of (AR time per token / the method's time per token)."""
    prompts = common_prompts(generations, ar)
    if not prompts:
        return None
    own, base = prompt_sums(generations, prompts), prompt_sums(ar, prompts)
    return float(np.mean((base.seconds / base.tokens) / (own.seconds / own.tokens)))


def after_first_draft(generations: Iterable[Generation]) -> list[Generation]:
    """The same answers with the clock that published tables use: started after the first draft."""
    return [replace(g, seconds=g.seconds - g.rounds[0].draft) for g in with_rounds(generations)]


def bootstrap_weights(prompts: int, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """How often each prompt is drawn in each resample, [S, P]. The same for all methods: that pairs them."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples).astype(float)


def interval(values_S: np.ndarray) -> list[float]:
    """The 95 % percentile interval [low, high]."""
    low, high = np.percentile(values_S, [2.5, 97.5])
    return [float(low), float(high)]


def tau_interval(generations: Sequence[Generation], seed: int) -> list[float] | None:
    prompts = common_prompts(generations)
    if not prompts:
        return None
    return interval(prompt_sums(generations, prompts).tau_mean(bootstrap_weights(len(prompts), seed)))


def speedup_interval(generations: Sequence[Generation], ar: Sequence[Generation], seed: int) -> list[float] | None:
    prompts = common_prompts(generations, ar)
    if not prompts:
        return None
    weights = bootstrap_weights(len(prompts), seed)
    base, own = prompt_sums(ar, prompts), prompt_sums(generations, prompts)
    return interval(base.seconds_per_token(weights) / own.seconds_per_token(weights))


def paired_difference(
    a: Sequence[Generation], b: Sequence[Generation], ar: Sequence[Generation], seed: int
) -> dict | None:
    """Differences a - b of tau_mean and of the speed-up, with intervals from resampling the same prompts for all three.

    Returns {prompts, tau_difference, tau_interval, speedup_difference, speedup_interval}, the speed-up fields None
    without AR; None when no prompt is common.
    """
    prompts = common_prompts(a, b, *([ar] if ar else []))
    if not prompts:
        return None
    # The first row draws every prompt once: the point estimate.
    weights = np.vstack([np.ones((1, len(prompts))), bootstrap_weights(len(prompts), seed)])
    left, right = prompt_sums(a, prompts), prompt_sums(b, prompts)
    taus = left.tau_mean(weights) - right.tau_mean(weights)
    row = {"prompts": len(prompts), "tau_difference": float(taus[0]), "tau_interval": interval(taus[1:])}
    if not ar:
        return row | {"speedup_difference": None, "speedup_interval": None}
    base = prompt_sums(ar, prompts).seconds_per_token(weights)
    speedups = base / left.seconds_per_token(weights) - base / right.seconds_per_token(weights)
    return row | {"speedup_difference": float(speedups[0]), "speedup_interval": interval(speedups[1:])}
