"""Answered rows as a memory-mapped table: what is read, in what order, by whom, and how little of it is in memory."""

import json
import os
import pickle
import tracemalloc
from dataclasses import replace
from multiprocessing import get_context

import datasets
import numpy as np
import pytest
from torch.utils.data import DataLoader

from data import row_cache
from data.answers import AnswerRow
from data.row_table import Rows, as_rows, content_digest
from data.rows import FOLDER, open_rows
from training.rows import PackedRows, TrainingRows
from training_runs import answer_rows


def write_answers(folder, rows, name="answers.jsonl", tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(vars(row)) + "\n" for row in rows) + tail)
    return str(folder)


def write_dataset(folder, rows, shards=2):
    for n in range(shards):
        part = [{**vars(row), "source": "made"} for row in rows[n::shards]]
        datasets.Dataset.from_list(part).to_parquet(folder / "data" / f"train-{n}.parquet")
    return str(folder)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub-cache"))


def test_rows_are_those_of_the_files_the_first_of_each_id(tmp_path):
    rows, other = answer_rows(30), replace(answer_rows(9)[4], answer_ids=[7, 8])
    write_answers(tmp_path, rows[:20], tail='{"id": "half')
    write_answers(tmp_path, [other, *rows[20:25]], "answers-rank-2.jsonl")
    write_answers(tmp_path, rows[25:], "answers-rank-10.jsonl")
    found = open_rows(str(tmp_path))
    assert len(found) == 30 and list(found) == rows and found[-1] == rows[-1] and list(found.ids())[7] == "row-7"
    assert found.digest == content_digest(rows)
    assert list(found[3:9:2]) == rows[3:9:2] and list(found[3:9][1:3]) == rows[4:6]
    with pytest.raises(IndexError):
        found[30]


def test_what_is_asked_of_all_rows_comes_from_arrays(tmp_path, monkeypatch):
    rows = [*answer_rows(40), AnswerRow("empty", "d", [], [], "eos")]
    monkeypatch.setattr(row_cache, "_TOKENS_OF_A_PIECE", 100)  # several chunks
    found = open_rows(write_answers(tmp_path, rows))
    few = found.select(np.array([5, 3, 40, 39]))
    for part, expected in ((found, rows), (few, [rows[5], rows[3], rows[40], rows[39]]), (Rows.of(rows), rows)):
        assert part.prompt_lengths.tolist() == [len(row.prompt_ids) for row in expected]
        assert part.answer_lengths.tolist() == [len(row.answer_ids) for row in expected]
        assert part.prompt_lengths.dtype == np.int32
        answered = [token for row in expected for token in row.answer_ids]
        assert part.token_counts(64).tolist() == np.bincount(answered, minlength=64).tolist()
        assert part.token_counts(5).tolist() == np.bincount(answered, minlength=64)[:5].tolist()
        assert part.largest_id == max(max(row.prompt_ids + row.answer_ids, default=0) for row in expected)
    assert found.find("row-17") == 17 and few.find("row-3") == 1
    with pytest.raises(KeyError):
        few.find("row-4")
    assert len(as_rows([])) == 0 and as_rows([]).token_counts(3).tolist() == [0, 0, 0] and as_rows([]).largest_id == -1


def test_the_table_is_made_once_and_anew_for_other_content(tmp_path, monkeypatch):
    """Not for other times, places or names."""
    rows = answer_rows(5)
    folder = write_answers(tmp_path / "a" / "answers", rows)
    open_rows(folder)
    (table,) = (tmp_path / "a" / "answers" / FOLDER).glob("*/rows.arrow")
    os.utime(tmp_path / "a" / "answers" / "answers.jsonl", (1, 1))
    monkeypatch.setattr(row_cache, "_write", lambda *_: pytest.fail("made again"))
    assert list(open_rows(folder)) == rows
    (tmp_path / "a").rename(tmp_path / "b")
    moved = open_rows(str(tmp_path / "b" / "answers"))
    assert list(moved) == rows
    monkeypatch.undo()
    changed = [*rows[:4], replace(rows[4], answer_ids=[9, *rows[4].answer_ids[1:]])]
    write_answers(tmp_path / "b" / "answers", changed)
    assert list(open_rows(str(tmp_path / "b" / "answers"))) == changed
    # What was made before is gone from the disk, and who reads it goes on.
    assert len(list((tmp_path / "b" / "answers" / FOLDER).glob("*/rows.arrow"))) == 1 and list(moved) == rows


def test_nothing_is_left_behind_where_nothing_may_be_written(tmp_path):
    folder = write_answers(tmp_path / "answers", answer_rows(4))
    before = sorted(tmp_path.rglob("*"))
    assert list(open_rows(folder, keep=False)) == answer_rows(4) and sorted(tmp_path.rglob("*")) == before
    open_rows(folder)
    assert open_rows(folder, keep=False).digest == content_digest(answer_rows(4))


