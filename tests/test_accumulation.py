"""DeepSpeed's accumulation: a step in parts is the step in one piece, and gradients add up in fp32."""

import json

import pytest

from training_runs import answer_rows, run_ranks, write_run

SIZES = {"whole": (4, 1, 2), "parts": (1, 4, 2), "parts-zero3": (1, 4, 3)}  # rows at once, parts, ZeRO stage


def test_a_step_in_parts_is_the_step_in_one_piece(tmp_path):
    """Adam hides a wrong scale of the gradient, its norm does not."""
    for name, (rows, parts, stage) in SIZES.items():
        (tmp_path / name).mkdir()
        write_run(
            tmp_path / name, answer_rows(8), dtype="bf16", per_device_train_batch_size=rows, max_steps=3,
            gradient_accumulation_steps=parts, deepspeed=f"configs/deepspeed/zero{stage}.json", learning_rate=1e-3,
        )  # fmt: skip
    ((code, _, errors),) = run_ranks(1, "tests/two_rank_scenarios.py", "accumulated", str(tmp_path))
    assert code == 0, errors[-2000:]
    found = json.loads((tmp_path / "accumulated.json").read_text())
    for name in ("parts", "parts-zero3"):
        assert found[name]["kept"] == "torch.float32" and len(found[name]["grad_norm"]) == 3
        assert found[name]["grad_norm"] == pytest.approx(found["whole"]["grad_norm"], rel=0.01)
        assert found[name]["loss"] == pytest.approx(found["whole"]["loss"], rel=0.01)
