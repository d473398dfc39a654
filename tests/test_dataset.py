"""The stage `dataset`: answers as Parquet with a card, whole or absent, the same for the same answers; publishing."""

import json
import os
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from datasets import load_dataset

from data import dataset as stage
from data import prepare, shards
from data.answers import AnswerRow, check_origin, target_identity, write_manifest
from data.card import size_category
from data.chat import PLAIN, ChatFormat, encode_prompt, messages_of, template_fingerprint
from data.records import Record
from data.rows import open_answers, open_rows
from data.settings import load_config
from hub_stand_in import TOKEN, Repository, running_hub
from mistakes import mistake
from test_publish import files_of
from tiny_tokenizer import TEMPLATE, save_tiny_target, tiny_tokenizer

TOOL_TEMPLATE = TEMPLATE.replace("['user', 'assistant']", "['user', 'assistant', 'tool']")
# An eos, then answers of the tiny tokenizer's letters.
ANSWERS = {"a": ["fine, thanks."], "b": ["one.", "two."], "c": ["three is it."], "d": []}
CALL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": {"of": "x"}}}
PROMPTS = [
    {"id": "a", "turns": ["how are you?"], "domain": "chat"},
    {"id": "b", "turns": ["count.", "more."], "domain": "maths"},
    {
        "id": "c",
        "domain": "maths",
        "messages": [
            {"role": "user", "content": "count x."},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "count"},
        ],
    },
    {"id": "d", "turns": ["no answer yet"], "domain": "chat"},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("target"), template=TOOL_TEMPLATE)


