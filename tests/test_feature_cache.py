"""The stage `features` and the sources of hidden states: what is stored, resumed, refused, and the same losses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import answers, feature_cache, features, make_features
from data.answers import check_origin
from data.batches import collate
from data.feature_cache import FeatureCache, row_key
from data.settings import load_config
from models.quantization import precision_name
from models.target import load_target
from tiny import tiny_drafter
from training.forward import block_loss
from training.objective import Objective, Terms
from training.plan import build_data
from training.slot_loss import Mixture
from training_runs import answer_rows, write_run

ROWS = answer_rows(7)
QUANTIZATIONS = ("none", "bnb-int8", "bnb-nf4")
TAPS = [0, 2]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, ROWS)


def stage(config, *words):
    return make_features.main([str(config), *words])


def cache_of(config, rows=ROWS):
    folder = str(config.parent / "run" / "cache")
    settings = answers.read_manifest(folder)["settings"]
    return FeatureCache(folder, settings, 640), settings


def test_the_stage_stores_taps_and_final_hidden_states(run, capsys):
    assert stage(run) == 0
    tokens = sum(len(r.prompt_ids) + len(r.answer_ids) - 1 for r in ROWS)
    output = capsys.readouterr().out
    assert f"up to {tokens * 3 * 32 * 2 / 1e9:.2f} GB of features" in output and f"features: {len(ROWS)} rows" in output
    target = load_target(str(run.parent / "target"), torch.float32)
    cache, settings = cache_of(run)
    assert settings["tap_ids"] == TAPS and answers.read_manifest(cache.folder)["finished"] is True
    for row in ROWS:
        expected = target.forward(torch.tensor([row.prompt_ids + row.answer_ids]), (0, 2), with_final=True)
        taps, final = cache.get(row)
        assert taps.dtype == final.dtype == torch.bfloat16
        torch.testing.assert_close(taps.float(), expected.taps[0, :-1], rtol=2**-8, atol=1e-4)
        torch.testing.assert_close(final.float(), expected.final[0, :-1], rtol=2**-8, atol=1e-4)


def test_a_killed_stage_goes_on_where_it_stopped(run, monkeypatch):
    monkeypatch.setattr(feature_cache, "_SHARD_BYTES", 1)  # a shard for each row
    write = features.FeatureWriter.write

    def dies(self, *arguments):
        if self.count == 3:
            (self.folder / "000003.safetensors.partial").write_text("half")
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(features.FeatureWriter, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        stage(run)
    monkeypatch.setattr(features.FeatureWriter, "write", write)
    cache, _ = cache_of(run)
    assert len(cache.missing(ROWS)) == 4 and not answers.read_manifest(cache.folder)["finished"]
    stored = [path.stat().st_mtime_ns for path in sorted(Path(cache.folder, "features").glob("*.safetensors"))]
    assert stage(run) == 0
    shards = sorted(Path(cache.folder, "features").glob("*.safetensors*"))
    assert [path.stat().st_mtime_ns for path in shards[:3]] == stored and len(shards) == 7
    cache, _ = cache_of(run)
    assert not cache.missing(ROWS) and answers.read_manifest(cache.folder)["finished"]


def test_two_ranks_share_the_rows_and_the_last_one_finishes(run, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, finished in ((1, False), (0, True)):
        monkeypatch.setenv("RANK", str(rank))
        assert stage(run) == 0
        assert answers.read_manifest(str(run.parent / "run" / "cache"))["finished"] is finished
    names = {path.name for path in (run.parent / "run" / "cache" / "features").iterdir()}
    assert names == {"index.jsonl", "000000.safetensors", "r1-index.jsonl", "r1-000000.safetensors"}


def test_the_disk_is_asked_before_the_first_byte(run, monkeypatch, capsys):
    """TRAPS 52."""
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 0}))
    assert stage(run) == 2
    assert "features: features: up to 0.00 GB of features, 0.0 GB free" in capsys.readouterr().err
    assert not (run.parent / "run" / "cache").exists()


def test_other_taps_target_or_template_are_refused(run, capsys):
    """TRAPS 29 for the template."""
    assert stage(run) == 0
    assert stage(run, "--target_layer_ids", "1", "2") == 2
    assert "cache was made with tap_ids [0, 2], this run has [1, 2]: delete it" in capsys.readouterr().err
    manifest = run.parent / "run" / "cache" / "manifest.json"
    for name in ("template", "target_identity"):
        content = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**content, "settings": {**content["settings"], name: "other"}}))
        assert stage(run) == 2
        assert f"was made with {name} other, this run has" in capsys.readouterr().err
        manifest.write_text(json.dumps(content))


def test_answers_asked_through_another_template_are_refused():
    now = {"target_identity": "a", "template": "new"}
    check_origin({"settings": {"target_identity": "a", "template": "new"}}, now, "F")
    with pytest.raises(ValueError, match="F are those of chat template old, this run has new"):
        check_origin({"settings": {"target_identity": "a", "template": "old"}}, now, "F")


@pytest.mark.parametrize("made", QUANTIZATIONS)
@pytest.mark.parametrize("now", QUANTIZATIONS)
def test_answers_of_a_quantised_target_are_anothers(made, now):
    """Their taps train a drafter for it. The plain precision may differ."""
    settings = {"target_identity": "a", "template": "t", "dtype": precision_name(torch.bfloat16, made)}
    needed = {"target_identity": "a", "template": "t", "quantization": now}
    if made == now:
        check_origin({"settings": settings}, needed, "F")
        return
    with pytest.raises(ValueError, match=f"F are those of a target with quantization {made}, this run has {now}"):
        check_origin({"settings": settings}, needed, "F")


def test_of_a_row_of_several_ranks_the_longest_entry_counts(run):
    """Rank 1 stored it under a smaller limit; an index that is read later must not hide the whole one."""
    assert stage(run) == 0
    cache, settings = cache_of(run)
    whole = cache.get(ROWS[0])[0].clone()
    cut = features.FeatureWriter(cache.folder, None, rank=1)
    cut.write({row_key(ROWS[0]): whole[:5] + 1}, {row_key(ROWS[0]): whole[:5, :32]})
    cache, _ = cache_of(run)
    assert not cache.missing(ROWS) and torch.equal(cache.get(ROWS[0])[0], whole)


def test_an_answer_written_anew_is_another_row(run):
    assert stage(run) == 0
    changed = type(ROWS[0])(ROWS[0].id, "d", ROWS[0].prompt_ids, [*ROWS[0].answer_ids[:-1], 9], "length")
    cache, _ = cache_of(run)
    assert row_key(changed) != row_key(ROWS[0]) and list(cache.missing([changed, *ROWS])) == [changed]
    # A row that was stored under a smaller limit lacks its end.
    cache.limit = 10
    assert not cache.missing(ROWS)


def test_a_row_that_is_there_is_not_stored_again(run):
    """A hybrid step captures a whole batch for the one row that it lacks."""
    assert stage(run) == 0
    cache, settings = cache_of(run)
    index = Path(cache.folder, "features", "index.jsonl")
    new = [type(row)(f"new-{row.id}", "d", row.prompt_ids, row.answer_ids, "eos") for row in ROWS[:2]]
    writer = FeatureCache(cache.folder, settings, 640, writing=True)
    before = len(index.read_text().splitlines())
    features = {row.id: [torch.full((len(row.prompt_ids + row.answer_ids), n), 9.0) for n in (64, 32)] for row in ROWS}
    for row in (*ROWS, new[0], new[0]):
        writer.add(row, *features[row.id.removeprefix("new-")])
    writer.flush()
    writer.add(new[0], *features[ROWS[0].id])  # on disk since, and not looked for again
    writer.add(new[1], *features[ROWS[1].id])
    writer.flush()
    lines = [json.loads(line)[0] for line in index.read_text().splitlines()[before:]]
    assert lines == [row_key(row) for row in new]
    cache, _ = cache_of(run)
    assert cache.get(ROWS[0])[0].max() != 9.0 and (cache.get(new[0])[0] == 9.0).all()


def losses(config, epochs=2, terms=None, **options):
    """Losses of some plain gradient steps, and the target's forwards in each epoch."""
    config = load_config(str(config), options)
    target = load_target(config.target, torch.float32)
    model = tiny_drafter(target, block_size=4, scale=0.3).model.requires_grad_(True)
    settings = feature_cache.cache_settings(target, config.target, TAPS)
    data = build_data(config, ROWS, settings, target, flex=False)
    objective, optimizer = Objective(target, None, 32, terms), torch.optim.SGD(model.parameters(), 1e-3)
    seen, forwards = [], []
    for epoch in range(epochs):
        data.set_epoch(epoch)
        before = target.forwards
        for start in range(0, len(data), 3):
            rows = [data[i] for i in range(start, min(len(data), start + 3))]
            options = data.collate_options()
            batch = collate(rows, 4, 3, 2, 4.0, teacher=objective.needs_teacher, **options)
            optimizer.zero_grad()
            loss = block_loss(model, model, objective, batch, 0.3, data.source).numerator
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        forwards.append(target.forwards - before)
    return seen, forwards


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("terms", [None, Terms(Mixture(0.2, 0.3, 0.5, 8))], ids=["ce", "kl+tv"])
def test_losses_are_the_same_wherever_features_come_from(run, packing, terms):
    weights = {} if terms is None else {"kl_weight": 0.3, "tv_weight": 0.5}
    options = dict(terms=terms, packing=packing, max_row_length=60, **weights)
    online, forwards = losses(run, features="online", **options)
    assert forwards[0] > 0 and forwards[1] == forwards[0]
    hybrid, forwards = losses(run, features="hybrid", **options)
    assert forwards[0] > 0 and forwards[1] == 0
    again, forwards = losses(run, features="hybrid", **options)
    assert forwards == [0, 0]
    offline, forwards = losses(run, features="offline", **options)
    assert forwards == [0, 0]
    # Hybrid rounds as it stores: bit for bit. Its rows are not cut at the last anchor, so that sums have another order.
    assert hybrid == again and hybrid == pytest.approx(offline, rel=1e-5)
    # Online in fp32 differs by the rounding of features to bf16.
    assert online == pytest.approx(offline, rel=2e-3)
    assert len(set(online)) == len(online) and online != offline


