"""Results as PNG pictures: bars of tau and speed-up, acceptance by position, time split, sweeps, throughput."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none may exist
from matplotlib import pyplot as plt

from .records import PARTS
from .table import rows_of, sections
from .tables import AVERAGE, averages_at, benchmark_names, temperatures


def draw_plots(results: dict, folder: Path) -> list[Path]:
    """Draws what was measured; returns the paths.

    `speed-BENCHMARK-tT.png` for each benchmark, and for all of them together (or the only one) also `acceptance-...`
    and `time-...`; `sweep-KNOB.png` for each swept knob, and `throughput-BENCHMARK-tT.png`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []

    def save(figure, name: str, title: str) -> None:
        figure.suptitle(title)
        figure.tight_layout()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)

    for benchmark, temperature in sections(results):
        rows = [r for r in rows_of(results, "summary", benchmark, temperature) if r["tau_mean"] is not None]
        if rows:
            title = f"{benchmark}, temperature {temperature:g}, {rows[0]['prompts']} prompts"
            save(_draw_bars(rows), f"speed-{_file_name(benchmark, temperature)}", title)
    for temperature in temperatures(results):
        rows, names = averages_at(results, temperature), benchmark_names(results, temperature)
        if not rows:
            continue
        name = names[0] if len(names) == 1 else AVERAGE
        title = f"{name if len(names) == 1 else f'{len(names)} benchmarks'}, temperature {temperature:g}"
        kinds: list[tuple[str, Callable]] = [("acceptance", _draw_acceptance), ("time", _draw_time)]
        if len(names) > 1:
            kinds.append(("speed", _draw_bars))
        for kind, draw in kinds:
            save(draw(rows), f"{kind}-{_file_name(name, temperature)}", title)
    for knob in dict.fromkeys(row["sweep"] for row in results["sweeps"]):
        rows = [r for r in results["sweeps"] if r["sweep"] == knob and r["tau_mean"] is not None]
        if rows:
            title = (
                f"{knob}: {rows[0]['benchmark']}, temperature {rows[0]['temperature']:g}, {rows[0]['prompts']} prompts"
            )
            save(_draw_sweep(rows, knob), f"sweep-{knob}", title)
    for key in dict.fromkeys((r["benchmark"], r["temperature"]) for r in results["concurrency"]):
        rows = rows_of(results, "concurrency", *key)
        save(_draw_throughput(rows), f"throughput-{_file_name(*key)}", f"{key[0]}, temperature {key[1]:g}")
    return paths


def _file_name(benchmark: str, temperature: float) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_]+', '-', benchmark)}-t{temperature:g}"


def _bounds(rows: list[dict], value: str, figure: str) -> list[list[float]]:
    """Lengths of the error bars below and above. An interval need not contain the estimate: never negative."""
    pairs = [(row[value] or 0.0, row[f"{figure}_interval"]) for row in rows]
    return [
        [max(0.0, v - bounds[0]) if bounds else 0.0 for v, bounds in pairs],
        [max(0.0, bounds[1] - v) if bounds else 0.0 for v, bounds in pairs],
    ]


def _draw_bars(rows: list[dict]):
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.5 + 0.4 * len(rows)), sharey=True)
    for axis, value, label, color in zip(
        axes,
        ("tau_mean", "speedup"),
        ("tau (tokens a target forward)", "speed-up over AR"),
        ("tab:blue", "tab:green"),
        strict=True,
    ):
        values = [row[value] or 0.0 for row in rows]
        errors = _bounds(rows, value, value.removesuffix("_mean"))
        axis.barh(range(len(rows)), values, xerr=errors, capsize=3, color=color)
        for place, v in enumerate(values):
            axis.text(0.02, place, f"{v:.2f}", va="center", color="white", transform=axis.get_yaxis_transform())
        axis.set_xlabel(label)
        axis.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes[0].set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes[0].invert_yaxis()
    return figure


def _draw_acceptance(rows: list[dict]):
    figure, axes = plt.subplots(1, 3, figsize=(15, 4))
    labels = ("accepted, given that the depth before was", "share of rounds that accept this depth")
    for axis, value, label in zip(axes, ("conditional", "survival"), labels, strict=False):
        for row in rows:
            if row["acceptance_by_position"]:
                depths = [point["depth"] for point in row["acceptance_by_position"]]
                axis.plot(
                    depths,
                    [point[value] for point in row["acceptance_by_position"]],
                    marker="o",
                    ms=3,
                    label=row["label"],
                )
        axis.set_xlabel("draft position")
        axis.set_title(label, fontsize=9)
        axis.set_ylim(0, 1.02)
    for row in rows:
        if row["acceptance_by_position"]:
            shares = [count / row["rounds"] for count in row["accepted_histogram"]]
            axes[2].plot(range(len(shares)), shares, drawstyle="steps-mid", label=row["label"])
    axes[2].set_xlabel("draft tokens accepted")
    axes[2].set_title("share of rounds that accept so many", fontsize=9)
    if axes[2].lines:
        axes[2].legend(fontsize=8)
    return figure


def _draw_time(rows: list[dict]):
    rows = [row for row in rows if row["ms_per_round"]]
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.4 * len(rows)))
    left = [0.0] * len(rows)
    for part in (*PARTS, "rest"):
        widths = [
            row["ms_per_round"][part]
            if part in PARTS
            else row["ms_per_round_total"] - sum(row["ms_per_round"].values())
            for row in rows
        ]
        axis.barh(range(len(rows)), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds a round")
    axis.legend(fontsize=8)
    return figure


def _draw_sweep(rows: list[dict], knob: str):
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, value, label in zip(axes, ("tau_mean", "speedup"), ("tau", "speed-up over AR"), strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            own = sorted((r for r in rows if r["method"] == method), key=lambda r: r["value"])
            errors = _bounds(own, value, value.removesuffix("_mean"))
            values = [row[value] or 0.0 for row in own]
            axis.errorbar([row["value"] for row in own], values, yerr=errors, marker="o", capsize=3, label=method)
        axis.set_xlabel(knob)
        axis.set_ylabel(label)
        if knob != "beta":
            axis.set_xscale("log", base=2)
            ticks = sorted({row["value"] for row in rows})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes[0].legend(fontsize=8)
    return figure


def _draw_throughput(rows: list[dict]):
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    labels = ("tokens a second", "speed-up over AR at the same concurrency")
    for axis, value, label in zip(axes, ("tokens_per_second", "speedup"), labels, strict=True):
        for plan in dict.fromkeys(row["plan"] for row in rows):
            own = sorted((r for r in rows if r["plan"] == plan), key=lambda r: r["concurrency"])
            levels = [row["concurrency"] for row in own]
            axis.plot(levels, [row[value] or 0.0 for row in own], marker="o", label=own[0]["label"])
        axis.set_xlabel("requests at once")
        axis.set_ylabel(label)
        axis.set_xscale("log", base=2)
        ticks = sorted({row["concurrency"] for row in rows})
        axis.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes[1].axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes[0].legend(fontsize=8)
    return figure
