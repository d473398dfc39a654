"""What of a drafter is trained: all of it, its head on a frozen backbone, or LoRA on its linear layers and the head.

LoRA layers are put into the drafter in place (peft), so that loss, head and decoding see the same module as ever.
Whatever leaves training is merged: files and decoding know the drafter's own tensor names only. The adapter is kept
beside the merged weights, in peft's format, with the head that was trained in full in a file of its own.

Shape suffixes: O and I output and input features, E rank of the adapter.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from data.settings import RunConfig
from models.drafter import DFlashDraftModel

FOLDER, HEAD = "adapter", "head.safetensors"
NAME = "default"  # peft's name of the one adapter
BACKBONE = ("fc", "hidden_norm", "layers", "norm")  # the drafter's children that are not its head


def choose_trainable(model: DFlashDraftModel, config: RunConfig) -> None:
    """Freezes what `trainable` leaves out, and adds LoRA layers where it asks for them.

    Raises ValueError for a layer name in lora_targets that the drafter does not have.
    """
    if config.trainable == "all":
        return
    model.requires_grad_(False)
    if config.trainable == "lora":
        _add_lora(model, config)
    heads = head_names(model)
    for name, parameter in model.named_parameters():
        if name in heads:
            parameter.requires_grad_(True)


def _add_lora(model: DFlashDraftModel, config: RunConfig) -> None:
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.split(".")[0] in BACKBONE]
    known = sorted({name.rsplit(".", 1)[-1] for name in linear})
    if wrong := set(config.lora_targets) - set(known):
        raise ValueError(f"lora_targets: {min(wrong)!r} is no linear layer of the drafter: {', '.join(known)}")
    options = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        # Whole names: the head may have layers of the same last name.
        target_modules=[name for name in linear if name.rsplit(".", 1)[-1] in config.lora_targets],
        base_model_name_or_path=config.init_drafter,
    )
    inject_adapter_in_model(options, model, NAME)


@torch.no_grad()
def copy_backbone(model: DFlashDraftModel, start: DFlashDraftModel) -> None:
    """Takes the backbone of the drafter that a run started from, which must be of the same shape."""
    theirs = start.state_dict()
    for name, tensor in model.state_dict().items():
        if name.split(".")[0] in BACKBONE:
            tensor.copy_(theirs[name])


def head_names(model: DFlashDraftModel) -> set[str]:
    """Names of the parameters that belong to the correction head (and its confidence head), not to the backbone."""
    return {name for name, _ in model.named_parameters() if name.split(".")[0] not in BACKBONE}


def lora_layers(model: DFlashDraftModel) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def full_weights(model: DFlashDraftModel, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """All weights under the drafter's own names, LoRA added in.

    Merged weights are fp32: in bf16 an update of .3 % of a weight would lose half of itself to rounding. The others
    keep their dtype. Whoever decodes in bf16 rounds once, when loading.

    Args:
        state: the model's state dict if the caller has it whole; else it is read here, gathered under ZeRO-3.
    """
    if state is None:
        with gathered(model):
            # ZeRO-3 gives the memory back after the context.
            sharded = any(hasattr(p, "ds_id") for p in model.parameters())
            state = {k: v.detach().clone() if sharded else v.detach() for k, v in model.state_dict().items()}
    full = {k.replace(".base_layer.", "."): v for k, v in state.items() if ".lora_" not in k}
    for name, layer in lora_layers(model).items():
        down_EI, up_OE = (state[f"{name}.lora_{part}.{NAME}.weight"].float() for part in "AB")
        full[f"{name}.weight"] = full[f"{name}.weight"].float() + layer.scaling[NAME] * (up_OE @ down_EI)
    return full


def save_adapter(model: DFlashDraftModel, state: dict[str, Tensor], folder: str) -> None:
    """FOLDER/adapter: what peft loads onto the drafter it started from, and the head."""
    target = Path(folder, FOLDER)
    target.mkdir(parents=True, exist_ok=True)
    lora = {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor.contiguous()
        for name, tensor in state.items()
        if ".lora_" in name
    }
    model.peft_config[NAME].save_pretrained(target)
    save_file(lora, target / "adapter_model.safetensors", metadata={"format": "pt"})
    if heads := head_names(model):
        save_file({name: state[name].contiguous() for name in sorted(heads)}, target / HEAD)


@contextlib.contextmanager
def gathered(model: nn.Module):
    """Whole parameters inside the context, on every rank, where ZeRO-3 keeps pieces of them."""
    pieces = [p for p in model.parameters() if hasattr(p, "ds_id")]
    if not pieces:
        yield
        return
    import deepspeed  # imported late: it costs seconds, and only sharded parameters need it

    with deepspeed.zero.GatheredParameters(pieces, modifier_rank=None):
        yield
