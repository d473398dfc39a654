"""Tables, pictures and settings of a report."""

import json

import pytest

from data.settings import RunConfig
from eval import plots, report, run_eval, tables
from eval.chat_format import read_provenance
from eval.decoding import proposals
from eval.document import headline, markdown
from eval.records import Divergence, Generation, Plan
from eval.results import build_results
from evaluation_runs import save_run, write_benchmark
from made_up import plan_of, response
from mistakes import mistake
from test_results import DDTREE, PRUNED, SERIAL, SETTINGS, full_results, sample
from tiny import tiny_drafter, tiny_target


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| {start}")]


def test_report_files(tmp_path):
    results, rows = full_results()
    report.write_report(str(tmp_path), results, rows)
    lines = (tmp_path / "generations.jsonl").read_text().splitlines()
    assert [Generation.from_dict(json.loads(line)) for line in lines] == rows
    plots = {p.name for p in (tmp_path / "plots").iterdir()}
    assert plots == {
        "sweep-budget.png",
        *(f"speed-{name}-t{t}.png" for name in ("builtin", "other") for t in (0, 1)),
        *(f"{kind}-average-t{t}.png" for kind in ("acceptance", "speed", "time") for t in (0, 1)),
    }
    assert all((tmp_path / "plots" / p).read_bytes().startswith(b"\x89PNG") for p in plots)
    assert not list(tmp_path.glob("*.partial"))
    assert (tmp_path / "summary.md").read_text() == headline(results)


@pytest.mark.parametrize(("runs", "interval"), [(1, None), (2, [1.5, 2.5])])
def test_plots_of_one_benchmark_bear_its_name_and_throughput_has_its_own(tmp_path, runs, interval):
    rows = [
        {
            **results_row,
            "concurrency": c,
            "runs": runs,
            "requests": 5,
            "tokens_per_second": 10.0 * c,
            "tokens_per_second_interval": interval and [9.0 * c, 11.0 * c],
            "speedup": 2.0,
            "speedup_interval": interval,
            "kv_cache_gb": 0.25 * c,
            "diverged": c,
            "near_ties": c - 1,
            "tau_mean": 3.0,
            "tau_interval": [2.5, 3.5],
        }  # fmt: skip
        for results_row in build_results(sample((0.0,)), SETTINGS)["summary"]
        for c in (1, 4)
    ]
    results = build_results(sample((0.0,)), SETTINGS, concurrency=rows)
    report.write_report(str(tmp_path), results, [])
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == [
        f"{kind}-builtin-t0.png" for kind in ("acceptance", "speed", "throughput", "time")
    ]
    table = tables.throughput_tables(results)
    spans = ("", "", "-") if runs == 1 else (" (9.0–11.0)", " (36.0–44.0)", "1.50–2.50")
    cells = [
        f"{speed}{span} tok/s, 2.00x ({spans[2]}), tau 3.00 (2.50–3.50)"
        for speed, span in zip(("10.0", "40.0"), spans[:2], strict=True)
    ]
    assert f"| dartree_pruned (B=4) | {' | '.join(cells)} |" in table
    assert f"builtin, T=0: 5 requests, {'1 run' if runs == 1 else '2 runs'} of each cell." in table
    assert "| dartree_pruned (B=4) | 0.250 | 1.000 |" in table and "| dartree_pruned (B=4) | 1 / 0 | 4 / 3 |" in table
    report_text = (tmp_path / "report.md").read_text()
    assert "cannot be resampled by prompt" in report_text and "`--concurrency_runs 3`" in report_text
    assert "| method | 1 at once | 4 at once |" in table
    assert f"| ar | 10.0{spans[0]} tok/s, 2.00x ({spans[2]}) |" in table


def test_plans_of_one_method_share_a_colour_and_are_all_named_beside_the_picture():
    chosen = Plan("dartree_pruned", 16, note="chosen from measured cost")
    rows = sample((0.0,)) + [response([2, 1], f"p{n}", plan=chosen) for n in range(6)]
    results = build_results(rows, SETTINGS)
    figure = plots._draw_acceptance(results["averages"])
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert {name: (line.get_color(), line.get_linestyle()) for name, line in lines.items()} == {
        "ddtree (B=4)": ("tab:cyan", "-"),
        "dartree_pruned (B=4)": ("tab:blue", "-"),
        "dartree_pruned (B=16)": ("tab:blue", "--"),
    }
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(lines)
    assert set(plots.COLOURS) >= {row["method"] for row in results["plans"]} | set(proposals.BUILDERS)


