"""The training command: mistakes are one line and exit code 2, found before a process group exists."""

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.answers import target_identity
from data.settings import RunConfig, load_config
from mistakes import mistake
from tiny import EOS, MASK, PAD, VOCAB
from trainers import make_trainer
from training import train_drafter
from training.agreement import label_agreement
from training.arguments import check_training_options, set_threads, spread_batch, zero_stage
from training.checkpoints import check_same_run, publish, write_json
from training.plan import prepare, sample_tokens
from training.progress import Progress, read_log
from training.rows import TrainingRows
from training.session import described
from training_runs import ROOT, answer_rows, environment, free_port, run_ranks, write_run


@pytest.fixture(autouse=True)
def _keep_environment(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    return write_run(folder, answer_rows(6)), folder


def fails(capsys, *argv) -> str:
    """Runs the command, expects exit code 2 and one line on stderr; returns the line."""
    line = mistake(capsys, train_drafter.main, "train", *argv)
    assert not torch.distributed.is_initialized()
    return line


def test_no_config_is_usage(capsys):
    assert "usage: train CONFIG" in fails(capsys)
    assert "usage: train CONFIG" in fails(capsys, "--local_rank=0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--blok_size", "8"], "unknown option 'blok_size', did you mean 'block_size'?"),
        (["--mask_token_id", "none"], "mask_token_id is not set"),
        (["--mask_token_id", EOS], f"mask_token_id {EOS} is an eos id"),
        (["--mask_token_id", PAD], f"mask_token_id {PAD} is the target's pad id"),
        (["--mask_token_id", VOCAB], f"mask_token_id {VOCAB} lies outside the target's {VOCAB} embeddings"),
        (["--target_layer_ids", "0", "3"], "taps layer 3, the target's last"),
        (["--learning_rate", "fast"], "learning_rate: invalid float value: 'fast'"),
        (["--lr_scheduler_type", "zigzag"], "lr_scheduler_type: invalid choice: 'zigzag'"),
        (["--output_dir", "x"], "output_dir is set by this project: use --run_dir"),
        (["--load_best_model_at_end", "true"], "load_best_model_at_end is not supported by this trainer"),
        (["--trainable", "lora"], "trainable is lora: give --init_drafter"),
        (["--trainable", "everything"], "trainable must be one of all, head, lora, got 'everything'"),
        (["--deepspeed", "no.json"], "deepspeed: no such file: no.json"),
        (["--target", "/nowhere/target"], "no such folder: /nowhere/target"),
        (["--resume_from_checkpoint", "/nowhere"], "/nowhere is not a checkpoint of this trainer"),
        (["--resume_from_checkpoint", "true"], "holds no checkpoint"),
        (["--global_batch_size", "3", "--run_dir", "{file}/run"], "which is a file"),
        (["--run_dir", "{folder}/other"], "run: bash launch.sh regenerate CONFIG"),
    ],
)
def test_mistakes(made, capsys, words, message):
    config, folder = made
    words = [str(word).format(file=config, folder=folder) for word in words]
    assert message in fails(capsys, config, *words)


def test_missing_config_file(capsys):
    assert "no such config file: nowhere.yaml" in fails(capsys, "nowhere.yaml")


def test_a_mistake_on_another_rank_is_told_with_its_rank_after_a_wait(made, capsys, monkeypatch):
    """A second machine may lack a file; where rank 0 has the same mistake, the launcher ends the others meanwhile."""
    waits = []
    monkeypatch.setattr(train_drafter.time, "sleep", lambda seconds: waits.append((seconds, capsys.readouterr().err)))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for words, message in (
        ([str(made[0]), "--mask_token_id", "none"], "mask_token_id is not set"),
        (["nowhere.yaml"], "no such config file: nowhere.yaml"),
    ):
        assert train_drafter.main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"train (rank 3): {message}") and error.count("\n") == 1
    assert waits == [(20, ""), (20, "")]


