"""The tables of a report, each a function of results.json; "" where nothing was measured for it.

main: the seed's form, methods x benchmarks. mechanism: DARTree pruned against per-node serial. head_swap: a Markov
head under DARTree without training. acceptance: by draft position. time, sweep: where a round's time goes, and what the
knobs do. throughput: with several requests at once. Rows are those of docs/results.md.
"""

from __future__ import annotations

from .records import AR, AVERAGE, FIXED, PARTS
from .table import number, percent, ranged, rows_of, sections, signed, table


def benchmark_names(results: dict, temperature: float) -> list[str]:
    return [name for name, t in sections(results) if t == temperature]


def temperatures(results: dict) -> list[float]:
    return list(dict.fromkeys(t for _, t in sections(results)))


def averages_at(results: dict, temperature: float) -> list[dict]:
    return [row for row in results["averages"] if row["temperature"] == temperature]


def _cells(results: dict, temperature: float) -> list[tuple[dict, dict[str, dict]]]:
    """For each plan: its average row, and its rows by benchmark with the average among them."""
    found = []
    for average in averages_at(results, temperature):
        own = [r for r in results["summary"] if (r["plan"], r["temperature"]) == (average["plan"], temperature)]
        found.append((average, {r["benchmark"]: r for r in own} | {AVERAGE: average}))
    return found


def main_tables(results: dict, temperature: float) -> str:
    """Speed-up / tau of every method on every benchmark, then both with their 95 % intervals."""
    names = benchmark_names(results, temperature)
    columns = [*names, AVERAGE] if len(names) > 1 else names
    rows = _cells(results, temperature)

    def both(row: dict) -> str:
        return f"{number(row['speedup'], 2)}x / {number(row['tau_mean'], 2)}"

    def body(cell) -> list[list[str]]:
        return [
            [plan["label"] + (f", {plan['note']}" if plan["note"] else "")]
            + [cell(own[column]) if column in own else "-" for column in columns]
            for plan, own in rows
        ]

    parts = [
        "Speed-up over AR / tau:\n",
        table(["method", *columns], body(both)),
        "Speed-up with 95 % intervals:\n",
        table(["method", *columns], body(lambda r: ranged(r["speedup"], r["speedup_interval"], "x"))),
        "tau with 95 % intervals:\n",
        table(["method", *columns], body(lambda r: ranged(r["tau_mean"], r["tau_interval"]))),
    ]
    return "\n".join(parts)


def differences_tables(results: dict, temperature: float) -> str:
    """Pairs of methods on every benchmark: differences in tau and in speed-up with 95 % intervals and corrected p."""
    rows = [r for r in results["differences"] if r["temperature"] == temperature]
    if not rows:
        return ""
    labels = {plan["plan"]: plan["label"] for plan in results["plans"]}
    columns = list(dict.fromkeys(r["benchmark"] for r in rows))
    pairs: dict[tuple, dict] = {}
    for row in rows:
        pairs.setdefault((row["a"], row["b"]), {})[row["benchmark"]] = row
    parts = []
    for figure, title in (("tau", "tau"), ("speedup", "speed-up")):
        keys = [f"{figure}_{part}" for part in ("difference", "interval", "p_holm")]
        body = [
            [f"{labels[a]} - {labels[b]}", *(signed(*map(own[c].get, keys)) if c in own else "-" for c in columns)]
            for (a, b), own in pairs.items()
        ]
        parts += [f"Differences in {title}:\n", table(["pair", *columns], body)]
    return "\n".join(parts)


def mechanism_table(results: dict) -> str:
    """DARTree pruned against the same heap with one head call a node, at equal B."""
    head = ["benchmark", "T", "method", "tau", "ms a round", "of it tree", "share of tree", "speed-up"]
    body = []
    for benchmark, temperature in sections(results):
        # Under another policy `budget` is the largest tree, not the tree.
        rows = [row for row in rows_of(results, "summary", benchmark, temperature) if row["policy"] == FIXED]
        serial = {row["budget"] for row in rows if row["method"] == "per_node_serial"}
        pair = [r for r in rows if r["method"] in ("dartree_pruned", "per_node_serial") and r["budget"] in serial]
        if len({row["method"] for row in pair}) < 2:
            continue
        for row in pair:
            tree = (row["ms_per_round"] or {}).get("tree")
            body.append(
                [benchmark, f"{temperature:g}", row["label"], ranged(row["tau_mean"], row["tau_interval"])]
                + [number(row["ms_per_round_total"], 1), number(tree, 1), percent(row["tree_share"], 1)]
                + [ranged(row["speedup"], row["speedup_interval"], "x")]
            )
    return table(head, body) if body else ""


