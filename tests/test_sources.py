"""Sources: files of every kind, whole and broken, and data sets of the Hub (faked)."""

import gzip
import json
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data import local_files
from data.conversations import prompt_of
from data.local_files import files_of, identity, known_rows, rows_of
from data.prompt import Unusable, parsed
from data.settings import StageError
from data.sources import open_source, shuffled


def read(path):
    """[(where, row or the reason why it is none)] of a file."""
    return [(where, row.reason if isinstance(row, Unusable) else row) for where, row in rows_of(str(path))]


def test_a_bad_line_is_one_skip_and_the_next_one_follows(tmp_path):
    path = tmp_path / "rows.jsonl"
    deep = b"[" * 100_000
    lines = [b'\xef\xbb\xbf{"n": 1}', b"{broken", b"", b'{"n": "\xff"}', deep, b'{"n": 2}', b'{"n": 3']
    path.write_bytes(b"\n".join(lines))
    assert read(path) == [
        ("line 1", {"n": 1}),
        ("line 2", "not JSON"),
        ("line 4", "not UTF-8"),
        ("line 5", "not JSON"),
        ("line 6", {"n": 2}),
        ("line 7", "not JSON"),
    ]


def test_a_line_of_any_length_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(local_files, "LONGEST_LINE", 64)
    path = tmp_path / "rows.jsonl"
    fits = {"n": "x" * (64 - len('{"n": ""}\n'))}
    path.write_text("".join(json.dumps(row) + "\n" for row in (fits, {"n": "x" * 300}, {"n": 2}, {"n": "x" * 55})))
    where, kinds = zip(*read(path), strict=True)
    assert where == ("line 1", "line 2", "line 3", "line 4")
    assert kinds == (fits, "a line that is too long", {"n": 2}, "a line that is too long")


def test_gzip_is_read_as_what_is_inside(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n{"n": 2}\n'))
    assert [row for _, row in read(path)] == [{"n": 1}, {"n": 2}]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match="rows.jsonl.gz is no whole gzip file"):
        read(path)


