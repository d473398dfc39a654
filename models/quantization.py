"""Quantised targets: transformers' own configurations by the name of the option.

int8 by torchao was run on CPU (tests); the bitsandbytes forms and int4 need a CUDA device and are untested here.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

NAMES = ("none", "bnb-int8", "bnb-nf4", "torchao-int8", "torchao-int4")
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
        return BitsAndBytesConfig(load_in_8bit=True)
    if name == "bnb-nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig  # an optional package

    return TorchAoConfig(Int8WeightOnlyConfig() if name == "torchao-int8" else Int4WeightOnlyConfig())
