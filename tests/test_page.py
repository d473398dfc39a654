"""The page for people in a headless Chromium, from file://: tables sort, trees are right, no network is asked, and
nothing that a prompt or a token says becomes markup."""

import json
import os

import pytest

from chromium import Browser, find_chromium
from eval.html_report import write_page
from eval.results import build_results
from page_data import EVIL_PROMPT, PLANS, SETTINGS, full_results, generation, markov_results, small_results, traces


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A page with nearly every part, one with the least, one of a single prompt, and one of a Markov head."""
    root = tmp_path_factory.mktemp("page")
    one = build_results([generation(plan, "builtin", 0) for plan in PLANS], {"num_proposals": 3})
    pages = {"full": full_results(), "small": small_results(), "one": one, "markov": markov_results()}
    for name, results in pages.items():
        (root / name).mkdir()
        write_page(str(root / name), results, traces() if name == "full" else None)
    return root


@pytest.fixture(scope="module")
def browser():
    if find_chromium() is None:
        if os.environ.get("REQUIRE_CHROMIUM"):
            pytest.fail("REQUIRE_CHROMIUM is set, but there is no chromium")
        pytest.skip("no Chromium here: apt-get install chromium")
    with Browser() as opened:
        yield opened


@pytest.fixture
def opened(browser, folder):
    """Opens one of the pages; at the end the browser must have had nothing to complain of."""

    def go(name="full", hash=""):
        browser.resize(1200, 900)
        browser.open((folder / name / "report.html").as_uri() + hash)
        return browser

    browser.events.clear()
    yield go
    assert browser.complaints() == []


def column(browser, caption, place):
    """The texts of a column of the table with this caption."""
    script = f"""[...document.querySelectorAll("table")].find((t) => t.caption.textContent === {json.dumps(caption)})
        .tBodies[0].rows"""
    return browser.value(f"[...{script}].map((row) => row.cells[{place}].textContent)")


def choose(browser, select, value):
    script = "((s, v) => { s.value = v; s.dispatchEvent(new Event('change')); })"
    browser.value(f"{script}(document.getElementById({json.dumps(select)}), {json.dumps(value)})")


def header(caption, place):
    table = f"[...document.querySelectorAll('table')].find((t) => t.caption.textContent === {json.dumps(caption)})"
    return f"[...{table}.tHead.rows].pop().cells[{place}]"


def test_a_table_sorts_by_a_click_and_by_the_keyboard(opened):
    browser = opened()
    names = ["ar", "ddtree", "dartree_pruned B=4", "dartree_pruned B=2"]
    assert [name.split(" (")[0] for name in column(browser, "Temperature 0", 0)][:2] == names[:2]
    before = column(browser, "Temperature 0", 1)
    assert len(before) == 4 and before != sorted(before, reverse=True)
    browser.value(f"{header('Temperature 0', 1)}.querySelector('button').click()")
    assert column(browser, "Temperature 0", 1) == sorted(before, reverse=True)
    assert browser.value(f"{header('Temperature 0', 1)}.getAttribute('aria-sort')") == "descending"
    browser.value(f"{header('Temperature 0', 1)}.querySelector('button').focus()")
    browser.press("Enter", "\r")
    assert column(browser, "Temperature 0", 1) == sorted(before)
    assert browser.value(f"{header('Temperature 0', 1)}.getAttribute('aria-sort')") == "ascending"
    # Words rise first; the other table and the other columns are as they were.
    browser.value(f"{header('Temperature 0', 0)}.querySelector('button').click()")
    assert column(browser, "Temperature 0", 0)[0] == "ar"
    assert browser.value(f"{header('Temperature 0', 1)}.getAttribute('aria-sort')") == "none"
    assert column(browser, "Temperature 1", 1) == before


def test_missing_values_stand_last_in_both_directions(opened):
    browser = opened()
    script = """(up) => [3, null, 1, undefined, 2].map((v) => ({ v }))
        .sort(comparing((row) => row.v, up)).map((row) => row.v ?? null)"""
    assert browser.value(f"({script})(true)") == [1, 2, 3, None, None]
    assert browser.value(f"({script})(false)") == [3, 2, 1, None, None]


def test_the_best_of_a_column_is_marked(opened):
    browser = opened()
    taus = [float(text) for text in column(browser, "Temperature 0", 1)]
    best = browser.value("[...document.querySelector('table').querySelectorAll('td.best')].map((c) => c.textContent)")
    assert f"{max(taus):.2f}" in best


def test_intervals_and_p_of_a_single_prompt_are_dashes(opened):
    caption = "Paired differences between methods; bold: p ≤ 0.05 among all these pairs"
    browser = opened("one")
    shown = [column(browser, caption, place) for place in (2, 3, 4, 5, 7, 8, 9)]
    assert all(float(text) >= -9 for text in shown[0]) and len(shown[0]) == 2
    assert shown[1:] == [["–"] * 2] * 6
    assert browser.value("document.querySelectorAll('.sure').length") == 0
    # Eight prompts, four of each benchmark, agree: p is 2^-7, and twice that among two pairs.
    browser = opened("full")
    assert all(" to " in text for text in column(browser, caption, 3))
    assert [column(browser, caption, place) for place in (4, 5)] == [["0.008"] * 2, ["0.016"] * 2]
    assert browser.value("document.querySelectorAll('.sure').length") == 4
    # Four prompts can show no less than 1/8.
    choose(browser, "benchmark", "builtin")
    assert column(browser, caption, 5) == ["0.250"] * 2
    assert browser.value("document.querySelectorAll('.sure').length") == 0


STATE = """({
    nodes: document.querySelectorAll(".tree [data-node]").length,
    accepted: [...document.querySelectorAll(".tree .node.accepted text:not(.small)")].map((t) => t.textContent),
    chosen: [...document.querySelectorAll(".tree .chosen text:not(.small)")].map((t) => t.textContent),
    pruned: document.querySelectorAll(".tree .node.pruned").length,
    status: document.querySelector(".status").textContent,
    hash: location.hash,
})"""


def test_the_tree_shows_its_nodes_what_was_accepted_and_what_was_pruned(opened):
    state = opened(hash="#prompt=1&round=1").value(STATE)
    # Six nodes and the target's own token, which no node held.
    assert state["nodes"] == 7
    assert state["accepted"] == ["✓␣fox", "✓</scrip…"]
    assert state["chosen"] == ["→!"]
    assert state["pruned"] == 2
    assert "proposes 4 tokens (2 pruned); the target accepts 2 and goes on with “!”" in state["status"]


def test_a_pruned_node_that_was_right_is_marked_instead_of_a_second_one(opened):
    state = opened(hash="#prompt=1&round=2").value(STATE)
    assert (state["nodes"], state["accepted"], state["pruned"]) == (2, [], 1)
    assert state["chosen"] == ["→\\u{202e…"]


def test_rounds_change_by_keys_buttons_slider_and_address(opened):
    browser = opened(hash="#prompt=1&round=1")
    assert "Round 1 of 2" in browser.value(STATE)["status"]
    browser.press("ArrowRight")
    assert browser.value(STATE)["hash"] == "#prompt=1&round=2&method=dartree_pruned"
    browser.press("ArrowRight")  # there is no third
    assert "Round 2 of 2" in browser.value(STATE)["status"]
    assert browser.value("document.querySelector('[aria-label=\"Next round\"]').disabled") is True
    browser.value("document.querySelector('[aria-label=\"Previous round\"]').click()")
    assert "Round 1 of 2" in browser.value(STATE)["status"]
    move = "(s) => { s.value = '2'; s.dispatchEvent(new Event('input')); }"
    browser.value(f"({move})(document.getElementById('round'))")
    assert "Round 2 of 2" in browser.value(STATE)["status"]
    browser.value("new Promise((done) => { onhashchange = done; location.hash = '#prompt=2&round=9'; }).then(() => 1)")
    assert "Round 1 of 1" in browser.value(STATE)["status"]


def test_other_methods_stand_below_and_can_be_drawn(opened):
    browser = opened(hash="#prompt=1&round=1")
    rows = browser.value(
        "[...document.querySelector('.compare tbody').rows].map((r) => [0, 1, 2, 3].map((i) => r.cells[i].textContent))"
    )
    assert rows == [["dflash_chain", "3", "3", "1"], ["dartree_pruned", "4", "3", "2"]]
    chips = "[...document.querySelector('.compare tbody').rows[0].querySelectorAll('.chip')].map((c) => c.className)"
    # Accepted, the target's own, the refused one, and the rest of the chain.
    assert browser.value(chips) == ["chip accepted", "chip bonus", "chip refused", "chip pruned"]
    browser.value("((b) => { b.focus(); b.click(); })(document.querySelector('.compare button[aria-pressed=false]'))")
    state = browser.value(STATE)
    assert state["hash"].endswith("method=dflash_chain") and state["nodes"] == 4 and state["pruned"] == 0
    assert browser.value("document.activeElement.textContent") == "dflash_chain"


def test_a_smaller_budget_keeps_the_nodes_of_lower_rank(opened):
    browser = opened(hash="#prompt=1&round=1")
    move = "(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }"
    browser.value(f"({move})(document.getElementById('budget'), '1')")
    state = browser.value(STATE)
    assert state["pruned"] == 5 and state["accepted"] == ["✓␣fox"] and "proposes 1 tokens" in state["status"]
    # The target's token was pruned, so that it is marked where it stands.
    assert state["nodes"] == 6 and len(state["chosen"]) == 1
    browser.value("document.getElementById('pruned').click()")
    assert browser.value(STATE)["nodes"] == 2


def test_the_paths_of_the_page_are_those_of_the_traces(opened):
    """`walk` finds in the emitted text what eval/traces.py found in it."""
    browser = opened()
    script = """JSON.parse(document.getElementById("data").textContent).traces.prompts.flatMap((p) =>
        p.rounds.flatMap((r) => Object.entries(r.trees).map(([m, t]) => [t.path,
            readTree(t, p.answer.slice(r.position + 1), m === "dartree_pruned" ? 4 : Infinity)
                .path.map((n) => n.index)])))"""
    pairs = browser.value(script)
    assert len(pairs) == 6 and all(stored == walked for stored, walked in pairs)


def test_prompts_tokens_and_names_are_text(opened):
    browser = opened(hash="#prompt=1&round=1")
    assert browser.value("typeof hack") == "undefined"
    assert browser.value("document.querySelectorAll('script').length") == 2
    assert browser.value("document.querySelectorAll('img, b b').length") == 0
    assert browser.value("document.querySelector('h1').textContent") == SETTINGS["target_name"]
    assert browser.value("document.querySelector('.prompt pre').textContent") == EVIL_PROMPT.replace("\n", "↵\n")
    assert "</script><script>hack('token')</script>" in browser.value("document.querySelector('.answer').textContent")
    # Control characters are spelled out where tokens stand, so that they cannot reorder the text around them.
    assert "\u202e" not in browser.value("document.body.innerText")


def test_every_setting_is_on_the_page(opened):
    browser = opened()
    names = set(browser.value("[...document.querySelectorAll('#settings dt')].map((e) => e.textContent)"))
    shown_otherwise = {"command", "engine", "budget_choice"}
    plain = {key for key, value in SETTINGS.items() if not isinstance(value, dict)} - shown_otherwise
    assert plain <= names and {"cpu", "gpus", "torch", "config.training.learning_rate", "steps"} <= names
    assert {"exponent", "cost.verify.3.ms", "curve.0.budget"} <= names
    captions = browser.value("[...document.querySelectorAll('#settings figcaption')].map((e) => e.textContent)")
    said = [f"Choice of the budget, temperature {t} B={b}" for t, b in ((0, 2), (1, 1))]
    assert all(any(caption.startswith(words) for caption in captions) for words in said), captions
    assert SETTINGS["command"] in browser.value("document.getElementById('settings').textContent")


def test_a_target_in_a_folder_is_called_by_its_last_part(opened):
    browser = opened("small")
    assert browser.value("shortName('/some/folder/model')") == browser.value("shortName('./model/')") == "model"
    assert browser.value("shortName('org/model')") == "org/model"


def test_what_was_not_measured_is_left_out(opened):
    every = ["results", "details", "trees", "sweeps", "concurrency", "quality", "settings"]
    sections = "[...document.querySelectorAll('section')].map((s) => s.id)"
    assert opened().value(sections) == every
    assert opened("small").value(sections) == ["results", "details", "quality", "settings"]
    assert opened("markov").value(sections) == ["results", "details", "isolation", "quality", "settings"]
    assert "None of 6 greedy answers differs" in opened("small").value("document.getElementById('quality').textContent")


def test_pictures_have_bars_lines_and_names(opened):
    browser = opened()
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
    browser.value(frame)
    assert browser.value("document.querySelectorAll('#details .bar').length") >= 8
    assert browser.value("document.querySelectorAll('#details .whisker:not(.halo)').length") == 8
    # Four stages and the rest, which is a mean round of 1 s without them.
    assert browser.value("document.querySelectorAll('#details .plot .part').length") == 20
    tips = "[...document.querySelectorAll('#details .part-4')].map((part) => part.getAttribute('data-tip'))"
    assert browser.value(tips)[0] == "ar, rest: 976.90 ms"
    assert browser.value("document.querySelectorAll('#sweeps path.line, #concurrency path.line').length") >= 8
    assert browser.value("[...document.querySelectorAll('svg[role=img]')].every((s) => s.getAttribute('aria-label'))")
    # Another benchmark is drawn at once.
    choose(browser, "benchmark", "gsm<8k>")
    browser.value(frame)
    assert browser.value("document.querySelectorAll('#details .whisker:not(.halo)').length") == 8
    assert "NaN" not in browser.value("document.documentElement.outerHTML.replace(/<script[^]*?<.script>/g, '')")


def test_divergences_of_sweeps_and_of_several_requests_are_counted_apart(opened):
    browser = opened()
    said = browser.value("[...document.querySelectorAll('#quality p')].map((p) => p.textContent)")
    assert said == [
        "1 of 24 greedy answers differ from AR's; a near tie explains 1 of them.",
        "2 of 12 greedy answers of the sweeps differ from AR's; a near tie explains 1 of them.",
        "2 of 96 greedy answers of several requests at once differ from AR's; a near tie explains 1 of them.",
    ]
    phases = column(browser, "Answers that differ from AR's", 4)
    assert phases == ["main", "sweep-1", "sweep-1"]
    assert all(" to " in text for text in column(browser, "Throughput", 5)) and column(browser, "Throughput", 0)


def test_the_mechanism_is_compared_at_equal_budgets_and_without_policies(opened):
    caption = "One head call a depth, or one a node, at equal B"
    shown = [column(opened("markov"), caption, place) for place in (0, 3, 5, 6, 7, 8)]
    # Three rounds in 0.4 s and in 0.5 s, AR in 0.1 s; 2 ms of each round build the tree.
    assert shown == [
        ["per_node_serial (B=4)", "dartree_pruned (B=4)"], ["4.00", "4.00"], ["133.3", "166.7"], ["2.0", "2.0"],
        ["1.5 %", "1.2 %"], ["0.25", "0.20"],
    ]  # fmt: skip


def test_a_markov_head_shows_what_trees_gain_over_its_chains(opened):
    caption = "DARTree on a Markov head that was trained for chains"
    shown = [column(opened("markov"), caption, place) for place in (0, 3, 5, 6)]
    trees = ["dartree_pruned (B=4)", "dartree_pruned (B=8)", "dartree_pruned (B=4, cost-aware)"]
    assert shown[0] == ["dflash_chain", "markov_chain", *trees] and shown[1] == ["2.00", "3.00", *["4.00"] * 3]
    assert shown[2] == ["–", "+50.0 %", *["+100.0 %"] * 3] and shown[3] == ["-33.3 %", "–", *["+33.3 %"] * 3]


def test_acceptance_is_a_table_too(opened):
    browser = opened("markov")
    rows = [column(browser, "Acceptance by draft position", place) for place in range(8)]
    # dflash_chain accepts one of three in every round: the third was never tried.
    assert [texts[0] for texts in rows] == ["dflash_chain", "100.0 %", "0.0 %", "–", "100.0 %", "0.0 %", "0.0 %", "0 %"]
    assert [texts[-1] for texts in rows[1:]] == ["100.0 %"] * 6 + ["100 %"]


def test_a_long_name_is_whole_and_a_small_p_is_not_zero(opened):
    browser = opened("markov")
    browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
    texts = "[...document.querySelectorAll('#details .pair svg text')]"
    assert browser.value(f"{texts}.filter((t) => t.textContent.endsWith('cost-aware)')).length") == 2
    assert browser.value(f"Math.min(...{texts}.map((t) => t.getBBox().x))") >= 0
    row = {"a": "x", "b": "y", "tau_difference": 1, "tau_p": 0.0002, "tau_p_holm": 0.04}
    cells = f"[...differenceTable({{plans: []}}, [{json.dumps(row)}]).querySelector('tbody').rows[0].cells]"
    assert browser.value(f"{cells}.map((c) => c.textContent)")[4:6] == ["<0.001", "0.040"]
    assert browser.value(f"{cells}.filter((c) => c.querySelector('.sure')).length") == 1


def test_a_wide_interval_does_not_flatten_the_lines(opened):
    point = {"x": 1, "y": 1, "interval": [0.5, 1000]}
    series = [{"name": "a", "method": "ar", "dash": 0, "points": [point]}]
    script = f"lines(500, {json.dumps(series)}, {{title: 't', xLabel: 'x', yLabel: 'y'}})"
    # The picture is 275 high, its area from 24 to 235, and 1 lies at two thirds of 1.5.
    browser = opened("small")
    assert browser.value(f"Number({script}.querySelector('circle').getAttribute('cy'))") == pytest.approx(
        235 - 211 / 1.5
    )
    assert browser.value(f"{script}.querySelector('.error').getAttribute('d')").endswith("V24")


@pytest.mark.parametrize("name", ["full", "small", "markov"])
def test_nothing_is_wider_than_a_phone(opened, name):
    browser = opened(name)
    browser.resize(400, 800)
    browser.value("new Promise((done) => setTimeout(done, 100))")
    assert browser.value("document.documentElement.scrollWidth") <= 400


def test_the_same_page_asks_for_nothing_but_itself(opened, browser):
    opened()
    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert [url.split("/")[-1] for url in requests if not url.startswith("about:")] == ["report.html"]
