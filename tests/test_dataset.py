"""The stage `dataset`: answers as Parquet with a card and a report; publishing."""

import json
import re
import shutil

import huggingface_hub
import pytest
from datasets import load_dataset

from data import dataset as stage
from data.answers import check_origin, target_identity
from data.card import size_category
from data.chat import ChatFormat, template_fingerprint
from data.rows import open_answers, open_rows
from data.settings import load_config
from dataset_runs import CALL, TOOL_TEMPLATE, begin_run, save_target, write_answers
from hub_stand_in import TOKEN, Repository, running_hub
from mistakes import mistake
from test_publish import files_of
from tiny_tokenizer import save_tiny_target, tiny_tokenizer

SHARD = "data/train-00000-of-00001.parquet"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def _fast(request, monkeypatch):
    """The picture takes most of a test's time; one of them looks at it."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(stage.quality_report, "draw", lambda report, path: path.write_bytes(b"PNG"))


@pytest.fixture
def run(tmp_path, target):
    return begin_run(tmp_path, target)


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