def test_throughput_has_error_bars_that_do_not_flatten_it():
    plan = {"plan": "p", "label": "p", "method": "ddtree", "runs": 2}
    figures = {"tokens_per_second": 10.0, "tokens_per_second_interval": [9.0, 12.0], "speedup": 2.0}
    row = {**plan, **figures, "concurrency": 1, "speedup_interval": [0.1, 40.0]}
    speed, speedup = plots._draw_throughput([row]).axes
    (bar,) = speed.containers[0].lines[2][0].get_segments()
    assert bar.tolist() == [[1.0, 9.0], [1.0, 12.0]]
    assert speedup.get_ylim() == (0.0, 3.0) and speed.get_ylim()[1] < 15.0
    assert "95 % intervals of 2 runs" in speed.get_xlabel()
    alone = {**row, "runs": 1, "tokens_per_second_interval": None, "speedup_interval": None}
    assert "one run: no intervals" in plots._draw_throughput([alone]).axes[0].get_xlabel()


def test_main_table_is_methods_by_benchmarks_with_an_average():
    results, _ = full_results()
    text = tables.main_tables(results, 0.0)
    assert lines_of(text, "method")[0] == "| method | builtin | other | average |"
    speed_tau, speed, tau = lines_of(text, "dartree_pruned (B=4)")
    assert speed_tau == "| dartree_pruned (B=4) | 4.00x / 3.00 | 4.00x / 3.00 | 4.00x / 3.00 |"
    assert speed.split("|")[2] == " 4.00x (4.00–4.00) " and tau.split("|")[4] == " 3.00 (3.00–3.00) "
    assert lines_of(text, "ar")[0] == "| ar | 1.00x / 1.00 | 1.00x / 1.00 | 1.00x / 1.00 |"


def test_report_has_every_section_with_its_command():
    results, _ = full_results()
    results["settings"] = {**SETTINGS, "command": "bash launch.sh eval --seed 1", "dtype": "float32"}
    text = markdown(results)
    for heading in (
        "## 1. Methods and benchmarks, temperature 0",
        "### builtin, temperature 0",
        "### Pairwise differences, temperature 1",
        "## 4. Acceptance by draft position, temperature 0",
        "## 5. Where a round's time goes, temperature 1",
        "### Sweeps",
        "## Divergences from the autoregressive text",
        "## Settings",
    ):
        assert f"\n{heading}\n" in text, heading
    # Not measured, so not there.
    for heading in ("## 2. Mechanism", "## 3. Head swap", "## 6. Throughput"):
        assert heading not in text
    assert text.count("Command: `bash launch.sh eval --seed 1`") == 7
    assert "- dtype: float32" in text
    assert "AR in this loop runs at 0.80x the tokens/s of `target.generate`" in text
    rows = [line for line in text.splitlines() if line.startswith("| dartree_pruned | 4 | 6 | 3.00 | 3.00 to 3.00 |")]
    assert rows and "| 4.00 | 4.00 to 4.00 | 4.0 |" in rows[0]


def test_differences_are_bold_where_p_is_small_among_all_pairs_of_the_column():
    results, _ = full_results()
    text = tables.differences_tables(results, 0.0)
    tau, speed = lines_of(text, "dartree_pruned (B=4) - ddtree (B=4)")
    assert lines_of(text, "pair")[0] == "| pair | builtin | other | average |"
    # Six prompts that agree: p is 2^-5; three in the other benchmark: 2^-2; nine in the average: 2^-8.
    bold = "**+{0:.2f} (+{0:.2f} to +{0:.2f}), p 0.031**"
    assert tau.split("|")[2].strip() == bold.format(1) and speed.split("|")[2].strip() == bold.format(2)
    assert tau.split("|")[3].strip() == "+1.00 (+1.00 to +1.00), p 0.250" and "p 0.004**" in tau.split("|")[4]
    # Another method at the same temperature: three pairs, p is three times as large, and nothing is proved.
    more = sample((0.0,)) + [response([0, 0, 1], f"p{n}", plan=SERIAL) for n in range(6)]
    text = tables.differences_tables(build_results(more, SETTINGS), 0.0)
    assert lines_of(text, "dartree_pruned (B=4) - ddtree")[0].split("|")[2].strip() == bold.format(1)[2:-9] + "p 0.094"
    rows = [response([n % 3], f"p{n}", plan=p) for n in range(6) for p in (Plan("ar"), plan_of("dflash_chain"))]
    rows += [response([(n + 1) % 3], f"p{n}", plan=PRUNED) for n in range(6)]
    text = tables.differences_tables(build_results(rows, SETTINGS), 0.0)
    assert "**" not in lines_of(text, "dartree_pruned (B=4) - dflash_chain")[0]


