"""The trainer in one process, without DeepSpeed: division by the step's weight, stopping, saving, learning."""

import json
from pathlib import Path

import pytest
import torch

from eval.decoding.proposals import DraftProposer, TreeOptions
from models.checkpoint import Drafter, load_drafter
from tiny import EOS, MASK, VOCAB, tiny_target
from trainers import SpoiledObjective, logged, make_trainer
from training.checkpoints import newest_checkpoint
from training.forward import capture_taps
from training.initialise import initialise_from_target, zero_correction
from training.metrics import summarise
from training.objective import STATISTICS
from training.trainer import NonFiniteLoss


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # on models this small a second thread only waits


GOLDEN = Path(__file__).parent / "golden.json"


def test_golden_run(tmp_path):
    """Ten steps of the tiny model. A refactor keeps the losses; a change of the mathematics updates the file."""
    trainer = make_trainer(tmp_path)
    trainer.train()
    golden = json.loads(GOLDEN.read_text())
    # fp32 sums in another order (another CPU, another thread count) move the losses by about 1e-5 in ten steps.
    assert logged(trainer) == pytest.approx(golden["losses"], abs=2e-4)


def test_accumulated_micro_batches_equal_one_large_batch(tmp_path):
    """Slot weights differ between the micro-batches, so an average of averages would differ too."""
    large = make_trainer(tmp_path / "a", per_device_train_batch_size=4)
    small = make_trainer(tmp_path / "b", per_device_train_batch_size=1, gradient_accumulation_steps=4)
    large.train(), small.train()
    assert logged(small) == pytest.approx(logged(large), rel=1e-4)
    for (name, a), b in zip(large.model.named_parameters(), small.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3, msg=name)


def test_last_step_of_an_epoch_with_fewer_micro_batches(tmp_path):
    """9 rows, 2 a micro-batch, 2 micro-batches a step: the third step of an epoch has one micro-batch of one row."""
    small = make_trainer(
        tmp_path / "a", rows=9, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3
    )
    large = make_trainer(tmp_path / "b", rows=9, per_device_train_batch_size=4, max_steps=3)
    small.train(), large.train()
    assert logged(small) == pytest.approx(logged(large), rel=1e-4)


def test_lambda_falls_linearly_over_the_run(tmp_path):
    trainer = make_trainer(tmp_path, options={"lambda_start": 1.0, "lambda_end": 0.2}, max_steps=5)
    seen, loss = [], trainer.objective
    trainer.objective = lambda model, batch, lam, hidden: seen.append(lam) or loss(model, batch, lam, hidden)
    trainer.objective.target = loss.target
    trainer.train()
    assert seen == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("spoil", ["nan gradients", "finite gradients"])
