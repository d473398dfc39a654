"""What may change when a run continues, what is refused by name, and what a refused write leaves behind."""

import json
import os
import re
import resource
import time

import pytest
import torch
from safetensors.torch import save_file

from data.answers import target_identity
from data.settings import RunConfig, StageError, load_config
from models.checkpoint import load_drafter
from models.drafter import DFlashDraftModel
from tiny import MASK, tiny_drafter, tiny_target
from trainers import make_trainer
from training import operators, train_drafter
from training.checkpoints import PROVENANCE, RUN_FILE, newest_checkpoint, saving, write_json
from training.plan import prepare
from training.resume import changes
from training_runs import answer_rows, write_run


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    return interrupt(tmp_path_factory.mktemp("interrupted"))


def interrupt(folder, **options):
    """A run with one checkpoint, as it looks to the next start."""
    config = write_run(folder, answer_rows(8), global_batch_size=4, per_device_train_batch_size=4, **options)
    os.environ["DS_ACCELERATOR"] = "cpu"
    plan = prepare(load_config(str(config)))
    checkpoint = folder / "run" / "checkpoints" / "checkpoint-2"
    DFlashDraftModel(plan.drafter_config).save_pretrained(checkpoint)
    (checkpoint / "trainer_state.json").write_text("{}")
    write_json(checkpoint.parent / RUN_FILE, {"semantic": plan.semantic, "operational": plan.operational})
    return config, checkpoint


@pytest.mark.parametrize(
    ("option", "before", "value"),
    [
        ("mask_token_id", MASK, 3),
        ("target_layer_ids", [0, 2], [0, 1]),
        ("block_size", 4, 5),
        ("shift_label", False, True),
        ("head", "domino", "markov_rnn"),
        ("head_rank", 8, 4),
        ("num_draft_layers", 2, 1),
        ("anchors_per_row", 4, 5),
        ("seed", 0, 1),
        ("loss_gamma", 4.0, 3.0),
        ("lambda_end", 0.3, 0.0),
        ("tv_weight", 0.0, 0.5),
        ("position_weights", "exponential", "dpace"),
        ("packing", False, True),
        ("max_row_length", 640, 30),
        ("learning_rate", 0.01, 0.02),
    ],
)
def test_a_changed_semantic_option_is_refused_by_name_with_both_values(interrupted, option, before, value):
    config, checkpoint = interrupted
    with pytest.raises(ValueError) as caught:
        prepare(load_config(str(config), {option: value}))
    assert f"{option} was {before}, is {value}" in str(caught.value) and str(checkpoint) in str(caught.value)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """As `interrupted`, of a run that trains LoRA on another drafter."""
    folder = tmp_path_factory.mktemp("tuned")
    start = str(folder / "start")
    tiny_drafter(tiny_target(), block_size=4, head_type="none").model.save_pretrained(start)
    return *interrupt(folder, init_drafter=start, trainable="lora", lora_rank=4, init_from_target=False), start


def test_options_that_are_dropped_are_refused_too(tuned):
    config, checkpoint, start = tuned
    assert prepare(load_config(str(config))).resume == str(checkpoint)
    with pytest.raises(ValueError) as caught:
        prepare(load_config(str(config), {"init_drafter": "", "trainable": "all"}))
    for change in (f"init_drafter was {target_identity(start)}, is not given", "trainable was lora, is all"):
        assert change in str(caught.value)
    with pytest.raises(ValueError, match="trainable was lora, is all; lora_rank was 4, is 16"):
        prepare(load_config(str(config), {"trainable": "all"}))
    with pytest.raises(ValueError, match="lora_rank was 4, is 8"):
        prepare(load_config(str(config), {"lora_rank": 8}))


def test_a_start_from_the_hub_is_known_by_its_weights(tuned, monkeypatch):
    config, checkpoint, start = tuned
    monkeypatch.setattr("models.formats.folder.snapshot_download", lambda repo, allow_patterns: start)
    assert prepare(load_config(str(config), {"init_drafter": "owner/name"})).resume == str(checkpoint)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("option", "value", "now"),
    [
        ("target_adapter", "1a2b", "not given"),
        ("init_drafter", "3c4d", "not given"),
        ("trainable", "head", "all"),
        ("lora_targets", ["fc"], RunConfig().lora_targets),
        ("an_option_of_old", 3, None),
    ],
)
def test_what_only_the_stored_run_says_is_compared_with_the_default(interrupted, option, value, now, finished):
    """Of a checkpoint and of a finished drafter."""
    config, checkpoint = interrupted
    drafter, content = checkpoint.parents[1] / "drafter", json.loads((checkpoint.parent / RUN_FILE).read_text())
    path = drafter / PROVENANCE if finished else checkpoint.parent / RUN_FILE
    drafter.mkdir(exist_ok=True)
    try:
        write_json(path, {**content, "semantic": {**content["semantic"], option: value}})
        with pytest.raises(ValueError, match=re.escape(f"{option} was {value}, is {now}")):
            prepare(load_config(str(config)))
        if now not in ("not given", None):  # said, and the default
            write_json(path, {**content, "semantic": {**content["semantic"], option: now}})
            assert (prepare(load_config(str(config))) is None) is finished
    finally:
        (drafter / PROVENANCE).unlink(missing_ok=True)
        write_json(checkpoint.parent / RUN_FILE, content)


