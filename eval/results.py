"""results.json from decoded answers. Its schema is docs/results.md.

All figures of one benchmark and temperature are over the same answers for every plan (a section): an answer that one
plan lacks is left out for all, and tau and speed are over the answers that have a round under every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from . import bootstrap, metrics
from .bootstrap import Figures, Resampled
from .decoding.proposals import TREES
from .plans import labels, unique
from .records import AR, AVERAGE, FIXED, MAIN, Divergence, Generation, Plan

SCHEMA_VERSION = 2


@dataclass
class Section:
    """One benchmark at one temperature.

    Attributes:
        answers: by plan id, the answers that every plan has.
        decoded: those of them that have a round under every plan.
        figures: resampled tau and seconds a token by plan id; empty when nothing was decoded.
        left_out: answers that only some plans have.
    """

    benchmark: str
    temperature: float
    answers: dict[str, list[Generation]]
    decoded: dict[str, list[Generation]]
    figures: dict[str, Figures]
    prompts: list[str]
    left_out: int

    def speedup(self, plan: str) -> Resampled | None:
        if AR not in self.figures or plan not in self.figures:
            return None
        return self.figures[AR].seconds_per_token / self.figures[plan].seconds_per_token


def make_section(benchmark: str, temperature: float, generations: Iterable[Generation], seed: int) -> Section:
    """A section of one phase's answers to one benchmark at one temperature."""
    groups: dict[str, dict[tuple, Generation]] = {}
    for g in generations:
        groups.setdefault(g.plan.id, {})[g.answer] = g
    every = set.union(*(set(group) for group in groups.values()))
    common = sorted(set.intersection(*(set(group) for group in groups.values())))
    rounds = [answer for answer in common if all(group[answer].rounds for group in groups.values())]
    answers = {plan: [group[a] for a in common] for plan, group in groups.items()}
    decoded = {plan: [group[a] for a in rounds] for plan, group in groups.items()}
    prompts, figures = sorted({prompt for prompt, _ in rounds}), {}
    if prompts:
        weights_SP = bootstrap.draws(len(prompts), seed, benchmark)
        figures = {plan: bootstrap.resample(group, prompts, weights_SP) for plan, group in decoded.items()}
    return Section(benchmark, temperature, answers, decoded, figures, prompts, len(every) - len(common))


def build_results(
    generations: Sequence[Generation],
    settings: dict,
    divergences: Sequence[Divergence] = (),
    seed: int = 0,
    generate_speed: dict[str, float] | None = None,
    benchmarks: Sequence[dict] = (),
    sweeps: Sequence[tuple[str, float, Plan]] = (),
    concurrency: Sequence[dict] = (),
) -> dict:
    """Everything that results.json holds, as plain JSON types.

    Args:
        generations: of all phases, plan by plan in the order of the tables.
        settings: `num_proposals` and `max_new_tokens` among them.
        divergences: one record for each greedy answer that differs from AR's.
        generate_speed: tokens a second of `target.generate`, by benchmark.
        benchmarks: {benchmark, source, prompts, turns, skipped} of each benchmark that was asked; `turns` of these
            prompts, whether they could be asked or not.
        sweeps: (knob, value, plan) of each point; their answers are those whose phase is not "main".
        concurrency: finished rows.
    """
    main = [g for g in generations if g.phase == MAIN]
    swept = [g for g in generations if g.phase != MAIN]
    names = labels(unique([g.plan for g in main]))
    sweep_names = labels(unique([g.plan for g in swept]))
    sections = _sections(main, seed)
    builder = _Rows(settings, divergences)
    plans = unique([g.plan for g in generations])
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": settings,
        "benchmarks": [_benchmark_row(row, sections) for row in benchmarks],
        "plans": [plan_fields(plan, names.get(plan.id) or sweep_names[plan.id]) for plan in plans],
        "summary": [builder.summary(section, plan, names) for section in sections for plan in _plans(section)],
        "averages": [
            row for temperature in _temperatures(sections) for row in builder.averages(sections, temperature, names)
        ],
        "differences": _differences(sections),
        "quality": [_quality_row(section, generate_speed or {}) for section in sections if AR in section.answers],
        "sweeps": [
            {"sweep": knob, "value": value, **builder.summary(section, section_plan, sweep_names)}
            for section in _sections(swept, seed)
            for knob, value, plan in sweeps
            for section_plan in _plans(section)
            if section_plan.id == plan.id
        ],
        "concurrency": list(concurrency),
        "divergences": [d.to_dict() for d in divergences],
    }


def plan_fields(plan: Plan, label: str) -> dict:
    """The fields by which rows name their plan."""
    return {"plan": plan.id, "label": label, **asdict(plan)}


