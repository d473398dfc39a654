"""A target without its decoder layers in memory: for training from stored features, which needs only what lies around
them (embeddings, final norm, LM head).

The layers stay in the safetensors files. accelerate's hooks read a module's tensors when it is called and drop them
after it, so that the few forwards of a start (drafters that start from the target, labels compared with its argmax)
still work, with one module in memory at a time.
"""

from __future__ import annotations

import contextlib

import torch
from accelerate import init_empty_weights
from accelerate.hooks import attach_align_device_hook
from accelerate.utils import set_module_tensor_to_device
from accelerate.utils.offload import OffloadedWeightsLoader
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations.accelerate import accelerate_disk_offload
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from .target import Target, one_line, open_model


def stream_target(path: str, dtype: torch.dtype, device: str = "cpu", trust_remote_code: bool = False) -> Target | None:
    """A target whose layers stay in its files, or None when the files hold other tensors than the model's own (experts
    that transformers fuses, for one).

    It is not run on a small tree as `load_target` does: whoever stored the features has loaded it whole.
    Raises ValueError in one line as `load_target` does.
    """
    source, common, config = open_model(path, trust_remote_code, device)
    with one_line(path):
        with init_empty_weights():  # parameters only: buffers, such as rope frequencies, are in no file
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        weights, layers = _weights(model, source), _layers(model)
        if weights is None or layers is None:
            return None
        _fill(model, weights, layers, device)
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    with contextlib.suppress(OSError):  # without the file, what the configuration says stays
        model.generation_config = GenerationConfig.from_pretrained(source)
    target = Target(model, tokenizer, path)
    target.streams = True
    return target


def _layers(model: nn.Module) -> str | None:
    """Name of the module that holds the decoder's layers."""
    layers = getattr(model.get_decoder(), "layers", None)
    return next((name for name, module in model.named_modules() if module is layers), None)


def _weights(model: nn.Module, source: str) -> OffloadedWeightsLoader | None:
    """The tensors of the files by the model's names, read when they are asked for; None where a name has none."""
    index = cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        files, shards = [cached_file(source, "model.safetensors")], None
    else:
        files, shards = get_checkpoint_shard_files(source, index)
    places = accelerate_disk_offload(model, None, files, {"": "disk"}, shards, get_model_conversion_mapping(model))
    tied = getattr(model, "all_tied_weights_keys", {})
    known = all(name in places or name in tied for name in model.state_dict())
    return OffloadedWeightsLoader(index=places) if known else None


def _fill(model: nn.Module, weights: OffloadedWeightsLoader, layers: str, device: str) -> None:
    """Loads everything but the parameters of the module `layers`, which get hooks that read them."""
    inside = {name for name, _ in model.named_parameters() if name.startswith(f"{layers}.")}
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in model.state_dict():
        if name not in inside and name not in tied:
            set_module_tensor_to_device(model, name, device, value=weights[name])
    model.tie_weights()
    for name, _ in [*model.named_buffers()]:  # those that are in no file
        set_module_tensor_to_device(model, name, device)
    hooked = model.get_submodule(layers)
    attach_align_device_hook(hooked, torch.device(device), offload=True, weights_map=weights, module_name=layers)
