"""The files of a data set: whole or absent, on the disk, nobody else's, the same for the same answers."""

import json
import os
import shutil
from pathlib import Path

import pytest

from data import dataset as stage
from data import shards
from data.answers import AnswerRow, write_manifest
from data.records import Record
from data.rows import open_rows
from dataset_runs import ANSWERS, begin_run, save_target, write_answers
from mistakes import mistake
from test_publish import files_of

SHARD = "data/train-00000-of-00001.parquet"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """The picture takes most of a test's time; tests/test_dataset.py looks at it."""
    monkeypatch.setattr(stage.quality_report, "draw", lambda report, path: path.write_bytes(b"PNG"))


@pytest.fixture
def run(tmp_path, target):
    return begin_run(tmp_path, target)


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
