"""Peak memory of a piece of work: resident memory of the process on a CPU, allocated device memory on CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def give_back() -> None:
    """Freed memory goes back to the system, so that what is resident is what is in use: glibc keeps it otherwise, and
    a peak above it shows nothing of work that fits in there. Costs the next work its page faults."""
    with contextlib.suppress(OSError, AttributeError):  # another system, another C library
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Starts counting at `reset`; `read` gives the peak since then in GB (1e9 bytes), models included."""

    def __init__(self, device: torch.device):
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            _RESET.write_text("5")  # Linux: the peak becomes what is resident now
        except OSError:
            return  # some containers forbid it: the peak is then that of the process so far

    def read(self) -> float | None:
        """None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        try:
            found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        except OSError:
            return None
        return int(found[1]) * 1024 / 1e9 if found else None
