"""A quality report (data/quality.py) for people: report.md, a table, and report.png."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from data.quality import LOW_AGREEMENT, PERCENTILES

matplotlib.use("Agg")  # no display is needed, and none may exist
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

_SHOWN = 10  # parts of a mix; the others are one
_STOPS = {"eos": "tab:blue", "length": "tab:orange"}


def agreement_share(report: dict) -> float | None:
    """Share of the sampled labels that are the target's own argmax; None where it was not looked for."""
    found = report["agreement"]
    return found["equal"] / found["labels"] if found and found["labels"] else None


def warnings(report: dict, greedy: bool) -> list[str]:
    """What somebody who trains on these rows should know first, in lines."""
    said, rows = [], report["rows"]
    share, cut = agreement_share(report), report["stops"].get("length", 0)
    if share is not None and share < LOW_AGREEMENT and greedy:
        said.append(f"only {share:.1%} of the sampled labels are the target's argmax: did it write these answers?")
    if cut > rows / 2:
        said.append(f"{cut / rows:.0%} of the answers are cut: raise max_answer_length")
    found = report["contamination"]
    if found and found["rows"]:
        held = ", ".join(f"{name} {count}" for name, count in found["benchmarks"].items() if count)
        said.append(f"{found['rows']} rows ask what evaluation asks ({held}): prepare with --decontaminate")
    if report["empty_answers"]:
        said.append(f"{report['empty_answers']} answers are empty")
    return said


def markdown(report: dict, greedy: bool) -> str:
    """The report as tables; `greedy` answers are expected to be the target's argmax."""
    said = warnings(report, greedy)
    parts = ["# Quality report\n"]
    if said:
        parts.append("\n".join(f"- **{line}**" for line in said) + "\n")
    parts += [_table(["", ""], _figures(report)), "## Tokens\n", _lengths(report)]
    parts += ["## Repetition\n", _repetition(report), "## Domains\n", _domains(report)]
    for title, key in (("Sources", "sources"), ("Languages of the prompts", "languages")):
        if report[key]:
            sample = report["language_sample"] if key == "languages" else None
            note = f" (told on a sample of {sample:,})" if sample and sample < report["rows"] else ""
            parts += [f"## {title}{note}\n", _table(["", "rows"], [[_name(n), f"{c:,}"] for n, c in _top(report[key])])]
    return "\n".join([*parts, "![](report.png)\n"])


def _figures(report: dict) -> list[list[str]]:
    rows, found, share = report["rows"], report["contamination"], agreement_share(report)
    figures = [
        ["rows (answered turns)", f"{rows:,}"],
        ["conversations", f"{report['conversations']:,}"],
        [f"tokens supervised, rows cut at {report['max_row_length']:,}", f"{report['supervised_tokens']:,}"],
        *([f"answers that end by {stop}", _part(count, rows)] for stop, count in report["stops"].items()),
        ["answers tokenised again from text", _part(report["tokenised_again"], rows)],
        ["empty answers", _part(report["empty_answers"], rows)],
    ]
    if share is not None:
        sample = report["agreement"]
        words = f"labels equal to the target's argmax ({sample['labels']:,} of {sample['rows']} answers)"
        figures.append([words, f"{share:.1%}"])
    if found:
        figures.append(["rows that hold an evaluation prompt", _part(found["rows"], rows)])
        figures += [[f"- of {name}", f"{count:,}"] for name, count in found["benchmarks"].items()]
    figures += [[f"- of {name}: not looked for", reason] for name, reason in report.get("not_looked_for", {}).items()]
    return figures


def _lengths(report: dict) -> str:
    head = ["", "total", "mean", "min", *(f"p{p}" for p in PERCENTILES), "max"]
    body = []
    for name, key in (("prompts", "prompt_tokens"), ("answers", "answer_tokens")):
        found = report[key]
        own = [found["min"], *found["percentiles"].values(), found["max"]]
        body.append([name, f"{found['tokens']:,}", f"{found['mean']:.1f}", *(f"{n:,}" for n in own)])
    return _table(head, body)


def _repetition(report: dict) -> str:
    body = [
        [name, f"{d['texts']:,}", _part(d["exact"], d["texts"]), _part(d["near"], d["near_compared"])]
        for name, d in report["duplicates"].items()
    ]
    compared = max(d["near_compared"] for d in report["duplicates"].values())
    threshold = report["duplicates"]["prompts"]["near_threshold"]
    note = f"Near: word 3-grams agree to {threshold:g} with an earlier one's, among the first {compared:,}.\n"
    return _table(["", "texts", "exact duplicates", "near duplicates"], body) + "\n" + note


def _domains(report: dict) -> str:
    body = []
    for domain, found in report["domains"].items():
        own = [f"{found['rows']:,}", f"{found['answer_tokens']:,}", _part(found["stops"].get("eos", 0), found["rows"])]
        body.append([_name(domain), *own])
    return _table(["", "rows", "answer tokens", "end by eos"], body[:_SHOWN])


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join(f"| {' | '.join(word.replace('|', '/') for word in line)} |\n" for line in lines)


def _part(count: int, of: int) -> str:
    return f"{count:,} ({count / of:.1%})" if of else f"{count:,}"


def _name(name: str) -> str:
    return name or "not said"


