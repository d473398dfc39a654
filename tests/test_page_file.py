"""The page as a file: what is embedded in it, its parts, its colours, and the command that writes it again."""

import json
import re
from html.parser import HTMLParser

import pytest

from eval import html_report
from eval.html_report import FOLDER, page
from page_data import small_results, traces


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
        for mark in ("ok", "bonus", "bad", "ar", "dflash", "chain", "ddtree", "serial", "fixed", "pruned", "rest"):
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
