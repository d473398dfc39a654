"""Checks of the machine (data/environment.py), of the code's state (eval/environment.py) and the demo's bookkeeping
(data/demo.py), on faked machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import demo, environment
from data.settings import RunConfig
from eval import environment as code

ROOT = Path(__file__).resolve().parents[1]


def fake_nvidia_smi(folder: Path, output: str, code: int = 0) -> Path:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    program.chmod(0o755)
    return program


def test_a_driver_without_a_usable_torch_is_an_error_unless_cpu_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake_nvidia_smi(tmp_path, "550.54.14")
    for name in ("auto", "cuda"):
        with pytest.raises(ValueError, match=r"driver 550\.54\.14 .*--device cpu"):
            environment.choose_device(name)
    assert environment.choose_device("cpu") == "cpu"
    fake_nvidia_smi(tmp_path, "NVIDIA-SMI has failed", code=9)
    assert environment.choose_device("auto") == "cpu"
    with pytest.raises(ValueError, match="no NVIDIA driver was found and device is cuda"):
        environment.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert environment.choose_device("auto") == "cuda"


def test_a_missing_compiler_and_missing_headers_name_their_packages(monkeypatch, tmp_path):
    """A bare machine learns it before anything is downloaded, in one line, without any package."""
    command = [sys.executable, "-S", "-m", "data.environment", "compiler"]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "CXX": "no-such"}, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "setup: no C++ compiler (no-such); on Debian or Ubuntu: apt-get install g++\n"
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="apt-get install python3-dev"):
        environment.check_compiler()


def test_train_goes_through_deepspeed_with_all_gpus_or_one_cpu_rank(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = environment.launcher(["train", "--device", "cpu"])
    assert words[:3] == ["env", "DS_ACCELERATOR=cpu", "CUDA_VISIBLE_DEVICES="]
    assert words[words.index("--num_gpus") + 1] == "1" and words[-1] == "training/train_drafter.py"
    assert environment.launcher(["eval", "--device", "cpu"])[1:] == ["-m", "eval.run_eval"]
    assert environment.launcher(["features", "--device", "cpu"])[1:] == ["-m", "data.make_features"]
    monkeypatch.setattr(environment, "choose_device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    words = environment.launcher(["train"])
    assert words[1] == "DS_ACCELERATOR=cuda" and words[words.index("--num_gpus") + 1] == "4"
    words = environment.launcher(["eval"])
    assert words[words.index("--nproc_per_node") + 1] == "4" and words[-1] == "eval.run_eval"
    words = environment.launcher(["regenerate"])
    assert words[words.index("--nproc_per_node") + 1] == "4" and words[-1] == "data.regenerate"
    # Servers have the GPUs: one client is enough.
    assert environment.launcher(["regenerate", "--endpoints", "http://x/v1"])[1:] == ["-m", "data.regenerate"]


def test_launcher_refuses_bad_options_before_any_process_group(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        environment.main(["launcher", "train", "--lerning_rate", "1"])
    assert stop.value.code == 2
    assert "did you mean 'learning_rate'" in capsys.readouterr().err


def test_only_slow_machines_are_cut():
    config = RunConfig(num_prompts=1536, eval_prompts=24, training={"max_steps": "400"})
    assert environment.cut_for_speed(config, 1.0) == environment.cut_for_speed(config, 1.9) == {}
    assert environment.cut_for_speed(config, 3.0) == {"num_prompts": 512, "eval_prompts": 16, "max_steps": 133}
    assert environment.cut_for_speed(config, 50.0) == {"num_prompts": 192, "eval_prompts": 16, "max_steps": 100}
    assert environment.cut_for_speed(RunConfig(training={"max_steps": None}), 3.0).get("max_steps") is None
    small = RunConfig(num_prompts=40, eval_prompts=4, training={"max_steps": 5})
    assert environment.cut_for_speed(small, 50.0) == {"num_prompts": 40, "eval_prompts": 4, "max_steps": 5}


def test_the_probe_measures_and_restores_the_threads():
    before = torch.get_num_threads()
    assert 0 < environment.probe_seconds(torch.float32, limit=0.05) < 5
    assert torch.get_num_threads() == before
    assert environment.slow_down("cuda", "auto") == 1.0


def test_measured_run_reports_exit_code_time_and_memory():
    # In a process of its own: a child's peak begins with what its parent held, and the tests hold much.
    script = (
        "import json, sys; from data.demo import run_measured as run; python = [sys.executable, '-c']\n"
        "print(json.dumps([run([*python, 'b = bytearray(300_000_000); raise SystemExit(7)']), run([*python, 'pass']),"
        " run(['sh', '-c', 'kill -9 $$'])]))"
    )
    output = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (code, seconds, peak), (_, _, later_peak), (killed, _, _) = json.loads(output)
    assert code == 7 and seconds > 0 and 0.3 < peak < 0.6
    assert later_peak < 0.3 and killed == 137


@pytest.fixture
def staged(tmp_path, monkeypatch):
    """The demo with faked stages; `staged.calls` are their words, `staged.codes` their exit codes."""
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"run_dir": str(tmp_path / "run"), "device": "cpu", "num_prompts": 1536}))

    def fake(command):
        run.calls.append(command[2:])
        (tmp_path / "run" / "summary.md").write_text("THE TABLE")
        return run.codes.get(command[2], 0), 9.0 - len(run.calls) / 10, 1.5

    def run(*words):
        return demo.main([str(config), *words])

    run.calls, run.codes, run.record = [], {}, tmp_path / "run" / "stages.json"
    monkeypatch.setattr(demo, "run_measured", fake)
    monkeypatch.setattr(demo, "slow_down", lambda device, dtype: 1.0)
    return run


def test_demo_runs_all_stages_and_prints_table_time_and_memory(staged, capsys):
    assert staged("--seed", "3") == 0
    assert [call[0] for call in staged.calls] == list(demo.STAGES)
    assert all(call[2:] == ["--seed", "3"] for call in staged.calls)
    out = capsys.readouterr().out
    assert "THE TABLE" in out and out.count("1.50 GB") == 5
    assert json.loads(staged.record.read_text())["stages"]["train"] == {"seconds": 8.7, "peak_gb": 1.5}


def test_a_failing_stage_ends_the_demo_with_its_exit_code(staged, capsys):
    staged.codes["train"] = 3
    assert staged() == 3
    assert [call[0] for call in staged.calls] == ["target", "regenerate", "train"]
    assert "stage train ended with exit code 3" in capsys.readouterr().err


def test_the_cut_is_decided_once_and_options_by_hand_win(staged, monkeypatch, capsys):
    monkeypatch.setattr(demo, "slow_down", lambda device, dtype: 3.0)
    assert staged("--eval_prompts", "24") == 0
    assert staged.calls[0][2:] == ["--eval_prompts", "24", "--num_prompts", "512"]
    out = capsys.readouterr().out
    config = staged.calls[0][1]
    assert "this machine is slow" in out
    assert f"bash launch.sh STAGE {config} --eval_prompts 24 --num_prompts 512\n" in out
    monkeypatch.setattr(demo, "slow_down", lambda device, dtype: pytest.fail("measured again"))
    assert staged() == 0
    assert staged.calls[-1][2:] == ["--num_prompts", "512", "--eval_prompts", "16"]


def test_a_run_folder_under_a_file_is_one_line(staged, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert staged("--run_dir", str(tmp_path / "file" / "run")) == 2
    assert capsys.readouterr().err.startswith("demo: run_dir: cannot create")
    assert staged.calls == []


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    return subprocess.run(
        ["git", "-C", folder, *who, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_source_that_git_does_not_know_makes_the_code_dirty(tmp_path, monkeypatch):
    """What a run imports decides its results, committed or not; what git ignores and other files decide nothing."""
    monkeypatch.setattr(code, "ROOT", tmp_path / "clone")
    assert code.git_commit() is code.git_diff() is None  # no clone
    (tmp_path / "clone" / "models").mkdir(parents=True)
    git(code.ROOT, "init", "-q")
    (code.ROOT / ".gitignore").write_text("runs/\n")
    (code.ROOT / "models" / "head.py").write_text("a = 1\n")
    git(code.ROOT, "add", ".")
    git(code.ROOT, "commit", "-qm", "first")
    commit = git(code.ROOT, "rev-parse", "HEAD")
    (code.ROOT / "runs").mkdir()
    (code.ROOT / "runs" / "made.py").write_text("ignored")
    (code.ROOT / "notes.txt").write_text("no source")
    assert (code.git_commit(), code.git_diff()) == (commit, None)
    states = [None]
    for name, text in (
        ("models/n\u00e9w.py", "b = 1\n"),
        ("models/n\u00e9w.py", "b = 2\n"),
        ("main.py", ""),
        ("models/head.py", ""),
    ):
        (code.ROOT / name).write_text(text)
        assert code.git_commit() == f"{commit}-dirty"
        states.append(code.git_diff())
    assert len(set(states)) == 5 and all(len(state) == 16 for state in states[1:])
    git(code.ROOT, "checkout", "-q", "models/head.py")
    assert code.git_diff() == states[3]
    (code.ROOT / "main.py").rename(code.ROOT / "other.py")
    assert code.git_diff() not in states
    git(code.ROOT, "add", ".")
    git(code.ROOT, "commit", "-qm", "second")
    assert (code.git_commit(), code.git_diff()) == (git(code.ROOT, "rev-parse", "HEAD"), None)