def _top(counts: dict[str, int]) -> list[tuple[str, int]]:
    items = list(counts.items())
    rest = sum(count for _, count in items[_SHOWN:])
    return items[:_SHOWN] + ([("others", rest)] if rest else [])


def draw(report: dict, path: Path) -> None:
    """report.png: lengths above; how answers end, the mix and repetition below."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    figure.suptitle(
        f"{report['rows']:,} answered turns of {report['conversations']:,} conversations, "
        f"{report['supervised_tokens']:,} supervised tokens"
    )
    _draw_lengths(axes[0, 0], report["prompt_tokens"], "prompt tokens", "tab:green")
    _draw_lengths(axes[0, 1], report["answer_tokens"], "answer tokens", "tab:blue")
    _draw_stops(axes[0, 2], report)
    _draw_mix(axes[1, 0], report["sources"], "rows by source", report["rows"])
    sample = report["language_sample"]
    title = "prompts by language" + (f" (sample of {sample:,})" if sample and sample < report["rows"] else "")
    _draw_mix(axes[1, 1], report["languages"], title, sum(report["languages"].values()))
    _draw_shares(axes[1, 2], report)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _draw_lengths(axis, found: dict, name: str, colour: str) -> None:
    bins = found["histogram"]
    width = bins[0]["to"] - bins[0]["from"] if bins[0]["to"] else 1
    # The open bin is drawn as wide as the others, in grey.
    colours = [colour if b["to"] is not None else "tab:gray" for b in bins]
    axis.bar([b["from"] for b in bins], [b["rows"] for b in bins], width=width, align="edge", color=colours)
    for p, dash in (("50", "-"), ("95", "--")):
        value = found["percentiles"][p]
        axis.axvline(value, color="black", linestyle=dash, linewidth=1, label=f"p{p} = {value:,}")
    if bins[-1]["to"] is None:
        axis.bar([0], [0], color="tab:gray", label=f"longer, up to {found['max']:,}")
    axis.set(xlabel=name, ylabel="rows", title=f"{name}: mean {found['mean']:,.1f}", xlim=(0, bins[-1]["from"] + width))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.legend(edgecolor="none", framealpha=0.9)


def _draw_stops(axis, report: dict) -> None:
    """Shares of how answers end, a bar for each domain."""
    domains = list(report["domains"].items())[:_SHOWN][::-1]
    names = [f"{_short(name)} ({found['rows']:,})" for name, found in domains]
    left = [0.0] * len(domains)
    for stop in sorted(report["stops"]):
        shares = [100 * found["stops"].get(stop, 0) / found["rows"] for _, found in domains]
        axis.barh(names, shares, left=left, color=_STOPS.get(stop, "tab:gray"), label=stop)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set(xlabel="% of the domain's answers", title="how answers end, by domain (rows)", xlim=(0, 100))
    axis.set_ylim(_room(len(domains)))
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, -0.3), ncols=len(report["stops"]), frameon=False)


def _draw_mix(axis, counts: dict[str, int], title: str, total: int) -> None:
    axis.set_title(title)
    if not counts:
        axis.text(0.5, 0.5, "not told", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    parts = _top(counts)[::-1]
    bars = axis.barh([_short(_name(name)) for name, _ in parts], [count for _, count in parts], color="tab:cyan")
    axis.bar_label(bars, [f" {count:,} ({count / total:.1%})" for _, count in parts], fontsize=9)
    axis.set(xlabel="rows", xlim=(0, 1.6 * max(counts.values())), ylim=_room(len(parts)))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter("{x:,.0f}")


def _draw_shares(axis, report: dict) -> None:
    """What should be small, and the labels' agreement, in per cent."""
    prompts, answers = report["duplicates"]["prompts"], report["duplicates"]["answers"]
    found, rows = report["contamination"], report["rows"]
    bars = [
        ("exact duplicates, prompts", prompts["exact"], prompts["texts"]),
        ("near duplicates, prompts", prompts["near"], prompts["near_compared"]),
        ("exact duplicates, answers", answers["exact"], answers["texts"]),
        ("near duplicates, answers", answers["near"], answers["near_compared"]),
        ("hold an evaluation prompt", found["rows"], rows) if found else ("evaluation prompts: not looked for", 0, 0),
        ("tokenised again", report["tokenised_again"], rows),
        ("empty answers", report["empty_answers"], rows),
    ]
    sample = report["agreement"]
    colours = ["tab:red"] * len(bars)
    if sample and sample["labels"]:
        bars.append(("labels = target's argmax", sample["equal"], sample["labels"]))
        colours.append("tab:blue")
    shares = [100 * count / of if of else 0.0 for _, count, of in bars]
    drawn = axis.barh([name for name, _, _ in bars][::-1], shares[::-1], color=colours[::-1])
    labels = [f" {share:.1f} %" if of else "" for share, (_, _, of) in zip(shares, bars, strict=True)]
    axis.bar_label(drawn, labels[::-1], fontsize=9)
    axis.set(xlabel="%", xlim=(0, 125), title="repetition, contamination, labels")


def _room(bars: int) -> tuple[float, float]:
    """Limits of an axis on which a few bars are not taller than many; they stand at its top."""
    return min(-0.6, bars - 5.0), bars - 0.4


def _short(name: str, length: int = 28) -> str:
    return name if len(name) <= length else f"…{name[-length + 1 :]}"
