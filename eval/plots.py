"""Results as PNG pictures: bars of tau and speed-up, acceptance by position, time split, sweeps, throughput."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none may exist
from matplotlib import pyplot as plt

from .records import AVERAGE, PARTS
from .table import rows_of, sections
from .tables import averages_at, benchmark_names, temperatures

# A method has one colour in all pictures; plans of one method differ by the dash of their lines.
COLOURS = {
    "ar": "tab:gray", "dflash_chain": "tab:orange", "domino_chain": "tab:purple", "markov_chain": "tab:pink",
    "ddtree": "tab:cyan", "per_node_serial": "tab:red", "dartree_fixed": "tab:green", "dartree_pruned": "tab:blue",
}  # fmt: skip
DASHES = ("-", "--", ":", "-.")


def draw_plots(results: dict, folder: Path) -> list[Path]:
    """Draws what was measured; returns the paths.

    `speed-BENCHMARK-tT.png` for each benchmark, and for all of them together (or the only one) also `acceptance-...`
    and `time-...`; `sweep-KNOB.png` for each swept knob, and `throughput-BENCHMARK-tT.png`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []

    def save(figure, name: str, title: str) -> None:
        figure.suptitle(title)
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


def _styles(rows: list[dict]) -> dict[str, dict]:
    """Colour and dash of the lines of each plan, by its id."""
    plans: dict[str, list[str]] = {}
    for row in rows:
        own = plans.setdefault(row["method"], [])
        if row["plan"] not in own:
            own.append(row["plan"])
    return {
        plan: {"color": COLOURS[method], "linestyle": DASHES[place % len(DASHES)]}
        for method, own in plans.items()
        for place, plan in enumerate(own)
    }


def _legend(figure, axis) -> None:
    """Beside the pictures: ten plans would cover what they name."""
    handles, names = axis.get_legend_handles_labels()
    if names:
        figure.legend(handles, names, loc="outside right upper", fontsize=8, handlelength=3)


def _bounds(rows: list[dict], value: str, figure: str) -> list[list[float]]:
    """Lengths of the error bars below and above. An interval need not contain the estimate: never negative."""
    pairs = [(row[value] or 0.0, row[f"{figure}_interval"]) for row in rows]
    return [
        [max(0.0, v - bounds[0]) if bounds else 0.0 for v, bounds in pairs],
        [max(0.0, bounds[1] - v) if bounds else 0.0 for v, bounds in pairs],
    ]


def _draw_bars(rows: list[dict]):
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.5 + 0.4 * len(rows)), sharey=True, layout="constrained")
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
    figure, axes = plt.subplots(1, 3, figsize=(17, 4), layout="constrained")
    rows = [row for row in rows if row["acceptance_by_position"]]
    styles = _styles(rows)
    labels = ("accepted, given that the depth before was", "share of rounds that accept this depth")
    for axis, value, label in zip(axes, ("conditional", "survival"), labels, strict=False):
        for row in rows:
            points = row["acceptance_by_position"]
            xs, ys = [point["depth"] for point in points], [point[value] for point in points]
            axis.plot(xs, ys, marker="o", ms=3, label=row["label"], **styles[row["plan"]])
        axis.set_xlabel("draft position")
        axis.set_title(label, fontsize=9)
        axis.set_ylim(0, 1.02)
    for row in rows:
        shares = [count / row["rounds"] for count in row["accepted_histogram"]]
        axes[2].plot(range(len(shares)), shares, drawstyle="steps-mid", **styles[row["plan"]])
    axes[2].set_xlabel("draft tokens accepted")
    axes[2].set_title("share of rounds that accept so many", fontsize=9)
    _legend(figure, axes[0])
    return figure


def _draw_time(rows: list[dict]):
    rows = [row for row in rows if row["ms_per_round"]]
    figure, axis = plt.subplots(figsize=(10, 1.5 + 0.4 * len(rows)), layout="constrained")
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
    _legend(figure, axis)
    return figure


def _draw_sweep(rows: list[dict], knob: str):
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for axis, value, label in zip(axes, ("tau_mean", "speedup"), ("tau", "speed-up over AR"), strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            own = sorted((r for r in rows if r["method"] == method), key=lambda r: r["value"])
            errors = _bounds(own, value, value.removesuffix("_mean"))
            values = [row[value] or 0.0 for row in own]
            style = dict(marker="o", capsize=3, color=COLOURS[method], label=method)
            axis.errorbar([row["value"] for row in own], values, yerr=errors, **style)
        axis.set_xlabel(knob)
        axis.set_ylabel(label)
        if knob != "beta":
            axis.set_xscale("log", base=2)
            ticks = sorted({row["value"] for row in rows})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    _legend(figure, axes[0])
    return figure


def _draw_throughput(rows: list[dict]):
    figure, axes = plt.subplots(1, 2, figsize=(13, 4), layout="constrained")
    styles = _styles(rows)
    labels = ("tokens a second", "speed-up over AR at the same concurrency")
    for axis, value, label in zip(axes, ("tokens_per_second", "speedup"), labels, strict=True):
        for plan in dict.fromkeys(row["plan"] for row in rows):
            own = sorted((r for r in rows if r["plan"] == plan), key=lambda r: r["concurrency"])
            levels, values = [row["concurrency"] for row in own], [row[value] or 0.0 for row in own]
            style = dict(marker="o", ms=4, capsize=3, label=own[0]["label"], **styles[plan])
            axis.errorbar(levels, values, yerr=_bounds(own, value, value), **style)
        runs = "one run: no intervals" if rows[0]["runs"] == 1 else f"95 % intervals of {rows[0]['runs']} runs"
        axis.set_xlabel(f"requests at once ({runs})")
        axis.set_ylabel(label)
        # An interval of two runs can be so wide that it would flatten the lines: it may leave the picture.
        axis.set_ylim(0, min(axis.get_ylim()[1], 1.5 * max(row[value] or 0.0 for row in rows)))
        axis.set_xscale("log", base=2)
        ticks = sorted({row["concurrency"] for row in rows})
        axis.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes[1].axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    _legend(figure, axes[0])
    return figure
