"""Where a measurement was taken: hardware, library versions, the project's commit. A result carries all of it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]  # of the project, which may be a clone
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
    """The project's commit, with `-dirty` when tracked files differ from it or there are Python files that it lacks
    (ignored ones apart); None outside a clone."""
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no") or _untracked_sources()
    return commit and commit + ("-dirty" if changed else "")


def git_diff() -> str | None:
    """A hash of what tracked files differ in from the commit, and of the Python files that it lacks; None when there is
    neither, or outside a clone."""
    difference, sources = _git("diff", "HEAD"), _untracked_sources()
    if not difference and not sources:
        return None
    digest = hashlib.sha256((difference or "").encode())
    for name in sources:
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""  # a link to nothing, or removed meanwhile
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _untracked_sources() -> list[str]:
    """Python files under the project that git neither tracks nor ignores: a run may import them all the same."""
    listed = _git("ls-files", "--others", "--exclude-standard", "-z", "--", "*.py") or ""
    return sorted(name for name in listed.split("\0") if name)


def _git(*words: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