def _sections(generations: Iterable[Generation], seed: int) -> list[Section]:
    groups: dict[tuple, list[Generation]] = {}
    for g in generations:
        groups.setdefault((g.benchmark, g.temperature), []).append(g)
    return [make_section(*key, group, seed) for key, group in groups.items()]


def _plans(section: Section) -> list[Plan]:
    return [group[0].plan for group in section.answers.values() if group]


def _temperatures(sections: Sequence[Section]) -> list[float]:
    return list(dict.fromkeys(section.temperature for section in sections))


def _benchmark_row(row: dict, sections: Sequence[Section]) -> dict:
    own = [section for section in sections if section.benchmark == row["benchmark"]]
    answers = {len(group) for section in own for group in section.answers.values()}
    asked = [len(next(iter(section.answers.values()))) + section.left_out for section in own]
    return {
        **row,
        "turns_dropped": sum(row["turns"] - turns for turns in asked),
        "answers": max(answers, default=0),
        "left_out": sum(section.left_out for section in own),
    }


class _Rows:
    """Rows of `summary` and `averages`."""

    def __init__(self, settings: dict, divergences: Sequence[Divergence]):
        self.max_new_tokens, self.depth = settings.get("max_new_tokens"), settings.get("num_proposals") or 0
        self.near = {(d.phase, d.benchmark, d.prompt_id, d.turn, d.plan) for d in divergences if d.near_tie}

    def summary(self, section: Section, plan: Plan, names: dict[str, str]) -> dict:
        group, decoded = section.answers[plan.id], section.decoded[plan.id]
        ar = section.decoded.get(AR, [])
        figures, speedup = section.figures.get(plan.id), section.speedup(plan.id)
        diverged, near_ties = self._divergences(section, plan)
        return {
            **plan_fields(plan, names[plan.id]),
            "benchmark": section.benchmark,
            "temperature": section.temperature,
            "max_new_tokens": self.max_new_tokens,
            "prompts": len({g.prompt_id for g in group}),
            "answers": len(group),
            "answers_without_rounds": sum(not g.rounds for g in group),
            "tau_mean": figures and figures.tau.estimate,
            "tau_interval": figures and figures.tau.interval,
            "tau_trimmed": metrics.tau_mean(decoded, trimmed=True),
            "tau_rounds": metrics.tau_rounds(decoded),
            "tokens_per_second": metrics.tokens_per_second(decoded),
            "tokens_per_second_end_to_end": metrics.tokens_per_second_end_to_end(group),
            "speedup": speedup and speedup.estimate,
            "speedup_interval": speedup and speedup.interval,
            "speedup_mean_of_ratios": metrics.speedup_mean_of_ratios(decoded, ar),
            "speedup_after_first_draft": metrics.speedup(metrics.after_first_draft(decoded), ar),
            "target_forwards": sum(g.target_forwards for g in group),
            "tokens": sum(len(g.tokens) for g in group),
            **self.pooled(plan, decoded),
            "eos_share": metrics.eos_share(group),
            "distinct_4gram": metrics.distinct_ngram_ratio(g.tokens for g in group),
            "diverged": diverged,
            "near_ties": near_ties,
        }

    def pooled(self, plan: Plan, decoded: Sequence[Generation]) -> dict:
        """Figures over rounds, which benchmarks can share."""
        return {
            "rounds": sum(len(g.rounds) for g in decoded),
            "ms_per_round": metrics.ms_per_round(decoded),
            "busy_ms_per_round": metrics.busy_ms_per_round(decoded),
            "ms_per_round_total": metrics.ms_per_round_total(decoded),
            "tree_share": metrics.tree_share(decoded),
            "nodes_per_round": metrics.nodes_per_round(decoded),
            "acceptance_by_position": metrics.acceptance_by_position(decoded),
            "whole_block_share": metrics.whole_block_share(decoded, 0 if plan.method == AR else self.depth),
            "accepted_histogram": metrics.accepted_histogram(decoded),
            "peak_memory_gb": metrics.peak_memory(decoded),
        }

    def averages(self, sections: Sequence[Section], temperature: float, names: dict[str, str]) -> list[dict]:
        """Unweighted means over the benchmarks that have figures; rounds are pooled."""
        own = [s for s in sections if s.temperature == temperature and s.figures]
        rows = []
        for plan in _plans(own[0]) if own else []:
            taus = bootstrap.mean([s.figures[plan.id].tau for s in own])
            speedups = [s.speedup(plan.id) for s in own]
            speedup = None if None in speedups else bootstrap.mean(speedups)
            decoded = [g for s in own for g in s.decoded[plan.id]]
            ratios = [metrics.speedup_mean_of_ratios(s.decoded[plan.id], s.decoded.get(AR, [])) for s in own]
            rows.append(
                {
                    **plan_fields(plan, names[plan.id]),
                    "temperature": temperature,
                    "benchmarks": len(own),
                    "tau_mean": taus.estimate,
                    "tau_interval": taus.interval,
                    "tau_trimmed": _mean([metrics.tau_mean(s.decoded[plan.id], trimmed=True) for s in own]),
                    "speedup": speedup and speedup.estimate,
                    "speedup_interval": speedup and speedup.interval,
                    "speedup_mean_of_ratios": _mean(ratios),
                    **self.pooled(plan, decoded),
                }
            )
        return rows

    def _divergences(self, section: Section, plan: Plan) -> tuple[int | None, int | None]:
        """Answers that differ from AR's, and those of them whose record says that rounding explains it."""
        if section.temperature != 0 or AR not in section.answers:
            return None, None
        reference = {g.answer: g.tokens for g in section.answers[AR]}
        different = [g for g in section.answers[plan.id] if g.tokens != reference[g.answer]]
        near = [g for g in different if (g.phase, g.benchmark, *g.answer, plan.id) in self.near]
        return len(different), len(near)


