"""Quantised targets: transformers' own configurations by the name of the option.

All three decode without loss on CPUs (a test); on CUDA they are untested.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

NAMES = ("none", "bnb-int8", "bnb-nf4", "torchao-int8")
# Of a quantised weight; NF4 has an fp32 scale for every 64 of them. Scales of whole rows are not counted.
BYTES = {"bnb-int8": 1.0, "bnb-nf4": 0.5 + 4 / 64, "torchao-int8": 1.0}
_PACKAGES = {"bnb": "bitsandbytes", "torchao": "torchao"}


def quantization_config(name: str, dtype: torch.dtype):
    """The `quantization_config` of `from_pretrained`, None for "none". Weights only; the LM head stays as it is.

    Raises ValueError for an unknown name and for a package that is not installed.
    """
    if name == "none":
        return None
    if name not in NAMES:
        raise ValueError(f"quantization must be one of {', '.join(NAMES)}, got {name!r}")
    package = _PACKAGES[name.split("-")[0]]
    if find_spec(package) is None:
        raise ValueError(f"quantization {name} needs the package {package}: pip install {package}")
    if name == "bnb-int8":
        # LLM.int8's outlier columns are those of the whole batch: a token's logits would depend on other branches of
        # the tree, by far more than rounding, and decoding would not be lossless. Without them each token stands alone.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    if name == "bnb-nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return TorchAoConfig(import_module("torchao.quantization").Int8WeightOnlyConfig())


def precision_name(dtype: torch.dtype, quantization: str = "none") -> str:
    """How results and answers name the target's precision: answers of a quantised target are another target's."""
    name = str(dtype).removeprefix("torch.")
    return name if quantization == "none" else f"{name} with {quantization} weights"


def quantization_of(precision: str) -> str:
    """The value of the option `quantization` in what `precision_name` returned."""
    return precision.partition(" with ")[2].removesuffix(" weights") or "none"
