"""launch.sh with a fake environment whose python only writes down how it was called."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch.sh"


@pytest.fixture
def launch(tmp_path):
    """Calls launch.sh; `launch.log()` lists the calls of the fake python, one a line."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/bash\necho "$*" >> "$LOG"\necho "$PATH" > "$LOG.path"\n'
        'case "$*" in *"${FAIL:-nothing}"*) exit 7;; *launcher*) printf "%s\\nSTAGE" "$0";; esac\n'
    )
    python.chmod(0o755)
    log = tmp_path / "log"

    def call(*words, cwd=tmp_path, **variables):
        env = {**os.environ, "VENV": str(tmp_path / "venv"), "LOG": str(log), **variables}
        return subprocess.run(
            ["bash", str(LAUNCH), *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
        )

    call.log = lambda: log.read_text().splitlines() if log.exists() else []
    return call


def test_help_names_every_stage(launch):
    text = launch("--help").stdout
    for stage in ("setup", "target", "regenerate", "train", "eval", "export", "verify", "test", "demo"):
        assert f"\n  {stage} " in text
    assert launch.log() == []


def test_no_stage_and_a_wrong_stage_are_errors(launch):
    assert launch().returncode == 2
    result = launch("trian")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "unknown stage 'trian'" in result.stderr


def test_set_up_happens_once_and_again_for_test_extras(launch):
    assert launch("regenerate").returncode == 0
    first = launch.log()
    assert first[0] == "-m pip --version" and "data.environment compiler" in first[2]
    assert first[3].startswith("-m pip install") and first[3].endswith("--constraint constraints.txt --editable .")
    assert first[4:] == ["-m training.operators", "-m data.regenerate configs/demo.yaml"]
    assert launch("regenerate").returncode == 0
    assert launch.log()[len(first) :] == ["-m data.regenerate configs/demo.yaml"]
    assert launch("test", "-k", "heads").returncode == 0
    assert "--editable .[test]" in launch.log()[-3]
    words = launch.log()[-1].split()
    assert words[:3] == ["-m", "pytest", "--numprocesses"] and 1 <= int(words[3]) <= 8
    assert words[4:] == ["--dist", "loadfile", "--durations=10", "-k", "heads"]


def test_programs_of_the_environment_are_found_first(launch, tmp_path):
    """DeepSpeed calls plain `ninja`."""
    assert launch("regenerate").returncode == 0
    path = (tmp_path / "log.path").read_text().strip().split(":")
    assert path[0] == f"{tmp_path}/venv/bin" and path[1:] == os.environ["PATH"].split(":")


@pytest.fixture
def base(tmp_path):
    """A Python whose `-m venv FOLDER` makes the folder and fails; it writes its calls to `calls`."""
    program, calls = tmp_path / "base", tmp_path / "calls"
    program.write_text(
        f'#!/bin/bash\necho "$*" >> {calls}\n'
        'if [[ $2 == venv ]]; then mkdir -p "${@: -1}/bin"; exit 1; fi\n'  # as without python3-venv
    )
    program.chmod(0o755)
    return str(program)


def test_an_environment_that_could_not_be_made_is_removed_unless_it_was_there(launch, base, tmp_path):
    result = launch("setup", VENV=str(tmp_path / "new"), PYTHON=base)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1) and "apt-get install python3-venv" in result.stderr
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    assert launch("setup", VENV=str(tmp_path / "mine"), PYTHON=base).returncode == 2
    assert (tmp_path / "mine" / "notes").exists()


def test_a_half_made_environment_is_made_again(launch, base, tmp_path):
    """Without pip it is completed; where not even its Python starts, it is cleared. A plain folder never is."""
    venv = tmp_path / "venv"
    assert launch("setup", FAIL="pip --version", PYTHON=base).returncode == 2
    (venv / "pyvenv.cfg").touch()
    assert launch("setup", FAIL="pip --version", PYTHON=base).returncode == 2
    (venv / "bin" / "python").unlink()
    assert launch("setup", PYTHON=base).returncode == 2
    (venv / "pyvenv.cfg").unlink()
    assert launch("setup", PYTHON=base).returncode == 2
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("-m venv")]
    assert calls == [f"-m venv {venv}", f"-m venv {venv}", f"-m venv --clear {venv}", f"-m venv {venv}"]


def test_config_is_found_from_the_callers_folder(launch, tmp_path):
    (tmp_path / "mine.yaml").write_text("")
    launch("verify", "mine.yaml", "--budget", "8")
    assert launch.log()[-1] == f"-m eval.verify {tmp_path}/mine.yaml --budget 8"
    launch("verify", "configs/demo.yaml")
    assert launch.log()[-1] == "-m eval.verify configs/demo.yaml"


@pytest.mark.parametrize("stage", ["train", "eval"])
def test_launched_stages_ask_for_their_command_and_pass_words_on(launch, stage):
    assert launch(stage, "--seed", "4").returncode == 0
    assert launch.log()[-2:] == [
        f"-m data.environment launcher {stage} configs/demo.yaml --seed 4",
        "STAGE configs/demo.yaml --seed 4",
    ]
    launch(stage, "--help")
    assert "launcher" not in launch.log()[-1] and launch.log()[-1].endswith("configs/demo.yaml --help")


@pytest.mark.parametrize(
    "stage, part", [("train", "launcher"), ("train", "STAGE"), ("export", "eval.export"), ("test", "pytest")]
)
def test_exit_codes_come_through(launch, stage, part):
    assert launch("setup").returncode == 0
    assert launch(stage, FAIL=part).returncode == 7


def test_a_failed_installation_is_tried_again(launch):
    assert launch("setup", FAIL="pip install").returncode == 7
    assert launch("setup", FAIL="training.operators").returncode == 7
    assert launch("setup").returncode == 0
    assert sum("pip install" in line for line in launch.log()) == 3


def test_a_missing_or_old_python_is_one_line(launch, tmp_path):
    result = launch("setup", VENV=str(tmp_path / "none"), PYTHON="no-such-python")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "no Python (no-such-python)" in result.stderr
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.1"\n[ "$1" != -c ]\n')
    old.chmod(0o755)
    result = launch("setup", VENV=str(tmp_path / "none"), PYTHON=str(old))
    assert result.returncode == 2 and "3.11 or newer is needed" in result.stderr and "3.9.1" in result.stderr


def test_a_missing_compiler_stops_before_the_download(launch, tmp_path):
    result = launch("setup", VENV=str(tmp_path / "none"), CXX="no-such-compiler", PYTHON="python3")
    assert result.returncode == 2 and "apt-get install g++" in result.stderr
    assert not (tmp_path / "none").exists()


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    assert "bash launch.sh test\n" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_bench_chooses_its_program_by_a_word(launch):
    assert launch("bench", "--parts", "tree", "share").returncode == 0
    assert launch.log()[-1] == "-m eval.bench configs/demo.yaml --parts tree share"
    assert launch("bench", "--training", "--parts", "loss").returncode == 0
    assert launch.log()[-1] == "-m training.bench configs/demo.yaml --parts loss"
    assert launch("bench", "--data", "--bench_processes", "4").returncode == 0
    assert launch.log()[-1] == "-m eval.bench_data configs/demo.yaml --bench_processes 4"