def test_a_data_set_reads_as_the_answers_it_was_made_of(tmp_path):
    rows = answer_rows(12)
    found = open_rows(write_dataset(tmp_path / "dataset", rows))
    assert list(found) == [*rows[::2], *rows[1::2]]
    # The folder may be another's: the table lies in the cache of `datasets`.
    assert [path.name for path in (tmp_path / "dataset").iterdir()] == ["data"]
    assert list((tmp_path / "hub-cache" / "dartree-rows").glob("*/rows.arrow"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1, 2]", "mapping"),
        ("{", "property name"),
        ('{"id": "a", "domain": "d", "prompt_ids": [1], "answer_ids": [2]}', "stop"),
        ('{"id": 4, "domain": "d", "prompt_ids": [1], "answer_ids": [2], "stop": "eos"}', "id is 4, not text"),
        (
            '{"id": "a", "domain": "d", "prompt_ids": [1], "answer_ids": [NaN], "stop": "eos"}',
            "answer_ids is no list of",
        ),
        ('{"id": "a", "domain": "d", "prompt_ids": [-1], "answer_ids": [2], "stop": "eos"}', "prompt_ids holds -1"),
        (
            '{"id": "a", "domain": "d", "prompt_ids": [1], "answer_ids": [4294967296], "stop": "eos"}',
            "holds 4294967296",
        ),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, reason):
    folder = write_answers(tmp_path, answer_rows(2), tail=line + "\n")
    with pytest.raises(ValueError, match="answers.jsonl line 3 is no answer row") as caught:
        open_rows(folder)
    assert reason in str(caught.value)
    assert not list(tmp_path.rglob("rows.arrow"))


def test_files_that_are_no_data_set_are_named(tmp_path):
    with pytest.raises(ValueError, match="holds neither answers"):
        open_rows(str(tmp_path))
    datasets.Dataset.from_list([{"id": "a", "text": "b"}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet has no column domain; it has id, text"):
        open_rows(str(tmp_path))
    (tmp_path / "a.parquet").write_text("nothing")
    with pytest.raises(ValueError, match="a.parquet is no Parquet file"):
        open_rows(str(tmp_path))
    (tmp_path / "a.parquet").unlink()
    write_dataset(tmp_path, [replace(answer_rows(1)[0], domain=None)], 1)
    with pytest.raises(ValueError, match="train-0.parquet row 1 is no answer row .domain is None"):
        open_rows(str(tmp_path))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_cache.ArrowWriter, "write_batch", full)
    folder = write_answers(tmp_path, answer_rows(2))
    with pytest.raises(RuntimeError, match="could not be saved .*No space left") as caught:
        open_rows(folder)
    assert type(caught.value).__name__ == "StageError"
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [".lock"]


def _race(folder, barrier, results):
    barrier.wait()
    results.put(open_rows(folder).digest)


def test_processes_that_race_make_one_table(tmp_path):
    context = get_context("fork")
    folder, barrier, results = write_answers(tmp_path, answer_rows(300)), context.Barrier(3), context.Queue()
    processes = [context.Process(target=_race, args=(folder, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert {results.get(timeout=60) for _ in processes} == {content_digest(answer_rows(300))}
    for process in processes:
        process.join()
    assert len(list((tmp_path / FOLDER).iterdir())) == 2  # the lock and one table


def test_copies_map_the_same_file(tmp_path):
    """A spawned worker gets a pickle, a forked one the mapping."""
    rows = answer_rows(20)
    found = open_rows(write_answers(tmp_path, rows))
    content = pickle.dumps(found[2:])
    assert len(content) < 4000 and list(pickle.loads(content)) == rows[2:]
    data = TrainingRows(found, 64, 4, seed=0)
    loader = DataLoader(data, batch_size=3, num_workers=2, collate_fn=list, multiprocessing_context="fork")
    assert [(s.id, s.tokens_S.tolist()) for batch in loader for s in batch] == [
        (row.id, row.prompt_ids + row.answer_ids) for row in rows
    ]


def _python_bytes(folder, packed):
    """Python's own memory after a training set was opened and walked through in two epochs."""
    tracemalloc.start()
    data = TrainingRows(open_rows(folder), 64, 4, seed=0)
    data = PackedRows(data) if packed else data
    for epoch in range(2):
        data.set_epoch(epoch)
        for index in range(0, len(data), 50):
            data[index]
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size


@pytest.mark.parametrize("packed", [False, True])
def test_python_holds_a_few_numbers_of_each_row(tmp_path, packed):
    """An AnswerRow of these rows takes some 2 kB, its id alone 55 bytes."""
    sizes = {}
    for count in (1000, 9000):
        rows = answer_rows(100)
        folder = write_answers(tmp_path / str(count), [replace(rows[n % 100], id=f"row-{n}") for n in range(count)])
        open_rows(folder)
        sizes[count] = _python_bytes(folder, packed)
    assert (sizes[9000] - sizes[1000]) / 8000 < 40, sizes
