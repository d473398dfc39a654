import json
import random
from pathlib import Path

import pytest
import torch

from data import answers, features
from data.engine_local import answer_batch
from data.engines import Question
from data.feature_index import FeatureIndex
from data.features import FeatureReader, FeatureWriter, gather_taps, resolve_taps
from data.settings import RunConfig
from tiny import VOCAB, tiny_target
from tiny_tokenizer import tiny_tokenizer

TAPS = (0, 2)


def questions(lengths=(3, 17, 9, 1)):
    rng = random.Random(0)
    return [Question(f"q{i}", "d", [rng.randrange(4, VOCAB) for _ in range(n)]) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_features_of_generation_are_those_of_one_forward(family, monkeypatch):
    """Left padding and the cache change nothing; TRAPS 14: all tokens but the last, and no row short."""
    target = tiny_target(family)
    target.tokenizer = tiny_tokenizer()
    kept = {}
    original = features.gather_taps

    def in_fp32(hidden_states, tap_ids, row, start, length):
        columns = [torch.cat([step[t + 1][row] for step in hidden_states])[start : start + length] for t in tap_ids]
        kept[row] = torch.cat(columns, dim=-1)
        return original(hidden_states, tap_ids, row, start, length)

    monkeypatch.setattr(features, "gather_taps", in_fp32)
    rows, taps = answer_batch(target, questions(), TAPS, RunConfig(max_answer_length=15))
    for index, row in enumerate(rows):
        tokens = torch.tensor([row.prompt_ids + row.answer_ids])
        expected = target.forward(tokens, TAPS).taps[0, :-1]
        assert taps[row.id].shape == expected.shape
        assert taps[row.id].dtype == torch.bfloat16
        torch.testing.assert_close(kept[index], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(taps[row.id].float(), expected, rtol=2**-8, atol=1e-4)


def test_rows_that_stop_early_keep_their_own_length():
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    (alone,), _ = answer_batch(target, questions((5,)), (), RunConfig(max_answer_length=12))
    target.eos_ids = (alone.answer_ids[2],)
    rows, taps = answer_batch(target, questions((5, 4, 8)), TAPS, RunConfig(max_answer_length=12))
    assert rows[0].stop == "eos" and len(rows[0].answer_ids) <= 3 < max(len(r.answer_ids) for r in rows)
    for row in rows:
        expected = target.forward(torch.tensor([row.prompt_ids + row.answer_ids]), TAPS).taps[0, :-1]
        torch.testing.assert_close(taps[row.id].float(), expected, rtol=2**-8, atol=1e-4)


def test_a_tap_is_the_output_of_its_layer():
    """TRAPS 22 for the stored form: layer i is hidden_states[i + 1]."""
    steps = [tuple(torch.full((1, n, 2), float(layer)) for layer in range(5)) for n in (3, 1, 1)]
    taps = gather_taps(steps, (0, 2), row=0, start=1, length=4)
    assert taps.tolist() == [[1.0, 1.0, 3.0, 3.0]] * 4


def store(folder, taps=TAPS, **rows):
    folder.mkdir(exist_ok=True)
    answers.write_manifest(str(folder), {"settings": {"tap_ids": list(taps), "target_identity": "abc"}})
    writer = FeatureWriter(str(folder), set())
    for key, length in rows.items():
        writer.write({key: torch.full((length, 4), float(length)), f"{key}-b": torch.zeros(2, 4)})
    return writer


def test_reader_returns_rows_and_refuses_other_features(tmp_path):
    store(tmp_path / "answers", one=3, two=5)
    reader = FeatureReader(str(tmp_path / "answers"), TAPS, "abc")
    assert reader.get("one")[0].tolist() == [[3.0] * 4] * 3
    assert reader.get("two")[0].shape == (5, 4) and reader.get("two")[1] is None
    assert reader.get("two-b")[0].sum() == 0 and reader.get("two-b")[0].shape == (2, 4)
    assert "one" in reader and "three" not in reader and (reader.length("two"), reader.length("three")) == (5, 0)
    with pytest.raises(ValueError, match=r"layers \[0, 2\], this run taps \[1\]"):
        FeatureReader(str(tmp_path / "answers"), (1,))
    with pytest.raises(ValueError, match="target abc, this run has xyz"):
        FeatureReader(str(tmp_path / "answers"), TAPS, "xyz")
    with pytest.raises(ValueError, match="holds no features"):
        FeatureReader(str(tmp_path / "other"))


def test_of_many_entries_of_a_row_the_longest_counts(tmp_path):
    """As a dict of all entries has it, for made-up index files."""
    source, expected, paths = random.Random(0), {}, []
    for rank in range(3):
        lines = []
        for _ in range(200):
            key, length = f"row-{source.randrange(150)} \u00e4", source.randrange(1, 6)
            place = (f"r{rank}-{source.randrange(4):06d}.safetensors", source.randrange(10**12), length)
            lines.append(json.dumps([key, *place]))
            if length > expected.get(key, ("", 0, 0))[2]:
                expected[key] = place
        paths.append(tmp_path / f"r{rank}-index.jsonl")
        paths[-1].write_text("\n".join(lines) + '\n["row-999", "half')
    index = FeatureIndex(paths)
    assert len(index) == len(expected) and {key: index.place(key) for key in expected} == expected
    assert index.place("row-999") is None and FeatureIndex([]).place("row-1") is None


def test_writer_continues_and_drops_what_no_row_names(tmp_path):
    store(tmp_path / "answers", one=3, two=5)
    index = tmp_path / "answers" / "features" / "index.jsonl"
    index.write_text(index.read_text() + '["half", "0000')
    writer = FeatureWriter(str(tmp_path / "answers"), {"one"})
    assert sorted(p.name for p in index.parent.glob("*.safetensors")) == ["000000.safetensors"]
    writer.write({"new": torch.ones(1, 4)})
    reader = FeatureReader(str(tmp_path / "answers"))
    assert reader.get("one")[0].shape == (3, 4) and reader.get("new")[0].shape == (1, 4) and "two" not in reader
    with pytest.raises(ValueError, match="lacks features of 1 answers, such as gone"):
        FeatureWriter(str(tmp_path / "answers"), {"one", "gone"})


def test_size_is_checked_before_the_first_byte(tmp_path, monkeypatch, capsys):
    """TRAPS 52."""
    words = ("keep_features", "pass --keep_features false")
    assert features.check_space(str(tmp_path / "not" / "yet"), 1000, 8, *words) == 16000
    assert "GB of features" in capsys.readouterr().out
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 15999}))
    with pytest.raises(ValueError, match="--keep_features false"):
        features.check_space(str(tmp_path), 1000, 8, *words)
    assert not list(Path(tmp_path).iterdir())


