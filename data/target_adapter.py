"""A target with the user's own LoRA adapter: merged once into a folder of the cache, which then is a target like any.

The merged folder has weights of its own and the adapter's hash in its config.json, so that everything that knows a
target by its identity (answers, features, checkpoints) tells it from the base model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from data.disk import written
from models.whole import load_whole

MARK = "merged_adapter"  # key of config.json
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_digest(adapter: str) -> str:
    """sha256 over an adapter's configuration and weights. Raises ValueError for a folder that is no adapter."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        path = Path(adapter, name)
        if not path.is_file():
            raise ValueError(f"target_adapter: {adapter} holds no {name} (pickled weights are not loaded)")
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def merge_adapter(base: str, adapter: str, output: str, trust_remote_code: bool = False) -> None:
    """Writes base and adapter as one model, in the base's dtype, with the tokenizer: the adapter's where it has one.

    Raises ValueError for an adapter that does not fit, and before the first byte when the disk is too small.
    """
    from peft import PeftModel  # imported late, like transformers: a merged target is only looked up
    from transformers import AutoTokenizer

    options = dict(trust_remote_code=trust_remote_code)
    model = load_whole(base, dtype="auto", use_safetensors=True, **options)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    free = shutil.disk_usage(os.path.dirname(output)).free
    if size > free:
        raise ValueError(
            f"target_adapter: the merged target takes {size / 1e9:.1f} GB, {os.path.dirname(output)} has "
            f"{free / 1e9:.1f} GB free: choose another --cache_dir"
        )
    print(f"target: merging {adapter} into {base} ({size / 1e9:.1f} GB)")
    try:
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except (RuntimeError, ValueError, KeyError) as error:  # peft's own, for names and shapes alike
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"target_adapter: {adapter} does not fit the target {base}: {reason}") from error
    setattr(merged.config, MARK, adapter_digest(adapter))
    with written("the merged target"):
        merged.save_pretrained(output)
    words = adapter if os.path.isfile(os.path.join(adapter, "tokenizer_config.json")) else base
    AutoTokenizer.from_pretrained(words, **options).save_pretrained(output)
