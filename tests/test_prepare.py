"""The stage `prepare`: a whole store or none, the same prompts for every number of them, nothing lost uncounted."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from data import prepare
from data.answers import read_manifest
from data.dataset import evaluation_prompts
from data.prepare import prepared
from data.prompt_store import Prepared
from data.prompts import load_mixture, load_prompts
from data.settings import load_config
from training_runs import ROOT


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(count, name="q"):
    return [{"id": f"{name}{n}", "messages": [{"role": "user", "content": f"{name} number {n}"}]} for n in range(count)]


@pytest.fixture
def config(tmp_path):
    """A function from options to a RunConfig over a run folder of this test."""
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path / 'run'}\nnum_prompts: 0\n")
    return lambda **options: load_config(str(path), options)


def side_file(run):
    return [json.loads(line) for line in (run / "prompts/skipped.jsonl").read_text().splitlines()]


def answered(run):
    (run / "answers").mkdir()
    (run / "answers/answers.jsonl").write_text("{}\n")


def test_every_row_is_kept_or_in_the_side_file(tmp_path, config, capsys):
    long = "x" * 500
    rows = [
        *questions(3), "{broken\n", {"id": 9, "prompt": "", "response": long}, {"id": "u", "messages": [{"role": "x"}]},
        {"prompt": "Q number 1"}, {"prompt": long}, {"turns": ["a", "b"], "domain": "talk"},
    ]  # fmt: skip
    source = write(tmp_path / "mine.jsonl", rows)
    assert prepare.main([str(tmp_path / "config.yaml"), "--prompts", source, "--max_prompt_characters", "400"]) == 0
    store = Prepared(str(tmp_path / "run/prompts"))
    assert [p.turns for p in store] == [["q number 0"], ["q number 1"], ["q number 2"], ["a", "b"]]
    assert [p.domain for p in store] == ["mine"] * 3 + ["talk"] and [p.id for p in store[:3]] == ["q0", "q1", "q2"]
    skipped = {"not JSON": 1, "an empty turn": 1, "an unknown role": 1, "a duplicate": 1, "too long": 1}
    assert store.counts == {"read": 9, "kept": 4, "skipped": skipped}
    assert (len(store), store.turns, store.turn_counts.tolist()) == (4, 5, [1, 1, 1, 2])
    side = side_file(tmp_path / "run")
    assert [(s["where"], s["id"], s["reason"]) for s in side] == [
        ("line 4", "", "not JSON"), ("line 5", "9", "an empty turn"), ("line 6", "u", "an unknown role"),
        ("line 7", "", "a duplicate"), ("line 8", "", "too long"),
    ]  # fmt: skip
    assert {s["source"] for s in side} == {source}
    assert side[4]["detail"] == "500 characters, max_prompt_characters is 400"
    assert [s["text"] for s in side[:4]] == ["", long[:200], "u x", "Q number 1"]
    assert side[2]["detail"] == "x" and side[4]["text"] == "x" * 200
    printed = capsys.readouterr().out
    assert "9 rows read, 4 prompts kept with 5 turns, 5 skipped" in printed and "1  an unknown role" in printed


def test_prompts_come_back_as_they_were_from_any_place(tmp_path, config):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1, "b": null, "é": "\\n"}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None}}}}]
    asked = [
        {"role": "user", "content": "naïve 日本\x00"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ]
    rows = [
        *questions(2500),
        {"id": "tools", "messages": [*asked, {"role": "assistant", "content": "a"}], "tools": tools},
    ]
    store = prepared(config(prompts=[write(tmp_path / "mine.jsonl", rows)]))
    assert (store[2500].turns, store[2500].tools, store[2500].answers) == ([asked], tools, ["a"])
    assert store[-1] == store[2500] == list(store)[-1] == store[2499:][1]
    assert [store[n].id for n in (0, 999, 1000, 2499)] == ["q0", "q999", "q1000", "q2499"]
    assert [p.id for p in store] == [f"q{n}" for n in range(2500)] + ["tools"] == store.column("id").to_pylist()
    with pytest.raises(IndexError):
        store[2501]


def test_memory_holds_one_batch_of_large_rows(tmp_path, config, monkeypatch):
    monkeypatch.setattr("data.prompt_store._BATCH_BYTES", 16 << 10)
    rows = [{"prompt": f"{n} " + "x" * 3000} for n in range(12)]
    store = prepared(config(prompts=[write(tmp_path / "mine.jsonl", rows)]))
    with pyarrow.memory_map(str(tmp_path / "run/prompts/prompts.arrow")) as file:
        assert pyarrow.ipc.open_file(file).num_record_batches == 2
    assert [len(p.turns[0]) for p in store] == [len(row["prompt"]) for row in rows]


@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 7}])
def test_more_prompts_begin_with_the_same_ones(tmp_path, config, options):
    sources = [
        write(tmp_path / "a.jsonl", [*questions(10, "a"), "{broken\n", *questions(40, "A")]),
        write(tmp_path / "b.jsonl", questions(9, "b")),
        "builtin",
    ]
    ids = {}
    for count in (5, 8, 60, 33):
        store = prepared(config(prompts=sources, num_prompts=count, **options))
        ids[count] = [p.id for p in store]
        assert len(store) == count
        fingerprint = ids.setdefault("fingerprint", store.fingerprint)
        assert store.fingerprint == fingerprint
        assert store.counts["read"] == count + sum(store.counts["skipped"].values())
    longest = ids[60]
    assert all(ids[count] == longest[:count] for count in (5, 8, 33))
    kept = {s["name"]: s["kept"] for s in store.manifest["sources"]}
    assert kept == dict(zip(sources, (12, 9, 12), strict=True))
    if not options:
        assert longest[:4] == ["a0", "b0", load_prompts("builtin", 1)[0].id, "a1"]
        with pytest.warns(UserWarning, match="1 rows skipped: line 11: not JSON"):
            mixture = [p.id for p in load_mixture(sources, 60)]
        assert mixture != longest  # without the filter of duplicates: A1 is a1
        prepared(config(prompts=sources, num_prompts=60, drop_duplicates=False))
        assert mixture == [p.id for p in Prepared(str(tmp_path / "run/prompts"))]


# Of the first version of the generator: the demo's answers, and all that was measured with them, belong to these.
FIRST, DEMO, TEXTS = "3d1ba4dbe8e8e8a3", "a3f1af2eb13e22eb", "b3456aef165bc0cb"


def test_the_demos_prompts_are_what_they_were(config):
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
    assert "seed" not in demo
    store = prepared(config(prompts=demo["prompts"], num_prompts=demo["num_prompts"]))
    assert (len(store), store.turns, store.counts["skipped"]) == (1024, 1024, {})
    assert store[0].id == FIRST and hashlib.sha256("\n".join(p.id for p in store).encode()).hexdigest()[:16] == DEMO
    content = hashlib.sha256("\n".join(p.turns[0] for p in store).encode()).hexdigest()[:16]
    assert content == TEXTS and [p.domain for p in store][:4] == ["maths", "code", "chat", "maths"]
    assert load_mixture(["builtin"], 1024) == list(store)


def test_a_finished_store_is_not_read_again(tmp_path, config, monkeypatch):
    source = write(tmp_path / "mine.jsonl", questions(5))
    first = prepared(config(prompts=[source]))
    monkeypatch.setattr(prepare, "_write", lambda *args: pytest.fail("it is there"))
    assert list(prepared(config(prompts=[source]))) == list(first)
    os.remove(source)  # what was made from a file that is gone stays usable
    assert list(prepared(config(prompts=[source]))) == list(first)


def test_a_store_of_all_there_is_is_not_read_again_for_more(tmp_path, config, monkeypatch):
    source = write(tmp_path / "mine.jsonl", questions(5))
    prepared(config(prompts=[source], num_prompts=9))
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_write", lambda *args: pytest.fail("there are no more"))
        assert [len(prepared(config(prompts=[source], num_prompts=n))) for n in (9, 12, 5, 0)] == [5] * 4
    assert len(prepared(config(prompts=[source], num_prompts=4))) == 4
    assert len(prepared(config(prompts=[source], num_prompts=5))) == 5  # whether these are all is not known
    assert len(prepared(config(prompts=[source]))) == 5


def test_other_settings_make_another_store_but_not_under_answers(tmp_path, config):
    source = write(tmp_path / "mine.jsonl", questions(20))
    first = prepared(config(prompts=[source], num_prompts=6))
    other = prepared(config(prompts=[source], num_prompts=6, min_prompt_characters=3))
    assert other.fingerprint != first.fingerprint and list(other) == list(first)
    assert (
        prepared(config(prompts=[source], num_prompts=6, seed=3)).fingerprint == first.fingerprint
    )  # nothing is drawn
    answered(tmp_path / "run")
    with pytest.raises(ValueError, match="prepared with min_prompt_characters = 0, this run has 3: .*another run_dir"):
        prepared(config(prompts=[source], num_prompts=6, min_prompt_characters=3))
    with pytest.raises(ValueError, match="num_prompts 5 is less than the 6 prompts that .* holds answers to"):
        prepared(config(prompts=[source], num_prompts=5))
    grown = prepared(config(prompts=[source]))
    assert [p.id for p in grown] == [f"q{n}" for n in range(20)]
    with pytest.raises(ValueError, match="num_prompts 19 is less than the 20 prompts"):
        prepared(config(prompts=[source], num_prompts=19))
    write(tmp_path / "mine.jsonl", questions(21))
    with pytest.raises(ValueError, match="prepared with prompts = .*mine.jsonl"):
        prepared(config(prompts=[source]))
    assert len(Prepared(str(tmp_path / "run/prompts"))) == 20


def test_columns_that_are_not_known_name_the_options(tmp_path, config):
    rows = [{"ask": f"q{n}", "say": "a"} for n in range(300)]
    source = write(tmp_path / "mine.jsonl", rows)
    with pytest.raises(
        ValueError, match=r"no column of .*mine.jsonl .*\(it has ask, say\).*--messages_column or --prompt_"
    ):
        prepared(config(prompts=[source]))
    assert list((tmp_path / "run/prompts").glob("*.partial")) == []
    with pytest.raises(ValueError, match="prompt_column: no row of .*mine.jsonl has a column 'aks'"):
        prepared(config(prompts=[write(tmp_path / "good.jsonl", questions(1200)), source], prompt_column="aks"))
    store = prepared(config(prompts=[source], prompt_column="ask", answer_column="say"))
    assert (store[299].turns, store[299].answers) == (["q299"], ["a"])
    # A few rows of another form are skipped.
    some = write(tmp_path / "some.jsonl", [*questions(2), *rows])
    assert prepared(config(prompts=[some])).counts["skipped"] == {"no known column": 300}


def test_a_source_of_which_nothing_is_usable_is_an_error_with_its_commonest_reason(tmp_path, config, capsys):
    source = write(tmp_path / "mine.jsonl", [{"messages": None}, {"messages": None}, "{broken\n"])
    assert prepare.main([str(tmp_path / "config.yaml"), "--prompts", source]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no usable row among 3 (2 times: a null conversation)" in error and "skipped.jsonl lists them" in error
    assert len(side_file(tmp_path / "run")) == 3 and not read_manifest(str(tmp_path / "run/prompts"))
    with pytest.raises(ValueError, match="there are no prepared prompts in .*; run: bash launch.sh prepare CONFIG"):
        Prepared(str(tmp_path / "run/prompts"))
    with pytest.raises(ValueError, match="no usable row among 0 "):
        prepared(config(prompts=[write(tmp_path / "empty.jsonl", [])]))
    with pytest.raises(ValueError, match="num_prompts 0 takes all rows of all sources, and the generator"):
        prepared(config(prompts=["builtin"]))


@pytest.mark.parametrize("options, message", [
    ({"num_prompts": -1}, "num_prompts must be at least 0, got -1"),
    ({"near_duplicates": 80}, "near_duplicates must lie in 0..1, got 80"),
    ({"min_prompt_characters": 9, "max_prompt_characters": 8}, "min_prompt_characters 9 is more than max_prompt_char"),
    ({"prompts": ["a", "a"]}, "prompts: one source is named twice"),
    ({"decontaminate_words": 0}, "decontaminate_words must be at least 1, got 0"),
])  # fmt: skip
def test_options_out_of_range_are_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_filters_are_those_of_the_options(tmp_path, config, capsys):
    english = "Explain the theory of relativity to a child of {} years in a few sentences, please."
    rows = [{"id": n, "prompt": english.format(n)} for n in (7, 8)]
    rows += [{"prompt": "Schreibe mir bitte ein kurzes Gedicht über den Herbst und den Nebel."}]
    rows += [{"prompt": "Who wrote the book that this long question is about, and in which year did it appear?"}]
    evaluated = write(tmp_path / "bench.jsonl", [{"turns": ["Who wrote the book that this long question is about?"]}])
    options = dict(languages=["en"], near_duplicates=0.5, decontaminate=[evaluated], decontaminate_words=8)
    store = prepared(config(prompts=[write(tmp_path / "mine.jsonl", rows)], **options))
    assert [p.id for p in store] == ["7"]
    assert store.counts["skipped"] == {"a near duplicate": 1, "another language": 1, "asked by evaluation": 1}
    assert store.manifest["contaminated"] == {"bench": 1} and store.manifest["languages"] == {"en": 1}
    assert store.column("language").to_pylist() == ["en"]
    prepare._report(store)
    assert "hold prompts of bench: 1" in capsys.readouterr().out


def test_benchmarks_of_one_name_are_looked_for_both(tmp_path, config):
    rows = [{"turns": [f"Tell me all that you know about the {thing}, please."]} for thing in ("moon", "sea", "wind")]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    evaluated = [write(tmp_path / folder / "test.jsonl", [row]) for folder, row in zip("ab", rows, strict=False)]
    store = prepared(config(prompts=[write(tmp_path / "mine.jsonl", rows)], decontaminate=[*evaluated, evaluated[0]]))
    assert [p.turns for p in store] == [rows[2]["turns"]]
    assert store.manifest["contaminated"] == {"test": 1, "test (2)": 1}
    looked_for, missing = evaluation_prompts(config(benchmarks=evaluated))
    assert looked_for.found_in(rows[0]["turns"] + rows[1]["turns"]) == ["test", "test (2)"] and not missing


def test_parquet_of_unlike_rows_keeps_tool_arguments_apart(tmp_path, config):
    def row(name, **arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": f"use {name}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        return {"messages": [*messages, {"role": "tool", "content": "ok"}], "tools": json.dumps([{"name": name}])}

    table = pyarrow.Table.from_pylist([row("add", a=1), row("say", text="x"), {"messages": None, "tools": None}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    store = prepared(config(prompts=[str(tmp_path / "rows.parquet")]))
    assert [p.turns[0][1]["tool_calls"][0]["function"] for p in store] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "say", "arguments": {"text": "x"}},
    ]
    assert [p.tools for p in store] == [[{"type": "function", "function": {"name": n}}] for n in ("add", "say")]
    assert store.counts["skipped"] == {"a null conversation": 1}


COMMITS = ["1" * 40, "2" * 40]


def test_a_longer_run_reads_the_commit_of_the_shorter_one(tmp_path, config, monkeypatch):
    asked = []

    def load(name, subset, revision=None):
        asked.append(revision)
        commit = revision or COMMITS[min(len(asked), 2) - 1]
        rows = [{"prompt": f"{commit[0]} {n}"} for n in range(9)]
        info = SimpleNamespace(splits={"train": SimpleNamespace(num_examples=9)})
        return SimpleNamespace(
            info=info, base_path=f"hf://datasets/a/b@{commit}", as_streaming_dataset=lambda split: iter(rows)
        )

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    first = [p.turns[0] for p in prepared(config(prompts=["a/b"], num_prompts=3))]
    assert first == ["1 0", "1 1", "1 2"]
    longer = prepared(config(prompts=["a/b"]))
    assert [p.turns[0] for p in longer][:3] == first and asked == [None, COMMITS[0]] and len(longer) == 9
    assert longer.manifest["sources"] == [{"name": "a/b", "version": COMMITS[0], "rows": 9, "kept": 9}]
    # Another revision by name is another source, whose prompts are not those that were answered.
    answered(tmp_path / "run")
    with pytest.raises(ValueError, match="prepared with prompts"):
        prepared(config(prompts=["a/b#main"]))


def test_killed_while_it_reads_it_starts_over(tmp_path, config):
    source = write(tmp_path / "mine.jsonl", questions(30_000))
    command = [sys.executable, "-m", "data.prepare", str(tmp_path / "config.yaml"), "--prompts", source]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    partial = tmp_path / "run/prompts/prompts.arrow.partial"
    limit = time.monotonic() + 100
    while not (partial.is_file() and partial.stat().st_size > 10_000) and time.monotonic() < limit:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and partial.is_file()
    assert not read_manifest(str(tmp_path / "run/prompts"))
    store = prepared(config(prompts=[source], num_prompts=3000))
    assert [p.id for p in store] == [f"q{n}" for n in range(3000)] and not partial.exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(4))
def test_killed_while_it_replaces_a_store_there_is_a_whole_one_or_none(tmp_path, config, monkeypatch, step):
    source = write(tmp_path / "mine.jsonl", questions(30))
    prepared(config(prompts=[source], num_prompts=10))
    replace, done = Path.replace, []

    def killed(path, target):
        if len(done) == step:
            raise Killed
        done.append(path)
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        if step < 3:
            with pytest.raises(Killed):
                prepared(config(prompts=[source], num_prompts=20))
        else:
            prepared(config(prompts=[source], num_prompts=20))
    manifest = read_manifest(str(tmp_path / "run/prompts"))
    assert bool(manifest) == (step == 3)
    assert [p.id for p in prepared(config(prompts=[source], num_prompts=20))] == [f"q{n}" for n in range(20)]


def test_two_processes_at_once_make_one_store(tmp_path, config, monkeypatch):
    source, calls = write(tmp_path / "mine.jsonl", questions(200)), []
    real = prepare._write

    def slow(*args):
        calls.append(1)
        time.sleep(0.1)
        real(*args)

    monkeypatch.setattr(prepare, "_write", slow)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(len(prepared(config(prompts=[source]))))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [200] * 3 and len(calls) == 1


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, config, monkeypatch, capsys):
    source = write(tmp_path / "mine.jsonl", questions(5))

    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.prompt_store.Writer.close", full)
    assert prepare.main([str(tmp_path / "config.yaml"), "--prompts", source]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("prepare: the prompts could not be saved") and "No space left" in error
    assert sorted(p.name for p in (tmp_path / "run/prompts").iterdir()) == ["lock"]
