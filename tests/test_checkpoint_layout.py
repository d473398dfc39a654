"""A checkpoint says itself how it was written; the run's last start may have been another one."""

import pytest

from data.settings import load_config
from models.drafter import DFlashDraftModel
from training.checkpoints import PROVENANCE, RUN_FILE, write_json
from training.plan import prepare
from training.session import described
from training_runs import answer_rows, write_run


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """(Config, plan, checkpoint without provenance) of a run on one rank under ZeRO-1."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = load_config(str(write_run(tmp_path, answer_rows(8), global_batch_size=4)))
    plan = prepare(config)
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-2"
    DFlashDraftModel(plan.drafter_config).save_pretrained(checkpoint)
    (checkpoint / "trainer_state.json").write_text("{}")
    return config, plan, checkpoint


OTHER = {"world_size": 2, "zero_stage": 3}


def test_a_start_of_another_layout_does_not_change_what_a_checkpoint_is(interrupted, capsys):
    config, plan, checkpoint = interrupted
    assert described(plan)["operational"] == plan.operational and plan.operational["loss_chunk"] == 32
    write_json(checkpoint / PROVENANCE, described(plan))
    later = {"semantic": plan.semantic | OTHER, "operational": plan.operational | {"loss_chunk": 7}}
    write_json(checkpoint.parent / RUN_FILE, later)
    again = prepare(config)
    assert again.resume == str(checkpoint) and isinstance(again.arguments.deepspeed, str)
    assert "other settings" not in capsys.readouterr().out


def test_a_checkpoint_of_another_layout_is_known_though_the_last_start_was_like_this_one(interrupted):
    config, plan, checkpoint = interrupted
    write_json(checkpoint / PROVENANCE, {"semantic": plan.semantic | OTHER})
    write_json(checkpoint.parent / RUN_FILE, {"semantic": plan.semantic, "operational": plan.operational})
    with pytest.raises(ValueError, match=r"another layout \(world_size 2 -> 1, zero_stage 3 -> 1\)"):
        prepare(config)


def test_a_checkpoint_that_says_nothing_is_judged_by_the_run(interrupted):
    config, plan, checkpoint = interrupted
    write_json(checkpoint / PROVENANCE, {"step": 2})
    for run in ({"semantic": plan.semantic | OTHER, "operational": {}}, plan.semantic | OTHER):
        write_json(checkpoint.parent / RUN_FILE, run)
        with pytest.raises(ValueError, match=r"another layout \(world_size 2 -> 1, zero_stage 3 -> 1\)"):
            prepare(config)