def head_swap_table(results: dict) -> str:
    """DARTree over a Markov head that was trained for chains: what it gains over the chains of the same checkpoint."""
    if not str(results["settings"].get("head", "")).startswith("markov"):
        return ""
    head = ["benchmark", "T", "method", "tau", "over dflash_chain", "over markov_chain", "speed-up"]
    body = []
    for benchmark, temperature in sections(results):
        rows = rows_of(results, "summary", benchmark, temperature)
        shown = [r for r in rows if r["method"] in ("dflash_chain", "markov_chain", "dartree_fixed", "dartree_pruned")]
        base = {r["method"]: r["tau_mean"] for r in reversed(shown) if r["acceptance"] == "sample-match"}
        for row in shown:
            gains = [
                "-"
                if row["method"] == chain or not base.get(chain) or row["tau_mean"] is None
                else f"{100 * (row['tau_mean'] / base[chain] - 1):+.1f} %"
                for chain in ("dflash_chain", "markov_chain")
            ]
            body.append(
                [benchmark, f"{temperature:g}", row["label"], ranged(row["tau_mean"], row["tau_interval"]), *gains]
                + [ranged(row["speedup"], row["speedup_interval"], "x")]
            )
    return table(head, body) if body else ""


def acceptance_tables(results: dict, temperature: float) -> str:
    """Acceptance by draft position, whole blocks, and the histogram; rounds of all benchmarks together."""
    rows = [r for r in averages_at(results, temperature) if r["acceptance_by_position"]]
    if not rows:
        return ""
    depths = list(range(1, max(len(r["acceptance_by_position"]) for r in rows) + 1))
    parts = []
    # Beyond the last position that a method reached, no round accepts so many, and no trial says how many would.
    for key, title, beyond in (
        ("conditional", "Accepted at a draft position, given that the positions before it were", "-"),
        ("survival", "Rounds that accept at least this many draft tokens", "0.0 %"),
    ):
        body = [
            [row["label"]]
            + _padded([percent(point[key], 1) for point in row["acceptance_by_position"]], len(depths), beyond)
            + ([percent(row["whole_block_share"], 1)] if key == "survival" else [])
            for row in rows
        ]
        more = ["whole block"] if key == "survival" else []
        parts += [f"{title}:\n", table(["method", *map(str, depths), *more], body)]
    longest = max(len(r["accepted_histogram"]) for r in rows)
    body = [
        [r["label"], *_padded([percent(count / r["rounds"], 1) for count in r["accepted_histogram"]], longest, "0.0 %")]
        for r in rows
    ]
    parts += ["Rounds by number of accepted draft tokens:\n", table(["method", *map(str, range(longest))], body)]
    return "\n".join(parts)


def _padded(cells: list[str], length: int, filler: str) -> list[str]:
    return cells + [filler] * (length - len(cells))


def time_table(results: dict, temperature: float) -> str:
    """Wall milliseconds of the parts of a round, the processor's, and memory; rounds of all benchmarks together."""
    head = [
        "method", "rounds", "nodes", *(f"{part} ms" for part in PARTS), "rest", "all", "tree share", "processor ms",
        "peak GB",
    ]  # fmt: skip
    body = []
    for row in averages_at(results, temperature):
        split, busy = row["ms_per_round"], row["busy_ms_per_round"]
        if split is None:
            continue
        rest = row["ms_per_round_total"] - sum(split.values())
        figures = [*(split[part] for part in PARTS), rest, row["ms_per_round_total"]]
        body.append(
            [row["label"], str(row["rounds"]), number(row["nodes_per_round"], 1), *(number(f, 1) for f in figures)]
            + [percent(row["tree_share"], 1), number(sum(busy.values()) if busy else None, 1)]
            + [number(row["peak_memory_gb"], 2)]
        )
    return table(head, body) if body else ""


