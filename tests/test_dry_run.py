"""`--dry_run`: right sizes without a process group, a loaded weight or a written byte."""

from copy import deepcopy

import pytest
import torch

from models.checkpoint import save_draft_ids
from models.drafter import DFlashDraftModel
from models.target import load_target
from tiny import tiny_drafter
from training import dry_run, train_drafter
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
    figures = said(capsys, run, "--run_dir", str(config), "--num_prompts", "0")  # all rows of the sources
    assert figures["taps beside the answers"] == figures["answers"] == "unknown before there are answers"
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


@pytest.mark.parametrize(
    ("quantization", "dtype", "plain", "each"),
    [
        ("none", "fp32", 4, 4),
        ("bnb-nf4", "fp32", 4, 0.5625),
        ("bnb-int8", "bf16", 2, 1),
        ("torchao-int8", "bf16", 2, 1),
    ],
)
def test_a_quantised_target_is_counted_as_such(run, capsys, monkeypatch, quantization, dtype, plain, each):
    """Its linear layers, not its tables and norms. Nothing is quantised for it, and no package needed."""
    target = load_target(str(run.parent / "target"), torch.float32)
    sizes = {name: p.numel() for name, p in target.model.named_parameters()}
    linear = sum(size for name, size in sizes.items() if "_proj." in name)
    assert 0 < linear < sum(sizes.values())
    monkeypatch.setattr(dry_run, "_gib", str)
    figures = said(capsys, run, "--quantization", quantization, "--dtype", dtype, "--features", "online")
    held = round((sum(sizes.values()) - linear) * plain + linear * each)
    assert f" drafter + {held} target = " in figures["ZeRO-1 on 1 ranks, this run"]


def test_a_start_from_a_drafter_has_that_drafters_sizes(run, capsys, tmp_path):
    """Its own width of the MLP and its draft vocabulary."""
    target = load_target(str(run.parent / "target"), torch.float32)
    ids = torch.tensor([1, *range(10, 30)])
    model = tiny_drafter(target, block_size=4, target_layer_ids=(0, 2), draft_vocab_size=len(ids)).model
    config = deepcopy(model.config)
    config.intermediate_size = 2 * config.intermediate_size
    model = DFlashDraftModel(config)
    model.save_pretrained(tmp_path / "start")
    save_draft_ids(tmp_path / "start", ids)
    words = ["--init_drafter", str(tmp_path / "start"), "--init_from_target", "false"]
    figures, count = said(capsys, run, *words), sum(p.numel() for p in model.parameters())
    assert figures["drafter"] == f"{count:,}, {count:,} of them trained"
    frozen = said(capsys, run, *words, "--trainable", "head")["drafter"]
    heads = sum(p.numel() for name, p in model.named_parameters() if name.startswith(("prefix_gru", "embed_proj")))
    assert frozen == f"{count:,}, {heads:,} of them trained"
    assert train_drafter.main([str(run), "--dry_run", *words, "--num_draft_layers", "3"]) == 2
    assert "does not fit this run: num_draft_layers is 2 there, 3 here" in capsys.readouterr().err
    assert train_drafter.main([str(run), "--dry_run", "--trainable", "lora"]) == 2
    assert "trainable is lora: give --init_drafter" in capsys.readouterr().err


def test_a_checkpoint_of_lora_holds_a_drafter_in_fp32(run, capsys, tmp_path, monkeypatch):
    target = load_target(str(run.parent / "target"), torch.float32)
    tiny_drafter(target, block_size=4, target_layer_ids=(0, 2)).model.save_pretrained(tmp_path / "start")
    monkeypatch.setattr(dry_run, "_gb", str)
    words = ["--init_drafter", str(tmp_path / "start"), "--init_from_target", "false", "--dtype", "bf16"]
    for trainable, stored in {"head": 2, "lora": 4}.items():
        figures = said(capsys, run, *words, "--trainable", trainable)
        count, trained = (int(n.split()[0].replace(",", "")) for n in figures["drafter"].split(", "))
        assert figures["a checkpoint"].startswith(f"{count * (stored + 2) + trained * 12},")


def test_a_mistake_is_still_a_mistake(run, capsys):
    assert train_drafter.main([str(run), "--dry_run", "--mask_token_id", "none"]) == 2
    assert "mask_token_id is not set" in capsys.readouterr().err


def test_state_of_a_rank_by_stage():
    """16 bytes a parameter in bf16 (weights 2, gradients 2, masters 4, moments 8), divided as ZeRO does; gradients take
    4 where they are accumulated in fp32."""
    assert [state_bytes(100, 100, 2, 4, stage) for stage in range(4)] == [1600, 700, 600, 450]
    assert state_bytes(100, 10, 2, 1, 1) == 200 + 20 + 120
    assert state_bytes(100, 100, 4, 1, 0) == 1600
