"""The quality report counts right, whatever the order of the rows, and its tables say so."""

import json

import pytest
import torch

from data.answers import AnswerRow
from data.contamination import Contamination
from data.conversations import Prompt
from data.quality import Duplicates, Lengths, measure, target_agreement
from data.quality_report import draw, markdown, warnings
from data.records import Record
from data.settings import RunConfig
from models.target import load_target
from tiny_tokenizer import save_tiny_target


def record(name, question="How?", answer="So.", prompt=3, tokens=2, stop="eos", domain="chat", language="", before=()):
    messages = [*before, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages = [{"tool_calls": None, "tool_call_id": None, "name": None} | m for m in messages]
    row = AnswerRow(name, domain, [4] * prompt, [5] * tokens, stop, exact=name != "inexact")
    return Record(row, messages, source="s", language=language)


def test_percentiles_are_lengths_that_occur_and_the_last_bin_is_open():
    lengths = Lengths()
    for length in [*range(1, 100), 5000]:
        lengths.add(length)
    found = lengths.summary()
    assert (found["min"], found["max"], found["tokens"], found["mean"]) == (1, 5000, 4950 + 5000, 99.5)
    assert found["percentiles"] == {"1": 1, "5": 5, "25": 25, "50": 50, "75": 75, "95": 95, "99": 99}
    # 99 / 32 is over 2 and under 5: bins of 5, of which the first holds 1 to 4.
    assert found["histogram"][0] == {"from": 0, "to": 5, "rows": 4}
    assert found["histogram"][1] == {"from": 5, "to": 10, "rows": 5}
    assert found["histogram"][-1] == {"from": 100, "to": None, "rows": 1}
    assert sum(b["rows"] for b in found["histogram"]) == 100


def test_rows_of_one_length():
    lengths = Lengths()
    lengths.add(0)
    assert lengths.summary()["histogram"] == [{"from": 0, "to": 1, "rows": 1}]
    assert set(lengths.summary()["percentiles"].values()) == {0}


def test_duplicates_are_exact_or_near_and_never_both():
    text = "the quick brown fox jumps over the lazy dog and runs away into the deep dark wood behind the old mill"
    found = Duplicates(0.8)
    for t in (text, text.upper() + " ", text + " now", "nothing of the kind stands here at all"):
        found.add(t)
    assert found.summary() == {"texts": 4, "exact": 1, "near": 1, "near_compared": 4, "near_threshold": 0.8}
    some = Duplicates(0.8, near_rows=2)
    for t in (text, "something else", text + " now", text):
        some.add(t)
    assert (some.near, some.compared, some.exact) == (0, 2, 1)


def report(**more):
    rows = [
        record("a", "Why is the sky blue?", "Because.", prompt=3, tokens=4),
        record("a.turn2", "Go on.", "Light.", prompt=9, tokens=6, stop="length",
               before=[{"role": "user", "content": "Why is the sky?"}, {"role": "assistant", "content": "Because."}]),
        record("inexact", "why is the SKY blue?", "because.", prompt=3, tokens=2, domain="science", language="en"),
        record("b", "x", " ", prompt=8, tokens=1, domain="science", language="de"),
    ]  # fmt: skip
    asked = Contamination(
        {"bench": [Prompt("q", ["Why is the sky blue?"], "x")], "other": [Prompt("r", ["Really?"], "x")]}
    )
    return measure(rows[:: more.pop("order", 1)], 4, limit=10, contamination=asked, **more)


def test_what_is_counted():
    found = report()
    assert (found["rows"], found["conversations"]) == (4, 3)
    assert found["supervised_tokens"] == 4 + 1 + 2 + 1  # the second row is cut at 10 tokens
    assert found["stops"] == {"eos": 3, "length": 1}
    assert (found["tokenised_again"], found["empty_answers"]) == (1, 1)
    assert found["contamination"] == {"rows": 2, "benchmarks": {"bench": 2, "other": 0}}
    # A conversation's first question is its prompt; every answer is one.
    assert found["duplicates"]["prompts"]["texts"] == 3 and found["duplicates"]["prompts"]["exact"] == 1
    assert found["duplicates"]["answers"]["texts"] == 4 and found["duplicates"]["answers"]["exact"] == 1
    assert found["domains"]["chat"] == {"rows": 2, "answer_tokens": 10, "stops": {"eos": 1, "length": 1}}
    assert found["languages"] == {"de": 1, "en": 1} and found["sources"] == {"s": 4}


def test_languages_that_nobody_told_are_identified():
    asked = []
    found = report(identify=lambda text: asked.append(text) or "xx")
    assert found["languages"] == {"xx": 2, "de": 1, "en": 1} and asked == ["Why is the sky blue?", "Go on."]
    assert found["language_sample"] == 2


def test_the_sample_does_not_depend_on_the_order():
    seen = []
    for order in (1, -1):
        found = report(order=order, agreement_rows=2, agreement=lambda rows: seen.append(rows) or {"labels": 0})
        assert found["agreement"] == {"labels": 0}
    assert seen[0] == seen[1] and len(seen[0]) == 2


def test_no_row_is_a_mistake():
    with pytest.raises(ValueError, match="no answer to report on"):
        measure([], 0, 10)


def test_tables_and_warnings(tmp_path):
    found = report() | {
        "agreement": {"rows": 2, "labels": 200, "equal": 100},
        "not_looked_for": {"gsm8k": "no network"},
    }
    text = markdown(found, greedy=True)
    assert "| answers that end by eos | 3 (75.0%) |" in text and "| prompts | 3 | 1 (33.3%) | 0 (0.0%) |" in text
    assert "| - of gsm8k: not looked for | no network |" in text and "| of argmax" not in text
    assert "| labels equal to the target's argmax (200 of 2 answers) | 50.0% |" in text
    said = warnings(found, greedy=True)
    assert (
        said[0].startswith("only 50.0% of the sampled labels")
        and "2 rows ask what evaluation asks (bench 2)" in said[1]
    )
    assert not any("sampled labels" in line for line in warnings(found, greedy=False))
    json.dumps(found, allow_nan=False)
    draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000


def test_the_targets_own_greedy_text_agrees_and_other_text_does_not(tmp_path):
    path = save_tiny_target(tmp_path / "target")
    target, prompt = load_target(path, torch.float32), [9, 8, 7]
    answer = []
    for _ in range(5):
        answer.append(int(target.model(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
    other = [(token + 1) % 60 for token in answer]
    config = RunConfig(dtype="fp32", device="cpu")
    rows = [AnswerRow("own", "x", prompt, answer, "length"), AnswerRow("other", "x", prompt, other[:1], "length")]
    assert target_agreement(config, path, rows[:1]) == {"rows": 1, "labels": 5, "equal": 5}
    assert target_agreement(config, path, rows) == {"rows": 2, "labels": 6, "equal": 5}
    assert target_agreement(config, path, rows, limit=5) == {"rows": 2, "labels": 3, "equal": 2}
