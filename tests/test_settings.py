import json
from dataclasses import fields

import pytest

from data.settings import RunConfig, load_config, parse_arguments, run_stage


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
    assert parse_arguments("train", [path, "--local_rank=0"]).training == {"learning_rate": 2.0e-3}


@pytest.mark.parametrize(
    "text, words, message",
    [
        ("budgte: 3", [], "unknown option 'budgte', did you mean 'budget'"),
        ("training: {}", [], "unknown option 'training'"),
        ("budget: many", [], "budget must be a whole number, got 'many'"),
        ("budget: 1.5", [], "budget must be a whole number"),
        ("budget: 0", [], "budget must be at least 1, got 0"),
        ("keep_features: perhaps", [], "keep_features must be true or false"),
        ("head: gru", [], "head must be one of none, domino"),
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