def test_another_global_batch_is_refused(interrupted):
    with pytest.raises(ValueError, match="batch_size_of_a_step was 4, is 8"):
        prepare(load_config(str(interrupted[0]), {"global_batch_size": 8}))


def test_operational_options_may_change_and_are_said_in_one_line(interrupted, capsys):
    config, checkpoint = interrupted
    assert prepare(load_config(str(config))).resume == str(checkpoint)
    assert "continues with other settings" not in capsys.readouterr().out
    options = dict(
        dataloader_num_workers=2, per_device_train_batch_size=1, save_steps=7, loss_chunk=16, features="online"
    )
    plan = prepare(load_config(str(config), options))
    assert plan.resume == str(checkpoint)
    assert plan.arguments.per_device_train_batch_size == 1 and plan.arguments.gradient_accumulation_steps == 4
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "other settings" in line]
    assert line.startswith(f"train: {checkpoint} continues with other settings: ")
    for change in (
        "dataloader_num_workers None -> 2",
        "features auto -> online",
        "gradient_accumulation_steps 1 -> 4",
        "loss_chunk 32 -> 16",
        "per_device_train_batch_size 4 -> 1",
        "save_steps 100 -> 7",
    ):
        assert change in line


def test_changes_names_both_values():
    assert changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b 2 -> 3", "c None -> 4"]
    assert changes({}, {"a": 1}) == []  # written before operational options were


def test_other_ranks_need_the_universal_form(interrupted, monkeypatch, capsys):
    config, checkpoint = interrupted
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError) as caught:
        prepare(load_config(str(config)))
    assert f"(world_size 1 -> 2); convert it first: python -m training.universal {checkpoint}" in str(caught.value)
    (checkpoint / "latest_universal").write_text("global_step2_universal")
    try:
        plan = prepare(load_config(str(config)))
    finally:
        (checkpoint / "latest_universal").unlink()
    assert plan.arguments.deepspeed["checkpoint"] == {"load_universal": True}
    assert plan.arguments.deepspeed["zero_optimization"]["stage"] == 1
    assert "world_size 1 -> 2 through DeepSpeed's universal form, which is not bit for bit" in capsys.readouterr().out


def write_with_torch(path):
    torch.save({"a": torch.ones(1000)}, path)


def write_with_safetensors(path):
    save_file({"a": torch.ones(1000)}, path)


def write_text(path):
    with open(path, "w") as file:
        file.write("x" * 10000)


@pytest.mark.parametrize("write", [write_with_torch, write_with_safetensors, write_text])
def test_every_refused_write_is_understood(write, tmp_path):
    """A limit of the file size refuses bytes as a full disk does; each library has an error of its own for it."""
    staged = tmp_path / "unfinished" / "checkpoint-4"
    staged.mkdir(parents=True)
    (tmp_path / "checkpoint-2").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(StageError) as caught, saving(str(tmp_path), 4):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            write(str(staged / "file"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "checkpoint 4 could not be saved (" in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"the run continues from {tmp_path / 'checkpoint-2'}")
    assert not (tmp_path / "unfinished").exists()


def test_a_fault_of_ours_is_no_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="size mismatch"), saving(str(tmp_path), 4):
        raise RuntimeError("size mismatch")


def test_a_full_disk_loses_the_unfinished_save_only(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=6)
    trainer.provenance = {"git_commit": "abc"}
    write = type(trainer)._save_optimizer_and_scheduler

    def full(self, folder):
        if self.state.global_step == 4:
            raise OSError(28, "No space left on device")
        write(self, folder)

    monkeypatch.setattr(type(trainer), "_save_optimizer_and_scheduler", full)
    with pytest.raises(StageError, match=r"checkpoint 4 could not be saved \(.*No space left on device\)"):
        trainer.train()
    newest = newest_checkpoint(str(tmp_path / "checkpoints"))
    assert newest == str(tmp_path / "checkpoints" / "checkpoint-2")
    load_drafter(newest)
    provenance = json.loads((tmp_path / "checkpoints" / "checkpoint-2" / PROVENANCE).read_text())
    assert provenance == {"git_commit": "abc", "step": 2}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "/f"), StageError("checkpoint 4 could\nnot")])
def test_a_refused_write_is_one_line_and_exit_code_1(interrupted, monkeypatch, capsys, error):
    from training import session

    def refused(*arguments):
        raise error

    monkeypatch.setattr(train_drafter, "_single_process_defaults", lambda: None)
    monkeypatch.setattr(session, "build", lambda plan: (None, None))
    monkeypatch.setattr(session, "train", refused)
    assert train_drafter.main([str(interrupted[0])]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train:")]
    assert lines == [f"train: {' '.join(str(error).split())}"]


def test_a_cut_target_is_one_line(tmp_path, capsys):
    config = write_run(tmp_path, answer_rows(4))
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert train_drafter.main([str(config)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train:")]
    assert len(lines) == 1 and lines[0].startswith(f"train: target: cannot load {tmp_path / 'target'}: ")


def test_the_mark_of_a_killed_build_is_removed_once_it_is_old(tmp_path, monkeypatch):
    """torch waits for the lock of another build without end and without a word."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / operators.NAME / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    operators.drop_stale_lock()
    assert lock.exists()  # a build that may still be running
    os.utime(lock, (time.time() - 700, time.time() - 700))
    with lock.open():
        operators.drop_stale_lock()
        assert lock.exists()  # a slow one
    operators.drop_stale_lock()
    assert not lock.exists()
