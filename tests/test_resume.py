"""Two ranks over DeepSpeed on CPU: resume, equality with one rank, odd sizes, kills, fp32 masters."""

import csv
import json
import os
import shutil
import signal
import time
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from data.rows import as_rows
from data.settings import load_config
from eval.environment import versions
from models.checkpoint import load_drafter
from tiny import tiny_drafter, tiny_target
from training.adapters import FOLDER
from training.checkpoints import newest_checkpoint
from training.evaluation import Example
from training.plan import prepare
from training.universal import main
from training_runs import ROOT, answer_rows, log_lines, losses, run_ranks, start_ranks, write_prompts, write_run
from two_rank_scenarios import PARTLY

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
        **_asked(folder),
    )
    for name in ("straight", "split"):
        _make(folder / name, 24, **common)
    _make(folder / "global", 16, max_steps=6, save_steps=3, per_device_train_batch_size=2)
    _make(folder / "global-one", 16, max_steps=6, per_device_train_batch_size=4)
    _make(folder / "odd", 3, max_steps=4, per_device_train_batch_size=1)
    _make(
        folder / "bf16", 8, max_steps=100, dtype="bf16", learning_rate=1e-5, lr_scheduler_type="constant",
        init_from_target=False, logging_steps=50, lambda_start=0.5,
    )  # fmt: skip
    # Packed rows, a cache that the first epoch fills, workers: 22 documents in 10 rows, 5 steps an epoch. A Markov head
    # with a confidence head learns from the target's distribution under D-PACE.
    for name in ("mixed", "mixed-split"):
        _make(
            folder / name, 22, max_steps=12, save_steps=3, per_device_train_batch_size=1, packing=True,
            max_row_length=54, features="hybrid", dataloader_num_workers=1, deepspeed=_zero(1),
            head="markov_gated", enable_confidence_head=True, tv_weight=0.5, kl_weight=0.1, position_weights="dpace",
        )  # fmt: skip
    # Every parameter is cut into pieces, the smallest too.
    zero3 = json.loads((ROOT / _zero(3)).read_text())
    zero3["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (folder / "zero3.json").write_text(json.dumps(zero3))
    _make(
        folder / "zero3", 16, max_steps=6, save_steps=6, per_device_train_batch_size=2,
        deepspeed=str(folder / "zero3.json"), gradient_checkpointing=True, **_asked(folder),
    )  # fmt: skip
    tiny_drafter(tiny_target(), block_size=4, head_type="none").model.save_pretrained(folder / "start")
    _make(
        folder / "lora", 16, max_steps=6, save_steps=6, report_to="wandb", init_drafter=str(folder / "start"),
        trainable="lora", lora_rank=4, init_from_target=False, **_asked(folder),
    )  # fmt: skip
    # 16 rows in steps of 4: step 3 of an epoch of 4 is the middle of it. Dropout draws from the random state.
    for name in PARTLY:
        for folder_name in (name, f"{name}-split"):
            _make(
                folder / folder_name, 16, max_steps=6, save_steps=3, init_drafter=str(folder / "start"),
                trainable=name.removeprefix("partly-"), lora_rank=4, lora_dropout=0.1, init_from_target=False,
            )  # fmt: skip
    _make(folder / "spoiled", 8, max_steps=1, gradient_accumulation_steps=2)
    succeed(run_ranks(2, SCRIPT, "straight", str(folder)))
    succeed(run_ranks(2, SCRIPT, "resumed", str(folder)))
    return folder


def _zero(stage):
    return f"configs/deepspeed/zero{stage}.json"


def _asked(folder):
    """Evaluation while training: three held-out prompts every five steps."""
    return dict(
        eval_steps=5, benchmarks=[write_prompts(folder / "asked.jsonl", 5)], eval_prompts=2, train_eval_prompts=3,
        max_new_tokens=6, budget=6, width=2, candidates=8,
    )  # fmt: skip


def _make(folder, rows, **options):
    folder.mkdir()
    write_run(folder, answer_rows(rows), **options)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("one", ["straight", "mixed", *PARTLY])
def test_resume_is_exact_bit_for_bit(scenarios, rank, one):
    """Twice ten steps; packed rows with workers, interrupted while the first epoch fills the cache, the target as
    teacher; LoRA with dropout; a head on a frozen backbone. The last two were interrupted in the middle of an epoch."""
    straight = torch.load(scenarios / f"{one}-{rank}.pt")
    resumed = torch.load(scenarios / f"{'' if one == 'straight' else one + '-'}resumed-{rank}.pt")
    assert straight.keys() == resumed.keys() and len(straight["moments"]) >= 3
    for name, value in straight.items():
        pairs = zip(_tensors(value), _tensors(resumed[name]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name


def _tensors(value):
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", PARTLY)
def test_a_resumed_run_of_a_part_leaves_the_rest_as_it_was(scenarios, name):
    """Every frozen weight is bit for bit that of the start, on both ranks; what starts at zero (B, W2) has moved."""
    start = load_drafter(str(scenarios / "start")).model.state_dict()
    for rank in (0, 1):
        weights = torch.load(scenarios / f"{name}-resumed-{rank}.pt")["weights"]
        frozen = {key: value for key, value in weights.items() if key.replace(".base_layer.", ".") in start}
        assert len(frozen) == len(start) and all(
            torch.equal(value, start[key.replace(".base_layer.", ".")]) for key, value in frozen.items()
        )
        trained = weights.keys() - frozen.keys()
        assert {key.split(".")[0] for key in trained if ".lora_" not in key} == {"prefix_gru", "embed_proj"}
        assert any(".lora_A." in key for key in trained) == (name == "partly-lora")
        assert all(weights[key].abs().max() > 0 for key in trained)


def test_lora_goes_on_with_its_frozen_weights_on_other_ranks(scenarios):
    """DeepSpeed's universal form holds what is trained alone: the rest comes from the start again."""
    source, folder = scenarios / "partly-lora", scenarios / "partly-universal"
    config = _continued_by_one_rank(source, folder)
    assert main([str(folder / "run" / "checkpoints" / "checkpoint-3")]) == 0
    succeed(run_ranks(1, "training/train_drafter.py", str(config), "--global_batch_size", "4"))
    assert len(losses(folder)) == 6 and losses(folder)[:3] == losses(source)[:3]
    _check_merged(scenarios / "start", folder / "run" / "drafter")


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("partly-lora", {"lora_rank": 8}, "lora_rank was 4, is 8"),
        ("partly-lora", {"trainable": "head"}, "trainable was lora, is head"),
        ("partly-head", {"trainable": "lora"}, "trainable was head, is lora"),
        ("partly-head", {"trainable": "all"}, "trainable was head, is all"),
    ],
)
def test_another_part_or_rank_is_refused_by_name(scenarios, name, option, message):
    config = str(scenarios / name / "config.yaml")
    with pytest.raises(ValueError, match=f"{name}/run/checkpoints/checkpoint-6 belongs to a run with .*{message}"):
        prepare(load_config(config, {**option, "global_batch_size": 4}))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_stops_deepspeed_before_the_update(scenarios, rank):
    """The row is on one rank, in one of two micro-batches; both ranks stop, with its name."""
    nan, infinite = json.loads((scenarios / f"spoiled-{rank}.json").read_text())
    for found in (nan, infinite):
        assert "not finite at step 1; nothing was updated" in found["said"] and "row-5" in found["said"]
        assert found["equal"]


def test_logged_losses_of_a_resumed_run_are_equal(scenarios):
    straight, split = losses(scenarios / "straight"), losses(scenarios / "split")
    assert len(straight) == 20 and straight == split
    assert len(set(straight)) == 20
    for name, steps in {"mixed": 12, **dict.fromkeys(PARTLY, 6)}.items():
        made = losses(scenarios / name)
        assert len(set(made)) == steps and made == losses(scenarios / f"{name}-split")


def test_each_checkpoint_says_where_its_weights_come_from(scenarios):
    """Options, code, libraries and data: whoever finds the folder alone can make it again."""
    source, rows = scenarios / "global", answer_rows(16)
    config = load_config(str(source / "config.yaml"))
    code = json.loads((scenarios / "code-0.json").read_text())
    for step in (3, 6):
        folder = source / "run" / "checkpoints" / f"checkpoint-{step}"
        found = json.loads((folder / "provenance.json").read_text())
        assert found["step"] == step and found["config"] == json.loads(json.dumps(asdict(config)))
        assert found["config"]["training"]["save_steps"] == 3 and found["config"]["run_dir"] == str(source / "run")
        assert {name: found[name] for name in code} == code
        assert found["versions"] == versions() and found["versions"]["torch"] == torch.__version__
        assert found["semantic"]["answers"] == as_rows(rows).digest
    rows[7].answer_ids[2] += 1
    assert found["semantic"]["answers"] != as_rows(rows).digest


def test_zero_3_with_gradient_checkpointing_gives_the_losses_of_zero_1(scenarios):
    """TRAPS 48, 50 where parameters are in pieces: the loss reads the heads' weights, and a checkpoint is whole."""
    assert losses(scenarios / "zero3") == pytest.approx(losses(scenarios / "global"), rel=1e-4)
    drafter = load_drafter(str(scenarios / "zero3" / "run" / "checkpoints" / "checkpoint-6"))
    other = load_drafter(str(scenarios / "global" / "run" / "checkpoints" / "checkpoint-6"))
    for (name, a), b in zip(drafter.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-2, msg=name)


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


def test_one_rank_goes_on_where_two_stopped(scenarios):
    """DeepSpeed's universal form keeps weights, moments, learning rate and data position: the losses go on alike."""
    source, folder = scenarios / "global", scenarios / "universal"
    config = _continued_by_one_rank(source, folder)
    options = ("--global_batch_size", "4")
    ((code, _, errors),) = run_ranks(1, "training/train_drafter.py", str(config), *options)
    checkpoint = folder / "run" / "checkpoints" / "checkpoint-3"
    assert code == 2 and f"convert it first: python -m training.universal {checkpoint}" in errors
    assert main([str(checkpoint)]) == 0
    ((code, output, errors),) = run_ranks(1, "training/train_drafter.py", str(config), *options)
    assert code == 0, errors[-3000:]
    assert "world_size 2 -> 1 through DeepSpeed's universal form" in output
    assert losses(folder) == pytest.approx(losses(source), rel=1e-4) and losses(folder)[:3] == losses(source)[:3]


def _continued_by_one_rank(source, folder):
    """A copy of a run that stopped after its third step. Returns its config."""
    shutil.copytree(source, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(str(source / "run"), str(folder / "run")))
    shutil.rmtree(folder / "run" / "checkpoints" / "checkpoint-6")
    return config


def test_two_ranks_and_three_rows_do_not_hang(scenarios):
    assert len(losses(scenarios / "odd")) == 4


def test_small_updates_reach_bf16_weights_through_fp32_masters(scenarios):
    """100 updates of at most 1e-5 on weights of 1/64 to 1/32: bf16 numbers are 1.2e-4 apart, each alone is lost."""
    weights = torch.load(scenarios / "bf16.pt")
    before, after = weights["before"], weights["after"]
    assert before.dtype == after.dtype == torch.bfloat16
    place = (before.abs() >= 2**-6) & (before.abs() < 2**-5 - 2**-10)
    assert torch.equal((before[place] + 1e-5).bfloat16(), before[place]) and place.sum() > 100
    moved = (after[place].float() - before[place].float()).abs()
    assert moved.max() >= 4 * 2**-13 and moved.max() <= 100 * 1e-5 + 2**-13


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
    """Saved at step 257, which bf16 cannot hold: three more steps count to 260 and end in the same weights."""
    _make(tmp_path / "long", 8, max_steps=260, dtype="bf16", save_steps=257, logging_steps=100)
    last = tmp_path / "long" / "run" / "checkpoints" / "checkpoint-260"
    made = []
    for _ in range(2):
        succeed(run_ranks(1, SCRIPT, "long_run", str(tmp_path)))
        run = json.loads((tmp_path / "long.json").read_text())
        assert run["counts"] and set(run["counts"]) == {260}
        made.append(run["made"])
        if len(made) == 1:
            last.rename(tmp_path / "set-aside")
    assert made == [list(range(1, 261)), [258, 259, 260]]
    straight, resumed = (load_file(folder / "model.safetensors") for folder in (tmp_path / "set-aside", last))
    assert straight.keys() == resumed.keys() and all(torch.equal(straight[k], resumed[k]) for k in straight)


def test_evaluation_while_training_is_the_same_on_all_ways(scenarios):
    """Straight and resumed runs decode the same prompts with the same weights; ZeRO-3 gathers its pieces first."""
    straight, split, zero3 = (
        {line["step"]: line for line in log_lines(scenarios / name) if "eval_tau_dartree_pruned" in line}
        for name in ("straight", "split", "zero3")
    )
    assert list(straight) == list(split) == [5, 10, 15, 20] and list(zero3) == [5, 6]
    for step, line in straight.items():
        same = [name for name in line if name.startswith("eval_") and name != "eval_seconds"]
        assert len(same) > 9 and all(line[name] == split[step][name] for name in same)
        assert line["eval_equal_ar_dartree_pruned"] == 1.0 and line["eval_tau_dartree_pruned"] >= 1.0
    state = json.loads((scenarios / "split/run/checkpoints/checkpoint-20/trainer_state.json").read_text())
    taus = {step: line["eval_tau_dartree_pruned"] for step, line in straight.items()}
    assert state["best_metric"] == max(taus.values()) == taus[state["best_global_step"]]
    assert (scenarios / f"split/run/checkpoints/checkpoint-{state['best_global_step']}").is_dir()


def test_a_lora_run_ends_in_a_merged_drafter_with_its_adapter(scenarios):
    """Two ranks, DeepSpeed: the finished drafter is the start with the adapter merged, and the new head."""
    folder = scenarios / "lora" / "run" / "drafter"
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["semantic"]["trainable"] == "lora"
    _check_merged(scenarios / "start", folder)


def _check_merged(beginning, folder):
    """The drafter is the start with the adapter that lies beside it."""
    drafter, start = load_drafter(str(folder)), load_drafter(str(beginning))
    assert drafter.spec.head_type == "domino"
    lora = load_file(folder / FOLDER / "adapter_model.safetensors")
    name = "layers.1.mlp.up_proj"
    up, down = (lora[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA")
    expected = start.model.get_submodule(name).weight + 32 / 4 * up @ down
    torch.testing.assert_close(drafter.model.get_submodule(name).weight, expected, atol=1e-6, rtol=1e-5)
    assert up.abs().max() > 0 and torch.equal(drafter.model.norm.weight, start.model.norm.weight)


def test_wandb_offline_holds_config_code_and_a_table_of_drafts(scenarios):
    (files,) = (scenarios / "lora" / "run" / "wandb").glob("offline-run-*/files")
    (binary,) = files.parent.glob("*.wandb")
    content = binary.read_bytes()
    for word in (b"git_commit", b"lora_rank", b"eval/tau_dartree_pruned", b"train/loss"):
        assert word in content, word
    tables = [json.loads(path.read_text()) for path in files.rglob("*.table.json")]
    assert len(tables) == 2 and all(t["columns"] == list(Example.__annotations__) for t in tables)
    assert {row[0] for row in max(tables, key=lambda t: len(t["data"]))["data"]} == {5, 6}


def test_csv_and_curves_hold_what_the_log_holds(scenarios):
    run = scenarios / "lora" / "run"
    lines = log_lines(scenarios / "lora")
    with open(run / "train_log.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["step"] for row in table] == [str(line["step"]) for line in lines]
    for row, line in zip(table, lines, strict=True):
        assert {name: float(value) for name, value in row.items() if value} == pytest.approx(line)
    assert (run / "train_curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    wanted = {"loss", "grad_norm", "final_run", "recall", "accuracy_1", "base_accuracy_3", "tokens_per_second"}
    assert wanted | {"data_share", "peak_memory_gb", "learning_rate"} <= lines[0].keys()
    assert 0 <= lines[0]["data_share"] <= 1 and 0 <= lines[0]["final_run"] <= 3


def test_the_overfit_check_passes_a_right_layout_and_fails_a_shifted_one(tmp_path):
    """Labels one token too far: the sample is learned to the last slot, and decoding accepts nothing."""
    _make(tmp_path / "overfit", 6)
    succeed(run_ranks(1, SCRIPT, "check_overfitting", str(tmp_path)))
    right, wrong = json.loads((tmp_path / "overfit.json").read_text())
    assert (right["code"], right["passed"], wrong["code"], wrong["passed"]) == (0, True, 1, False)
    assert min(right["looks"][-1]["accepted"].values()) >= 2.7 and wrong["accuracy"] > 0.9
    # A tree of 64 nodes holds most tokens of so small a vocabulary at its first depth, and is right by chance.
    assert (
        wrong["looks"][-1]["accepted"]["domino_chain"] < 0.5 and wrong["looks"][-1]["accepted"]["dartree_pruned"] < 1.5
    )
    assert "labels, positions or masks differ between training and decoding" in wrong["said"]
    # Nothing but its log is left in the run.
    assert {p.name for p in (tmp_path / "overfit" / "run").iterdir()} == {"answers", "overfit_check.json"}
