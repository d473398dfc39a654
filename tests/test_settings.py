import json
from dataclasses import fields

import pytest

from data.settings import RunConfig, StageError, load_config, parse_arguments, run_stage


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_yaml_then_command_line(tmp_path):
    path = write(tmp_path, "budget: 32\ntemperatures: [0, 1]\nlearning_rate: 2.0e-3\nmask_token_id: 16\n")
    config = parse_arguments("eval", [path, "--budget", "16", "--benchmarks", "a.jsonl", "b.jsonl", "--beta", "-0.1"])
    assert (config.budget, config.beta, config.temperatures) == (16, -0.1, [0.0, 1.0])
    assert config.benchmarks == ["a.jsonl", "b.jsonl"] and config.mask_token_id == 16
    assert config.training == {"learning_rate": 2.0e-3}
    assert parse_arguments("eval", [path, "--keep_features=false"]).keep_features is False
    assert parse_arguments("eval", [path, "--trust_remote_code"]).trust_remote_code is True
    assert parse_arguments("eval", [path, "--mask_token_id", "none"]).mask_token_id is None


def test_the_launchers_local_rank_is_dropped_wherever_it_stands(tmp_path):
    path = write(tmp_path, "budget: 32\n")
    for words in (["--local_rank=0", path], [path, "--local_rank=0"], ["--local_rank=1", path, "--seed", "3"]):
        config = parse_arguments("train", words, default=None)
        assert config.budget == 32 and config.seed == (3 if "--seed" in words else 0) and config.training == {}


