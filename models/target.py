"""The target: always transformers' own module, with the few calls that drafting and verification need around it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .attention import causal_mask, document_mask, tree_mask, tree_positions, window_mask
from .families import FULL, SLIDING, layer_kinds, refuse_unsupported, window_of
from .products import wide_linear
from .quantization import quantization_config
from .whole import check_shards, load_whole

# One mask for all layers, or one for each layer type of a target with sliding windows.
Masks = Tensor | dict[str, Tensor]


@dataclass
class TargetOutput:
    """One forward of the target.

    Attributes:
        logits: [R, M, V] (or [R, 1, V] when only the last position was asked for), model dtype.
        taps: [R, M, L*D] outputs of the tapped layers, concatenated in id order.
        final: [R, M, D] final hidden state (after the last norm), the input of the LM head; None unless asked for.
    """

    logits: Tensor | None
    taps: Tensor
    final: Tensor | None = None


class Target:
    """A causal language model of transformers, in eval mode and frozen.

    Attributes:
        model: the transformers module, LM head included.
        decoder: the part of it that reads tokens: a multi-modal model's text model, else the model without its head.
        config: of the decoder.
        tokenizer: its tokenizer, or None.
        window: positions that a sliding layer sees, itself included; None without such layers.
        eos_ids: every id that ends an answer, from generation_config and config.
        forwards: number of forwards so far.
        streams: the layers stay in the files, and a forward reads them one by one (`models.streaming`).

    Layers may lie on several devices. What goes in and comes out lies on `device`, that of the embeddings.
    """

    def __init__(self, model: nn.Module, tokenizer=None, path: str = "", freeze: bool = True):
        # A model that is its owner's, lent for one call, keeps its mode and its gradients: `freeze=False`.
        self.model = model.eval().requires_grad_(False) if freeze else model
        self.tokenizer, self.path = tokenizer, path
        self.decoder, self.config = model.get_decoder(), model.config.get_text_config()
        refuse_unsupported(self.config)
        self.window = window_of(self.config)
        self.eos_ids = eos_ids(getattr(model, "generation_config", None), model.config.get_text_config())
        self.forwards, self.streams = 0, False
        self._rows: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def layer_devices(self) -> list[torch.device]:
        """Where each layer computes and its keys and values lie. accelerate's hooks know it when a model is spread."""
        if len(set(getattr(self.model, "hf_device_map", {}).values())) < 2:
            return [self.device] * self.num_layers
        return [torch.device(layer._hf_hook.execution_device) for layer in self.decoder.layers]

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and cache. Read from the embeddings, which stay as they are in a quantised target."""
        return self.model.get_input_embeddings().weight.dtype

    @property
    def quantized(self) -> bool:
        return getattr(self.model, "hf_quantizer", None) is not None

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table (may exceed what the tokenizer can decode)."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def max_length(self) -> int:
        """Positions that can be served. Sliding windows are no limit: the masks follow them."""
        return self.config.max_position_embeddings

    def embed(self, ids: Tensor) -> Tensor:
        """The target's own input embeddings [..., D], with the scale that some families apply in the module."""
        return self.model.get_input_embeddings()(ids)

    def logits(self, hidden: Tensor, ids: Tensor | None = None, wide: bool = False) -> Tensor:
        """The target's LM head on hidden states [..., D]: [..., V], or [..., len(ids)] for chosen rows.

        Args:
            wide: fp32 logits where the device multiplies so (`wide_linear`), for losses.
        """
        head = self.model.get_output_embeddings()
        # Two dimensions: a strided slice with more of them is multiplied row by row, with a copy of the head for each.
        flat = hidden.reshape(-1, hidden.shape[-1]).to(head.weight.device)
        linear = wide_linear if wide else nn.functional.linear
        if ids is not None:
            bias = None if head.bias is None else head.bias[ids.to(head.bias.device)]
            logits = linear(flat, self.head_rows(ids), bias)
        elif wide and type(head) is nn.Linear:
            logits = linear(flat, head.weight, head.bias)
        else:
            logits = head(flat)
        return self.scale_logits(logits).unflatten(0, hidden.shape[:-1]).to(hidden.device)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """What the family does to the LM head's output: Granite's divisor, Cohere's factor, Gemma's cap."""
        divisor, factor, cap = (
            getattr(self.config, name, None) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")
        )
        if divisor:
            logits = logits / divisor
        if factor:
            logits = logits * factor
        return torch.tanh(logits / cap) * cap if cap else logits

    def head_rows(self, ids: Tensor) -> Tensor:
        """The LM head's rows [len(ids), D] of a draft vocabulary. The last ids asked for are kept, and not read again.

        The draft vocabulary is one tensor for the whole run: its rows are gathered once.
        """
        if id(ids) not in self._rows:
            weight = self.model.get_output_embeddings().weight
            # Ids ascend: when they are the first ones, as for a padded table, a view saves a second copy of the head.
            first = int(ids[-1]) + 1 == len(ids)
            self._rows = {id(ids): (ids, weight[: len(ids)] if first else weight[ids.to(weight.device)].contiguous())}
        return self._rows[id(ids)][1]

    def causal_masks(self, lengths_R: Tensor, width: int) -> Masks:
        """What `forward(mask=...)` takes for right-padded prompts of the given lengths: [R, 1, width, width]."""
        positions = torch.arange(width, device=lengths_R.device)[None]
        return self._by_layer_kind(causal_mask(lengths_R, width), positions, positions)

    def document_masks(self, positions_RS: Tensor) -> Masks:
        """What `forward(mask=...)` takes for rows of several documents with the given positions: [R, 1, S, S]."""
        return self._by_layer_kind(document_mask(positions_RS), positions_RS, positions_RS)

    def tree_masks(self, parents_RM: Tensor, depths_RM: Tensor, lengths_R: Tensor, width: int) -> Masks:
        """What `forward(mask=...)` takes for trees of M tokens (root first) after `lengths_R` cached columns.

        Args:
            parents_RM: index of each token's parent among the M; the root is its own parent.
            depths_RM: 0 for the root; a token's position is length + depth.
            width: columns that the cache returns, see `eval.decoding.cache.TreeCache.place`.
        """
        return self._by_layer_kind(
            tree_mask(parents_RM, lengths_R, width), *tree_positions(depths_RM, lengths_R, width)
        )

    def _by_layer_kind(self, mask: Tensor, queries_RM: Tensor, keys_RT: Tensor) -> Masks:
        """The same mask for all layers, or one a layer kind, as transformers' families with `layer_types` want it."""
        if self.window is None:
            return mask
        near = mask & window_mask(queries_RM, keys_RT, self.window)
        return {FULL: mask, SLIDING: near} if layer_kinds(self.config) else near

    @torch.inference_mode()
    def check(self) -> None:
        """Raises ValueError for a family that computes something unknown here.

        Two siblings in one tree must have the logits that the target's own forward gives each of them alone. Logits
        that are scaled in an unknown way, recurrent state, attention that ignores masks or positions: all show here.
        """
        # Ids from the middle: the first and last ones are often padding, whose embeddings are zero.
        root, first, second = (self.vocab_size * part // 4 for part in (1, 2, 3))
        alone = torch.tensor([[root, first], [root, second]], device=self.device)
        theirs = self.model(input_ids=alone).logits.float()
        parents, depths = torch.tensor([[[0, 0, 0]], [[0, 1, 1]]], device=self.device)
        masks = self.tree_masks(parents, depths, depths.new_zeros(1), 3)
        tree = torch.tensor([[root, first, second]], device=self.device)
        ours = self.forward(tree, (), position_ids=depths, mask=masks).logits.float()[0]
        expected = torch.stack([theirs[0, 0], theirs[0, 1], theirs[1, 1]])
        error = float((ours - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
        # A leaking sibling gives 0.4 on SmolLM2-135M; bf16 rounds to 0.01 at most, quantised activations to more.
        if not error < (0.01 if self.dtype == torch.float32 and not self.quantized else 0.2):
            raise ValueError(
                f"target {self.config.model_type!r} computes its logits or its attention in a way that is not "
                f"supported: a tree's logits differ by {error:.0%} from those of its paths"
            )

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        tap_ids: tuple[int, ...],
        position_ids: Tensor | None = None,
        mask: Masks | None = None,
        cache=None,
        keep: int = 0,
        with_logits: bool = True,
        with_final: bool = False,
    ) -> TargetOutput:
        """One forward. Captures only the tapped layers (transformers' `output_hidden_states=[i + 1, ...]`).

        Args:
            input_ids: [R, M].
            tap_ids: 0-based layer ids i; the tap is the layer's output, `hidden_states[i + 1]`.
            mask: boolean [R, 1, M, width] as `cache` orders its keys, one or a dict by layer kind (`causal_masks`,
                `tree_masks`); or a 2-D padding mask, or None (causal, with the family's own windows).
            keep: positions, counted from the last, whose logits are computed; 0 means all.
        """
        self.forwards += 1
        output = self.decoder(
            input_ids=input_ids,
            attention_mask=self._for_kernel(mask),
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
            output_hidden_states=[i + 1 for i in tap_ids] or None,
        )
        final = output.last_hidden_state.to(self.device)
        taps = [output.hidden_states[i + 1].to(self.device) for i in tap_ids] or [final[..., :0]]
        logits = None
        if with_logits:
            logits = self.logits(final[:, -keep:])  # -0 is the start: everything
        return TargetOutput(logits, torch.cat(taps, dim=-1), final if with_final else None)

    def _for_kernel(self, mask: Masks | None) -> Masks | None:
        """Eager attention adds its mask, so that a boolean one would only shift scores by one (TRAPS 11)."""
        if isinstance(mask, dict):
            return {kind: self._for_kernel(part) for kind, part in mask.items()}
        if mask is None or mask.ndim != 4 or self.config._attn_implementation != "eager":
            return mask
        zeros = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return zeros.masked_fill(~mask, torch.finfo(self.dtype).min)


def eos_ids(*sources) -> tuple[int, ...]:
    """Every end token that a generation config or a model's config names."""
    ids: list[int] = []
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(ids))


def choose_dtype(name: str, device: str) -> torch.dtype:
    """`auto`: bf16 on CUDA and on CPUs with AMX or avx512_bf16, else fp32 (bf16 without them is about 8x slower)."""
    named = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32}
    if name in named:
        return named[name]
    if name != "auto":
        raise ValueError(f"dtype must be auto, bf16 or fp32, got {name!r}")
    return torch.bfloat16 if device.startswith("cuda") or cpu_has_bf16() else torch.float32


