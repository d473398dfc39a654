"""How a benchmark measures: warmed up, interleaved against drift, medians with their spread, JSON as the last line."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Hashable, Sequence

import torch

from models.quantization import precision_name

from .environment import git_commit, hardware, versions

SCHEMA_VERSION = 1


def interleave(arms: dict[Hashable, Callable[[], object]], repeats: int, warm_up: int = 1) -> dict[Hashable, list]:
    """What each arm returned in each of `repeats` turns. A turn runs every arm, starting with another one each time."""
    order = list(arms)
    results: dict[Hashable, list] = {name: [] for name in order}
    for turn in range(warm_up + repeats):
        shift = turn % len(order)
        for name in order[shift:] + order[:shift]:
            value = arms[name]()
            if turn >= warm_up:
                results[name].append(value)
    return results


def timed(work: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """The work as an arm that returns its wall seconds, the device's queue drained before and after."""

    def arm() -> float:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - start

    return arm


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float], scale: float = 1.0) -> dict:
    """Median, smallest and largest of the scaled values, and how many there were."""
    scaled = [scale * value for value in values]
    return {"median": statistics.median(scaled), "min": min(scaled), "max": max(scaled), "n": len(scaled)}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict:
    """Spread of the ratios turn by turn: what both arms of a turn share, such as a slower minute, cancels."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


class Stopwatch:
    """Wall seconds spent inside chosen methods of objects, each counted once however they call each other."""

    def __init__(self, device: torch.device):
        self.device, self.seconds, self._inside = device, {}, False

    def watch(self, owner: object, method: str, name: str) -> None:
        """Replaces the object's method by one that is timed under `name`; `release` gives it back."""
        call = getattr(owner, method)
        self.seconds.setdefault(name, 0.0)
        self._watched = [*getattr(self, "_watched", []), (owner, method)]

        @functools.wraps(call)
        def measured(*args, **kwargs):
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            synchronize(self.device)
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                synchronize(self.device)
                self.seconds[name] += time.perf_counter() - start
                self._inside = False

        owner.__dict__[method] = measured

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def release(self) -> None:
        for owner, method in self._watched:
            del owner.__dict__[method]


def print_table(title: str, rows: list[dict]) -> None:
    """Rows of equal keys as a plain table; spreads as `median (min-max)`."""
    cells = [[_cell(value) for value in row.values()] for row in rows]
    heads = list(rows[0])
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    print(f"\n{title}")
    for line in [heads, *cells]:
        print(
            "  ".join(
                text.rjust(width) if i else text.ljust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            )
        )


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return f"{_number(value['median'])} ({_number(value['min'])}-{_number(value['max'])})"
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def print_result(bench: str, dtype: torch.dtype | None, quantization: str, parts: dict, **more) -> None:
    """The last line: one JSON object with every figure, and where and on what it was measured.

    Args:
        dtype: None where no model takes part.
    """
    result = {
        "bench": bench,
        "schema_version": SCHEMA_VERSION,
        "dtype": dtype and precision_name(dtype, quantization),
        "hardware": hardware(),
        "versions": versions(),
        "git_commit": git_commit(),
        **more,
        "parts": parts,
    }
    print("\n" + json.dumps(result), flush=True)
