"""The target: always transformers' own module, with the few calls that drafting and verification need around it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .attention import causal_mask, tree_mask

# One mask for all layers, or one for each layer type of a target with sliding windows.
Masks = Tensor | dict[str, Tensor]

# Layer kinds whose state cannot be rolled back or masked as a tree.
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "gated_delta")


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
        model: the transformers module.
        tokenizer: its tokenizer, or None.
        eos_ids: every id that ends an answer, from generation_config and config.
        forwards: number of forwards so far.
    """

    def __init__(self, model: nn.Module, tokenizer=None, path: str = ""):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.path = tokenizer, path
        self.config = model.config.get_text_config()
        refuse_recurrent(self.config)
        self.eos_ids = _eos_ids(model)
        self.forwards = 0
        self._rows: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table (may exceed what the tokenizer can decode)."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def max_length(self) -> int:
        """Positions that can be served. Trees are not masked by a sliding window yet, so a window is a limit too."""
        window, kinds = getattr(self.config, "sliding_window", None), getattr(self.config, "layer_types", None)
        limit = self.config.max_position_embeddings
        return min(limit, window) if window and (kinds is None or "sliding_attention" in kinds) else limit

    def embed(self, ids: Tensor) -> Tensor:
        """The target's own input embeddings [..., D], with the scale that some families apply in the module."""
        return self.model.get_input_embeddings()(ids)

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """The target's LM head on hidden states [..., D]: [..., V], or [..., len(ids)] for chosen rows.

        A logit cap of the family (`final_logit_softcapping`) is applied, as the target itself does.
        """
        head = self.model.get_output_embeddings()
        # Two dimensions: a strided slice with more of them is multiplied row by row, with a copy of the head for each.
        flat = hidden.reshape(-1, hidden.shape[-1])
        if ids is None:
            logits = head(flat)
        else:
            bias = None if head.bias is None else head.bias[ids]
            logits = nn.functional.linear(flat, self._head_rows(ids), bias)
        logits = logits.unflatten(0, hidden.shape[:-1])
        cap = getattr(self.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def _head_rows(self, ids: Tensor) -> Tensor:
        # The draft vocabulary is one tensor for the whole run: gather its rows of the head once.
        if id(ids) not in self._rows:
            weight = self.model.get_output_embeddings().weight
            # Ids ascend: when they are the first ones, as for a padded table, a view saves a second copy of the head.
            first = int(ids[-1]) + 1 == len(ids)
            self._rows = {id(ids): (ids, weight[: len(ids)] if first else weight[ids].contiguous())}
        return self._rows[id(ids)][1]

    def causal_masks(self, lengths_R: Tensor, width: int) -> Masks:
        """What `forward(mask=...)` takes for right-padded prompts of the given lengths: [R, 1, width, width]."""
        return causal_mask(lengths_R, width)

    def tree_masks(self, parents_RM: Tensor, depths_RM: Tensor, lengths_R: Tensor, width: int) -> Masks:
        """What `forward(mask=...)` takes for trees of M tokens (root first) after `lengths_R` cached columns.

        Args:
            parents_RM: index of each token's parent among the M; the root is its own parent.
            depths_RM: 0 for the root; a token's position is length + depth.
            width: columns that the cache returns, see `eval.decoding.cache.TreeCache.place`.
        """
        return tree_mask(parents_RM, lengths_R, width)

    @torch.inference_mode()
    def check_logits(self) -> None:
        """Raises ValueError for a family that scales its logits in a way that `logits` does not know."""
        ids = torch.tensor([[0, self.vocab_size - 1]], device=self.device)
        theirs = self.model(input_ids=ids).logits.float()
        ours = self.forward(ids, ()).logits.float()
        if not torch.allclose(ours, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max())):
            raise ValueError(f"target {self.config.model_type!r} computes its logits in a way that is not supported")

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        tap_ids: tuple[int, ...],
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache=None,
        keep: int = 0,
        with_logits: bool = True,
        with_final: bool = False,
    ) -> TargetOutput:
        """One forward. Captures only the tapped layers (transformers' `output_hidden_states=[i + 1, ...]`).

        Args:
            input_ids: [R, M].
            tap_ids: 0-based layer ids i; the tap is the layer's output, `hidden_states[i + 1]`.
            mask: boolean [R, 1, M, width] as `cache` orders its keys, or a 2-D padding mask, or None (causal).
            keep: positions, counted from the last, whose logits are computed; 0 means all.
        """
        if mask is not None and mask.ndim == 4 and self.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(
                ~mask, torch.finfo(self.dtype).min
            )
        self.forwards += 1
        output = self.model.base_model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
            output_hidden_states=[i + 1 for i in tap_ids] or None,
        )
        final = output.last_hidden_state
        taps = [output.hidden_states[i + 1] for i in tap_ids] or [final[..., :0]]
        logits = None
        if with_logits:
            logits = self.logits(final[:, -keep:])  # -0 is the start: everything
        return TargetOutput(logits, torch.cat(taps, dim=-1), final if with_final else None)


