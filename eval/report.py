"""The report of an evaluation: RUN/results.json, generations.jsonl, report.md and plots/.

results.json, schema version 1 (a field that nothing supports is null; intervals are 95 % [low, high], bootstrapped over
prompts):

- schema_version: 1
- settings: target (loadable path), drafter, device, dtype, attention, engine {engine, zero_stage, world_size} (of the
  training), hardware {cpu, cores, threads, memory_gb, gpus}, versions {package: version}, git_commit, prompts,
  max_new_tokens and the other options of the evaluation, provenance (of the drafter, as its training wrote it, or null)
- summary: a row for each benchmark, temperature, method and budget:
  benchmark, temperature, method, budget (tree nodes), prompts, answers_without_rounds,
  tau_mean, tau_interval, tau_rounds, tau_trimmed (definitions: eval/metrics.py),
  tokens_per_second, tokens_per_second_end_to_end (prefill inside),
  speedup (ratio of sums), speedup_interval, speedup_mean_of_ratios, speedup_after_first_draft (the published clock),
  ms_per_round {draft, tree, verify, commit}, ms_per_round_total (all decoding time over rounds),
  target_forwards, acceptance [{depth, trials, conditional, survival}], accepted_histogram [rounds by accepted tokens],
  eos_share, distinct_4gram,
  diverged (answers that differ from AR's; null when temperature > 0), near_ties (those explained by rounding)
- differences: for each pair of methods of one benchmark and temperature (AR apart): benchmark, temperature,
  a {method, budget}, b {method, budget}, prompts, tau_difference (a - b), tau_interval, speedup_difference,
  speedup_interval
- quality: for each benchmark and temperature, of the AR answers: benchmark, temperature, answers, eos_share,
  distinct_4gram, ar_tokens_per_second, generate_tokens_per_second (target.generate on the same prompts),
  ar_over_generate
- divergences: the records of eval/records.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

from data.settings import RunConfig
from models.target import Target

from . import metrics
from .environment import git_commit, hardware, versions
from .plots import draw_plots
from .records import Divergence, Generation
from .table import markdown

SCHEMA_VERSION = 1
AR = "ar"
# Options of a run that decide what an evaluation measures.
_OPTIONS = (
    "benchmarks", "max_new_tokens", "max_prompt_length", "methods", "temperatures", "budget", "width", "candidates",
    "beta", "choose_budget", "near_tie", "seed",
)  # fmt: skip

# What the training's provenance says about how it ran.
_ENGINE = ("engine", "zero_stage", "world_size")

Key = tuple[str, float, str, int]  # benchmark, temperature, method, budget


def collect_settings(config: RunConfig, target: Target, drafter_folder: str, **more) -> dict:
    """The settings that every result carries; `more` adds to them or overrides them."""
    provenance = read_provenance(drafter_folder)
    settings = {
        "target": target.path,
        "target_name": config.target,
        "drafter": str(drafter_folder),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "engine": {name: provenance.get(name) for name in _ENGINE} if provenance else None,
        "hardware": hardware(),
        "versions": versions(),
        "git_commit": git_commit(),
        "prompts": config.eval_prompts,
        **{name: getattr(config, name) for name in _OPTIONS},
        "provenance": provenance,
    }
    return settings | more


def read_provenance(drafter_folder: str) -> dict | None:
    """What the training wrote beside the drafter; None for a drafter from elsewhere."""
    path = Path(drafter_folder) / "provenance.json"
    return json.loads(path.read_text()) if path.is_file() else None


def build_results(
    generations: Sequence[Generation],
    settings: dict,
    divergences: Sequence[Divergence] = (),
    seed: int = 0,
    generate_tokens_per_second: dict[str, float] | None = None,
) -> dict:
    """Everything that results.json holds, as plain JSON types.

    Args:
        generations: of all methods; AR's are the baseline of the same benchmark and temperature.
        divergences: one record for each greedy answer that differs from AR's.
        generate_tokens_per_second: by benchmark, of `target.generate` on the same prompts at temperature 0.
    """
    groups: dict[Key, list[Generation]] = {}
    for g in generations:
        groups.setdefault((g.benchmark, g.temperature, g.method, g.budget), []).append(g)
    baseline = {key[:2]: group for key, group in groups.items() if key[2] == AR}
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": settings,
        "summary": [_summary_row(k, g, baseline.get(k[:2], []), divergences, seed) for k, g in groups.items()],
        "differences": _differences(groups, baseline, seed),
        "quality": [_quality_row(k, g, generate_tokens_per_second or {}) for k, g in baseline.items()],
        "divergences": [d.to_dict() for d in divergences],
    }


def _summary_row(key: Key, group: list[Generation], ar: list[Generation], divergences, seed: int) -> dict:
    benchmark, temperature, method, budget = key
    diverged, near_ties = _count_divergences(group, ar, divergences) if temperature == 0 else (None, None)
    return {
        "benchmark": benchmark,
        "temperature": temperature,
        "method": method,
        "budget": budget,
        "prompts": len({g.prompt_id for g in group}),
        "answers_without_rounds": sum(not g.rounds for g in group),
        "tau_mean": metrics.tau_mean(group),
        "tau_interval": metrics.tau_interval(group, seed),
        "tau_rounds": metrics.tau_rounds(group),
        "tau_trimmed": metrics.tau_mean(group, trimmed=True),
        "tokens_per_second": metrics.tokens_per_second(group),
        "tokens_per_second_end_to_end": metrics.tokens_per_second_end_to_end(group),
        "speedup": metrics.speedup(group, ar),
        "speedup_interval": metrics.speedup_interval(group, ar, seed),
        "speedup_after_first_draft": metrics.speedup(metrics.after_first_draft(group), ar),
        "speedup_mean_of_ratios": metrics.speedup_mean_of_ratios(group, ar),
        "ms_per_round": metrics.ms_per_round(group),
        "ms_per_round_total": metrics.ms_per_round_total(group),
        "target_forwards": sum(g.target_forwards for g in group),
        "acceptance": metrics.acceptance_by_position(group),
        "accepted_histogram": metrics.accepted_histogram(group),
        "eos_share": metrics.eos_share(group),
        "distinct_4gram": metrics.distinct_ngram_ratio(g.tokens for g in group),
        "diverged": diverged,
        "near_ties": near_ties,
    }


def _count_divergences(
    group: list[Generation], ar: list[Generation], divergences: Iterable[Divergence]
) -> tuple[int, int]:
    """Answers that differ from AR's, and those among them whose record says that rounding explains it."""
    near = {(d.prompt_id, d.method, d.position, d.token) for d in divergences if d.near_tie}
    reference = {g.prompt_id: g.tokens for g in ar}
    diverged = near_ties = 0
    for g in group:
        expected = reference.get(g.prompt_id, g.tokens)
        if g.tokens == expected:
            continue
        diverged += 1
        position = next((i for i, (x, y) in enumerate(zip(g.tokens, expected, strict=False)) if x != y), None)
        near_ties += position is not None and (g.prompt_id, g.method, position, g.tokens[position]) in near
    return diverged, near_ties


