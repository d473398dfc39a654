"""Where a target lies that is too large for one GPU: the option `device_map` as arguments of `from_pretrained`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from accelerate.utils import get_max_memory

# transformers' own ways to spread layers over all GPUs that the process sees.
NAMES = ("auto", "balanced", "balanced_low_0", "sequential")


def placement(device_map: Sequence[str]) -> dict:
    """What `from_pretrained` takes for the option, {} for an empty one: all on one device.

    Args:
        device_map: one of `NAMES`, or the GPUs to use, such as cuda:0 cuda:1 (or 0 1).

    Raises ValueError for a name or a GPU that does not exist, and when several ranks would share the same GPUs.
    """
    if not device_map:
        return {}
    words, ranks = " ".join(device_map), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        raise ValueError(f"device_map {words} spreads the target over the GPUs of one process, got {ranks} ranks")
    if len(device_map) == 1 and device_map[0] in NAMES:
        return {"device_map": device_map[0]}
    numbers = [name.removeprefix("cuda:") for name in device_map]
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"device_map must be {', '.join(NAMES)} or GPUs such as cuda:0 cuda:1, got {words or 'nothing'}"
        )
    memory = get_max_memory()
    missing = [number for number in numbers if int(number) not in memory]
    if missing:
        found = ", ".join(f"cuda:{name}" for name in memory if isinstance(name, int)) or "none"
        raise ValueError(f"device_map names cuda:{missing[0]}, torch sees the GPUs: {found}")
    return {"device_map": "auto", "max_memory": {int(number): memory[int(number)] for number in numbers}}
