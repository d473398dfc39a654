"""What training reads: the run's answers in the order of their prompts, or a data set, checked like them."""

import json
import random
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer

from data.answers import AnswerRow, target_identity
from data.chat import template_fingerprint
from data.prepare import prepared
from data.rows import open_answers, open_rows
from data.settings import load_config
from training import train_drafter
from training.plan import prepare
from training_runs import answer_rows, write_run


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub-cache"))


def asked(folder, **more):
    """A run's prompts: conversations of one to three turns, and the ids of their turns in order."""
    talks = [{"id": f"p{n}", "turns": [f"t{n} t{turn}" for turn in range(1 + n % 3)]} for n in (7, 3, 8, 1, 9, 0)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    config = folder / "config.yaml"
    config.write_text(f"run_dir: {folder / 'run'}\nprompts: [{folder / 'mine.jsonl'}]\nnum_prompts: 0\n")
    config = load_config(str(config), more)
    ids = [talk["id"] + (f".turn{k + 1}" if k else "") for talk in talks for k in range(len(talk["turns"]))]
    return config, ids, prepared(config).fingerprint


def answered(config, ids, fingerprint, seed, ranks=2):
    """Answers that arrived in some order, in several files."""
    folder = Path(config.path("answers"))
    folder.mkdir(exist_ok=True)
    arrived = random.Random(seed).sample(ids, len(ids))
    for rank in range(ranks):
        rows = [AnswerRow(name, "d", [3, 4], [len(name), 5, 6], "eos") for name in arrived[rank::ranks]]
        name = f"answers-rank-{rank}.jsonl" if rank else "answers.jsonl"
        (folder / name).write_text("".join(json.dumps(vars(row)) + "\n" for row in rows))
    about = {"prompts": {"fingerprint": fingerprint}} if fingerprint else {}
    (folder / "manifest.json").write_text(json.dumps({"finished": True} | about))
    return [name for rank in range(ranks) for name in arrived[rank::ranks]]


def test_rows_come_in_the_order_of_their_prompts_whoever_answered_first(tmp_path):
    config, ids, fingerprint = asked(tmp_path)
    assert len(ids) == 10
    digests = set()
    for seed, ranks in ((1, 1), (2, 2), (3, 3)):
        files = answered(config, [name for name in ids if name != "p3"], fingerprint, seed, ranks)
        rows = open_rows(config.path("answers"))
        assert list(rows.ids()) == [name for name in ids if name != "p3"] != files
        assert [row.answer_ids[0] for row in rows] == [len(row.id) for row in rows]
        digests.add(rows.digest)
    assert len(digests) == 1
    # A row that no prompt has comes last, by its id.
    answered(config, [*ids, "strange2", "strange1"], fingerprint, 4)
    assert list(open_rows(config.path("answers")).ids()) == [*ids, "strange1", "strange2"]


def test_answers_that_do_not_say_what_they_were_asked_with_keep_their_order(tmp_path):
    """Those of before there were prepared prompts: a run on them can be resumed. Or the prompts have been replaced."""
    config, ids, fingerprint = asked(tmp_path)
    for said in (None, "another"):
        files = answered(config, ids, said, 1)
        assert list(open_rows(config.path("answers")).ids()) == files != ids
    Path(config.path("prompts", "manifest.json")).unlink()
    assert list(open_rows(config.path("answers")).ids()) == answered(config, ids, fingerprint, 1)


@pytest.fixture
def run(tmp_path):
    """A run without answers of its own, and a data set beside it that its target wrote."""
    rows = answer_rows(12)
    config = write_run(tmp_path, rows, draft_vocab_size=32)
    settings = plan_settings(config)
    folder = tmp_path / "dataset"
    part = [{**vars(row), "source": "made", "messages": [{"role": "user", "content": "x"}]} for row in rows]
    datasets.Dataset.from_list(part).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    (folder / "manifest.json").write_text(json.dumps({"finished": True, "settings": settings}))
    return config, folder, rows


def plan_settings(config):
    path = str(config.parent / "target")
    return {
        "target_identity": target_identity(path),
        "template": template_fingerprint(AutoTokenizer.from_pretrained(path)),
    }


def manifest_of(folder, **changes):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "settings": {**content["settings"], **changes}}))