def _differences(groups: dict[Key, list[Generation]], baseline: dict, seed: int) -> list[dict]:
    rows = []
    # DARTree stands on the left of a pair with anything else, so that a positive difference is in its favour.
    keys = sorted((k for k in groups if k[2] != AR), key=lambda k: k[2].startswith("dartree"))
    for b, a in combinations(keys, 2):
        if a[:2] != b[:2]:
            continue
        row = metrics.paired_difference(groups[a], groups[b], baseline.get(a[:2], []), seed)
        if row:
            names = {"a": {"method": a[2], "budget": a[3]}, "b": {"method": b[2], "budget": b[3]}}
            rows.append({"benchmark": a[0], "temperature": a[1], **names, **row})
    return rows


def _quality_row(key: tuple[str, float], ar: list[Generation], generate_speed: dict[str, float]) -> dict:
    benchmark, temperature = key
    own, theirs = metrics.tokens_per_second(ar), generate_speed.get(benchmark) if temperature == 0 else None
    return {
        "benchmark": benchmark,
        "temperature": temperature,
        "answers": len(ar),
        "eos_share": metrics.eos_share(ar),
        "distinct_4gram": metrics.distinct_ngram_ratio(g.tokens for g in ar),
        "ar_tokens_per_second": own,
        "generate_tokens_per_second": theirs,
        "ar_over_generate": own / theirs if own and theirs else None,
    }


def write_report(run_dir: str, results: dict, generations: Iterable[Generation]) -> None:
    """Writes results.json, generations.jsonl, report.md and plots/ under `run_dir`, each file whole or not at all."""
    run = Path(run_dir)
    run.mkdir(parents=True, exist_ok=True)
    write_whole(run / "generations.jsonl", "".join(json.dumps(g.to_dict()) + "\n" for g in generations))
    write_whole(run / "report.md", markdown(results))
    draw_plots(results, run / "plots")
    # Last, since its presence says that the evaluation is finished. NaN would be a bug: JSON has none.
    write_whole(run / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_results(path: str | os.PathLike) -> dict:
    """Reads a results.json. Raises ValueError for another schema version."""
    results = json.loads(Path(path).read_text())
    if results.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema_version {results.get('schema_version')}, this code reads {SCHEMA_VERSION}")
    return results