def test_a_full_disk_stops_the_stage_before_it_writes(tmp_path, monkeypatch, capsys):
    from data.regenerate import main
    from tiny_tokenizer import save_tiny_target

    (tmp_path / "p.jsonl").write_text('{"turns": ["hi"]}\n')
    words = ["--target", save_tiny_target(tmp_path / "t"), "--run_dir", str(tmp_path / "run"), "--device", "cpu"]
    words += ["--prompts", str(tmp_path / "p.jsonl"), "--target_layer_ids", "0", "2"]
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 0}))
    config = tmp_path / "c.yaml"
    config.write_text("")
    assert main([str(config), *words]) == 2
    assert "keep_features: up to" in capsys.readouterr().err
    assert not any(p.stat().st_size for p in (tmp_path / "run" / "answers").glob("*.jsonl"))
    assert main([str(config), *words, "--keep_features", "false"]) == 0


def test_taps_come_from_the_options():
    assert resolve_taps(RunConfig(target_layer_ids=[1, 2]), 4) == (1, 2)
    assert resolve_taps(RunConfig(num_draft_layers=5), 36) == (1, 9, 17, 25, 33)
    assert resolve_taps(RunConfig(num_draft_layers=3, num_taps=1), 30) == (15,)
    with pytest.raises(ValueError, match="last"):
        resolve_taps(RunConfig(target_layer_ids=[3]), 4)