def test_offline_needs_every_row_and_names_the_command(run):
    with pytest.raises(ValueError, match="lacks 7 of 7 rows, such as row-0; run: bash launch.sh features CONFIG"):
        losses(run, features="offline")


def test_a_cache_that_lacks_only_rows_which_are_never_trained_is_whole(run):
    """A hybrid run stores what it trains; a row without two adjacent answer tokens is not among it."""
    config = load_config(str(run))
    target = load_target(config.target, torch.float32)
    settings = feature_cache.cache_settings(target, config.target, TAPS)
    cache = FeatureCache(config.path("cache"), settings, 640, writing=True)
    make_features.fill(cache, target, TAPS, ROWS, 4)
    barren = type(ROWS[0])("barren", "d", [3, 4], [5], "length")
    for kind, name in (("auto", "offline"), ("offline", "offline"), ("hybrid", "hybrid")):
        data = build_data(replace(config, features=kind), [barren, *ROWS], settings, target, flex=False)
        assert (data.source.name, data.skipped, len(data)) == (name, 1, len(ROWS))
        assert data.source.complete(data.documents.rows)


def test_auto_takes_a_whole_cache_and_else_the_target(run):
    assert losses(run)[1] == [3, 3]
    assert stage(run) == 0
    assert losses(run)[1] == [0, 0]
    assert losses(run, features="online")[1] == [3, 3]
