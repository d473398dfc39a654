"""Writes that the system refuses (a full disk, a quota): one line, and nothing half written stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from data.settings import StageError

# torch.save has no class of its own for a failed write.
_TORCH_WRITER = ("inline_container", "PytorchStreamWriter", "unexpected pos")


@contextlib.contextmanager
def written(what: str, *leftovers: str | os.PathLike) -> Iterator[None]:
    """Around a write. A refused one removes the leftovers (files or folders) and raises StageError in one line.

    Each library has an error of its own for it: OSError, safetensors' SafetensorError, torch's RuntimeError.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, StageError):
            raise
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in _TORCH_WRITER):
            raise
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.remove(path)
        raise StageError(f"{what} could not be saved ({str(error).splitlines()[0]})") from error


def sync(path: str | os.PathLike) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk and survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(temporary: Path, output: Path, kept: Iterable[Path] = ()) -> None:
    """Puts a finished folder in the place of an earlier one, or where there is none yet.

    Args:
        kept: files of the earlier folder, relative to it, that move into the new one.
    """
    for path in (*temporary.rglob("*"), temporary):
        if not path.is_symlink():
            sync(path)
    if not output.exists():
        temporary.rename(output)
        sync(output.parent)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    output.rename(old)  # onto an empty folder, which POSIX replaces
    temporary.rename(output)
    for file in kept:
        (output / file).parent.mkdir(parents=True, exist_ok=True)
        (old / file).rename(output / file)
    sync(output.parent)
    shutil.rmtree(old)
