import json
import re
import warnings

import pytest

from data import templates, topics
from data.generator import DOMAINS, numbers
from data.prompts import load_prompts

TEXT_NUMBERS = re.compile(r"\d+")


def test_thousands_are_distinct_and_balanced():
    prompts = load_prompts("builtin", 6000, seed=0, split="train")
    assert len({p.turns[0] for p in prompts}) == len({p.id for p in prompts}) == 6000
    assert {d: sum(p.domain == d for p in prompts) for d in DOMAINS} == dict.fromkeys(DOMAINS, 2000)
    assert not any("{" in p.turns[0] for p in prompts)


def test_a_longer_set_continues_a_shorter_one_and_seeds_differ():
    long, short = load_prompts("builtin", 90, seed=3), load_prompts("builtin", 30, seed=3)
    assert long[:30] == short
    assert {p.id for p in load_prompts("builtin", 90, seed=4)} != {p.id for p in long}


def test_evaluation_shares_no_template_and_no_topic():
    tables = [templates.MATHS, templates.MATHS_ENDINGS, templates.CODE_FRAMES, templates.CODE_TASKS, topics.ENDINGS]
    for table in tables:
        assert not set(table["train"]) & set(table["eval"])
    for kind in topics.CHAT:
        assert not set(kind.train) & set(kind.eval)
    train = {p.turns[0] for p in load_prompts("builtin", 3000, split="train")}
    held_out = load_prompts("builtin", 300, split="eval")
    assert not train & {p.turns[0] for p in held_out}
    for kind in topics.CHAT:
        for index, topic in enumerate(kind.topics):
            if index % 6 == 5:
                requests = {template.replace("{topic}", topic) for template in kind.train}
                assert not any(text.startswith(tuple(requests)) for text in train), topic


def test_evaluation_uses_other_numbers():
    for pool in templates.NUMBERS:
        assert numbers(pool, "train") and numbers(pool, "eval")
        assert not set(numbers(pool, "train")) & set(numbers(pool, "eval"))
    for prompt in load_prompts("builtin", 300, split="eval"):
        if prompt.domain == "maths":
            assert all(int(n) % 5 == 3 for n in TEXT_NUMBERS.findall(prompt.turns[0])), prompt


def test_more_than_the_templates_can_give_is_an_error():
    with pytest.raises(
        ValueError, match=r"the generator \(builtin\) has only \d+ distinct eval prompts: ask for fewer"
    ):
        load_prompts("builtin", 1_000_000, split="eval")


def test_bad_rows_are_skipped_counted_and_named(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"turns": ["hello", "and again"], "id": 7, "domain": "talk"},
        {"turns": []},
        {"turns": ["fine", " "]},
        {"turns": "text"},
        {"turns": [3]},
        ["list"],
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "from messages"}]},
        {
            "conversations": [
                {"from": who, "value": text} for who, text in (("human", "q1"), ("gpt", "a"), ("human", "q2"))
            ]
        },
        {"turns": ["hello", "and again"], "id": 7},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n\n")
    with pytest.warns(UserWarning, match=r"8 rows skipped: line 2: no turns; line 3: an empty turn.*and 3 more"):
        prompts = load_prompts(str(path), 100)
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "from messages"}]
    assert [p.turns for p in prompts] == [["hello", "and again"], [system], ["q1", "q2"]]
    assert [p.answers for p in prompts] == [None, None, ["a"]]
    assert (prompts[0].id, prompts[0].domain) == ("7", "talk")
    assert prompts[1].domain == "mine"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load_prompts(str(path), 1)) == 1


def test_a_file_without_usable_rows_is_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match="empty.jsonl holds no usable row"):
        load_prompts(str(empty), 5)
    with pytest.raises(ValueError, match="no such file: .*absent.jsonl"):
        load_prompts(str(tmp_path / "absent.jsonl"), 5)


def test_ids_without_a_given_one_depend_on_the_content_only(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    second.write_text('{"turns": ["two"]}\n{"turns": ["one"]}\n')
    assert {p.id for p in load_prompts(str(first), 5)} == {p.id for p in load_prompts(str(second), 5)}
