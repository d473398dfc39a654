"""Results as PNG pictures: tau and speed-up bars with intervals, acceptance by position, time split of a round."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none may exist
from matplotlib import pyplot as plt

from .table import name, rows_of, sections


def draw_plots(results: dict, folder: Path) -> list[Path]:
    """Draws three pictures for each benchmark and temperature; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for benchmark, temperature in sections(results):
        rows = rows_of(results, "summary", benchmark, temperature)
        suffix = f"{re.sub(r'[^A-Za-z0-9_]+', '-', Path(benchmark).stem)}-t{temperature:g}.png"
        for kind, draw in (("speed", _draw_bars), ("acceptance", _draw_acceptance), ("time", _draw_time)):
            figure = draw([row for row in rows if row["tau_mean"] is not None])
            figure.suptitle(f"{benchmark}, temperature {temperature:g}, {rows[0]['prompts']} prompts")
            figure.tight_layout()
            paths.append(folder / f"{kind}-{suffix}")
            figure.savefig(paths[-1], dpi=110)
            plt.close(figure)
    return paths


def _draw_bars(rows: list[dict]):
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.5 + 0.4 * len(rows)), sharey=True)
    for axis, value, label in zip(
        axes, ("tau", "speedup"), ("tau (tokens a target forward)", "speed-up over AR"), strict=True
    ):
        values = [row["tau_mean" if value == "tau" else value] or 0.0 for row in rows]
        # A percentile interval need not contain the estimate: an error bar must not be negative.
        bounds = [row[f"{value}_interval"] or [v, v] for row, v in zip(rows, values, strict=True)]
        errors = [
            [max(0.0, v - low) for v, (low, _) in zip(values, bounds, strict=True)],
            [max(0.0, high - v) for v, (_, high) in zip(values, bounds, strict=True)],
        ]
        axis.barh(range(len(rows)), values, xerr=errors, capsize=3, color="tab:blue" if value == "tau" else "tab:green")
        for place, v in enumerate(values):
            axis.text(0.02, place, f"{v:.2f}", va="center", color="white", transform=axis.get_yaxis_transform())
        axis.set_xlabel(label)
        axis.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes[0].set_yticks(range(len(rows)), [name(row) for row in rows])
    axes[0].invert_yaxis()
    return figure


def _draw_acceptance(rows: list[dict]):
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    labels = ("accepted, given that the depth before was", "share of rounds that accept this depth")
    for axis, value, label in zip(axes, ("conditional", "survival"), labels, strict=True):
        for row in rows:
            if row["acceptance"]:
                depths = [point["depth"] for point in row["acceptance"]]
                axis.plot(depths, [point[value] for point in row["acceptance"]], marker="o", ms=3, label=name(row))
        axis.set_xlabel("depth")
        axis.set_title(label, fontsize=9)
        axis.set_ylim(0, 1.02)
    if axes[1].lines:
        axes[1].legend(fontsize=8)
    return figure


def _draw_time(rows: list[dict]):
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.4 * len(rows)))
    left = [0.0] * len(rows)
    for part in ("draft", "tree", "verify", "commit"):
        widths = [row["ms_per_round"][part] for row in rows]
        axis.barh(range(len(rows)), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(rows)), [name(row) for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds a round")
    axis.legend(fontsize=8)
    return figure
