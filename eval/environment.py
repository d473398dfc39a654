"""Where a measurement was taken: hardware, library versions, the project's commit. A result carries all of it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = (
    "torch", "transformers", "tokenizers", "deepspeed", "accelerate", "peft", "datasets", "safetensors", "numpy",
)  # fmt: skip


def hardware() -> dict:
    """{cpu, cores, threads, memory_gb, gpus}: cores that this process may use, memory of the machine in GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gb": round(memory / 2**30, 1),
        "gpus": gpus,
    }


def cpu_model() -> str:
    """The CPU's name as the kernel gives it; the architecture where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Python's version and those of the installed packages that decide a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The project's commit, with `-dirty` when tracked files differ from it; None outside a clone."""
    commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return commit and commit + ("-dirty" if changed else "")


def git_diff() -> str | None:
    """A hash of what tracked files differ in from the commit; None when they do not, or outside a clone."""
    difference = _git("diff", "HEAD")
    return hashlib.sha256(difference.encode()).hexdigest()[:16] if difference else None


def _git(*words: str) -> str | None:
    root = str(Path(__file__).resolve().parents[1])
    try:
        result = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