def test_only_what_is_found_before_training_is_a_users_mistake(made, monkeypatch, capsys):
    from training import session

    def broken(*args):
        raise ValueError("a size\nof ours")

    monkeypatch.setattr(train_drafter, "_single_process_defaults", lambda: None)
    monkeypatch.setattr(session, "build", broken)
    assert "train: a size of ours" in fails(capsys, made[0])
    monkeypatch.setattr(session, "build", lambda plan: (None, None))
    monkeypatch.setattr(session, "train", broken)
    with pytest.raises(ValueError, match="a size\nof ours"):
        train_drafter.main([str(made[0])])


def test_answers_of_another_target_are_refused_without_features_too(tmp_path, capsys):
    config = write_run(tmp_path, answer_rows(6))
    manifest, own = tmp_path / "run" / "answers" / "manifest.json", target_identity(str(tmp_path / "target"))
    write_json(manifest, {"finished": True, "settings": {"target_identity": "0123"}})
    for words in ([], ["--keep_features", "false"]):
        assert f"those of target 0123, this run has {own}" in fails(capsys, config, *words)
    write_json(manifest, {"finished": True, "settings": {"target_identity": own}})
    assert prepare(load_config(str(config))) is not None


def test_a_mask_token_that_the_target_emits_is_a_warning(tmp_path, caplog):
    rows = answer_rows(6)
    config = write_run(tmp_path, rows)
    assert prepare(load_config(str(config))) and "occurs" not in caplog.text
    rows = [replace(row, answer_ids=[MASK, 5, MASK, *row.answer_ids]) for row in rows[:4]]
    write_run(tmp_path, rows)
    assert prepare(load_config(str(config)))
    assert f"mask_token_id {MASK} occurs 8 times in the answers: choose another --mask_token_id" in caplog.text


def test_missing_compiler(made, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler (no-such-compiler)" in fails(capsys, made[0])


def test_fewer_rows_than_ranks(tmp_path, capsys, monkeypatch):
    config = write_run(tmp_path, answer_rows(2))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert "2 rows with anchors are fewer than the 3 ranks" in fails(capsys, config)


def test_a_finished_run_of_other_options_is_not_overwritten(tmp_path, capsys):
    config = write_run(tmp_path, answer_rows(6))
    plan = prepare(load_config(str(config)))
    (tmp_path / "run" / "drafter").mkdir()
    write_json(tmp_path / "run" / "drafter" / "provenance.json", {"semantic": plan.semantic})
    assert train_drafter.main([str(config)]) == 0
    assert "is finished already" in capsys.readouterr().out
    # What only the optimizer's state depends on does not matter any more.
    assert (plan.semantic["world_size"], plan.semantic["bf16"], plan.semantic["zero_stage"]) == (1, False, 1)
    assert train_drafter.main([str(config), "--dtype", "bf16", "--deepspeed", "configs/deepspeed/zero2.json"]) == 0
    assert "is finished already" in capsys.readouterr().out
    line = fails(capsys, config, "--learning_rate", "0.5", "--lambda_end", "0")
    assert "lambda_end was 0.3, is 0.0; learning_rate was 0.01, is 0.5" in line and "choose another --run_dir" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--deepspeed", "configs/deepspeed/zero2.json"], "was written under another layout (zero_stage 1 -> 2)"),
        (["--dtype", "bf16"], "(bf16 was False, is True)"),
    ],
)
def test_a_resume_refuses_another_form_of_the_optimizers_state(tmp_path, capsys, words, message):
    config = write_run(tmp_path, answer_rows(6))
    folder = tmp_path / "run" / "checkpoints"
    semantic = prepare(load_config(str(config))).semantic
    (folder / "checkpoint-1").mkdir(parents=True)
    write_json(folder / "checkpoint-1" / "trainer_state.json", {})
    write_json(folder / "run.json", semantic)
    assert message in fails(capsys, config, *words)


def test_launcher_prints_a_mistake_once(made):
    """Through DeepSpeed's own launcher, as users start it."""
    config, _ = made
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    command += ["--master_port", str(free_port()), "training/train_drafter.py", str(config), "--mask_token_id", "none"]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    output = result.stdout + result.stderr
    assert result.returncode == 2, output[-3000:]
    assert output.count("mask_token_id is not set") == 1 and "Traceback" not in output