def cpu_has_bf16() -> bool:
    """True on x86 CPUs that multiply bf16 in hardware."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


@contextlib.contextmanager
def one_line(path: str):
    # A missing file or package, an unreachable Hub, a model of another kind: the user's to solve, and transformers
    # explains each in a paragraph.
    try:
        yield
    except (OSError, ImportError, ValueError, SafetensorError) as error:
        raise ValueError(f"target: cannot load {path}: {str(error).strip().splitlines()[0]}") from error


def _source(path: str) -> tuple[str, dict]:
    """What `from_pretrained` takes for a path: name and keyword arguments. Raises ValueError for what is not there."""
    if path.endswith(".gguf"):
        if not os.path.isfile(path):
            raise ValueError(f"target: no such GGUF file: {path}")
        folder, name = os.path.split(os.path.abspath(path))
        return folder, {"gguf_file": name}
    if os.path.exists(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ValueError(f"target: {path} holds no config.json")
        if not any(name.endswith(".safetensors") for name in os.listdir(path)):
            raise ValueError(f"target: {path} holds no safetensors weights; pickled weights are not loaded")
        check_shards(path)
    elif path.startswith((".", "/", "~")):
        raise ValueError(f"target: no such folder: {path}")
    return path, {}


def load_target(
    path: str,
    dtype: torch.dtype,
    device: str = "cpu",
    trust_remote_code: bool = False,
    quantization: str = "none",
    placed: dict | None = None,
) -> Target:
    """Loads a Hugging Face folder, a Hub id or a GGUF file (safetensors or GGUF only, never pickle).

    Args:
        quantization: one of `models.quantization.NAMES`.
        placed: of `models.placement.placement`, for a target that is spread over several devices, `device` first.

    Raises ValueError in one line when the path has no config, only pickled weights, files or tensors missing or of
    another shape, a model that cannot be verified, or one that does not fit on the devices of `placed`.
    """
    source, common, _ = open_model(path, trust_remote_code, device)
    weights = {} if "gguf_file" in common else {"use_safetensors": True}
    if quantization != "none":
        # Quantised layers are made on the device where they stay.
        weights |= {"quantization_config": quantization_config(quantization, dtype), "device_map": {"": device}}
    weights |= placed or {}
    with one_line(path):
        model = load_whole(source, dtype=dtype, **common, **weights)
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    target = Target(model if "device_map" in weights else model.to(device), tokenizer, path)
    _check_tables(target, torch.device(device))
    target.check()
    return target


def open_model(path: str, trust_remote_code: bool, device: str = "cpu") -> tuple[str, dict, Any]:
    """Name and keyword arguments for transformers, and the configuration, which is checked before any weight is read.

    Raises ValueError as `load_target` does.
    """
    source, kwargs = _source(path)
    common = {"trust_remote_code": trust_remote_code, **kwargs}
    with one_line(path):
        config = AutoConfig.from_pretrained(source, **common)
    refuse_unsupported(config.get_text_config())
    if device == "cpu":
        # transformers repeats the key/value heads under a mask unless told that the kernel groups them itself.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    return source, common, config


def _check_tables(target: Target, device: torch.device) -> None:
    """The drafter reads both tables: they must be in memory, and block inputs arrive where the drafter is."""
    tables = {"embedding": target.model.get_input_embeddings(), "LM head": target.model.get_output_embeddings()}
    for name, module in tables.items():
        if module.weight.is_meta:
            raise ValueError(f"device_map: the target does not fit on these GPUs: no room for its {name}")
    if (target.device.type, target.device.index or 0) != (device.type, device.index or 0):
        raise ValueError(f"device_map: the embedding must be on {device}, the drafter's device, got {target.device}")


def outline_target(path: str, dtype: torch.dtype, trust_remote_code: bool = False) -> Target:
    """A target without its weights, on torch's meta device: every size at no cost. Raises as `load_target` does."""
    source, common, config = open_model(path, trust_remote_code)
    with one_line(path):
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    with torch.device("meta"):
        return Target(AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer, path)


def convert_gguf(gguf: str, output: str) -> None:
    """Dequantises a GGUF file once and saves it as a safetensors folder with tokenizer and generation config.

    Loading the GGUF every time costs tens of seconds; the quantisation marks must go from model and config, or saving
    refuses. The folder is written beside its final name and renamed, so that it is whole or absent.
    """
    directory, name = os.path.split(os.path.abspath(gguf))
    model = load_whole(directory, gguf_file=name, dtype=torch.float32)
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, mark):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    temporary = Path(f"{output}.partial")
    model.save_pretrained(temporary)
    AutoTokenizer.from_pretrained(directory, gguf_file=name).save_pretrained(temporary)
    eos = model.config.eos_token_id
    GenerationConfig(eos_token_id=eos, bos_token_id=model.config.bos_token_id, pad_token_id=eos).save_pretrained(
        temporary
    )
    saved = json.loads((temporary / "config.json").read_text())
    assert "quantization_config" not in saved
    temporary.rename(output)