@pytest.fixture(autouse=True)
def _fast(request, monkeypatch):
    """The picture takes most of a test's time; one of them looks at it."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(stage.quality_report, "draw", lambda report, path: path.write_bytes(b"PNG"))


@pytest.fixture
def run(tmp_path, target):
    """Words of a command line over a run with prepared prompts and finished answers."""
    source, folder = tmp_path / "asked.jsonl", tmp_path / "run"
    source.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"run_dir: {folder}\ntarget: {target}\nprompts: [{source}]\nbenchmarks: [{tmp_path / 'b.jsonl'}]\n"
    )
    (tmp_path / "b.jsonl").write_text('{"turns": ["How are YOU?"]}\n{"turns": ["something else altogether"]}\n')
    assert prepare.main([str(config)]) == 0
    write_answers(folder, target)
    return [str(config), "--agreement_rows", "0"]


def write_answers(folder, target, finished=True, order=1):
    tokenizer, rows = tiny_tokenizer(TOOL_TEMPLATE), []
    prompts = prepare.Prepared(str(folder / "prompts"))
    for prompt in prompts:
        texts = ANSWERS[prompt.id]
        for turn, text in enumerate(texts):
            ids = encode_prompt(tokenizer, messages_of(prompt.turns[: turn + 1], texts[:turn]))
            cut = prompt.id == "c"
            rows.append(
                {
                    "id": prompt.id + (f".turn{turn + 1}" if turn else ""),
                    "domain": prompt.domain,
                    "prompt_ids": ids,
                    "answer_ids": tokenizer(text)["input_ids"] + [1] * (not cut),
                    "stop": "length" if cut else "eos",
                    "exact": prompt.id != "a",
                }
            )
    (folder / "answers").mkdir(exist_ok=True)
    (folder / "answers" / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::order]))
    settings = {"target": target, "target_identity": target_identity(target), "answer_temperature": 0.0, "seed": 0}
    settings |= {
        "template": template_fingerprint(tokenizer),
        **PLAIN.recorded,
        "prompts": ["/home/someone/asked.jsonl"],
    }
    counts = {"input": 5, "done": 4, "failed": 0, "skipped": 1, "left": 0}
    manifest = {"finished": finished, "num_prompts": 1536, "settings": settings, "counts": counts}
    manifest["prompts"] = {"fingerprint": prompts.fingerprint}
    (folder / "answers" / "manifest.json").write_text(json.dumps(manifest))


def test_rows_come_back_through_datasets(run, tmp_path, capsys):
    assert stage.main(run) == 0
    folder = tmp_path / "run" / "dataset"
    rows = load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache")).to_list()
    assert [row["id"] for row in rows] == ["a", "b", "b.turn2", "c"]
    none = {"tool_calls": None, "tool_call_id": None, "name": None}
    assert rows[2]["messages"] == [
        {"role": role, "content": text, **none}
        for role, text in [("user", "count."), ("assistant", "one."), ("user", "more."), ("assistant", "two.")]
    ]
    called, told = rows[3]["messages"][1:3]
    assert json.loads(called["tool_calls"]) == [CALL] and called["content"] == ""
    assert (told["role"], told["content"], told["tool_call_id"], told["name"]) == ("tool", "3", "c1", "count")
    tokenizer = tiny_tokenizer(TOOL_TEMPLATE)
    assert tokenizer.decode(rows[2]["prompt_ids"]) == "u:count./a:one./u:more./a:"
    assert tokenizer.decode(rows[2]["answer_ids"]) == "two.<eos>"
    assert [row["stop"] for row in rows] == ["eos", "eos", "eos", "length"]
    assert [row["exact"] for row in rows] == [False, True, True, True]
    assert {row["source"] for row in rows} == {"asked.jsonl"} and rows[0]["domain"] == "chat"
    assert "4 rows in 1 Parquet files" in capsys.readouterr().out


def test_the_report_and_the_card_count_right(run, tmp_path):
    assert stage.main(run) == 0
    folder = tmp_path / "run" / "dataset"
    report = json.loads((folder / "report.json").read_text())
    assert report["rows"] == 4 and report["conversations"] == 3 and report["tokenised_again"] == 1
    assert report["stops"] == {"eos": 3, "length": 1}
    # A token is a character; three answers end in an eos.
    lengths = [len("fine, thanks.") + 1, len("one.") + 1, len("two.") + 1, len("three is it.")]
    assert report["supervised_tokens"] == report["answer_tokens"]["tokens"] == sum(lengths)
    assert (report["answer_tokens"]["min"], report["answer_tokens"]["max"]) == (5, 14)
    # One prompt of evaluation, written otherwise, is asked.
    assert report["contamination"] == {"rows": 1, "benchmarks": {"b": 1}}
    assert report["domains"]["maths"] == {"rows": 3, "answer_tokens": 22, "stops": {"eos": 2, "length": 1}}
    assert report["duplicates"]["prompts"]["texts"] == 3 and report["agreement"] is None
    card = (folder / "README.md").read_text()
    head = card.split("---\n")[1]
    assert "data/train-*.parquet" in head and "- n<1K" in head and "license" not in head
    assert (
        "thinking: off" in card and "answers that end by eos: 75.0%" in card and "accounting: 5 input, 4 done" in card
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["fingerprint"] in card and manifest["settings"]["template"] in card
    assert "| answers that end by eos | 3 (75.0%) |" in (folder / "report.md").read_text()


def test_nothing_that_is_published_names_this_machines_folders(run, tmp_path, target):
    away = tmp_path / "no" / "bench.jsonl"
    assert stage.main([*run, "--benchmarks", str(away), str(tmp_path / "b.jsonl")]) == 0
    report = json.loads((tmp_path / "run" / "dataset" / "report.json").read_text())
    assert list(report["not_looked_for"]) == ["bench.jsonl"] and report["contamination"]["benchmarks"] == {"b": 1}
    assert "bench.jsonl" in report["not_looked_for"]["bench.jsonl"]
    for name, content in files_of(tmp_path / "run" / "dataset").items():
        for path in (str(tmp_path), target, "/home/someone"):
            assert path.encode() not in content, name


def test_the_same_answers_give_the_same_bytes_whatever_order_they_came_in(run, tmp_path, target):
    folder = tmp_path / "run" / "dataset"
    assert stage.main(run) == 0
    first = files_of(folder)
    assert "data/train-00000-of-00001.parquet" in first
    shutil.rmtree(folder)
    write_answers(tmp_path / "run", target, order=-1)
    assert stage.main(run) == 0
    assert files_of(folder) == first


def test_a_finished_data_set_is_left_alone_and_new_answers_replace_it(run, tmp_path, target, capsys, monkeypatch):
    assert stage.main(run) == 0
    fingerprint = json.loads((tmp_path / "run" / "dataset" / "manifest.json").read_text())["fingerprint"]
    capsys.readouterr()
    assert stage.main(run) == 0
    assert capsys.readouterr().out.startswith("dataset: finished already, 4 rows")
    monkeypatch.setitem(ANSWERS, "d", ["late."])
    write_answers(tmp_path / "run", target)
    assert stage.main(run) == 0
    manifest = json.loads((tmp_path / "run" / "dataset" / "manifest.json").read_text())
    assert manifest["rows"] == 5 and manifest["fingerprint"] != fingerprint


@pytest.mark.parametrize("words", [[], ["--report_only"]])
def test_another_report_leaves_the_rows_alone(run, tmp_path, monkeypatch, words):
    assert stage.main(run) == 0
    folder, shard = tmp_path / "run" / "dataset", "data/train-00000-of-00001.parquet"
    before, written = files_of(folder), (folder / shard).stat().st_mtime_ns
    monkeypatch.setattr(stage, "write_shards", None)
    assert stage.main([*run, "--max_row_length", "20", *words]) == 0
    after = files_of(folder)
    assert json.loads(after["report.json"])["max_row_length"] == 20 and (folder / shard).stat().st_mtime_ns == written
    assert {name for name in after if after[name] != before[name]} == {"report.json", "report.md", "manifest.json"}
    assert stage.main([*run, "--max_row_length", "20"]) == 0


def test_a_data_set_that_lost_a_file_is_written_again(run, tmp_path):
    assert stage.main(run) == 0
    before = files_of(tmp_path / "run" / "dataset")
    (tmp_path / "run" / "dataset" / "data" / "train-00000-of-00001.parquet").unlink()
    assert stage.main(run) == 0
    assert files_of(tmp_path / "run" / "dataset") == before


SHARD = "data/train-00000-of-00001.parquet"


@pytest.mark.parametrize("pushed", [False, True])
def test_a_damaged_shard_is_written_again(run, tmp_path, hub, pushed):
    """A lost end by its size; a byte in its middle, before others get it, by its hash."""
    assert stage.main(run) == 0
    folder = tmp_path / "run" / "dataset"
    before = files_of(folder)
    content = bytearray((folder / SHARD).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / SHARD).write_bytes(content if pushed else content[:-1])
    assert stage.main([*run, *["--push_to_hub", "tester/rows"] * pushed]) == 0
    assert (folder / SHARD).read_bytes() == before[SHARD]
    if pushed:
        assert hub.repositories["tester/rows"].files[SHARD] == before[SHARD]


def test_an_unfinished_data_set_goes_on_behind_the_last_shard_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_BATCH_ROWS", 1)
    records = [Record(AnswerRow(name, "chat", [4], [5, 1], "eos"), [], None, "", "") for name in "abc"]
    written = shards.write_shards(tmp_path / "part", records, limit=1)
    assert shards.finished_shards(tmp_path / "part") == written and len(written) == 3
    written[1].write_bytes(written[1].read_bytes()[:-5])
    assert shards.finished_shards(tmp_path / "part") == written[:1]


def test_files_of_others_stay(run, tmp_path, target, monkeypatch, capsys):
    folder = tmp_path / "run" / "dataset"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "mine.csv").write_text("a,b")
    line = mistake(capsys, stage.main, "dataset", *run)
    assert f"run_dir: {folder} holds data/mine.csv, which this stage did not write" in line
    assert files_of(folder) == {"data/mine.csv": b"a,b"} and not (tmp_path / "run" / ".dataset.partial").exists()
    shutil.rmtree(folder)
    assert stage.main(run) == 0
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("kept")
    first = files_of(folder)
    monkeypatch.setitem(ANSWERS, "d", ["late."])
    write_answers(tmp_path / "run", target)
    assert stage.main(run) == 0
    assert files_of(folder).keys() == first.keys() and files_of(folder)["notes/mine.txt"] == b"kept"
    assert files_of(folder)[SHARD] != first[SHARD]
    assert not list((tmp_path / "run").glob(".dataset.*/"))


def test_files_are_on_the_disk_before_they_take_their_names(run, tmp_path, monkeypatch):
    """A loss of power after a rename must not leave an empty file under the final name."""
    events, fsync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda path, to: events.append((str(path), str(to))) or rename(path, to))
    assert stage.main(run) == 0
    partial, folder = tmp_path / "run" / ".dataset.partial", str(tmp_path / "run" / "dataset")
    shard = f"{partial}/data/shard-00000.parquet"
    moved, placed = events.index((f"{shard}.partial", shard)), events.index((str(partial), folder))
    assert f"{shard}.partial" in events[:moved] and events[moved + 1] == f"{partial}/data"
    assert {f"{partial}/{name}" for name in files_of(Path(folder))} <= set(map(str, events[:placed]))
    assert events[placed + 1] == str(tmp_path / "run")
    events.clear()
    write_manifest(str(tmp_path), {"finished": True})
    assert events[0].startswith(f"{tmp_path}/manifest.json.") and events[-1] == str(tmp_path)


def test_shards_and_a_run_that_is_killed_between_them(run, tmp_path, monkeypatch, capsys):
    """It goes on behind the last whole shard, and ends with the same bytes."""
    monkeypatch.setattr(shards, "_BATCH_ROWS", 1)
    monkeypatch.setattr(stage, "write_shards", lambda folder, records: shards.write_shards(folder, records, limit=1))
    assert stage.main(run) == 0
    folder = tmp_path / "run" / "dataset"
    whole = files_of(folder)
    assert sorted(name for name in whole if name.endswith("parquet")) == [
        f"data/train-0000{n}-of-00004.parquet" for n in range(4)
    ]
    shutil.rmtree(folder)

    class Killed(BaseException):
        pass

    def dying(folder, records):
        for record in records:
            yield record
            if record.row.id == "b.turn2":
                raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(stage, "write_shards", lambda f, records: shards.write_shards(f, dying(f, records), limit=1))
        with pytest.raises(Killed):
            stage.main(run)
    assert not folder.exists()
    capsys.readouterr()
    assert stage.main(run) == 0
    assert "goes on behind 2 rows in 2 whole shards" in capsys.readouterr().out
    assert files_of(folder) == whole
    assert open_rows(str(folder), keep=False)[2].id == "b.turn2"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda folder: shutil.rmtree(folder / "answers"), "the answers in .* are missing; run: bash launch.sh regen"),
        (lambda folder: shutil.rmtree(folder / "prompts"), "no prepared prompts in .*; run: bash launch.sh prepare"),
        (lambda folder: (folder / "answers" / "answers.jsonl").write_text(""), "holds no answer"),
        (
            lambda folder: (folder / "answers" / "manifest.json").write_text(
                '{"finished": true, "prompts": {"fingerprint": "another"}}'
            ),
            "were asked with other prompts than those in",
        ),
        (
            lambda folder: (folder / "answers" / "answers.jsonl").write_text(
                json.dumps(dict(id="z", domain="d", prompt_ids=[4], answer_ids=[5, 1], stop="eos")) + "\n"
            ),
            "1 of 1 answers belong to no prompt of",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_the_command(run, tmp_path, capsys, change, message):
    change(tmp_path / "run")
    assert re.search(message, mistake(capsys, stage.main, "dataset", *run))


def test_unfinished_answers_are_refused_unless_a_part_is_asked_for(run, tmp_path, target, capsys):
    write_answers(tmp_path / "run", target, finished=False)
    assert re.search("not finished: .*--allow_partial", mistake(capsys, stage.main, "dataset", *run))
    assert stage.main([*run, "--allow_partial"]) == 0
    folder = tmp_path / "run" / "dataset"
    assert json.loads((folder / "manifest.json").read_text())["partial"] is True
    assert "Not all prompts are answered yet" in (folder / "README.md").read_text()


@pytest.mark.parametrize("counts", [{"failed": 0, "left": 2}, {"failed": 2, "left": 0}])
def test_answers_cut_by_the_time_or_failed_are_a_part(run, tmp_path, counts, capsys):
    path = tmp_path / "run" / "answers" / "manifest.json"
    known = json.loads(path.read_text())
    counts = {"input": 6, "done": 4, "skipped": 0, **counts}
    path.write_text(json.dumps(known | {"out_of_time": True, "counts": counts}))
    words = []
    if counts["left"]:
        line = mistake(capsys, stage.main, "dataset", *run)
        assert "not finished (cut by time_budget, 2 turns are left): run" in line
        words = ["--allow_partial"]
    assert stage.main([*run, *words]) == 0
    folder = tmp_path / "run" / "dataset"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["partial"] is True and manifest["counts"] == counts
    assert "Not all prompts are answered yet" in (folder / "README.md").read_text()


def test_another_target_and_another_format_are_refused(run, tmp_path, capsys):
    other = save_tiny_target(tmp_path / "other", template=TOOL_TEMPLATE, seed=1)
    line = mistake(capsys, stage.main, "dataset", *run, "--target", other)
    assert re.search("are those of target .*, this run has", line)
    line = mistake(capsys, stage.main, "dataset", *run, "--thinking")
    assert "asked with thinking False, this run has True" in line


def test_the_picture_and_the_table_are_there(run, tmp_path):
    assert stage.main(run) == 0
    picture = (tmp_path / "run" / "dataset" / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_the_report_alone(run, tmp_path, capsys):
    line = mistake(capsys, stage.main, "dataset", *run, "--report_only", "--push_to_hub", "tester/rows")
    assert "push_to_hub: with report_only there is no data set to upload" in line
    folder = tmp_path / "run" / "dataset"
    assert stage.main([*run, "--report_only"]) == 0
    assert sorted(files_of(folder)) == ["report.json", "report.md", "report.png"]
    alone = files_of(folder)
    assert stage.main(run) == 0
    assert {name: files_of(folder)[name] for name in alone} == alone


def test_training_takes_the_data_set_for_the_answers_that_it_is_made_of(run, tmp_path, target):
    assert stage.main(run) == 0
    config = load_config(run[0], {"answers": str(tmp_path / "run" / "dataset")})
    rows, manifest = open_answers(config)
    assert rows.digest == open_rows(str(tmp_path / "run" / "answers")).digest and rows[3].stop == "length"
    now = {"target_identity": target_identity(target), "quantization": "none"}
    template = template_fingerprint(tiny_tokenizer(TOOL_TEMPLATE))
    check_origin(manifest, now | {"template": template}, config.answers)
    with pytest.raises(ValueError, match="are those of chat template"):
        check_origin(manifest, now | {"template": "another"}, config.answers)
    with pytest.raises(ValueError, match="asked with thinking False"):
        check_origin(manifest, now | {"template": template}, config.answers, ChatFormat(True))


def test_a_full_disk_is_one_line_and_whole_shards_stay(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shards, "_BATCH_ROWS", 1)
    monkeypatch.setattr(stage, "write_shards", lambda folder, records: shards.write_shards(folder, records, limit=1))
    write, written = shards.pyarrow.parquet.ParquetWriter.write_table, []

    def fails(self, table):
        written.append(table)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        write(self, table)

    with monkeypatch.context() as patch:
        patch.setattr(shards.pyarrow.parquet.ParquetWriter, "write_table", fails)
        assert stage.main(run) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dataset: ")]
    assert len(lines) == 1 and "shard-00002.parquet could not be saved" in lines[0] and "No space left" in lines[0]
    partial = tmp_path / "run" / ".dataset.partial" / "data"
    assert sorted(path.name for path in partial.iterdir()) == ["shard-00000.parquet", "shard-00001.parquet"]
    assert not (tmp_path / "run" / "dataset").exists()
    assert stage.main(run) == 0 and "goes on behind 2 rows" in capsys.readouterr().out
    assert not partial.exists()


def test_labels_of_another_writer_are_no_argmax_of_the_target(run, tmp_path, capsys):
    """The answers here were made up: a random target would have written others (TRAPS 31)."""
    assert stage.main([*run[:-1], "2"]) == 0
    report = json.loads((tmp_path / "run" / "dataset" / "report.json").read_text())
    sample = report["agreement"]
    assert sample["rows"] == 2 and sample["equal"] / sample["labels"] < 0.5
    assert (
        "warning: only" in capsys.readouterr().out
        and "did it write these answers?" in (tmp_path / "run" / "dataset" / "report.md").read_text()
    )


@pytest.mark.parametrize("rows, words", [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**6, "1M<n<10M")])
def test_size_categories_are_the_hubs(rows, words):
    assert size_category(rows) == words


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        yield hub


def test_a_push_makes_a_data_set_and_removes_what_an_earlier_one_left(run, tmp_path, hub, capsys):
    stale, theirs = "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"
    files = {stale: b"old", theirs: b"theirs", ".gitattributes": b"x"}
    hub.repositories["tester/rows"] = Repository(False, files, kind="dataset")
    assert stage.main([*run, "--push_to_hub", "tester/rows"]) == 0
    written = files_of(tmp_path / "run" / "dataset")
    assert hub.repositories["tester/rows"].files == written | {theirs: b"theirs", ".gitattributes": b"x"}
    assert f"uploaded: {hub.url}/datasets/tester/rows" in capsys.readouterr().out
    assert 'load_dataset("tester/rows"' in written["README.md"].decode()


def test_a_private_push_of_a_finished_data_set(run, hub):
    assert stage.main(run) == 0
    assert stage.main([*run, "--push_to_hub", "tester/new", "--private"]) == 0
    assert (hub.repositories["tester/new"].private, hub.repositories["tester/new"].kind) == (True, "dataset")
    assert b'load_dataset("tester/new"' in hub.repositories["tester/new"].files["README.md"]


def test_a_refused_push_says_how_to_go_on(run, tmp_path, hub, capsys):
    hub.refuse["/commit/main"] = 403
    assert stage.main([*run, "--push_to_hub", "tester/rows"]) == 2
    folder = tmp_path / "run" / "dataset"
    line = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dataset: ")][-1]
    assert line.endswith(f"go on with: hf upload tester/rows {folder} --repo-type dataset")
