"""Drafter weights that start from the target: its last layers, its final norm, and a context that looks like its own.

Measured on SmolLM2-135M (NOTES.md): with few minutes of training this decides how good the drafter gets.

Shape suffixes: S tokens, D hidden, H heads, F head size, L taps.
"""

from __future__ import annotations

import logging

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from models.drafter import DFlashDraftModel
from models.target import Target

log = logging.getLogger(__name__)

# The target's final norm at full size gives over-confident logits on the drafter's first outputs: a first loss of 23
# on SmolLM2-135M against 7 with this factor.
FINAL_NORM_SCALE = 0.3
PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@torch.no_grad()
def initialise_from_target(model: DFlashDraftModel, target: Target, tokens_RS: Tensor) -> None:
    """Copies the target's last layers and final norm into the drafter, and makes the context start as one tap.

    A part whose size or name differs in the target keeps its random weights, with a line in the log.

    Args:
        tokens_RS: a few rows of real text without padding, to measure the scale of the target's queries and keys.
    """
    if target.quantized:
        raise ValueError(
            "init_from_target copies weights, which a quantised target lacks: pass --init_from_target false"
        )
    base = target.decoder
    start = target.num_layers - len(model.layers)
    if start < 0:
        raise ValueError(f"num_draft_layers {len(model.layers)} exceeds the target's {target.num_layers} layers")
    sources = base.layers[start:]
    inputs: list[Tensor | None] = [None] * len(sources)
    if any(getattr(source.self_attn, f"{name}_norm", None) is None for source in sources for name in ("q", "k")):
        inputs = _layer_inputs(target, tokens_RS, range(start, target.num_layers))
    for layer, source, input_RSD in zip(model.layers, sources, inputs, strict=True):
        for name in PROJECTIONS:
            _copy(layer, source, name)
        for name in ("input_layernorm", "post_attention_layernorm"):
            _copy_norm(layer.get_submodule(name), getattr(source, name, None), name)
        _copy_attention_norms(layer.self_attn, source, input_RSD)
    _copy_norm(model.norm, base.norm, "norm", FINAL_NORM_SCALE)
    _start_from_tap(model, base, start)


def zero_correction(model: DFlashDraftModel) -> None:
    """The head starts without an effect: its output projection W2 is zero."""
    if model.head is not None:
        nn.init.zeros_(model.head.output.weight)


def _layer_inputs(target: Target, tokens_RS: Tensor, layers: range) -> list[Tensor]:
    # The input of layer i is the output of layer i - 1, a tap.
    taps = target.forward(tokens_RS, tuple(i - 1 for i in layers), with_logits=False).taps
    return list(taps.chunk(len(layers), dim=-1))


def _copy(layer: nn.Module, source: nn.Module, name: str) -> None:
    own = layer.get_submodule(name).weight
    try:
        theirs = source.get_submodule(name)
    except AttributeError:
        theirs = None
    if theirs is None or theirs.weight.shape != own.shape:
        log.warning("the target has no %s of shape %s: random weights stay", name, tuple(own.shape))
    else:
        with align_module_device(theirs):  # the weight may still be on disk
            own.copy_(theirs.weight)


def _effective_weight(norm: nn.Module, size: int, like: Tensor) -> Tensor:
    """What a norm multiplies with, whether it stores w or 1 + w (Gemma): its output for a constant vector.

    The constant is large, so that the norm's epsilon is lost in rounding.
    """
    return norm(torch.full((size,), 256.0, dtype=like.dtype, device=like.device))


def _copy_norm(own: nn.Module, source: nn.Module | None, name: str, scale: float = 1.0) -> None:
    if source is None:
        log.warning("the target has no %s: ones stay", name)
    else:
        with align_module_device(source):
            own.weight.copy_(_effective_weight(source, own.weight.numel(), source.weight) * scale)


def _copy_attention_norms(attention: nn.Module, source: nn.Module, input_RSD: Tensor | None) -> None:
    """q_norm and k_norm: the target's where it has them (Qwen3), else its own mean scale of queries and keys.

    A Llama target does not normalise queries and keys, ours does. The weight that keeps the attention's temperature is
    the root mean square of the target's own queries (keys) over tokens and heads; the first token is left out, since
    its activations are many times larger (CPU_RECIPE: rms 1050 against 3-27).

    Args:
        input_RSD: of the layer; None where the target has both norms.
    """
    normed_RSD = None if input_RSD is None else source.input_layernorm(input_RSD[:, 1:])
    for name in ("q", "k"):
        own = getattr(attention, f"{name}_norm")
        theirs = getattr(source.self_attn, f"{name}_norm", None)
        if theirs is not None:
            _copy_norm(own, theirs, f"{name}_norm")
            continue
        projected = getattr(source.self_attn, f"{name}_proj")(normed_RSD).float()
        heads_RSHF = projected.unflatten(-1, (-1, attention.head_dim))
        own.weight.fill_(heads_RSHF.pow(2).mean().sqrt().item())


def _start_from_tap(model: DFlashDraftModel, base: nn.Module, start: int) -> None:
    """fc passes one tap on, and hidden_norm is the input norm of the layer that reads this tap in the target.

    Context keys and values then start as the target's own. The tap is the one nearest below the copied layers' middle.
    """
    size = model.config.hidden_size
    wanted = start + (len(model.layers) - 1) // 2 - 1
    taps = model.spec.target_layer_ids
    index = min(range(len(taps)), key=lambda i: abs(taps[i] - wanted))
    model.fc.weight[:, index * size : (index + 1) * size] += torch.eye(size, dtype=model.fc.weight.dtype)
    reader = base.layers[taps[index] + 1]
    _copy_norm(model.hidden_norm, getattr(reader, "input_layernorm", None), "hidden_norm")