@pytest.mark.parametrize(
    "text, words, message",
    [
        ("budgte: 3", [], "unknown option 'budgte', did you mean 'budget'"),
        ("training: {}", [], "unknown option 'training'"),
        ("budget: many", [], "budget must be a whole number, got 'many'"),
        ("budget: 1.5", [], "budget must be a whole number"),
        ("budget: 0", [], "budget must be at least 1, got 0"),
        ("budget: .inf", [], "budget must be a whole number, got inf"),
        ("", ["--seed", "1" + 400 * "0" + ".5"], "seed must be a whole number"),
        ("loss_gamma: .nan", [], "loss_gamma must be a finite number, got nan"),
        ("", ["--lora_alpha", "inf"], "lora_alpha must be a finite number, got 'inf'"),
        ("", ["--temperatures", "0", "nan"], "temperatures must be a finite number, got 'nan'"),
        ("", ["--sweep_beta", "-inf"], "sweep_beta must be a finite number, got '-inf'"),
        ("", ["--num_draft_layers", "0"], "num_draft_layers must be at least 1, got 0"),
        ("", ["--head_rank", "0"], "head_rank must be at least 1, got 0"),
        ("", ["--gru_hidden_dim", "0"], "gru_hidden_dim must be at least 1, got 0"),
        ("", ["--anchors_per_row", "0"], "anchors_per_row must be at least 1, got 0"),
        ("", ["--max_row_length", "0"], "max_row_length must be at least 1, got 0"),
        ("", ["--max_answer_length", "0"], "max_answer_length must be at least 1, got 0"),
        ("", ["--max_prompt_length", "0"], "max_prompt_length must be at least 1, got 0"),
        ("", ["--draft_vocab_size", "-3"], "draft_vocab_size must be at least 0, got -3"),
        ("", ["--answer_temperature", "-1"], "answer_temperature must be at least 0, got -1.0"),
        ("", ["--global_batch_size", "-8"], "global_batch_size must be at least 0, got -8"),
        ("", ["--device_map"], "device_map needs a value: GPUs of one process over which"),
        ("", ["--target"], "target needs a value"),
        ("", ["--budget"], "budget needs a value: tree nodes B, the root not counted"),
        ("keep_features: perhaps", [], "keep_features must be true or false"),
        ("beta: 0.1", [], "beta must be <= 0"),
        ("- 1", [], "must be a mapping"),
        ("a: [", [], "is not valid YAML"),
        ("", ["--seed", "1", "--seed", "2"], "--seed is given twice"),
        ("", ["stray"], "unexpected argument 'stray'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, text, words, message):
    with pytest.raises(SystemExit) as stop:
        parse_arguments("eval", [write(tmp_path, text), *words])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error
    assert error.startswith("eval: ") and error.count("\n") == 1


def test_null_in_a_config_is_the_default(tmp_path):
    config = load_config(write(tmp_path, "target:\nbudget: null\nmask_token_id: null\n"))
    assert (config.target, config.budget, config.mask_token_id) == ("smollm2-135m-instruct", 64, None)


def test_the_command_line_can_undo_a_configs_device_map(tmp_path):
    path = write(tmp_path, "device_map: [cuda:0, cuda:1]")
    assert parse_arguments("eval", [path]).device_map == ["cuda:0", "cuda:1"]
    assert parse_arguments("eval", [path, "--device_map", "none"]).device_map == []


def test_a_missing_config_is_named(tmp_path, capsys):
    """TRAPS 53."""
    with pytest.raises(SystemExit) as stop:
        parse_arguments("train", [str(tmp_path / "absent.yaml")])
    assert stop.value.code == 2 and "no such config file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        parse_arguments("train", [], default=None)
    assert stop.value.code == 2 and "usage: train CONFIG" in capsys.readouterr().err


def test_help_lists_the_options_of_a_stage(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_arguments("regenerate", ["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--answer_temperature" in text and "--head_rank" not in text and "--seed" in text


@pytest.mark.parametrize(
    "name, stages",
    [
        ("prompts", ["regenerate", "eval", "demo"]),
        ("max_prompt_length", ["regenerate", "train", "eval", "demo"]),
        ("num_draft_layers", ["regenerate", "train"]),  # the default number of taps is one a layer
    ],
)
def test_options_are_listed_where_they_count(capsys, name, stages):
    listed = []
    for stage in ("target", "regenerate", "train", "eval", "export", "verify", "demo"):
        with pytest.raises(SystemExit):
            parse_arguments(stage, ["--help"])
        if f"\n  --{name} " in capsys.readouterr().out:
            listed.append(stage)
    assert listed == stages


def test_every_option_is_documented():
    for option in fields(RunConfig):
        assert option.metadata["help"] and option.metadata["stages"], option.name


def test_resolved_config_survives_json(tmp_path):
    config = load_config(write(tmp_path, "seed: 5"))
    assert load_config(write(tmp_path, json.dumps({"seed": config.seed, "beta": config.beta}))) == config


def test_run_stage_turns_a_users_mistake_into_one_line(tmp_path, capsys):
    def work(config):
        raise ValueError("bad\n  thing")

    assert run_stage("eval", [write(tmp_path, "")], work) == 2
    assert capsys.readouterr().err == "eval: bad thing\n"
    assert run_stage("eval", [write(tmp_path, "")], lambda config: None) == 0

    def broken(config):
        raise KeyError("ours")

    with pytest.raises(KeyError):
        run_stage("eval", [write(tmp_path, "")], broken)


@pytest.mark.parametrize("rank, where", [(None, "eval"), ("0", "eval"), ("1", "eval (rank 1)")])
def test_run_stage_turns_a_failure_into_one_line_and_code_1(tmp_path, capsys, monkeypatch, rank, where):
    monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
    for error, text in (
        (OSError(28, "No space left on device", "x"), "[Errno 28] No space left on device: 'x'"),
        (StageError("no\nnetwork"), "no network"),
    ):

        def work(config, error=error):
            raise error

        assert run_stage("eval", [write(tmp_path, "")], work) == 1
        assert capsys.readouterr().err == f"{where}: {text}\n"

    def torchs_own(config):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError):
        run_stage("eval", [write(tmp_path, "")], torchs_own)


def test_a_mistake_of_all_ranks_is_printed_once(tmp_path, capsys, monkeypatch):
    def work(config):
        raise ValueError("bad")

    monkeypatch.setenv("RANK", "1")
    assert run_stage("eval", [write(tmp_path, "")], work) == 2
    assert capsys.readouterr().err == ""