def test_mechanism_compares_at_equal_budgets_only():
    serial = plan_of("per_node_serial")
    rows = sample((0.0,)) + [response([3, 1], f"p{n}", plan=serial, seconds=4.0) for n in range(6)]
    rows += [response([1], f"p{n}", plan=Plan("dartree_pruned", 12)) for n in range(6)]
    # A policy's budget is the most that it may use.
    rows += [response([1], f"p{n}", plan=plan_of("dartree_pruned", policy="cost-aware")) for n in range(6)]
    text = tables.mechanism_table(build_results(rows, SETTINGS))
    body = [line for line in text.splitlines() if line.startswith("| builtin")]
    assert len(body) == 2 and "B=12" not in text
    # 2 rounds in 1.5 s and in 4 s; 2 ms of each is the tree.
    pruned = next(line for line in body if "dartree_pruned" in line)
    assert "| 750.0 | 2.0 | 0.3 % | 4.00x (4.00–4.00) |" in pruned
    assert "| 2000.0 | 2.0 | 0.1 % | 1.50x (1.50–1.50) |" in next(line for line in body if "per_node_serial" in line)


def test_head_swap_is_for_markov_heads_and_shows_the_gain_over_both_chains():
    rows = []
    for method, accepted in (("ar", 0), ("dflash_chain", 1), ("markov_chain", 2), ("dartree_pruned", 3)):
        rows += [response([accepted], f"p{n}", method) for n in range(3)]
    assert tables.head_swap_table(build_results(rows, SETTINGS | {"head": "domino"})) == ""
    text = tables.head_swap_table(build_results(rows, SETTINGS | {"head": "markov_rnn"}))
    body = [line for line in text.splitlines() if line.startswith("| builtin")]
    assert len(body) == 3
    assert "| 4.00 (4.00–4.00) | +100.0 % | +33.3 % |" in next(line for line in body if "dartree_pruned" in line)
    assert "| 3.00 (3.00–3.00) | +50.0 % | - |" in next(line for line in body if "markov_chain" in line)


def test_acceptance_by_position_whole_blocks_and_histogram():
    rows = [response([0, 4, 2, 2], "p0", plan=PRUNED), response([0] * 9, "p0", "ar")]
    text = tables.acceptance_tables(build_results(rows, SETTINGS), 0.0)
    conditional, survival, histogram = lines_of(text, "dartree_pruned (B=4)")
    assert conditional == "| dartree_pruned (B=4) | 75.0 % | 100.0 % | 33.3 % | 100.0 % |"
    assert survival == "| dartree_pruned (B=4) | 75.0 % | 75.0 % | 25.0 % | 25.0 % | 25.0 % |"
    assert histogram == "| dartree_pruned (B=4) | 25.0 % | 0.0 % | 50.0 % | 0.0 % | 25.0 % |"
    assert not lines_of(text, "ar")
    # A method that went no further than one position accepted no round beyond it, and was never tried there.
    rows.append(response([0, 0, 0, 0], "p0", plan=DDTREE))
    conditional, survival, histogram = lines_of(tables.acceptance_tables(build_results(rows, SETTINGS), 0.0), "ddtree")
    assert conditional == "| ddtree (B=4) | 0.0 % | - | - | - |"
    assert survival == "| ddtree (B=4) | 0.0 % | 0.0 % | 0.0 % | 0.0 % | 0.0 % |"
    assert histogram == "| ddtree (B=4) | 100.0 % | 0.0 % | 0.0 % | 0.0 % | 0.0 % |"


def test_sweeps_show_nodes_and_divergences():
    rows = []
    for n in range(2):
        rows.append(response([0] * 3, f"p{n}", "ar", seconds=6.0, phase="sweep-1"))
        rows.append(response([2], f"p{n}", plan=PRUNED, seconds=1.5, phase="sweep-1"))
    rows[1].tokens = [0, 1, 40, 3]  # explained by rounding
    rows[3].tokens = [0, 41, 2, 3]
    near = Divergence("p0", PRUNED.method, 2, 2, 40, 1e-5, 1e-4, True, "builtin", 0, PRUNED.id, "sweep-1")
    results = build_results(rows, SETTINGS, [near], sweeps=[("budget", 4, PRUNED)])
    text = tables.sweep_tables(results)
    assert "| tokens/s | nodes a round | tree ms | verify ms | all ms | diverged | near ties |" in text
    assert (
        "| 4 | dartree_pruned | 3.00 (3.00–3.00) | 4.00x (4.00–4.00) | 2.0 | 4.0 | 2.0 | 3.0 | 1500.0 | 2 | 1 |" in text
    )


def test_time_split_names_what_is_left_over():
    rows = [response([3, 1], plan=PRUNED, seconds=0.03, peak_memory_gb=1.25), response([0] * 6, method="ar")]
    for record in rows[0].rounds:
        record.busy = (0.002, 0.004, 0.006, 0.008)
    text = tables.time_table(build_results(rows, SETTINGS), 0.0)
    assert lines_of(text, "dartree_pruned (B=4)")[0] == (
        "| dartree_pruned (B=4) | 2 | 4.0 | 1.0 | 2.0 | 3.0 | 4.0 | 5.0 | 15.0 | 13.3 % | 20.0 | 1.25 |"
    )