def test_a_non_finite_loss_ends_both_ranks_with_code_1(tmp_path):
    """The taps of one row are infinite on one rank only: both stop, before any update."""
    config = write_run(tmp_path, answer_rows(4), per_device_train_batch_size=1)
    results = run_ranks(2, "tests/infinite_features.py", str(config))
    assert [code for code, _, _ in results] == [1, 1], results[0][2][-3000:]
    lines = [line for line in results[0][2].splitlines() if line.startswith("train:") and "not finite" in line]
    assert len(lines) == 1 and "row-2" in lines[0] and "nothing was updated" in lines[0]
    assert not list((tmp_path / "run").glob("checkpoints/checkpoint-*")) and not (tmp_path / "run" / "drafter").exists()


def test_label_agreement_is_one_for_the_targets_own_answers(made):
    plan = prepare(load_config(str(made[0])))
    assert plan.agreement < 0.8
    tokens = sample_tokens(plan.data, plan.target.device)[:1, :4]
    answer = plan.target.model.generate(tokens, max_new_tokens=12, do_sample=False)[0, 4:].tolist()
    row = type(answer_rows(1)[0])("own", "d", tokens[0].tolist(), answer, "length")
    assert label_agreement(plan.target, TrainingRows([row], 64, 4, 0)) == 1.0


def test_low_agreement_is_a_warning_and_high_agreement_is_not(tmp_path, caplog, monkeypatch):
    """TRAPS 31: text that the target did not write, and its own answers."""
    rows = answer_rows(6)
    config = write_run(tmp_path, rows)
    plan = prepare(load_config(str(config)))
    assert plan.agreement < 0.5
    assert f"{100 * plan.agreement:.0f} % agreement is low: are these the target's own answers?" in caplog.text
    own = []
    for row in rows:
        prompt = torch.tensor([row.prompt_ids])
        text = plan.target.model.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
        own.append(replace(row, answer_ids=text[len(row.prompt_ids) :], stop="length"))
    write_run(tmp_path, own)
    for agreement, warned in ((None, False), (0.8, False), (0.79, True)):
        caplog.clear()
        if agreement:
            monkeypatch.setattr("training.plan.label_agreement", lambda *_, share=agreement: share)
        assert prepare(load_config(str(config))).agreement == (agreement or 1.0)
        assert ("79 % agreement is low" in caplog.text) == ("agreement is low" in caplog.text) == warned


def test_low_agreement_is_said_once_while_training_too(tmp_path):
    progress = Progress(str(tmp_path / "log.jsonl"), 1, first_rank=True)
    said = []
    progress.bar = SimpleNamespace(write=said.append, set_postfix_str=lambda _: None)
    logs = {"loss": 1.0, "learning_rate": 1e-3, "accuracy_1": 0.5}
    for step, agreement in enumerate((None, 0.8, 0.79, 0.2)):
        known = {} if agreement is None else {"agreement": agreement}
        progress.on_log(None, SimpleNamespace(global_step=step), None, logs=logs | known)
        assert len(said) == (step >= 2)
    assert said[0].startswith("step 2: only 79% of the labels are the target's argmax")


def test_agreement_is_logged_where_the_loss_has_no_teacher_too(tmp_path):
    """Cross entropy alone: another row at each line, far from the one before. The target wrote every second row."""
    trainer = make_trainer(tmp_path, max_steps=3)
    rows = answer_rows(16)
    for index in range(0, 16, 2):
        prompt = torch.tensor([rows[index].prompt_ids])
        text = trainer.target.model.generate(prompt, max_new_tokens=9, do_sample=False)[0].tolist()
        rows[index] = replace(rows[index], answer_ids=text[len(rows[index].prompt_ids) :], stop="length")
    trainer.train_dataset = TrainingRows(rows, 64, 6, seed=0)
    trainer.train()
    shares = [line["agreement"] for line in read_log(tmp_path / "log.jsonl")]
    asked = [1_000_003 * step % 16 for step in (1, 2, 3)]
    assert asked == [3, 6, 9] and shares[1] == 1 and max(shares[0], shares[2]) < 0.5


