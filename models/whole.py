"""A model from its files, or one line about the tensor that they lack: transformers fills a gap with random numbers."""

from __future__ import annotations

import json
import os
from typing import Any

_INDEX = "model.safetensors.index.json"


def check_shards(folder: str) -> None:
    """Raises ValueError, naming the file, when an index of `folder` names a file of weights that is not there."""
    path = os.path.join(folder, _INDEX)
    if not os.path.isfile(path):
        return
    try:
        with open(path, encoding="utf-8") as file:
            names = set(json.load(file)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of safetensors files: {error!r}") from error
    missing = sorted(name for name in names if not os.path.isfile(os.path.join(folder, name)))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} lacks {missing[0]}{more} of the {len(names)} files that {_INDEX} names")


def load_whole(source: str, **options: Any):
    """`AutoModelForCausalLM.from_pretrained`, for files that hold every tensor of the model in its shape.

    Args:
        source, options: as `from_pretrained` takes them.

    Raises ValueError naming the first tensor that is missing or of another shape. Tied weights need only one copy.
    """
    from transformers import AutoModelForCausalLM  # imported late: only who loads weights waits for transformers

    # Other shapes are reported with both of them, instead of in an error that names none.
    model, found = AutoModelForCausalLM.from_pretrained(
        source, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ValueError(f"tensor {name} has shape {list(stored)} in the files, {list(expected)} in the configuration")
    missing = sorted(set(found["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", {})))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"the files lack the tensor {missing[0]}{more}")
    return model
