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
    """One figure, or None where nothing supports it.

    Attributes:
        values_S: float64, the estimate first.
        prompts: how many were drawn from, for each benchmark that goes into the figure.
    """

    values_S: np.ndarray
    prompts: tuple[int, ...]

    @property
    def estimate(self) -> float:
        return float(self.values_S[0])

    @property
    def varies(self) -> bool:
        """One prompt, in any of the benchmarks, says nothing of how prompts differ."""
        return min(self.prompts) > 1

    @property
    def interval(self) -> list[float] | None:
        """The 95 % percentile interval [low, high]; None where a benchmark has a single prompt."""
        if not self.varies:
            return None
        low, high = np.percentile(self.values_S[1:], [2.5, 97.5])
        return [float(low), float(high)]

    @property
    def p_value(self) -> float | None:
        """Two-sided p of "the figure is 0": twice the share of resamples on the other side; None as for `interval`.

        At least 2 resamples, and at least what an exact sign test gives when all P prompts agree, 2 ** (1 - P): the
        resamples of few prompts know nothing that the prompts do not.
        """
        if not self.varies:
            return None
        resampled = self.values_S[1:]
        tail = min((resampled <= 0).sum(), (resampled >= 0).sum())
        return float(min(1.0, max(2 * max(1, tail) / len(resampled), 2.0 ** (1 - sum(self.prompts)))))

    def __sub__(self, other: Resampled) -> Resampled:
        return Resampled(self.values_S - other.values_S, self.prompts)

    def __truediv__(self, other: Resampled) -> Resampled:
        return Resampled(self.values_S / other.values_S, self.prompts)


def mean(figures: Sequence[Resampled]) -> Resampled:
    """The unweighted mean of figures from separate draws."""
    prompts = tuple(count for figure in figures for count in figure.prompts)
    return Resampled(np.mean([figure.values_S for figure in figures], axis=0), prompts)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction for several tests of one family (Holm 1979): the least level at which all of them together
    would reject each, in the same order. None, for what was not tested, stays None and counts as no test."""
    tested = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[place] = largest
    return corrected


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
    return Figures(ratio(taus_P, count_P, weights_SP), ratio(seconds_P, tokens_P, weights_SP))


def ratio(sums_P: np.ndarray, counts_P: np.ndarray, weights_SP: np.ndarray) -> Resampled:
    """Sum over sum, of the prompts as drawn."""
    return Resampled((weights_SP @ sums_P) / (weights_SP @ counts_P), (len(sums_P),))


# 97.5 % points of Student's t at 1, 2, ... degrees of freedom; beyond the last one it stands in, slightly too wide.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def runs_interval(ratios: Sequence[float]) -> list[float] | None:
    """95 % interval [low, high] of a ratio measured in several runs, on the logarithm; None for a single run.

    Runs are too few to be resampled: Student's t assumes that their logarithms scatter normally.
    """
    if len(ratios) < 2:
        return None
    logs = np.log(ratios)
    margin = _STUDENT[min(len(logs) - 1, len(_STUDENT)) - 1] * logs.std(ddof=1) / np.sqrt(len(logs))
    return [float(np.exp(logs.mean() - margin)), float(np.exp(logs.mean() + margin))]