def test_a_non_finite_loss_stops_before_the_update_and_names_the_rows(tmp_path, spoil):
    trainer = make_trainer(tmp_path, rows=8, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    order, loss = [], trainer.objective
    trainer.objective = SpoiledObjective(loss, "row-5", spoil == "nan gradients")
    before = {}
    step = trainer.training_step

    def watch(model, inputs, count):
        order.append(inputs["ids"])
        if trainer.accelerator.gradient_state.sync_gradients:
            before.update({k: v.clone() for k, v in trainer.model.state_dict().items()})
        return step(model, inputs, count)

    trainer.training_step = watch
    with pytest.raises(NonFiniteLoss, match="row-5") as caught:
        trainer.train()
    assert "nothing was updated" in str(caught.value)
    guilty = next(ids for ids in order if "row-5" in ids)
    assert all(row in str(caught.value) for row in guilty) and len(guilty) == 2
    after = trainer.model.state_dict()
    assert before and all(torch.equal(before[name], after[name]) for name in after)


def test_every_parameter_is_trained_and_survives_a_strict_reload(tmp_path):
    ids = torch.tensor([1, *range(3, VOCAB, 2)])
    trainer = make_trainer(tmp_path, draft_ids=ids, save_strategy="steps", save_steps=3, max_steps=3)
    zero_correction(trainer.model)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert all(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    checkpoint = newest_checkpoint(str(tmp_path / "checkpoints"))
    assert checkpoint.endswith("checkpoint-3")
    drafter = load_drafter(checkpoint)
    assert drafter.draft_ids.tolist() == ids.tolist() and drafter.spec == trainer.model.spec
    own = trainer.model.state_dict()
    assert own.keys() == drafter.model.state_dict().keys()
    assert all(torch.equal(own[name], value) for name, value in drafter.model.state_dict().items())
    files = sorted(path.name for path in Path(checkpoint).iterdir())
    assert "training_args.bin" not in files and "pytorch_model.bin" not in files
    assert not list((tmp_path / "checkpoints" / "unfinished").iterdir())


def test_old_checkpoints_are_removed(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=2, max_steps=6)
    trainer.train()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint-4", "checkpoint-6", "unfinished"]


def test_progress_log_holds_every_figure_and_forgets_what_is_repeated(tmp_path):
    make_trainer(tmp_path, max_steps=3).train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    wanted = {"loss", "learning_rate", "grad_norm", "base_loss", "final_loss", "accuracy", "accuracy_1", "accuracy_3"}
    assert wanted <= lines[0].keys() and lines[0]["seconds"] <= lines[2]["seconds"]
    (tmp_path / "log.jsonl").write_text((tmp_path / "log.jsonl").read_text() + '{"step": 4, "los')
    make_trainer(tmp_path, max_steps=2).train()  # starts at step 0: every older line is written again
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def test_summary_weights_losses_and_counts_hits_and_leading_runs():
    """Two blocks of two slots: the first is right at depths 1 and 2, the second at depth 1 only."""
    known = {
        "weight": [2, 1], "base_loss": [4, 2], "final_loss": [2, 1], "count": [2, 2], "base_hits": [1, 0],
        "final_hits": [2, 1], "final_run": [2, 1], "base_run": [1, 0], "recall_hits": [2, 2],
    }  # fmt: skip
    unknown = [float("nan")] * 2
    figures = summarise(torch.tensor([known.get(name, unknown) for name in STATISTICS], dtype=torch.float32))
    assert figures["base_loss"] == 2.0 and figures["final_loss"] == 1.0
    assert figures["base_accuracy"] == 0.25 and figures["accuracy"] == 0.75 and figures["recall"] == 1.0
    assert figures["accuracy_1"] == 1.0 and figures["accuracy_2"] == 0.5
    assert figures["final_run"] == 1.5 and figures["base_run"] == 0.5
    assert not any(name.startswith(("kl", "tv", "agreement")) for name in figures)


@pytest.mark.parametrize("shifted", [False, True])
def test_a_scripted_text_is_learned_and_drafted_through_the_inference_path(tmp_path, shifted):
    """Every token is the one before plus one. Labels off by one or a leak of the anchor's own feature would train
    well and draft wrongly (TRAPS 1, 4)."""
    target = tiny_target()
    trainer = make_trainer(
        tmp_path, rows=240, shifted=shifted, target=target, max_steps=220, learning_rate=1e-2, logging_steps=20,
        per_device_train_batch_size=16, lr_scheduler_type="cosine",
    )  # fmt: skip
    initialise_from_target(trainer.model, target, torch.arange(3, 23)[None])
    trainer.train()
    assert logged(trainer, "accuracy")[-1] > 0.9
    drafter = Drafter(trainer.model.eval().requires_grad_(False))
    hits = {"dflash_chain": 0, "domino_chain": 0}
    for start in range(3, 43, 4):
        tokens = torch.arange(start, start + 9)[None]
        taps = capture_taps(target, tokens[:, :8], (0, 2))
        for method in hits:
            proposer = DraftProposer(target, drafter, method, TreeOptions())
            proposer.begin(1, 64)
            proposer.join(taps, [8])
            tree = proposer.build(proposer.draft(tokens[:, 8]))
            expected = torch.arange(start + 9, start + 9 + drafter.spec.num_proposals)
            hits[method] += int(torch.equal(tree.tokens_RN[0], expected))
    assert hits["domino_chain"] >= 9 and hits["dflash_chain"] >= 7
    assert EOS < 3 and MASK < 3  # counting never meets them


def test_slot_weights_stay_fp32_under_deepspeed(tmp_path):
    """transformers would cast every float of a batch to the engine's dtype, bf16 (TRAPS 26)."""
    trainer = make_trainer(tmp_path)
    trainer.is_deepspeed_enabled = True
    weights, ids = torch.rand(2, 3), ["row-1"]
    prepared = trainer._prepare_inputs({"weights_RNT": weights, "ids": ids})
    assert torch.equal(prepared["weights_RNT"], weights) and prepared["ids"] is ids
