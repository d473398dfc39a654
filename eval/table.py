"""Markdown tables: formatting, the measured table of one benchmark, and the settings as a list."""

from __future__ import annotations

from .records import PARTS


def sections(results: dict) -> list[tuple[str, float]]:
    """The (benchmark, temperature) pairs of the results, in order."""
    return list(dict.fromkeys((row["benchmark"], row["temperature"]) for row in results["summary"]))


def rows_of(results: dict, part: str, benchmark: str, temperature: float) -> list[dict]:
    return [r for r in results[part] if (r["benchmark"], r["temperature"]) == (benchmark, temperature)]


def summary_table(results: dict, benchmark: str, temperature: float) -> str:
    """Methods as rows: tau and speed-up with 95 % intervals, tokens/s, milliseconds a round."""
    head = [
        "method", "B", "prompts", "tau", "95 %", "speed-up", "95 %", "tokens/s", "ms a round: draft", "tree", "verify",
        "commit", "all", "diverged", "near ties",
    ]  # fmt: skip
    body = []
    for row in rows_of(results, "summary", benchmark, temperature):
        split = row["ms_per_round"] or {}
        figures = [row["tau_mean"], row["tau_interval"], row["speedup"], row["speedup_interval"]]
        body.append(
            [method_name(row), str(row["budget"] or ""), str(row["prompts"])]
            + [number(f, 2) for f in figures]
            + [number(row["tokens_per_second"], 1)]
            + [number(split.get(part), 1) for part in PARTS]
            + [number(row["ms_per_round_total"], 1)]
            + [number(row["diverged"], 0), number(row["near_ties"], 0)]
        )
    return table(head, body)


def definitions_table(results: dict, benchmark: str, temperature: float) -> str:
    """The same answers under the other definitions of tau and speed-up that are in use (METHODS section 4)."""
    head = [
        "method", "tau, published", "trimmed", "by rounds", "speed-up, ratio of sums", "mean of ratios",
        "clock from the first draft", "tokens/s with prefill",
    ]  # fmt: skip
    rows = rows_of(results, "summary", benchmark, temperature)
    keys = (
        "tau_mean", "tau_trimmed", "tau_rounds", "speedup", "speedup_mean_of_ratios", "speedup_after_first_draft",
        "tokens_per_second_end_to_end",
    )  # fmt: skip
    # The published clock is shown where it differs by more than 1 %.
    clock = any(abs(r["speedup_after_first_draft"] / r["speedup"] - 1) > 0.01 for r in rows if r["speedup"])
    dropped = None if clock else keys.index("speedup_after_first_draft")
    body = [[row["label"], *(number(row[key], 2) for key in keys)] for row in rows]
    if dropped is not None:
        head, *body = [cells[: dropped + 1] + cells[dropped + 2 :] for cells in [head, *body]]
    return table(head, body)


def method_name(row: dict) -> str:
    """The label of a plan where B has a column of its own, and why the plan is there."""
    label = row["label"].replace(f"(B={row['budget']})", "").replace(f"(B={row['budget']}, ", "(").strip()
    return f"{label}, {row['note']}" if row["note"] else label


def settings_lines(settings: dict) -> str:
    """One list item a setting; what the results hold in full (provenance) is named only."""
    hardware, versions = settings.get("hardware") or {}, settings.get("versions") or {}
    hidden = ("hardware", "versions", "provenance", "engine", "budget_choice", "budget_calibration", "fingerprint")
    shown = {
        **{k: v for k, v in settings.items() if k not in hidden},
        "engine of the training": settings.get("engine"),
        "hardware": ", ".join(f"{k} {_plain(v)}" for k, v in hardware.items() if v not in (None, [], "")),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
    }
    return "\n".join(f"- {key}: {_plain(value)}" for key, value in shown.items() if value not in (None, "", [])) + "\n"


def table(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table, first column left, the others right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value, digits: int) -> str:
    """A number or an interval; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return f"{value[0]:.{digits}f} to {value[1]:.{digits}f}"
    return f"{value:.{digits}f}"


def ranged(value: float | None, interval: list[float] | None, unit: str = "") -> str:
    """A figure with its interval in one cell: `2.73 (2.34–3.16)`, or `2.73 (-)` without one."""
    if value is None:
        return "-"
    return f"{value:.2f}{unit} ({f'{interval[0]:.2f}–{interval[1]:.2f}' if interval else '-'})"


def signed(value: float | None, interval: list[float] | None, p: float | None) -> str:
    """A difference in one cell: `+0.40 (+0.10 to +0.70), p 0.012`, or `+0.40 (-)` of a single prompt.

    `p` is corrected for the other tests of the table; bold where it is at most 5 %.
    """
    if value is None:
        return "-"
    if interval is None:
        return f"{value:+.2f} (-)"
    text = f"{value:+.2f} ({interval[0]:+.2f} to {interval[1]:+.2f}), p {f'{p:.3f}' if p >= 0.001 else '<0.001'}"
    return f"**{text}**" if p <= 0.05 else text


def percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _plain(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(map(_plain, value)) if isinstance(value, list) else str(value)
