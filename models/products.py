"""Products of low-precision matrices whose result is fp32.

A logit of 40 in bf16 is a multiple of 1/4: rounding moves the gradient of a nearly certain label by 5 to 10 %. GPUs
add up in fp32 anyway and can give the sum as it is. CPUs cannot: there products of bf16 matrices come out in bf16.

Shape suffixes: M rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


class _WideProduct(torch.autograd.Function):
    """input @ weight.T in fp32. The weight gets no gradient."""

    @staticmethod
    def forward(ctx, input_MD: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(weight_VD)
        return torch.mm(input_MD, weight_VD.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient_MV: Tensor):
        (weight_VD,) = ctx.saved_tensors
        return gradient_MV.to(weight_VD.dtype) @ weight_VD, None


def wide_linear(input_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """`linear` with a constant weight: [M, V] in fp32 on CUDA, in the input's dtype elsewhere."""
    if input_MD.device.type != "cuda" or input_MD.dtype == torch.float32:
        return linear(input_MD, weight_VD, bias_V)
    product_MV = _WideProduct.apply(input_MD, weight_VD)
    return product_MV if bias_V is None else product_MV + bias_V