def _mean(values: Sequence[float | None]) -> float | None:
    return None if not values or None in values else sum(values) / len(values)


def _differences(sections: Sequence[Section]) -> list[dict]:
    rows = []
    for section in sections:
        figures = {plan: (f.tau, section.speedup(plan)) for plan, f in section.figures.items()}
        rows += _pairs(section.benchmark, section.temperature, figures, len(section.prompts), _by_id([section]))
    for temperature in _temperatures(sections):
        own = [s for s in sections if s.temperature == temperature and s.figures]
        if len(own) < 2:
            continue
        figures = {}
        for plan in own[0].figures:
            speedups = [s.speedup(plan) for s in own]
            tau = bootstrap.mean([s.figures[plan].tau for s in own])
            figures[plan] = tau, None if None in speedups else bootstrap.mean(speedups)
        prompts = sum(len(s.prompts) for s in own)
        rows += _pairs(AVERAGE, temperature, figures, prompts, _by_id(own))
    return rows


def _by_id(sections: Sequence[Section]) -> dict[str, Plan]:
    return {plan.id: plan for section in sections for plan in _plans(section)}


def _comparable(a: Plan, b: Plan) -> bool:
    """Two kinds of tree are compared at equal B only (METHODS section 4): more nodes are accepted deeper by anyone."""
    if a.method == b.method or a.method not in TREES or b.method not in TREES:
        return True
    return a.budget == b.budget and a.policy == b.policy == FIXED


def _pairs(benchmark: str, temperature: float, figures: dict, prompts: int, by_id: dict[str, Plan]) -> list[dict]:
    """A row for each pair of plans that can be compared, AR apart: the speed-up is already a comparison with it.

    The pairs of one benchmark (or of the average) at one temperature are the family over which Holm corrects p.
    """
    # DARTree stands on the left of a pair with anything else, so that a positive difference is in its favour.
    plans = sorted((plan for plan in figures if plan != AR), key=lambda plan: by_id[plan].method.startswith("dartree"))
    rows = []
    for b, a in combinations(plans, 2):
        if not _comparable(by_id[a], by_id[b]):
            continue
        tau = figures[a][0] - figures[b][0]
        speed = figures[a][1] - figures[b][1] if figures[a][1] and figures[b][1] else None
        rows.append(
            {
                "benchmark": benchmark,
                "temperature": temperature,
                "a": a,
                "b": b,
                "prompts": prompts,
                "tau_difference": tau.estimate,
                "tau_interval": tau.interval,
                "tau_p": tau.p_value,
                "speedup_difference": speed and speed.estimate,
                "speedup_interval": speed and speed.interval,
                "speedup_p": speed and speed.p_value,
            }
        )
    for figure in ("tau", "speedup"):
        for row, corrected in zip(rows, bootstrap.holm([row[f"{figure}_p"] for row in rows]), strict=True):
            row[f"{figure}_p_holm"] = corrected
    return rows


def _quality_row(section: Section, generate_speed: dict[str, float]) -> dict:
    ar = section.answers[AR]
    own = metrics.tokens_per_second(ar)
    theirs = generate_speed.get(section.benchmark) if section.temperature == 0 else None
    return {
        "benchmark": section.benchmark,
        "temperature": section.temperature,
        "answers": len(ar),
        "eos_share": metrics.eos_share(ar),
        "distinct_4gram": metrics.distinct_ngram_ratio(g.tokens for g in ar),
        "ar_tokens_per_second": own,
        "generate_tokens_per_second": theirs,
        "ar_over_generate": own / theirs if own and theirs else None,
    }