def test_the_published_clock_is_shown_only_where_it_differs_by_more_than_one_percent():
    results = build_results(sample((0.0,)), SETTINGS)
    from eval.table import definitions_table

    assert "clock" not in definitions_table(results, "builtin", 0.0)
    rows = sample((0.0,))
    for g in rows:
        if g.plan == PRUNED:
            g.rounds[0].draft = 0.5
    text = definitions_table(build_results(rows, SETTINGS), "builtin", 0.0)
    assert "clock from the first draft" in text
    assert (
        lines_of(text, "dartree_pruned")[0]
        == "| dartree_pruned (B=4) | 3.00 | 3.00 | 3.00 | 4.00 | 4.00 | 6.00 | 3.50 |"
    )


def test_divergences_beyond_near_ties_are_named():
    rows = sample((0.0,))
    rows[1].tokens = rows[0].tokens[:2] + [40] + rows[0].tokens[3:]
    results = build_results(rows, SETTINGS)
    results["divergences"] = [
        {"plan": rows[1].plan.id, "phase": "main", "gap": 0.5, "near_tie": False, "benchmark": "builtin",
         "prompt_id": "p0", "position": 2, "pieces": None},
        {"plan": rows[2].plan.id, "phase": "main", "gap": 0.25, "near_tie": True, "benchmark": "builtin",
         "prompt_id": "p1", "position": 1, "pieces": 24},
    ]  # fmt: skip
    text = tables.divergence_table(results)
    assert "| ddtree (B=4) | 6 | 1 | 0 | 0 | 0.5000 | builtin/p0 at 2 |" in text
    assert "| dartree_pruned (B=4) | 6 | 0 | 0 | 1 | 0.2500 | none |" in text


def test_settings_say_what_was_measured_and_where(tmp_path):
    (tmp_path / "provenance.json").write_text(
        json.dumps({"engine": "DeepSpeedEngine", "zero_stage": 1, "world_size": 2})
    )
    target = tiny_target()
    config = RunConfig(max_new_tokens=17)
    settings = report.collect_settings(config, target, tiny_drafter(target), str(tmp_path), chosen_budget=24)
    assert settings["target"] == "tiny" and settings["dtype"] == "float32" and settings["device"] == "cpu"
    assert settings["engine"] == {"engine": "DeepSpeedEngine", "zero_stage": 1, "world_size": 2}
    assert settings["provenance"]["world_size"] == 2
    assert settings["max_new_tokens"] == 17 and settings["chosen_budget"] == 24
    assert (settings["head"], settings["block_size"], settings["num_proposals"]) == ("domino", 5, 4)
    assert settings["hardware"]["cores"] >= 1 and settings["hardware"]["memory_gb"] > 0
    assert {"python", "torch", "transformers"} <= settings["versions"].keys()
    json.dumps(settings, allow_nan=False)
    assert read_provenance(str(tmp_path / "elsewhere")) is None


@pytest.mark.parametrize("prompts", [1, 6])
def test_headline_of_one_benchmark_is_its_measured_table(prompts):
    text = headline(build_results(sample((0.0,), prompts=prompts), SETTINGS))
    assert f"| dartree_pruned | 4 | {prompts} | 3.00 |" in text and "distinct 4-gram ratio" in text


def test_turns_that_cannot_be_asked_are_counted_in_the_results_and_in_the_report(tmp_path):
    rows = [{"turns": ["count to ten.", "a fox and a dog " * 60, "and then?"]}, {"turns": ["what is a fox?"]}]
    benchmark = write_benchmark(tmp_path / "long.jsonl", rows)
    options = dict(methods=["dflash_chain"], max_new_tokens=4, temperatures=[0.0, 1.0], trace_prompts=0)
    config, folder = save_run(tmp_path, benchmark, **options)
    assert run_eval.main([config]) == 0
    (asked,) = json.loads((folder / "results.json").read_text())["benchmarks"]
    # The second turn is too long, and so there is no third: twice, as there are two temperatures.
    counts = ("prompts", "turns", "answers", "skipped", "turns_dropped", "left_out")
    assert [asked[key] for key in counts] == [2, 4, 2, 0, 4, 0]
    assert "2 answers; 0 prompts skipped; 4 of their turns could not be asked" in (folder / "report.md").read_text()


def test_no_benchmark_may_have_the_name_of_the_average(tmp_path, capsys):
    benchmark = write_benchmark(tmp_path / "average.jsonl", [{"turns": ["what is a fox?"]}])
    config, _ = save_run(tmp_path, benchmark)
    assert "benchmarks: 'average' is the name of the mean" in mistake(capsys, run_eval.main, "eval", config)
