"""Two ranks over DeepSpeed on CPU: resume, equality with one rank, odd sizes, kills, fp32 masters."""

import json
import os
import signal
import time

import pytest
import torch

from models.checkpoint import load_drafter
from training.checkpoints import newest_checkpoint
from training_runs import answer_rows, losses, run_ranks, start_ranks, write_run

SCRIPT = "tests/two_rank_scenarios.py"


def succeed(results):
    for code, _, errors in results:
        assert code == 0, errors[-3000:]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    """Runs every two-rank scenario once; tests read what they left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    # 24 rows, 2 ranks, 2 rows each, 2 micro-batches: 3 steps an epoch, so that both halves end inside an epoch.
    common = dict(
        max_steps=20,
        save_steps=10,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        deepspeed=_zero(2),
        warmup_steps=3,
    )
    for name in ("straight", "split"):
        _make(folder / name, 24, **common)
    _make(folder / "global", 16, max_steps=6, per_device_train_batch_size=2)
    _make(folder / "global-one", 16, max_steps=6, per_device_train_batch_size=4)
    _make(folder / "odd", 3, max_steps=4, per_device_train_batch_size=1)
    _make(
        folder / "bf16", 8, max_steps=100, dtype="bf16", learning_rate=1e-4, lr_scheduler_type="constant",
        init_from_target=False, logging_steps=50, lambda_start=0.5,
    )  # fmt: skip
    succeed(run_ranks(2, SCRIPT, "straight", str(folder)))
    succeed(run_ranks(2, SCRIPT, "resumed", str(folder)))
    return folder


def _zero(stage):
    return f"configs/deepspeed/zero{stage}.json"


def _make(folder, rows, **options):
    folder.mkdir()
    write_run(folder, answer_rows(rows), **options)


@pytest.mark.parametrize("rank", [0, 1])
def test_resume_is_exact_bit_for_bit(scenarios, rank):
    straight = torch.load(scenarios / f"straight-{rank}.pt")
    resumed = torch.load(scenarios / f"resumed-{rank}.pt")
    assert straight.keys() == resumed.keys() and len(straight["moments"]) >= 3
    for name, value in straight.items():
        pairs = zip(value, resumed[name], strict=True) if isinstance(value, list) else [(value, resumed[name])]
        assert all(torch.equal(a, b) for a, b in pairs), name


def test_logged_losses_of_a_resumed_run_are_equal(scenarios):
    straight, split = losses(scenarios / "straight"), losses(scenarios / "split")
    assert len(straight) == 20 and straight == split
    assert len(set(straight)) == 20


def test_one_and_two_ranks_give_the_same_losses(scenarios):
    # Tolerance: fp32 sums in another order, over six steps.
    succeed(run_ranks(1, "training/train_drafter.py", str(scenarios / "global-one" / "config.yaml")))
    assert losses(scenarios / "global-one") == pytest.approx(losses(scenarios / "global"), rel=1e-4)
    # The finished run says so, and costs no training.
    ((code, out, _),) = run_ranks(1, "training/train_drafter.py", str(scenarios / "global-one" / "config.yaml"))
    assert code == 0 and "is finished already" in out
    provenance = json.loads((scenarios / "global-one" / "run" / "drafter" / "provenance.json").read_text())
    assert provenance["engine"] == "DeepSpeedEngine" and provenance["zero_stage"] == 1
    assert provenance["world_size"] == 1 and provenance["steps"] == 6
    assert load_drafter(str(scenarios / "global-one" / "run" / "drafter")).spec.block_size == 4


def test_two_ranks_and_three_rows_do_not_hang(scenarios):
    assert len(losses(scenarios / "odd")) == 4


def test_small_updates_reach_bf16_weights_through_fp32_masters(scenarios):
    """100 updates of 1e-4 on weights of 1: each alone is lost in bf16, whose next number is 0.0078 away."""
    result = json.loads((scenarios / "bf16.json").read_text())
    assert result["dtype"] == "torch.bfloat16" and result["moved"] >= 0.0039


def test_a_kill_in_the_middle_of_a_save_leaves_the_previous_checkpoint(tmp_path):
    _make(tmp_path / "killed", 8, max_steps=6, save_steps=2)
    config, folder = tmp_path / "killed" / "config.yaml", tmp_path / "killed" / "run" / "checkpoints"
    processes = start_ranks(1, SCRIPT, "pause_in_save", str(tmp_path))
    deadline = time.monotonic() + 120
    while not (tmp_path / "paused-0").exists() and processes[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "paused-0").exists(), processes[0].communicate()[1][-3000:]
    os.kill(processes[0].pid, signal.SIGKILL)
    processes[0].communicate()
    unfinished = folder / "unfinished" / "checkpoint-4"
    assert (unfinished / "model.safetensors").exists() and not (unfinished / "trainer_state.json").exists()
    assert newest_checkpoint(str(folder)) == str(folder / "checkpoint-2")
    load_drafter(str(folder / "checkpoint-2"))
    # The next start continues from step 2 and finishes; the leftovers are gone.
    succeed(run_ranks(1, "training/train_drafter.py", str(config)))
    assert not list((folder / "unfinished").iterdir()) and len(losses(tmp_path / "killed")) == 6
    assert (folder / "checkpoint-6" / "trainer_state.json").exists()


@pytest.mark.slow
def test_the_optimizer_counts_beyond_256_steps_after_a_resume(tmp_path):
    options = dict(max_steps=259, dtype="bf16", save_steps=250, logging_steps=100)
    _make(tmp_path / "long", 8, **options)
    succeed(run_ranks(1, SCRIPT, "long_run", str(tmp_path)))
    # Again from step 250: the final checkpoint is set aside.
    (tmp_path / "long" / "run" / "checkpoints" / "checkpoint-259").rename(tmp_path / "set-aside")
    succeed(run_ranks(1, SCRIPT, "long_run", str(tmp_path)))
    assert set(json.loads((tmp_path / "long.json").read_text())) == {259}