@pytest.mark.parametrize("where", [12, 60])
def test_broken_gzip_is_one_line(tmp_path, where):
    """Bytes that are no deflate stream raise zlib's own error."""
    path = tmp_path / "rows.jsonl.gz"
    content = bytearray(gzip.compress("".join(f'{{"n": {n * 7919 % 1000}}}\n' for n in range(1000)).encode()))
    content[where : where + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(ValueError, match="rows.jsonl.gz is no whole gzip file"):
        read(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_number_of_too_many_digits_costs_its_row(tmp_path, monkeypatch, name):
    monkeypatch.setattr(local_files, "_CHUNK", 1000)  # the number comes in pieces
    rows = ['{"n": 1}', '{"n": {"m": [' + "9" * 5000 + "]}}", '{"n": 2}']
    path = tmp_path / name
    path.write_text("\n".join(rows) if name == "rows.jsonl" else f"[{', '.join(rows)}]")
    assert [row for _, row in read(path)] == [{"n": 1}, "not JSON", {"n": 2}]
    with pytest.raises(Unusable, match="strange calls"):
        parsed(rows[1], "strange calls")


@pytest.mark.parametrize("piece", [3, 7, 64, 1 << 20])
def test_an_array_is_read_in_pieces(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(local_files, "_CHUNK", piece)
    rows = [{"text": "naïve [1, 2] 日本"}, {"text": "]"}, 12, ["x"], "word", {"a": {"b": [1.5, None, True]}}]
    for indent in (None, 2):
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=indent), encoding="utf-8")
        assert read(path) == [(f"row {n}", row) for n, row in enumerate(rows)]


def test_what_follows_a_broken_place_of_an_array_is_one_skip(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"n": 1}, {"n": 2}, {"n": 3')
    assert read(path) == [("row 0", {"n": 1}), ("row 1", {"n": 2}), ("row 2 and all after it", "not JSON")]
    path.write_bytes(b'[{"n": "\xff"}, {"n": 2}]')
    (_, first), second = read(path)
    assert first["n"].encode("utf-8", "surrogateescape") == b"\xff" and second == ("row 1", {"n": 2})
    path.write_text("[]")
    assert read(path) == []


def test_json_without_an_array_is_read_by_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    assert [row for _, row in read(path)] == [{"n": 1}, {"n": 2}]


CALLS = [[{"name": "add", "arguments": {"a": 1, "b": None}}], [{"name": "say", "arguments": {"text": "x"}}], None]
ROWS = [{"n": n, "calls": calls} for n, calls in enumerate(CALLS)]
# A columnar file gives every object the keys of all: those that are null are left out again.
FULL = [
    {"n": 0, "calls": [{"name": "add", "arguments": {"a": 1}}]},
    {"n": 1, "calls": [{"name": "say", "arguments": {"text": "x"}}]},
    {"n": 2, "calls": None},
]


def test_parquet_and_both_forms_of_arrow(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=2)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=2)
    for name in ("rows.parquet", "file.arrow", "stream.arrow"):
        assert read(tmp_path / name) == [(f"row {n}", row) for n, row in enumerate(FULL)], name
    assert known_rows([str(tmp_path / "rows.parquet")] * 2) == 6
    assert known_rows([str(tmp_path / "rows.parquet"), str(tmp_path / "file.arrow")]) is None


def test_unlike_messages_that_datasets_keeps_as_json_are_messages_again(tmp_path):
    calls = [{"function": {"name": "add", "arguments": {"a": 1, "b": None}}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    rows = [{"messages": messages}, {"messages": None}, {"messages": [{"role": "user", "content": ["part"]}]}]
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    data = datasets.Dataset.from_list(rows, features=features)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    for path in (tmp_path / "saved", tmp_path / "rows.parquet"):
        assert [row for _, row in open_source(str(path)).rows()] == rows, path
    turn = prompt_of({"messages": [*messages, {"role": "tool", "content": "1"}]}, "d").turns[0]
    assert turn[1]["tool_calls"] == calls


def test_streams_of_the_hub_leave_out_the_nulls_of_a_schema_but_not_those_of_json(tmp_path, monkeypatch):
    text, struct = datasets.Value("string"), {"a": datasets.Value("int64"), "b": datasets.Value("int64")}
    features = datasets.Features({"n": text, "args": [struct], "json": datasets.List(datasets.Json())})
    rows = [{"n": None, "args": [{"a": 1, "b": None}], "json": [{"a": None}, {"c": [None, 2]}]}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    files = {"train": str(tmp_path / "rows.parquet")}
    builder = datasets.load_dataset_builder("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **more: builder)
    assert list(open_source("some/set").rows()) == [("row 0", {**rows[0], "args": [{"a": 1}]})]
    assert [row for _, row in open_source(files["train"]).rows()] == [{**rows[0], "args": [{"a": 1}]}]


def test_broken_parquet_is_refused_or_skipped_in_part(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"text": f"{n} " * 200} for n in range(30)]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, row_group_size=10, use_dictionary=False, compression="none",
        write_page_checksum=True,
    )  # fmt: skip
    whole = path.read_bytes()
    page = whole.index(b"15 15 15")  # within the second group
    path.write_bytes(whole[: page - 3000] + b"\xff" * 3000 + whole[page:])
    found = read(path)
    assert [where for where, _ in found] == [f"row {n}" for n in range(30)]
    assert [row for _, row in found[:10] + found[20:]] == rows[:10] + rows[20:]
    assert {reason for _, reason in found[10:20]} == {"an unreadable part of the file"}
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match="rows.parquet is no whole Parquet file"):
        read(path)
    (tmp_path / "rows.arrow").write_bytes(b"no arrow")
    with pytest.raises(ValueError, match="rows.arrow is no Arrow file"):
        read(tmp_path / "rows.arrow")


def test_a_column_that_is_no_utf8_costs_its_row(tmp_path):
    raw = pyarrow.array([b"one", b"\xff", b"three"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    assert [row for _, row in read(path)] == [{"text": "one"}, "an unreadable row", {"text": "three"}]


def test_folders_and_patterns_name_files_in_order(tmp_path):
    folder = tmp_path / "logs"
    (folder / "b").mkdir(parents=True)
    for name in ("b/2.jsonl", "1.jsonl", "3.parquet.txt", "dataset_info.json"):
        (folder / name).write_text(f'{{"text": "{name}"}}\n')
    wanted = [str(folder / "1.jsonl"), str(folder / "b/2.jsonl")]
    assert files_of(str(folder)) == wanted and files_of(str(folder / "**/*.jsonl")) == wanted
    source = open_source(str(folder))
    assert [where for where, _ in source.rows()] == ["1.jsonl line 1", "2.jsonl line 1"]
    assert (source.domain, open_source(str(folder / "*.jsonl")).domain) == ("logs", "logs")
    assert open_source(str(folder / "1.jsonl")).domain == "1"
    assert list(source.rows()) == list(source.rows())  # a source can be read again
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="the folder .*empty holds no file of .jsonl"):
        open_source(str(tmp_path / "empty"))


def test_a_saved_dataset_is_a_folder_of_arrow(tmp_path):
    datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}]).save_to_disk(tmp_path / "saved")
    assert [row for _, row in open_source(str(tmp_path / "saved")).rows()] == [{"text": "one"}, {"text": "two"}]


