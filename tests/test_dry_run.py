"""`--dry_run`: right sizes without a process group, a loaded weight or a written byte."""

import pytest
import torch

from models.target import load_target
from tiny import tiny_drafter
from training import train_drafter
from training.dry_run import state_bytes
from training.objective import Objective
from training_runs import answer_rows, write_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return write_run(tmp_path, answer_rows(10), global_batch_size=4, per_device_train_batch_size=2, num_taps=0)


def said(capsys, config, *words) -> dict[str, str]:
    assert train_drafter.main([str(config), "--dry_run", *words]) == 0
    assert not torch.distributed.is_initialized()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    return {line[2:36].strip(): line[36:].strip() for line in lines}


def test_sizes_are_those_of_the_run(run, capsys):
    files = sorted(run.parent.rglob("*"))
    figures = said(capsys, run, "--max_steps", "9", "--save_total_limit", "2")
    assert sorted(run.parent.rglob("*")) == files
    target = load_target(str(run.parent / "target"), torch.float32)
    drafter = tiny_drafter(target, block_size=4).model
    parameters = sum(p.numel() for p in drafter.parameters())
    heads = sum(p.numel() for n, p in drafter.named_parameters() if n.startswith(("prefix_gru", "embed_proj")))
    assert figures["drafter"] == f"{parameters:,}, {parameters:,} of them trained"
    assert figures["drafter, heads"] == f"{heads:,}"
    assert figures["target, frozen"] == f"{sum(p.numel() for p in target.model.parameters()):,}"
    assert figures["rows of a step"] == "4 = 2 x 2 accumulated x 1 ranks"
    assert figures["rows"] == "10 of 10 conversations, 0 skipped"
    assert figures["steps"] == "9, 3 an epoch, 3.00 epochs"
    assert figures["block slots of a step"] == "64 (16 anchors)"
    tokens = sum(len(r.prompt_ids) + len(r.answer_ids) for r in answer_rows(10))
    assert figures["context tokens of a step"] == f"{4 * tokens / 10:,.0f}"
    assert figures["a checkpoint"].endswith("kept: 3 at once") and "ZeRO-1 on 1 ranks, this run" in figures


def test_before_there_are_answers_sizes_are_limits(run, capsys):
    config = run.parent / "other"
    figures = said(capsys, run, "--run_dir", str(config), "--num_prompts", "1000000")
    assert figures["tokens and steps"].startswith("unknown before there are answers")
    # 1M rows of at most 512 + 128 tokens, two taps of 32 numbers of two bytes.
    assert figures["taps beside the answers"] == f"at most {1e6 * 640 * 2 * 32 * 2 / 1e9:.2f} GB"
    assert not config.exists()


def test_packed_rows_and_partial_training_are_counted(run, capsys):
    packed = said(capsys, run, "--packing", "--max_row_length", "100")
    assert packed["rows"].endswith("of 10 conversations, 0 skipped") and not packed["rows"].startswith("10")


def test_a_small_vocabulary_makes_larger_chunks(run, capsys):
    """As many slots as 64 MiB of fp32 logits hold, of the tokens that the drafter can propose."""
    figures = said(capsys, run, "--loss_chunk", "0", "--draft_vocab_size", "16")
    assert figures["the loss's logits, fp32"] == "0.06 GiB an array (1048576 slots x 16 tokens)"
    target = load_target(str(run.parent / "target"), torch.float32)
    assert Objective(target, torch.arange(16)).chunk == 1048576
    whole = said(capsys, run, "--loss_chunk", "0")
    assert whole["the loss's logits, fp32"] == "0.06 GiB an array (262144 slots x 64 tokens)"


@pytest.mark.parametrize("kind", ["adapter", "gguf"])
def test_no_target_is_merged_or_converted(run, capsys, monkeypatch, tmp_path, kind):
    plain = said(capsys, run)
    words = ["--cache_dir", str(tmp_path / "cache")]
    if kind == "adapter":
        words += ["--target_adapter", str(tmp_path / "lora")]
    else:
        (tmp_path / "mine.gguf").touch()
        words += ["--target", str(tmp_path / "mine.gguf")]
        folder = str(run.parent / "target")
        monkeypatch.setattr("models.target._source", lambda path: (folder, {}) if path.endswith(".gguf") else 1 / 0)
    figures = said(capsys, run, *words)
    assert figures["drafter"] == plain["drafter"] and figures["target, frozen"] == plain["target, frozen"]
    assert not (tmp_path / "cache").exists()


def test_a_mistake_is_still_a_mistake(run, capsys):
    assert train_drafter.main([str(run), "--dry_run", "--mask_token_id", "none"]) == 2
    assert "mask_token_id is not set" in capsys.readouterr().err


def test_state_of_a_rank_by_stage():
    """16 bytes a parameter in bf16 (weights 2, gradients 2, masters 4, moments 8), divided as ZeRO does."""
    assert [state_bytes(100, 100, 2, 4, stage) for stage in range(4)] == [1600, 700, 550, 400]
    assert state_bytes(100, 10, 2, 1, 1) == 200 + 20 + 120
    assert state_bytes(100, 100, 4, 1, 0) == 1600
