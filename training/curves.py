"""RUN/train_log.jsonl as a table (CSV) and as a picture (PNG), written when training ends."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none may exist
from matplotlib import pyplot as plt

# Panel title -> names of its curves; a name that ends in * stands for all that begin so.
PANELS = {
    "loss": ("loss", "*_loss"),
    "teacher-forced accuracy, recall of the label": ("accuracy", "base_accuracy", "*recall"),
    "teacher-forced leading run (tokens)": ("*_run",),
    "decoded: tau (tokens a target forward)": ("eval_tau_*",),
    "learning rate, share of the base loss": ("learning_rate", "distill_lambda"),
    "gradient norm": ("grad_norm",),
}


def write_table(lines: list[dict], path: Path) -> None:
    """One row a log line, one column a figure; empty where a line does not have it."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)


def draw_curves(lines: list[dict], path: Path) -> None:
    """Figures by step, one panel a kind; kinds that nobody logged are left out."""
    logged = list(dict.fromkeys(name for line in lines for name in line))
    panels = {title: chosen for title, patterns in PANELS.items() if (chosen := _matching(logged, patterns))}
    rows = -(-max(1, len(panels)) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(12, 3.2 * rows), squeeze=False)
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=False):
        for name in names:
            points = [(line["step"], line[name]) for line in lines if name in line]
            scale = max((abs(y) for _, y in points), default=0.0) or 1.0
            # The learning rate is a thousand times smaller than lambda: shown as a share of its maximum.
            values, label = (
                ([y / scale for _, y in points], f"{name} / {scale:.1e}")
                if name == "learning_rate"
                else ([y for _, y in points], name.removeprefix("eval_"))
            )
            axis.plot([x for x, _ in points], values, label=label, marker="o" if len(points) < 30 else None, ms=3)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _matching(logged: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in logged if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    if name.startswith("eval_tau_rounds_"):
        return False  # nearly the same curve as the other tau
    if pattern.startswith("*"):
        return name.endswith(pattern[1:]) and not name.startswith("eval_")
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