@pytest.mark.parametrize(
    ("batch", "limit", "ranks", "expected"),
    [(8, 8, 1, (8, 1)), (8, 8, 2, (4, 1)), (16, 4, 2, (4, 2)), (6, 4, 1, (3, 2))],
)
def test_global_batch_is_kept_whatever_the_ranks(batch, limit, ranks, expected):
    config = RunConfig(training={"per_device_train_batch_size": limit})
    values = check_training_options(config, "cpu")
    spread_batch(values, batch, ranks)
    assert (values.per_device_train_batch_size, values.gradient_accumulation_steps) == expected


def test_global_batch_that_does_not_divide_is_refused():
    values = check_training_options(RunConfig(), "cpu")
    with pytest.raises(ValueError, match="global_batch_size 7 does not divide by the 2 ranks"):
        spread_batch(values, 7, 2)


def test_yaml_text_and_command_line_values_get_their_types():
    config = RunConfig(
        training={"learning_rate": "1e-3", "warmup_steps": 0.04, "report_to": ["none"], "bf16_full_eval": "false"}
    )
    values = check_training_options(config, "cpu")
    assert values.learning_rate == 1e-3 and values.warmup_steps == 0.04 and values.bf16_full_eval is False
    assert values.deepspeed.endswith("configs/deepspeed/zero1.json") and values.optim == "adamw_torch_fused"


def test_yamls_null_leaves_a_key_at_its_default():
    values = check_training_options(RunConfig(training={"max_steps": None, "run_name": None, "deepspeed": None}), "cpu")
    assert values.max_steps == -1 and values.run_name is None and values.deepspeed.endswith("zero1.json")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("learning_rate", "nan", "learning_rate must be a finite number, got nan"),
        ("weight_decay", float("inf"), "weight_decay must be a finite number, got inf"),
        ("max_steps", 0, "max_steps must be at least 1, or -1 to go by num_train_epochs, got 0"),
        ("max_steps", -2, "max_steps must be at least 1, or -1 .* got -2"),
        ("num_train_epochs", 0, "num_train_epochs must be above 0, got 0"),
        ("gradient_accumulation_steps", 0, "gradient_accumulation_steps must be at least 1, got 0"),
        ("per_device_train_batch_size", -1, "per_device_train_batch_size must be at least 1, got -1"),
    ],
)
def test_numbers_that_train_nothing_are_refused(key, value, words):
    with pytest.raises(ValueError, match=words):
        check_training_options(RunConfig(training={key: value}), "cpu")


def test_zero_stage_of_a_deepspeed_file(tmp_path):
    (tmp_path / "plain.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{,")
    assert zero_stage(str(tmp_path / "plain.json")) == 0
    assert [zero_stage(str(ROOT / f"configs/deepspeed/zero{n}.json")) for n in (1, 2)] == [1, 2]
    with pytest.raises(ValueError, match="deepspeed: .*broken.json is not valid JSON"):
        zero_stage(str(tmp_path / "broken.json"))


def test_threads_are_divided_among_local_ranks(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    set_threads("cpu", 3)
    assert torch.get_num_threads() == 2
    set_threads("cpu", 99)
    assert torch.get_num_threads() == 1


def test_publish_replaces_a_folder(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    publish(str(tmp_path / "new"), str(tmp_path / "old"))
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["new"] and not (tmp_path / "new").exists()


def test_changed_options_are_named():
    check_same_run({"a": 1, "b": [1]}, {"a": 1, "b": [1]}, "here")
    check_same_run({"a": 1, "b": 1}, {"a": 1, "b": 2}, "here", ignored=("b",))
    with pytest.raises(ValueError, match=r"here belongs to a run with other options \(a was 1, is 2\)"):
        check_same_run({"a": 1}, {"a": 2}, "here")


def test_every_config_in_the_repository_parses():
    for path in sorted(Path(ROOT, "configs").glob("*.yaml")):
        check_training_options(load_config(str(path)), "cpu")


def test_provenance_names_the_libraries_that_decide_a_result(made):
    versions = described(prepare(load_config(str(made[0]))))["versions"]
    for name in ("torch", "transformers", "tokenizers", "deepspeed", "accelerate", "peft", "datasets", "safetensors"):
        assert versions[name] == version(name)
