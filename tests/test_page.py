"""The page for people in a headless Chromium, from file://: tables sort, trees are right, no network is asked, and
nothing that a prompt or a token says becomes markup."""

import json
import os
import re
from html.parser import HTMLParser

import pytest

from chromium import Browser, find_chromium
from eval import html_report
from eval.html_report import FOLDER, page, write_page
from eval.results import build_results
from page_data import EVIL_PROMPT, PLANS, SETTINGS, full_results, generation, small_results, traces


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A page with every part, one with the least, and one of a single prompt."""
    root = tmp_path_factory.mktemp("page")
    one = build_results([generation(plan, "builtin", 0) for plan in PLANS], {"num_proposals": 3})
    pages = ("full", full_results(), traces()), ("small", small_results(), None), ("one", one, None)
    for name, results, shown in pages:
        (root / name).mkdir()
        write_page(str(root / name), results, shown)
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
    caption = "Paired differences between methods; bold: the 95 % interval excludes 0"
    browser = opened("one")
    shown = [column(browser, caption, place) for place in (2, 3, 4, 6, 7)]
    assert all(float(text) >= -9 for text in shown[0]) and len(shown[0]) == 3
    assert shown[1:] == [["–"] * 3] * 4
    assert browser.value("document.querySelectorAll('.sure').length") == 0
    shown = column(opened("full"), caption, 3)
    assert all(" to " in text for text in shown)


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
    plain = {key for key, value in SETTINGS.items() if not isinstance(value, dict)} - {"command", "engine"}
    assert plain <= names and {"cpu", "gpus", "torch", "config.training.learning_rate", "steps"} <= names
    assert {"exponent", "cost.verify.3.ms", "curve.0.budget"} <= names
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
    assert "None of 6 greedy answers differs" in opened("small").value("document.getElementById('quality').textContent")


def test_pictures_have_bars_lines_and_names(opened):
    browser = opened()
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
    browser.value(frame)
    assert browser.value("document.querySelectorAll('#details .bar').length") >= 8
    assert browser.value("document.querySelectorAll('#details .whisker:not(.halo)').length") == 8
    assert browser.value("document.querySelectorAll('#details .plot .part').length") == 16
    assert browser.value("document.querySelectorAll('#sweeps path.line, #concurrency path.line').length") >= 8
    assert browser.value("[...document.querySelectorAll('svg[role=img]')].every((s) => s.getAttribute('aria-label'))")
    # Another benchmark is drawn at once.
    browser.value(
        "(s => { s.value = 'gsm<8k>'; s.dispatchEvent(new Event('change')); })(document.getElementById('benchmark'))"
    )
    browser.value(frame)
    assert browser.value("document.querySelectorAll('#details .whisker:not(.halo)').length") == 8
    assert "NaN" not in browser.value("document.documentElement.outerHTML.replace(/<script[^]*?<.script>/g, '')")


@pytest.mark.parametrize("name", ["full", "small"])
def test_nothing_is_wider_than_a_phone(opened, name):
    browser = opened(name)
    browser.resize(400, 800)
    browser.value("new Promise((done) => setTimeout(done, 100))")
    assert browser.value("document.documentElement.scrollWidth") <= 400


def test_the_same_page_asks_for_nothing_but_itself(opened, browser):
    opened()
    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert [url.split("/")[-1] for url in requests if not url.startswith("about:")] == ["report.html"]


class Scripts(HTMLParser):
    """The contents of all <script> elements, as an HTML parser delimits them."""

    def __init__(self, text):
        super().__init__()
        self.inside, self.found = False, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.inside = tag == "script"
        if self.inside:
            self.found.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.found[-1] += data


def test_embedded_data_come_back_whole():
    shown = traces()
    data, script = Scripts(page(small_results(), shown)).found
    assert json.loads(data) == {"results": small_results(), "traces": shown}
    assert "<" not in data and "hack(" not in script
    # A template's place inside the data stays what it is.
    shown["prompts"][0]["text"] = "{{script}}"
    assert json.loads(Scripts(page(small_results(), shown)).found[0])["traces"]["prompts"][0]["text"] == "{{script}}"


def test_the_pages_own_files_are_all_used_and_short():
    names = sorted(path.name for path in FOLDER.iterdir())
    assert names == sorted(["page.html", *html_report.SCRIPTS, *html_report.STYLES])
    for name in (*html_report.SCRIPTS, *html_report.STYLES):
        lines = (FOLDER / name).read_text().splitlines()
        assert len(lines) <= 400 and max(map(len, lines)) <= 120, name


def luminance(colour):
    """Relative luminance of #rrggbb (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_in_both_schemes():
    """Text 4.5 to 1, graphical objects 3 to 1 (WCAG 2 AA)."""
    light, dark = re.findall(r":root {(.*?)}", (FOLDER / "theme.css").read_text(), re.S)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", scheme))
        for text in ("ink", "soft", "link"):
            assert min(contrast(colours[text], colours[back]) for back in ("page", "card", "faint")) >= 4.5, text
        for back in ("ok-back", "bonus-back", "bad-back"):
            assert contrast(colours["ink"], colours[back]) >= 4.5, back
        for mark in ("ok", "bonus", "bad", "ar", "dflash", "chain", "ddtree", "serial", "fixed", "pruned"):
            assert contrast(colours[mark], colours["card"]) >= 3, mark


def test_the_page_is_written_again_from_a_run(tmp_path, capsys):
    (tmp_path / "results.json").write_text(json.dumps(small_results()))
    (tmp_path / "traces.json").write_text(json.dumps(traces()))
    assert html_report.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page(small_results(), traces())
    (tmp_path / "traces.json").write_text(json.dumps({**traces(), "schema_version": 9}))
    assert html_report.main([str(tmp_path)]) == 2
    assert "traces.json has schema_version 9, this code reads 1" in capsys.readouterr().err
    assert html_report.main([str(tmp_path / "elsewhere")]) == 2
    assert "holds no results.json" in capsys.readouterr().err
    assert html_report.main([]) == 2