def test_files_that_change_are_another_version(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n')
    first = identity([str(path)])
    path.write_text('{"n": 2}\n')
    assert identity([str(path)]) != first
    path.write_text('{"n": 1}\n')
    (tmp_path / "moved").mkdir()
    assert identity([str(path.rename(tmp_path / "moved" / "rows.jsonl"))]) == first


def test_an_edit_anywhere_in_a_large_file_is_another_version(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n' * 100_000)
    first = identity([str(path)])
    assert identity([str(path)]) == first
    with open(path, "r+b") as file:
        file.seek(9 * 30_000)
        file.write(b'{"n": 2}')
    assert identity([str(path)]) != first


@pytest.mark.parametrize(
    "name", ["absent.jsonl", "./absent", "/absent/x.parquet", "~/absent.json", "no/*.arrow", "a.jsonl.gz"]
)
def test_a_file_that_is_not_there_is_not_sought_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **more: pytest.fail("the Hub was asked"))
    with pytest.raises(ValueError, match="prompts: no such file"):
        open_source(name)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeBuilder:
    """What `load_dataset_builder` gives: the splits, where they come from, and streams of rows."""

    def __init__(self, rows, splits=("train", "test")):
        self.rows, self.base_path = rows, f"hf://datasets/some/set@{COMMIT}/data"
        self.info = SimpleNamespace(splits={name: SimpleNamespace(num_examples=len(rows)) for name in splits})

    def as_streaming_dataset(self, split):
        def stream():
            for row in self.rows:
                if isinstance(row, Exception):
                    raise row
                yield {"split": split, **row}

        return stream()


@pytest.fixture
def hub(monkeypatch):
    """Calls of `load_dataset_builder`; the builder is FakeBuilder over `hub.rows`."""
    hub = SimpleNamespace(calls=[], rows=[{"text": "one", "more": {"a": 1, "b": None}}, {"text": "two", "more": None}])

    def load(*args, **more):
        hub.calls.append((args, more))
        return FakeBuilder(hub.rows)

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    return hub


def test_a_hub_id_may_name_configuration_split_and_revision(hub):
    source = open_source("some/set:main@test#v2")
    assert hub.calls == [(("some/set", "main"), {"revision": "v2"})]
    assert list(source.rows()) == [
        ("row 0", {"split": "test", "text": "one", "more": {"a": 1, "b": None}}),
        ("row 1", {"split": "test", "text": "two", "more": None}),
    ]
    assert (source.domain, source.count, source.version) == ("set", 2, COMMIT)
    for name, split, wanted in (
        ("some/set", "train", "train"),
        ("some/set", "eval", "test"),
        ("set@test", "train", "test"),
    ):
        assert next(open_source(name, split).rows())[1]["split"] == wanted
    # A longer run reads the commit that a shorter one has read, unless the source names one.
    open_source("some/set", version=COMMIT)
    open_source("some/set#v2", version=COMMIT)
    assert [more["revision"] for _, more in hub.calls[-2:]] == [COMMIT, "v2"]


def test_mistakes_in_hub_ids_are_one_line(hub, monkeypatch):
    with pytest.raises(ValueError, match="some/set has no split 'valid'; write some/set@SPLIT with one of train, test"):
        open_source("some/set@valid")
    with pytest.raises(ValueError, match=r"'a/b/c' is no file, and no OWNER/NAME"):
        open_source("a/b/c")

    def offline(*args, **more):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    with pytest.raises(
        ValueError, match="'some/set' is no file and no data set that can be reached: no route"
    ) as error:
        open_source("some/set")
    assert "\n" not in str(error.value)


def test_a_stream_that_breaks_is_no_shorter_data_set(hub):
    hub.rows = [{"text": "one"}, ConnectionError("reset")]
    with pytest.raises(StageError, match="some/set cannot be read beyond row 1: reset"):
        list(open_source("some/set").rows())


def test_local_builders_of_datasets_stream_as_the_hub_does(tmp_path, monkeypatch):
    """The real builder of the library, over a file of this machine in place of the Hub's."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    builder = datasets.load_dataset_builder("json", data_files={"train": str(path)}, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **more: builder)
    source = open_source("some/set")
    assert list(source.rows()) == [("row 0", {"text": "one"}), ("row 1", {"text": "two"})]
    assert (source.count, source.version) == (None, "")
    with pytest.raises(ValueError, match="'some/set@valid' cannot be read at split 'valid'"):
        open_source("some/set@valid")


def test_a_shuffled_source_keeps_its_rows_and_its_order_for_a_seed():
    rows = [(f"row {n}", n) for n in range(100)]
    first, again = list(shuffled(iter(rows), 10, "seed")), list(shuffled(iter(rows), 10, "seed"))
    assert first == again and sorted(first) == sorted(rows) and first != rows
    assert list(shuffled(iter(rows), 10, "other")) != first
    assert list(shuffled(iter(rows), 0, "seed")) == rows and sorted(shuffled(iter(rows[:5]), 10, "seed")) == rows[:5]
    # What leaves does not depend on how many rows are still to come.
    longer = list(shuffled(iter(rows + [("row 100", 100)] * 50), 10, "seed"))
    assert longer[:90] == first[:90]
