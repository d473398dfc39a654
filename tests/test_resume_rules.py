"""What may change when a run continues, and what is refused by name."""

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace

import pytest

from data.answers import target_identity
from data.settings import RunConfig, StageError, load_config
from models.drafter import DFlashDraftModel
from tiny import MASK, tiny_drafter, tiny_target
from training import operators, train_drafter
from training.checkpoints import (
    PROVENANCE,
    RUN_FILE,
    check_same_run,
    semantic_options,
    write_json,
)
from training.plan import prepare
from training.resume import changes
from training_runs import ROOT, answer_rows, write_run


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
        ("dataloader_drop_last", False, True),
        ("optim_args", None, "a=1"),
        ("accelerator_config", None, {"split_batches": True}),
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


def test_another_quantization_is_refused(interrupted):
    """Hidden states of a quantised target are another's. A run from before the option had none."""
    plan = prepare(load_config(str(interrupted[0])))
    now, stored = dict(plan.semantic), dict(plan.semantic)
    assert stored.pop("quantization") == "none"
    check_same_run(stored, now, "F")
    config = replace(plan.config, quantization="bnb-nf4")
    quantised = semantic_options(config, plan.arguments, plan.spec.target_layer_ids, 1, answer_rows(8))
    for before in (stored, now):
        with pytest.raises(ValueError, match=r"F belongs .*\(quantization was none, is bnb-nf4\)"):
            check_same_run(before, quantised, "F")


def test_options_from_before_they_existed_had_transformers_defaults(interrupted):
    now = prepare(load_config(str(interrupted[0]))).semantic
    new = ("dataloader_drop_last", "optim_args", "accelerator_config")
    check_same_run({name: value for name, value in now.items() if name not in new}, now, "F")


def engine(path, **changed):
    """The DeepSpeed JSON with other contents. Returns its path."""
    content = json.loads((ROOT / "configs/deepspeed/zero1.json").read_text())
    path.write_text(json.dumps(content | changed))
    return str(path)


def test_the_contents_of_the_deepspeed_json_are_said(interrupted, tmp_path, capsys):
    """Its name may change, what it holds is told value by value; an optimizer of its own is another run."""
    config = interrupted[0]
    prepare(load_config(str(config), {"deepspeed": engine(tmp_path / "same.json")}))
    assert "continues with other settings" not in capsys.readouterr().out
    zero = {"stage": 1, "overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": 7}
    types = {"grad_accum_dtype": "fp32"}
    path = engine(tmp_path / "other.json", zero_optimization=zero, data_types=types)
    prepare(load_config(str(config), {"deepspeed": path}))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "other settings" in line]
    assert line.endswith(
        ": deepspeed_json.data_types.grad_accum_dtype None -> fp32; "
        "deepspeed_json.zero_optimization.allgather_bucket_size 50000000 -> None; "
        "deepspeed_json.zero_optimization.reduce_bucket_size 50000000 -> 7"
    )
    path = engine(tmp_path / "adam.json", optimizer={"type": "Adam"})
    with pytest.raises(ValueError, match=r"deepspeed_optimizer was None, is {'type': 'Adam'}"):
        prepare(load_config(str(config), {"deepspeed": path}))


def test_going_back_is_refused_while_later_checkpoints_are_there(tmp_path):
    """They would win over the new run's own: at its next start, and when old checkpoints are deleted."""
    config, earlier = interrupt(tmp_path)
    folder = earlier.parent
    for step in (10, 9):
        shutil.copytree(earlier, folder / f"checkpoint-{step}")
    for step in (10, 9, 2):
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    back = {"resume_from_checkpoint": str(earlier)}
    with pytest.raises(ValueError) as caught:
        prepare(load_config(str(config), back))
    message, command = str(caught.value).split("; move them away first: ")
    assert f"{folder} holds checkpoint-9, checkpoint-10 behind {earlier}" in message
    assert prepare(load_config(str(config))).resume == str(folder / "checkpoint-10")
    subprocess.run(command, shell=True, check=True)
    assert prepare(load_config(str(config), back)).resume == str(earlier)
    assert prepare(load_config(str(config))).resume == str(earlier)


def test_another_global_batch_is_refused(interrupted):
    with pytest.raises(ValueError, match="batch_size_of_a_step was 4, is 8"):
        prepare(load_config(str(interrupted[0]), {"global_batch_size": 8}))


def test_operational_options_may_change_and_are_said_in_one_line(interrupted, capsys):
    config, checkpoint = interrupted
    assert prepare(load_config(str(config))).resume == str(checkpoint)
    assert "continues with other settings" not in capsys.readouterr().out
    options = dict(
        dataloader_num_workers=2, per_device_train_batch_size=1, save_steps=7, loss_chunk=16, features="online",
        trust_remote_code=True,
    )  # fmt: skip
    plan = prepare(load_config(str(config), options))
    assert plan.resume == str(checkpoint)
    assert plan.arguments.per_device_train_batch_size == 1 and plan.arguments.gradient_accumulation_steps == 4
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "other settings" in line]
    assert line.startswith(f"train: {checkpoint} continues with other settings: ")
    for change in (
        "dataloader_num_workers 0 -> 2",
        "features auto -> online",
        "gradient_accumulation_steps 1 -> 4",
        "loss_chunk 32 -> 16",
        "per_device_train_batch_size 4 -> 1",
        "save_steps 100 -> 7",
        "trust_remote_code False -> True",
    ):
        assert change in line
    assert line.count(" -> ") == 7


def test_changes_names_both_values():
    assert changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b 2 -> 3"]  # c did not exist yet
    assert changes({"a": 1}, {"a": 1, "logging_steps": 3.0}) == ["logging_steps 500 -> 3"]
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
