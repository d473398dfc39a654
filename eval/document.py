"""report.md: every table of eval/tables.py under its heading, with the command that made it and the settings."""

from __future__ import annotations

from . import tables
from .table import definitions_table, number, percent, rows_of, sections, settings_lines, summary_table, table


def headline(results: dict) -> str:
    """What a terminal shows at the end: the measured table of one benchmark, or the main table of several."""
    names = {name for name, _ in sections(results)}
    parts = []
    for temperature in tables.temperatures(results):
        if len(names) > 1:
            parts += [f"Temperature {temperature:g}:\n", tables.main_tables(results, temperature)]
            continue
        for name in names:
            parts += [f"{name}, temperature {temperature:g}:\n", summary_table(results, name, temperature)]
            parts.append(_quality_lines(results, name, temperature))
    return "\n".join([*parts, budget_table(results["settings"].get("budget_choice"))])


def markdown(results: dict) -> str:
    """The whole of report.md."""
    settings = results["settings"]
    command = f"Command: `{settings['command']}`\n" if settings.get("command") else ""
    parts = ["# Evaluation\n", _legend()]
    for temperature in tables.temperatures(results):
        at = f"temperature {temperature:g}"
        parts += _section(f"1. Methods and benchmarks, {at}", tables.main_tables(results, temperature), command)
        for name in tables.benchmark_names(results, temperature):
            parts += _section(f"{name}, {at}", _benchmark(results, name, temperature), level=3)
        parts += _section(f"Pairwise differences, {at}", tables.differences_tables(results, temperature), _BOLD, 3)
    parts += _section(
        "2. Mechanism isolation: one head call a depth, or one a node", tables.mechanism_table(results), command
    )
    parts += _section("3. Head swap: DARTree on a Markov head", tables.head_swap_table(results), command)
    for temperature in tables.temperatures(results):
        text = tables.acceptance_tables(results, temperature)
        parts += _section(f"4. Acceptance by draft position, temperature {temperature:g}", text, command)
    for temperature in tables.temperatures(results):
        text = tables.time_table(results, temperature)
        parts += _section(f"5. Where a round's time goes, temperature {temperature:g}", text, command)
    parts += _section("Sweeps", tables.sweep_tables(results), f"{_SWEPT}\n{command}", 3)
    parts += _section("6. Throughput against concurrency", tables.throughput_tables(results), f"{_LOAD}\n{command}")
    parts += _section("Divergences from the autoregressive text", tables.divergence_table(results), _NEAR)
    parts.append(budget_table(settings.get("budget_choice")))
    parts.append("## Settings\n\n" + settings_lines(settings))
    return "\n".join(part for part in parts if part)


_BOLD = (
    "p: paired bootstrap over prompts, two-sided, after Holm's correction for all pairs of a column; bold: p <= 0.05. "
    "The intervals are 95 % each, not corrected; a dash stands for that of a single prompt. P prompts that all agree "
    "give no p below 2^(1-P), so that few prompts cannot make a long column bold. Trees of different B are no pair.\n"
)
_SWEPT = (
    "Nodes a round: draft tokens sent to the target. dartree_pruned keeps at most W nodes at each position of the "
    "draft, so that a B above W x positions adds nothing to it, while ddtree fills any B.\n"
)
_NEAR = (
    "A near tie: both tokens lie within the rounding of the run's dtype of the highest logit (in bf16 two units in its "
    "last place, in fp32 `--near_tie`). By pieces: wider, up to eight units, but the target alone picks the other "
    "token while it reads the same text in other pieces. The gap is recomputed in a plain forward.\n"
)

_LOAD = (
    "Intervals: tau by bootstrap over the prompts. A run's throughput belongs to all its prompts together, since they "
    "wait for each other, so that it cannot be resampled by prompt: speed and speed-up have intervals (Student's t "
    "over the runs) from two runs on (`--concurrency_runs 3`), and none for one. Requests: the first turns of the "
    "first `concurrency_prompts` prompts.\n"
)


def _legend() -> str:
    return (
        "tau: tokens emitted a target forward, the bonus token included; mean over answers of the mean over rounds, "
        "the last round untrimmed. Speed-up: seconds a token of autoregressive decoding in the same loop over the "
        "method's, interleaved prompt by prompt in random order; the clock runs from the end of the target's prefill "
        "to the last token, first draft inside. Intervals: 95 %, paired bootstrap over prompts.\n"
    )


def _section(title: str, text: str, note: str = "", level: int = 2) -> list[str]:
    return [f"{'#' * level} {title}\n", text, note] if text else []


def _benchmark(results: dict, name: str, temperature: float) -> str:
    asked = [b for b in results["benchmarks"] if b["benchmark"] == name]
    source = [
        f"{b['prompts']} prompts of {b['source']}, {b['answers']} answers; {b['skipped']} prompts skipped; "
        f"{b['turns_dropped']} of their turns could not be asked (too long by then, or refused by the chat template).\n"
        for b in asked
    ]
    return "\n".join(
        [
            *source,
            summary_table(results, name, temperature),
            "Other definitions:\n",
            definitions_table(results, name, temperature),
            _quality_lines(results, name, temperature),
        ]
    )


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


def budget_table(choices: list[dict] | None) -> str:
    """How the budget of this machine was chosen at each temperature, in the fields of eval/budget.py."""
    parts = ["## Budget\n"] if choices else []
    for choice in choices or []:
        body = [
            [str(row["budget"]), number(row["tau"], 2)]
            + [number(row[key], 1) for key in ("verify_ms", "round_ms", "tokens_per_second")]
            for row in choice["curve"]
        ]
        parts.append(
            f"At temperature {choice['temperature']:g}, B={choice['budget']} is the smallest tree within 2 % of the "
            "most expected tokens per measured second here; tau is that of dartree_pruned on training prompts at this "
            "temperature, no evaluated prompt took part:\n"
        )
        parts.append(table(["B", "tau", "verify ms", "round ms", "tokens/s"], body))
    return "\n".join(parts)