def refuse_recurrent(config) -> None:
    """Raises ValueError for a target with recurrent state: a mask cannot undo a rejected token there."""
    kinds = [k for k in (getattr(config, "layer_types", None) or ()) if any(r in k for r in _RECURRENT)]
    if kinds or "mamba" in config.model_type:
        raise ValueError(
            f"target {config.model_type!r} has recurrent layers ({kinds[0] if kinds else 'mamba'}): its state "
            "cannot be rolled back after a rejected draft, so it cannot be verified; choose one with attention only"
        )


def _eos_ids(model) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config.get_text_config()):
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
def _one_line(path: str):
    # A missing file or an unreachable Hub is the user's to solve; transformers explains it in a paragraph.
    try:
        yield
    except OSError as error:
        raise ValueError(f"target: cannot load {path}: {str(error).splitlines()[0]}") from error


def load_target(
    path: str,
    dtype: torch.dtype,
    device: str = "cpu",
    trust_remote_code: bool = False,
    attention: str | None = None,
) -> Target:
    """Loads a Hugging Face folder, a Hub id or a GGUF file (safetensors or GGUF only, never pickle).

    Raises ValueError in one line when the path has no config, or only pickled weights.
    """
    kwargs: dict = {}
    source = path
    if path.endswith(".gguf"):
        if not os.path.isfile(path):
            raise ValueError(f"target: no such GGUF file: {path}")
        source, kwargs["gguf_file"] = os.path.split(os.path.abspath(path))
    elif os.path.exists(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ValueError(f"target: {path} holds no config.json")
        if not any(name.endswith(".safetensors") for name in os.listdir(path)):
            raise ValueError(f"target: {path} holds no safetensors weights; pickled weights are not loaded")
    elif path.startswith((".", "/", "~")):
        raise ValueError(f"target: no such folder: {path}")
    common = {"trust_remote_code": trust_remote_code, **kwargs}
    with _one_line(path):
        config = AutoConfig.from_pretrained(source, **common)
    refuse_recurrent(config.get_text_config())
    if not kwargs:
        common["use_safetensors"] = True
    if attention:
        common["attn_implementation"] = attention
    if device == "cpu":
        # transformers repeats the key/value heads under a mask unless told that the kernel groups them itself.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    with _one_line(path):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **common)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **kwargs)
    target = Target(model.to(device), tokenizer, path)
    target.check_logits()
    return target


def convert_gguf(gguf: str, output: str) -> None:
    """Dequantises a GGUF file once and saves it as a safetensors folder with tokenizer and generation config.

    Loading the GGUF every time costs tens of seconds; the quantisation marks must go from model and config, or saving
    refuses. The folder is written beside its final name and renamed, so that it is whole or absent.
    """
    directory, name = os.path.split(os.path.abspath(gguf))
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
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