def test_a_data_set_trains_as_the_answers_it_was_made_of(run):
    config, folder, rows = run
    own = prepare(load_config(str(config)))
    plan = prepare(load_config(str(config), {"answers": str(folder), "run_dir": str(config.parent / "other")}))
    assert plan.draft_ids.tolist() == own.draft_ids.tolist() and plan.coverage == own.coverage
    assert plan.semantic["answers"] == own.semantic["answers"] and plan.data.source.name == "online"
    assert [plan.data[i].tokens_S.tolist() for i in range(12)] == [row.prompt_ids + row.answer_ids for row in rows]


def test_another_runs_answers_are_a_source_too(run):
    config, _, rows = run
    answers = str(config.parent / "run" / "answers")
    found = open_answers(load_config(str(config), {"answers": answers, "run_dir": str(config.parent / "other")}))[0]
    assert list(found) == rows


@pytest.mark.parametrize(
    ("name", "said"), [("target_identity", "are those of target strange"), ("template", "are those of chat template")]
)
def test_a_data_set_of_another_target_or_template_is_refused(run, capsys, name, said):
    config, folder, _ = run
    manifest_of(folder, **{name: "strange"})
    assert train_drafter.main([str(config), "--answers", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"the answers in {folder} {said}" in error and error.count("\n") == 1


def test_a_data_set_of_unknown_origin_or_with_unknown_tokens_is_refused(run, capsys):
    config, folder, rows = run
    (folder / "manifest.json").rename(folder / "kept.json")
    assert train_drafter.main([str(config), "--answers", str(folder)]) == 2
    assert "has no manifest.json, which says what target wrote them" in capsys.readouterr().err
    (folder / "kept.json").rename(folder / "manifest.json")
    strange = [vars(replace(rows[0], answer_ids=[5, 64, 7]))]
    datasets.Dataset.from_list(strange).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    assert train_drafter.main([str(config), "--answers", str(folder)]) == 2
    assert "hold token 64, the target has 64: they are another target's" in capsys.readouterr().err
    assert train_drafter.main([str(config), "--answers", str(folder / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_a_data_set_of_the_hub_is_fetched_and_read(run, monkeypatch, capsys):
    config, folder, rows = run
    calls = []

    def fetch(name, repo_type, allow_patterns):
        calls.append((name, repo_type, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    found, manifest = open_answers(load_config(str(config), {"answers": "someone/answers"}))
    assert list(found) == rows and manifest["finished"]
    assert calls == [("someone/answers", "dataset", ["*.parquet", "manifest.json"])]

    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("cannot reach it\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert train_drafter.main([str(config), "--answers", "someone/answers"]) == 2
    error = capsys.readouterr().err
    assert "'someone/answers' is no folder and no data set that the Hub gives: cannot reach it" in error


def test_a_dry_run_reads_a_data_set_too(run, capsys):
    config, folder, _ = run
    assert train_drafter.main([str(config), "--dry_run", "--answers", str(folder)]) == 0
    assert "12 of 12 conversations, 0 skipped" in capsys.readouterr().out
    assert not (config.parent / "hub-cache").exists()


@pytest.mark.parametrize(
    ("changed", "words", "said"),
    [
        ({"target_identity": "strange"}, [], "are those of target strange"),
        ({"thinking": False}, ["--thinking", "true"], "were asked with thinking False, this run has True"),
    ],
)
def test_a_dry_run_refuses_what_a_real_one_refuses(run, capsys, changed, words, said):
    config, folder, rows = run
    manifest_of(folder, **changed)
    for more in ([], ["--dry_run"]):
        assert train_drafter.main([str(config), "--answers", str(folder), *words, *more]) == 2
        assert said in capsys.readouterr().err
    (config.parent / "run" / "answers" / "answers.jsonl").write_text(
        json.dumps(vars(replace(rows[0], answer_ids=[5, 64, 7]))) + "\n"
    )
    assert train_drafter.main([str(config), "--dry_run"]) == 2
    assert "hold token 64, the target has 64" in capsys.readouterr().err
