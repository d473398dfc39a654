"""What a refused write (a full disk, a quota) leaves behind: one line, the earlier work, nothing half written."""

import contextlib
import json
import resource
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from data import answers
from data.features import FeatureReader, FeatureWriter
from data.settings import StageError
from models.checkpoint import load_drafter
from trainers import make_trainer
from training.checkpoints import PROVENANCE, newest_checkpoint, saving
from training.progress import Progress
from training.session import finish


@contextlib.contextmanager
def full_disk(free=2000):
    """No file may grow beyond `free` bytes: the write that would is refused."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_with_torch(path):
    torch.save({"a": torch.ones(1000)}, path)


def write_with_safetensors(path):
    save_file({"a": torch.ones(1000)}, path)


def write_text(path):
    with open(path, "w") as file:
        file.write("x" * 10000)


@pytest.mark.parametrize("write", [write_with_torch, write_with_safetensors, write_text])
def test_every_refused_write_is_understood(write, tmp_path):
    """A limit of the file size refuses bytes as a full disk does; each library has an error of its own for it."""
    staged = tmp_path / "unfinished" / "checkpoint-4"
    staged.mkdir(parents=True)
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(StageError) as caught, saving(str(tmp_path), 4), full_disk():
        write(str(staged / "file"))
    assert "checkpoint 4 could not be saved (" in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"the run continues from {tmp_path / 'checkpoint-2'}")
    assert not (tmp_path / "unfinished").exists()


def test_a_full_disk_at_the_very_end_is_one_line_and_leaves_nothing_half_written(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(StageError) as caught, full_disk():
        finish(SimpleNamespace(config=trainer.config), trainer, None)
    assert str(caught.value).startswith(f"the finished drafter {tmp_path / 'drafter'} could not be saved (")
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("drafter*"))


def test_a_full_disk_while_features_are_stored_keeps_the_earlier_ones(tmp_path):
    """Of `regenerate`, the stage `features` and hybrid training alike."""
    answers.write_manifest(str(tmp_path), {"settings": {"tap_ids": [0], "target_identity": "a"}})
    writer = FeatureWriter(str(tmp_path), None)
    writer.write({"one": torch.ones(3, 4)})
    with pytest.raises(StageError) as caught, full_disk():
        writer.write({"two": torch.ones(1000, 4)})
    assert str(caught.value).startswith(f"features in {tmp_path / 'features'} could not be saved (")
    assert [p.name for p in (tmp_path / "features").glob("*.safetensors*")] == ["000000.safetensors"]
    writer = FeatureWriter(str(tmp_path), None)
    writer.write({"two": torch.ones(5, 4)})
    reader = FeatureReader(str(tmp_path))
    assert (reader.length("one"), reader.length("two")) == (3, 5)


def test_a_log_that_cannot_be_rewritten_is_left_whole(tmp_path):
    """A resume drops the lines after its checkpoint; a kill or a full disk there must not lose those before it."""
    path = tmp_path / "train_log.jsonl"
    text = "".join(json.dumps({"step": step, "loss": 1.0, "seconds": step}) + "\n" for step in range(100))
    path.write_text(text)
    progress = Progress(str(path), 3, first_rank=True)
    state = SimpleNamespace(global_step=90, max_steps=100)
    with pytest.raises(OSError), full_disk():
        progress.on_train_begin(None, state, None)
    assert path.read_text() == text
    progress.on_train_begin(None, state, None)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(91))


def test_a_fault_of_ours_is_no_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="size mismatch"), saving(str(tmp_path), 4):
        raise RuntimeError("size mismatch")


def test_a_full_disk_loses_the_unfinished_save_only(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=6)
    trainer.provenance = {"git_commit": "abc"}
    write = type(trainer)._save_optimizer_and_scheduler

    def full(self, folder):
        if self.state.global_step == 4:
            raise OSError(28, "No space left on device")
        write(self, folder)

    monkeypatch.setattr(type(trainer), "_save_optimizer_and_scheduler", full)
    with pytest.raises(StageError, match=r"checkpoint 4 could not be saved \(.*No space left on device\)"):
        trainer.train()
    newest = newest_checkpoint(str(tmp_path / "checkpoints"))
    assert newest == str(tmp_path / "checkpoints" / "checkpoint-2")
    load_drafter(newest)
    provenance = json.loads((tmp_path / "checkpoints" / "checkpoint-2" / PROVENANCE).read_text())
    assert provenance == {"git_commit": "abc", "step": 2}
