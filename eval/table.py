"""Results as Markdown for people: the measured table, the differences between methods, and the settings."""

from __future__ import annotations


def markdown(results: dict) -> str:
    """The whole of report.md."""
    parts = ["# Evaluation\n"]
    for benchmark, temperature in sections(results):
        parts.append(f"## {benchmark}, temperature {temperature:g}\n")
        parts.append(summary_table(results, benchmark, temperature))
        parts.append(_quality_lines(results, benchmark, temperature))
        parts.append(differences_table(results, benchmark, temperature))
    parts.append(budget_table(results["settings"].get("budget_choice")))
    parts.append("## Settings\n\n" + settings_lines(results["settings"]))
    return "\n".join(part for part in parts if part)


def sections(results: dict) -> list[tuple[str, float]]:
    """The (benchmark, temperature) pairs of the results, in order."""
    return list(dict.fromkeys((row["benchmark"], row["temperature"]) for row in results["summary"]))


def rows_of(results: dict, part: str, benchmark: str, temperature: float) -> list[dict]:
    return [r for r in results[part] if (r["benchmark"], r["temperature"]) == (benchmark, temperature)]


def summary_table(results: dict, benchmark: str, temperature: float) -> str:
    """Methods as rows: tau and speed-up with 95 % intervals, tokens/s, milliseconds a round."""
    head = [
        "method", "B", "prompts", "tau", "95 %", "tau by rounds", "speed-up", "95 %", "tokens/s",
        "ms a round: draft", "tree", "verify", "commit", "diverged", "near ties",
    ]  # fmt: skip
    body = []
    for row in rows_of(results, "summary", benchmark, temperature):
        split = row["ms_per_round"] or {}
        figures = [row["tau_mean"], row["tau_interval"], row["tau_rounds"], row["speedup"], row["speedup_interval"]]
        body.append(
            [row["method"], str(row["budget"]), str(row["prompts"])]
            + [number(f, 2) for f in figures]
            + [number(row["tokens_per_second"], 1)]
            + [number(split.get(part), 1) for part in ("draft", "tree", "verify", "commit")]
            + [number(row["diverged"], 0), number(row["near_ties"], 0)]
        )
    return table(head, body)


def differences_table(results: dict, benchmark: str, temperature: float) -> str:
    """The differences in which DARTree takes part; the other pairs are in results.json."""
    rows = rows_of(results, "differences", benchmark, temperature)
    body = [
        [
            f"{name(row['a'])} - {name(row['b'])}",
            signed(row["tau_difference"]),
            number(row["tau_interval"], 2),
            signed(row["speedup_difference"]),
            number(row["speedup_interval"], 2),
        ]
        for row in rows
        if row["a"]["method"].startswith("dartree")
    ]
    if not body:
        return ""
    text = "Paired differences (bootstrap over prompts, 95 % intervals):\n\n"
    return text + table(["pair", "tau", "95 %", "speed-up", "95 %"], body)


def budget_table(choice: dict | None) -> str:
    """How the budget of this machine was chosen, in the fields of eval/budget.py."""
    if not choice:
        return ""
    body = [
        [str(row["budget"]), number(row["tau"], 2)]
        + [number(row[key], 1) for key in ("verify_ms", "round_ms", "tokens_per_second")]
        for row in choice["curve"]
    ]
    text = (
        f"## Budget\n\nB={choice['budget']} has the most expected tokens per measured second here; tau is that of "
        "training prompts, no evaluated prompt took part:\n\n"
    )
    return text + table(["B", "tau", "verify ms", "round ms", "tokens/s"], body)


def _quality_lines(results: dict, benchmark: str, temperature: float) -> str:
    lines = []
    for row in rows_of(results, "quality", benchmark, temperature):
        lines.append(
            f"Answers of the target: {percent(row['eos_share'])} end in eos, "
            f"distinct 4-gram ratio {number(row['distinct_4gram'], 3)} (a repetitive model flatters tau)."
        )
        if row["ar_over_generate"] is not None:
            lines.append(
                f"AR in this loop runs at {row['ar_over_generate']:.2f}x the tokens/s of `target.generate` on the same "
                f"prompts ({row['ar_tokens_per_second']:.1f} against {row['generate_tokens_per_second']:.1f})."
            )
    return "\n".join(lines) + "\n" if lines else ""


def settings_lines(settings: dict) -> str:
    """One list item a setting; what the results hold in full (provenance) is named only."""
    hardware, versions = settings.get("hardware") or {}, settings.get("versions") or {}
    hidden = ("hardware", "versions", "provenance", "engine", "budget_choice", "fingerprint")
    shown = {
        **{k: v for k, v in settings.items() if k not in hidden},
        "engine of the training": settings.get("engine"),
        "hardware": ", ".join(f"{k} {_plain(v)}" for k, v in hardware.items() if v not in (None, [], "")),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
    }
    return "\n".join(f"- {key}: {_plain(value)}" for key, value in shown.items() if value not in (None, "")) + "\n"


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


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def name(row: dict) -> str:
    """How a method at a budget is called in tables and plots."""
    return row["method"] if row["method"] == "ar" else f"{row['method']} (B={row['budget']})"


def _plain(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
