"""Pushing an export to the Hub: a repository made, the same bytes in it, nothing lost when it fails."""

import socket

import huggingface_hub
import pytest

from eval.export import main
from eval.publish import own_files
from hub_stand_in import TOKEN, Repository, running_hub
from test_export import make_run
from tiny import tiny_drafter, tiny_target


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        # Large files through LFS: the service behind Xet cannot be had on loopback.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield hub


@pytest.fixture
def words(tmp_path):
    make_run(tmp_path, tiny_drafter(tiny_target()))
    (tmp_path / "config.yaml").write_text(f"run_dir: {tmp_path / 'run'}\ntarget: owner/name\n")
    return [str(tmp_path / "config.yaml"), "--push_to_hub", "tester/drafter"]


def files_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def line_of(capsys):
    """The one line that the stage says, beside the library's progress."""
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line and "B/s]" not in line]
    assert len(lines) == 1 and lines[0].startswith("export: ")
    return lines[0]


def test_a_repository_is_made_that_holds_the_same_bytes(tmp_path, hub, words, capsys):
    assert main(words) == 0
    repository = hub.repositories["tester/drafter"]
    assert repository.files == files_of(tmp_path / "run" / "export") and "model.safetensors" in repository.files
    assert repository.private is False and repository.commits == 1
    assert f"uploaded: {hub.url}/tester/drafter\n" in capsys.readouterr().out


def test_private_is_asked_for(hub, words):
    assert main([*words, "--private"]) == 0
    assert hub.repositories["tester/drafter"].private is True


def test_a_second_push_of_the_same_sends_nothing(hub, words):
    assert main(words) == 0
    hub.calls.clear()
    assert main(words) == 0
    assert hub.repositories["tester/drafter"].commits == 1
    assert not [path for _, path in hub.calls if "/commit/" in path or path.startswith("/objects/")]


def test_an_interrupted_push_goes_on_where_it_was(tmp_path, hub, words, capsys):
    hub.refuse["/commit/main"] = 400
    assert main(words) == 1
    error = line_of(capsys)
    assert error.endswith(f"go on with: hf upload tester/drafter {tmp_path / 'run' / 'export'}")
    assert hub.repositories["tester/drafter"].files == {}
    hub.refuse.clear()
    hub.calls.clear()
    assert main(words) == 0
    # The weights were there already: only the commit was missing.
    assert not [path for _, path in hub.calls if path.startswith("/objects/")]
    assert hub.repositories["tester/drafter"].files == files_of(tmp_path / "run" / "export")


def test_what_an_earlier_export_left_goes_and_what_others_put_there_stays(tmp_path, hub, words):
    ours = ["draft_vocabulary.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    ours += ["drafter.py", "heads.py", "custom_generate/generate.py", "custom_generate/loop.py", "provenance.json"]
    theirs = ["picture.png", "notes.py", "lora/adapter_model.safetensors", "lora/model.safetensors", "sub/drafter.py"]
    theirs += ["custom_generate/theirs.py", "model-a/00001-of-00002.safetensors", "old/custom_generate/generate.py"]
    hub.repositories["tester/drafter"] = Repository(False, dict.fromkeys(ours + theirs, b"there before"))
    # A format of others, which holds no code and no files of ours beside the weights.
    assert main([*words, "--format", "zlab"]) == 0
    files, written = hub.repositories["tester/drafter"].files, files_of(tmp_path / "run" / "export")
    assert not {*ours} & {*written} - {"provenance.json"} and "model.safetensors" in written
    assert files == written | dict.fromkeys(theirs, b"there before")


def test_own_files_are_those_of_an_export(tmp_path, hub, words):
    assert main(words) == 0
    always = {"README.md", "config.json"}
    written = set(files_of(tmp_path / "run" / "export"))
    assert written - always <= set(own_files()) and not always & set(own_files())


def test_the_pipeline_for_large_files_is_used_where_it_is_installed(tmp_path, hub, words, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    hub.large = ".none"
    assert main(words) == 0 and main(words) == 0
    assert hub.repositories["tester/drafter"].files == files_of(tmp_path / "run" / "export")
    assert hub.repositories["tester/drafter"].commits == 1


def fails_before_the_export(tmp_path, words, capsys, code):
    capsys.readouterr()
    assert main(words) == code
    error = line_of(capsys)
    assert error.startswith("export: push_to_hub: ")
    assert not (tmp_path / "run" / "export").exists()
    return error


def test_no_token_a_wrong_one_and_no_network_are_said_before_any_work(tmp_path, hub, words, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refuses" in fails_before_the_export(tmp_path, words, capsys, 2)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "hf auth login" in fails_before_the_export(tmp_path, words, capsys, 2)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        assert "upload failed" in fails_before_the_export(tmp_path, words, capsys, 1)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "offline" in fails_before_the_export(tmp_path, words, capsys, 1)


def test_a_refused_repository_leaves_the_export_and_the_command_to_go_on(tmp_path, hub, words, capsys):
    hub.refuse["/repos/create"] = 403
    assert main([*words, "--private"]) == 2
    error = line_of(capsys)
    assert "refuses" in error and error.endswith("--private")
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["drafter", "a/b/c", "True"])
def test_a_name_that_is_none_is_refused(tmp_path, words, capsys, name):
    with pytest.raises(SystemExit) as stopped:
        main([words[0], "--push_to_hub", name])
    assert stopped.value.code == 2 and f"must be OWNER/NAME, got {name!r}" in capsys.readouterr().err
