"""Writes that the system refuses (a full disk, a quota): one line, and nothing half written stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
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


def replace_folder(temporary: Path, output: Path) -> None:
    """Puts a finished folder in the place of an earlier one, or where there is none yet."""
    if not output.exists():
        temporary.rename(output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    output.rename(old)  # onto an empty folder, which POSIX replaces
    temporary.rename(output)
    shutil.rmtree(old)
