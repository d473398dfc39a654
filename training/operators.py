"""`python -m training.operators` builds, or finds built, the shared-memory operator that DeepSpeed loads on a CPU.

launch.sh calls it while setting up, so that no training start has to wait for a compiler.
"""

import logging
import os
import time
from pathlib import Path

log = logging.getLogger(__name__)

NAME = "deepspeed_shm_comm"
STALE_SECONDS = 600  # a build takes about a minute; on a disk that machines share, its process may not be seen here


def build() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # chooses its accelerator when it is imported

    drop_stale_lock()
    ShareMemCommBuilder().load(verbose=False)


def drop_stale_lock() -> None:
    """Removes the mark of a build that was killed: torch would wait for its end for ever, without a word."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.glob(f"**/{NAME}/lock"):
        try:
            age = time.time() - lock.stat().st_mtime
            if age > STALE_SECONDS and not _is_open(lock):
                lock.unlink()
                log.warning("removed %s, which a killed build left %.0f minutes ago", lock, age / 60)
        except FileNotFoundError:  # its owner, or another rank, was faster
            continue


def _is_open(path: Path) -> bool:
    """Whether a process of this machine holds the file open, as torch does while it builds."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if descriptor.readlink() == path:
                return True
        except OSError:  # ended meanwhile, or another user's
            continue
    return False


if __name__ == "__main__":
    build()
