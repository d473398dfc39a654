"""Figures between two log lines: losses and hits over all ranks, throughput, the loader's share of time, memory.

Shape suffixes: K statistics, T depths.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from data.batches import Batch
from training.objective import STATISTICS


class Window:
    """What happened since the last log line on this rank. Device sums are read once, when the line is written."""

    def __init__(self):
        self.sums_KT: Tensor | None = None
        self.tokens: Tensor | int = 0
        self.started: float | None = None  # at the first batch: what comes before is no training
        self.loading = self.away = 0.0

    def add(self, statistics_KT: Tensor, batch: Batch) -> None:
        self.sums_KT = statistics_KT if self.sums_KT is None else self.sums_KT + statistics_KT
        self.tokens = self.tokens + batch.context_mask_RS.sum()

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds inside to `loading`, or to `away` (evaluations and saves, which are no training)."""
        start = time.monotonic()
        self.started = self.started or start
        yield
        setattr(self, name, getattr(self, name) + time.monotonic() - start)

    def figures(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Figures over all ranks. Seconds are this rank's: the ranks wait for each other at every step.

        Args:
            reduce: sums a tensor over the ranks; called by all of them.
        """
        sums_KT = reduce(self.sums_KT.double()).cpu()
        tokens = reduce(self.tokens.double()).item()
        seconds = max(time.monotonic() - self.started - self.away, 1e-9)
        return summarise(sums_KT) | {
            "tokens_per_second": tokens / seconds,
            "slots_per_second": sums_KT[STATISTICS.index("count")].sum().item() / seconds,
            "data_share": self.loading / seconds,
            **{f"peak_{name}": value for name, value in peak_memory().items()},
        }


def summarise(sums_KT: Tensor) -> dict[str, float]:
    """Named figures from summed statistics, which name themselves: `X_loss` is divided by the weights, `X_hits` by the
    slots, and `X_run` (blocks whose first t slots are all hits, by depth t) by the blocks: the mean leading run.

    What this run's loss cannot know is NaN and left out.
    """
    sums = dict(zip(STATISTICS, sums_KT, strict=True))
    weight, count_T = sums["weight"].sum().clamp(min=1e-9), sums["count"]
    figures: dict[str, float] = {}
    for name, values_T in sums.items():
        kind, _, unit = name.rpartition("_")
        if values_T.isnan().any():
            continue
        if unit == "loss":
            figures[name] = (values_T.sum() / weight).item()
        elif unit == "run":
            figures[name] = (values_T.sum() / count_T[0].clamp(min=1)).item()
        elif unit == "hits":
            label = "accuracy" if kind == "final" else f"{kind}_accuracy" if kind == "base" else kind
            figures[label] = (values_T.sum() / count_T.sum().clamp(min=1)).item()
            by_depth_T = values_T / count_T.clamp(min=1)
            figures |= {f"{label}_{depth}": value for depth, value in enumerate(by_depth_T.tolist(), start=1)}
    return figures


def peak_memory() -> dict[str, float]:
    """Largest memory of this process so far, in GiB; of its GPU too where there is one."""
    peak = {"memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)}
    if torch.cuda.is_available():
        peak["gpu_memory_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return peak
