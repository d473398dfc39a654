"""What the machine can do: device, compilers, bf16, speed."""

from __future__ import annotations

import shutil
import subprocess


def choose_device(name: str) -> str:
    """`auto`: cuda when torch sees a GPU, else cpu. Raises ValueError when a GPU is asked for or present but unusable."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    driver = gpu_driver()
    if driver is None and name == "auto":
        return "cpu"
    found = "no NVIDIA driver was found" if driver is None else f"NVIDIA driver {driver} is there"
    raise ValueError(
        f"device: torch {torch.__version__} sees no GPU although {found} and device is {name}; "
        "install a torch build that fits the driver, or go on with --device cpu"
    )


def gpu_driver() -> str | None:
    """The NVIDIA driver's version when nvidia-smi lists a GPU, else None."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = result.stdout.split()
    return lines[0] if result.returncode == 0 and lines else None
