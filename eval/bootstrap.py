"""Paired bootstrap over prompts: intervals of tau and speed-up, of averages over benchmarks, and of differences.

A prompt is drawn with all its turns, and with the same draws for all plans: that pairs them. Different benchmarks are
drawn separately. Everything is computed for the estimate (every prompt once) and for all resamples at once.

Shape suffixes: P prompts, S estimate and resamples (the estimate first).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .metrics import tau
from .records import Generation

RESAMPLES = 10_000


@dataclass
class Resampled:
    """One figure, or None where nothing supports it. Attributes: values_S: float64, the estimate first."""

    values_S: np.ndarray

    @property
    def estimate(self) -> float:
        return float(self.values_S[0])

    @property
    def interval(self) -> list[float]:
        """The 95 % percentile interval [low, high]."""
        low, high = np.percentile(self.values_S[1:], [2.5, 97.5])
        return [float(low), float(high)]

    @property
    def p_value(self) -> float:
        """Two-sided p of "the figure is 0": twice the share of resamples on the other side, at least 2 resamples."""
        resampled = self.values_S[1:]
        tail = min((resampled <= 0).sum(), (resampled >= 0).sum())
        return float(min(1.0, 2 * max(1, tail) / len(resampled)))

    def __sub__(self, other: Resampled) -> Resampled:
        return Resampled(self.values_S - other.values_S)

    def __truediv__(self, other: Resampled) -> Resampled:
        return Resampled(self.values_S / other.values_S)


def mean(figures: Sequence[Resampled]) -> Resampled:
    """The unweighted mean of figures from separate draws."""
    return Resampled(np.mean([figure.values_S for figure in figures], axis=0))


def draws(prompts: int, seed: int, benchmark: str = "", resamples: int = RESAMPLES) -> np.ndarray:
    """How often each prompt counts, float64 [S, P]: once in the first row, as drawn with replacement in the others."""
    rng = np.random.default_rng([seed, zlib.crc32(benchmark.encode())])
    drawn = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return np.vstack([np.ones((1, prompts)), drawn])


@dataclass
class Figures:
    """tau (mean over answers) and seconds a token (sum over sum) of one plan on one benchmark."""

    tau: Resampled
    seconds_per_token: Resampled


def resample(generations: Sequence[Generation], prompts: Sequence[str], weights_SP: np.ndarray) -> Figures:
    """Figures of one plan.

    Args:
        generations: answers with rounds, at least one for each of `prompts`.
        weights_SP: of `draws`, the same for all plans of the benchmark.
    """
    answers = defaultdict(list)
    for g in generations:
        answers[g.prompt_id].append(g)
    columns = [
        (sum(map(tau, gs)), len(gs), sum(g.seconds for g in gs), sum(len(g.tokens) - 1 for g in gs))
        for gs in (answers[prompt] for prompt in prompts)
    ]
    taus_P, count_P, seconds_P, tokens_P = np.array(columns, dtype=np.float64).T
    return Figures(
        Resampled((weights_SP @ taus_P) / (weights_SP @ count_P)),
        Resampled((weights_SP @ seconds_P) / (weights_SP @ tokens_P)),
    )
