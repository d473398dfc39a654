"""What a round costs on this machine: measured points, made convex in the size of the tree and interpolated.

Shape suffix: N sizes of a tree, 0 .. N.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class RoundCost:
    """Seconds of a round's parts by the number of requests decoded at once.

    Attributes:
        verify_points: (requests, context tokens) -> {nodes of a tree: seconds of the target's forward}.
        draft_points: requests -> seconds of draft, tree building and commit.
    """

    verify_points: dict[tuple[int, int], dict[int, float]]
    draft_points: dict[int, float]
    _curves: dict[tuple[int, int, int], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def draft(self, requests: int) -> float:
        return interpolate(self.draft_points, requests)

    def verify(self, requests: int, context: float, largest: int) -> Tensor:
        """[largest + 1] seconds of verifying 0 .. largest nodes a request, convex: each node costs more than the last.

        Sizes that were not measured for so many requests lie on the line through the last two that were.
        """
        # Contexts are rounded, so that a curve serves many rounds.
        key = requests, int(context) // 32 * 32, largest
        if key not in self._curves:
            self._curves[key] = torch.tensor(self._verify(*key), dtype=torch.float64)
        return self._curves[key]

    def _verify(self, requests: int, context: int, largest: int) -> list[float]:
        measured = sorted({rows for rows, _ in self.verify_points})
        curves = {rows: self._at_context(rows, context, largest) for rows in measured}
        return [interpolate({rows: curve[n] for rows, curve in curves.items()}, requests) for n in range(largest + 1)]

    def _at_context(self, rows: int, context: int, largest: int) -> list[float]:
        curves = {
            tokens: convex_curve(points, largest)
            for (measured, tokens), points in self.verify_points.items()
            if measured == rows
        }
        return [
            interpolate({tokens: curve[n] for tokens, curve in curves.items()}, context) for n in range(largest + 1)
        ]

    def to_dict(self) -> dict:
        """JSON types."""
        return {
            "verify": [
                {"requests": rows, "context": tokens, "nodes": n, "ms": 1e3 * seconds}
                for (rows, tokens), points in self.verify_points.items()
                for n, seconds in points.items()
            ],
            "draft": [{"requests": rows, "ms": 1e3 * seconds} for rows, seconds in self.draft_points.items()],
        }

    @classmethod
    def from_dict(cls, data: dict) -> RoundCost:
        points: dict[tuple[int, int], dict[int, float]] = {}
        for row in data["verify"]:
            points.setdefault((row["requests"], row["context"]), {})[row["nodes"]] = row["ms"] / 1e3
        return cls(points, {row["requests"]: row["ms"] / 1e3 for row in data["draft"]})


def interpolate(points: dict[int, float], x: float) -> float:
    """The line between the two points around x; beyond the outermost point its value."""
    keys = sorted(points)
    if x <= keys[0]:
        return points[keys[0]]
    for low, high in zip(keys, keys[1:], strict=False):
        if x <= high:
            return points[low] + (points[high] - points[low]) * (x - low) / (high - low)
    return points[keys[-1]]


def convex_curve(points: dict[int, float], largest: int) -> list[float]:
    """Greatest convex function below the points, read at 0 .. largest; lines go on beyond the outermost points.

    Kernels work in blocks, so that measured costs have steps; on a convex cost and a concave gain, the first size at
    which the ratio stops rising is the best of all.
    """
    hull: list[tuple[int, float]] = []
    for x, y in sorted(points.items()):
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    if len(hull) == 1:
        return [hull[0][1]] * (largest + 1)
    curve, segment = [], 0
    for n in range(largest + 1):
        while segment + 2 < len(hull) and n > hull[segment + 1][0]:
            segment += 1
        (x0, y0), (x1, y1) = hull[segment], hull[segment + 1]
        curve.append(y0 + (y1 - y0) * (n - x0) / (x1 - x0))
    return curve


def _turns_down(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) >= (c[1] - b[1]) * (b[0] - a[0])
