"""What rounding leaves of the loss's gradient when a label is nearly certain and logits are large (TRAPS 26)."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from models import products, target
from models.products import wide_linear
from tiny import tiny_target
from training.objective import Objective
from training.slot_loss import Chunk, Mixture, SlotLoss

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradient_error(logit: float, device: str) -> float:
    """Of the cross entropy by bf16 states, relative to that of fp32 logits of the same states.

    Each token is a label once, with the given logit or up to 1 more, and one competitor 5 below it: p(label) is .993.
    """
    small = tiny_target(dtype=torch.bfloat16)
    small.model.to(device)
    rows = small.model.get_output_embeddings().weight.float()
    pairs = torch.stack([rows, rows.roll(-1, dims=0)], dim=1)
    above = torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(0))
    wanted = (torch.tensor([logit, logit - 5.0]) + above)[..., None]
    hidden = (torch.linalg.pinv(pairs.cpu()) @ wanted)[..., 0].bfloat16().to(device)
    labels, ones = torch.arange(len(rows), device=device), torch.ones(len(rows), device=device)
    exact, rounded = hidden.float().requires_grad_(True), hidden.clone().requires_grad_(True)
    logits = exact @ rows.T
    assert ((logits.softmax(-1).gather(1, labels[:, None]) - 0.993).abs() < 0.01).float().mean() > 0.9
    cross_entropy(logits, labels, reduction="sum").backward()
    objective = Objective(small, None)
    SlotLoss.apply(
        objective._logits, Mixture(), 1.0, [Chunk(labels, False)], labels, ones, None, rounded, None, None
    )[0].backward()  # fmt: skip
    return float((rounded.grad.float() - exact.grad).norm() / exact.grad.norm())


@pytest.mark.parametrize(("logit", "least", "most"), [(20.0, 0.02, 0.07), (30.0, 0.03, 0.08), (40.0, 0.03, 0.15)])
def test_bf16_logits_of_a_cpu_cost_some_of_the_gradient(logit, least, most):
    """Steps of 1/8 from 16 on and of 1/4 from 32 on, in two logits: 5 % of the gradient 1 - p at 40."""
    assert least < gradient_error(logit, "cpu") < most


@pytest.mark.parametrize("logit", [20.0, 40.0])
def test_fp32_logits_of_bf16_states_keep_the_gradient(monkeypatch, logit):
    """The GPU's path with a product that a CPU has in its place."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    monkeypatch.setattr(target, "wide_linear", lambda left, right, bias: products._WideProduct.apply(left, right))
    assert gradient_error(logit, "cpu") < 0.01


@GPU
@pytest.mark.parametrize("logit", [20.0, 40.0])
def test_fp32_logits_of_a_gpu_keep_the_gradient(logit):
    assert gradient_error(logit, "cuda") < 0.01


@GPU
def test_wide_products_and_their_gradient():
    left, right, bias = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((5, 16), (24, 16), (24,)))
    left.requires_grad_(True)
    wide = wide_linear(left, right, bias)
    torch.testing.assert_close(wide, left.float() @ right.float().T + bias.float(), atol=1e-4, rtol=1e-5)
    (gradient,) = torch.autograd.grad(wide, left, torch.ones_like(wide))
    torch.testing.assert_close(gradient, right.sum(0).expand(5, -1), atol=0.05, rtol=0.02)


def test_products_of_a_cpu_are_those_of_linear():
    for dtype in (torch.float32, torch.bfloat16):
        left, right, bias = torch.randn(5, 16).to(dtype), torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype)
        expected = torch.nn.functional.linear(left, right, bias)
        assert torch.equal(wide_linear(left, right, bias), expected) and expected.dtype == dtype
