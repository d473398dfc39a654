"""How far a confidence head can be believed: temperature scaling, and its error before and after.

A `Sighting` is one drafted token of real decoding that the target looked at: the head's logit, and whether it was
accepted. Tokens behind a rejected one were never looked at and do not count, as the confidence is conditional on the
tokens before.

Sources: temperature scaling and ECE, Guo et al. 2017 (arXiv 1706.04599); the score of Brier 1950.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.answers import target_identity

CALIBRATION = "calibration.json"
BINS = 10
_LARGEST = 20.0  # temperatures between 1/20 and 20


@dataclass(frozen=True)
class Sighting:
    """Attributes: depth: 1 for the token after the anchor; logit: of the confidence head; accepted: by the target."""

    depth: int
    logit: float
    accepted: bool

    def confidence(self, temperature: float = 1.0) -> float:
        scaled = self.logit / temperature
        # Written for both signs, so that exp never overflows.
        small = math.exp(-abs(scaled))
        return (1 if scaled >= 0 else small) / (1 + small)


def fit_temperature(sightings: Sequence[Sighting]) -> float:
    """The temperature with the least cross entropy, between 1/20 and 20.

    The cross entropy is convex in 1/temperature, so that bisection on its slope finds the least.
    """
    low, high = 1 / _LARGEST, _LARGEST  # of 1 / temperature
    for _ in range(60):
        middle = (low + high) / 2
        slope = sum((s.confidence(1 / middle) - s.accepted) * s.logit for s in sightings)
        low, high = (middle, high) if slope < 0 else (low, middle)
    return 2 / (low + high)


def bins_of(sightings: Sequence[Sighting], temperature: float) -> list[dict]:
    """Tokens by confidence, in equal steps: how many, their mean confidence and the share that was accepted."""
    filled: dict[int, list[Sighting]] = {}
    for s in sightings:
        filled.setdefault(min(int(s.confidence(temperature) * BINS), BINS - 1), []).append(s)
    return [
        {
            "from": place / BINS,
            "to": (place + 1) / BINS,
            "tokens": len(found),
            "confidence": sum(s.confidence(temperature) for s in found) / len(found),
            "acceptance": sum(s.accepted for s in found) / len(found),
        }
        for place, found in sorted(filled.items())
    ]


def errors_of(sightings: Sequence[Sighting], temperature: float) -> dict[str, float]:
    """ECE (mean distance between confidence and acceptance over the bins) and Brier score (mean squared error)."""
    bins = bins_of(sightings, temperature)
    distances = sum(b["tokens"] * abs(b["confidence"] - b["acceptance"]) for b in bins)
    squares = sum((s.confidence(temperature) - s.accepted) ** 2 for s in sightings)
    return {"ece": distances / len(sightings), "brier": squares / len(sightings)}


def by_depth(sightings: Sequence[Sighting], temperature: float) -> list[dict]:
    """Errors at each depth that was looked at, with the number of tokens and the share accepted."""
    rows = []
    for depth in sorted({s.depth for s in sightings}):
        found = [s for s in sightings if s.depth == depth]
        accepted = sum(s.accepted for s in found) / len(found)
        rows.append({"depth": depth, "tokens": len(found), "acceptance": accepted} | errors_of(found, temperature))
    return rows


def calibrate_on(fitted: Sequence[Sighting], tested: Sequence[Sighting]) -> dict:
    """The report: temperature from one half of the prompts, its errors on the other half."""
    temperature = fit_temperature(fitted)
    return {
        "temperature": temperature,
        "fitted_tokens": len(fitted),
        "tested_tokens": len(tested),
        "acceptance": sum(s.accepted for s in tested) / len(tested),
        "uncalibrated": errors_of(tested, 1.0) | {"bins": bins_of(tested, 1.0)},
        "calibrated": errors_of(tested, temperature)
        | {"bins": bins_of(tested, temperature), "by_depth": by_depth(tested, temperature)},
    }


def read_temperature(run_dir: str, drafter_folder: str) -> float:
    """The temperature of RUN/calibration.json, 1 without the file. Raises ValueError when it is another drafter's."""
    path = Path(run_dir, CALIBRATION)
    if not path.is_file():
        return 1.0
    report, now = json.loads(path.read_text()), target_identity(drafter_folder)
    if report["drafter"] != now:
        raise ValueError(
            f"{os.fspath(path)} was measured for drafter {report['drafter']}, {drafter_folder} is {now}: run again: "
            "bash launch.sh calibrate CONFIG"
        )
    return report["temperature"]