def sweep_tables(results: dict) -> str:
    """tau and speed against each knob that was swept, and how often the text left AR's."""
    parts = []
    for knob in dict.fromkeys(row["sweep"] for row in results["sweeps"]):
        rows = [row for row in results["sweeps"] if row["sweep"] == knob]
        head = [
            knob, "method", "tau", "speed-up", "tokens/s", "nodes a round", "tree ms", "verify ms", "all ms",
            "diverged", "near ties",
        ]  # fmt: skip
        body = []
        for row in rows:
            split = row["ms_per_round"] or {}
            body.append(
                [f"{row['value']:g}", row["method"], ranged(row["tau_mean"], row["tau_interval"])]
                + [ranged(row["speedup"], row["speedup_interval"], "x")]
                + [number(row[key], 1) for key in ("tokens_per_second", "nodes_per_round")]
                + [number(split.get(part), 1) for part in ("tree", "verify")]
                + [number(row["ms_per_round_total"], 1), number(row["diverged"], 0), number(row["near_ties"], 0)]
            )
        first = rows[0]
        title = f"{knob} on {first['benchmark']}, T={first['temperature']:g}, {first['prompts']} prompts:\n"
        parts += [title, table(head, body)]
    return "\n".join(parts)


def throughput_tables(results: dict) -> str:
    """By requests decoded at once: speed against AR at the same concurrency, tau, memory of the caches, divergences."""
    groups: dict[tuple, dict[str, dict[int, dict]]] = {}
    for row in results["concurrency"]:
        plans = groups.setdefault((row["benchmark"], row["temperature"]), {})
        plans.setdefault(row["plan"], {})[row["concurrency"]] = row
    parts = []
    for (benchmark, temperature), plans in groups.items():
        levels = sorted({level for own in plans.values() for level in own})
        first = next(iter(next(iter(plans.values())).values()))
        runs = "1 run" if first["runs"] == 1 else f"{first['runs']} runs"
        head = ["method", *(f"{level} at once" for level in levels)]
        parts.append(f"{benchmark}, T={temperature:g}: {first['requests']} requests, {runs} of each cell.\n")
        for title, cell in (
            ("Tokens a second, speed-up over AR at the same concurrency, tau:", _throughput),
            ("Keys and values allocated by target and drafter, GB:", lambda row: number(row["kv_cache_gb"], 3)),
            ("Answers of all runs that left AR's text, and those of them that a near tie explains:", _left),
        ):
            body = [
                [next(iter(own.values()))["label"], *(cell(own[n]) if n in own else "-" for n in levels)]
                for own in plans.values()
            ]
            parts += [f"{title}\n", table(head, body)]
    return "\n".join(parts)


def _throughput(row: dict) -> str:
    tau = "" if row["method"] == AR else f", tau {ranged(row['tau_mean'], row['tau_interval'])}"
    interval = row["tokens_per_second_interval"]
    speed = number(row["tokens_per_second"], 1) + (f" ({interval[0]:.1f}–{interval[1]:.1f})" if interval else "")
    return f"{speed} tok/s, {ranged(row['speedup'], row['speedup_interval'], 'x')}{tau}"


def _left(row: dict) -> str:
    return "-" if row["diverged"] is None else f"{row['diverged']} / {row['near_ties']}"


def divergence_table(results: dict) -> str:
    """Greedy answers that left the AR text, by method, and whether rounding explains each."""
    head = ["method", "answers", "diverged", "near ties", "of them by pieces", "largest gap", "not explained"]
    body = []
    for plan in [p for p in results["plans"] if p["method"] != AR]:
        rows = [r for r in results["summary"] if r["plan"] == plan["plan"] and r["diverged"] is not None]
        if not rows:
            continue
        own = [d for d in results["divergences"] if d["plan"] == plan["plan"] and d["phase"] == "main"]
        gaps = [d["gap"] for d in own if d["gap"] is not None]
        beyond = [f"{d['benchmark']}/{d['prompt_id']} at {d['position']}" for d in own if not d["near_tie"]]
        body.append(
            [plan["label"], str(sum(r["answers"] for r in rows)), str(sum(r["diverged"] for r in rows))]
            + [str(sum(r["near_ties"] for r in rows)), str(sum(d["pieces"] is not None for d in own))]
            + [number(max(gaps, default=None), 4), " ".join(beyond) or "none"]
        )
    return table(head, body) if body else ""
