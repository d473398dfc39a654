"""Drafters that start from their target."""

import pytest
import torch

from models.configuration import DrafterSpec, build_drafter_config
from models.drafter import DFlashDraftModel
from models.target import Target
from tiny import MASK, tiny_target
from training.forward import capture_taps
from training.initialise import FINAL_NORM_SCALE, initialise_from_target, zero_correction


def started(family, layers=2, target=None, taps=(0, 2)):
    target = target or tiny_target(family)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    spec = DrafterSpec(4, MASK, taps, target.num_layers, head_rank=8, gru_hidden_dim=16)
    model = DFlashDraftModel(build_drafter_config(target.config, spec, layers))
    initialise_from_target(model, target, torch.arange(3, 43).view(2, 20))
    return target, model


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_layers_are_the_targets_last(family):
    target, model = started(family)
    for layer, source in zip(model.layers, target.model.model.layers[2:], strict=True):
        own, theirs = layer.state_dict(), source.state_dict()
        copied = [name for name in own if name in theirs]
        assert len(copied) == (11 if family == "qwen3" else 9)
        assert all(torch.equal(own[name], theirs[name]) for name in copied)
    torch.testing.assert_close(model.norm.weight, target.model.model.norm.weight * FINAL_NORM_SCALE, rtol=1e-4, atol=0)


def test_query_and_key_scales_of_a_target_without_their_norms():
    """The drafter normalises queries and keys, a Llama target does not: the weights keep their mean scale."""
    target, model = started("llama")
    tokens = torch.arange(3, 43).view(2, 20)
    attention, source = model.layers[1].self_attn, target.model.model.layers[3]
    hidden = source.input_layernorm(target.forward(tokens, (2,), with_logits=False).taps[:, 1:])
    for name in ("q", "k"):
        theirs = getattr(source.self_attn, f"{name}_proj")(hidden).unflatten(-1, (-1, 8))
        ours = getattr(attention, f"{name}_norm")(theirs)
        assert ours.pow(2).mean().sqrt().item() == pytest.approx(theirs.pow(2).mean().sqrt().item(), rel=1e-2)


def test_context_keys_start_as_the_targets_own():
    """With one tap passed on, a drafter layer that reads it has the target's keys: k_proj(input_layernorm(tap))."""
    target, model = started("qwen3", layers=1, taps=(0, 2))
    with torch.no_grad():
        # What the random small fc adds is taken away, so that only the passed tap is left.
        model.fc.weight.copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1))
    taps = capture_taps(target, torch.arange(3, 23)[None], (0, 2))
    source = target.model.model.layers[3]
    expected = source.self_attn.k_proj(source.input_layernorm(taps[..., 32:]))
    keys = model.layers[0].self_attn.k_proj(model.context_features(taps))
    torch.testing.assert_close(keys, expected, atol=1e-4, rtol=1e-3)


def test_a_part_that_the_target_lacks_stays_random(caplog):
    target = tiny_target()
    del target.model.model.layers[3].mlp.gate_proj
    target.model.model.layers[3].mlp.gate_proj = torch.nn.Linear(32, 48, bias=False)  # another size
    target.forward = lambda tokens, taps, with_logits: type("Output", (), {"taps": torch.randn(2, 20, 32 * len(taps))})
    started("qwen3", layers=1, target=target)
    assert "the target has no mlp.gate_proj of shape (64, 32): random weights stay" in caplog.text


def test_more_layers_than_the_target_has_are_refused():
    with pytest.raises(ValueError, match="num_draft_layers 5 exceeds the target's 4 layers"):
        started("qwen3", layers=5)


def test_gemma_style_norms_are_copied_as_they_act():
    class OnePlus(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, hidden):
            return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True)) * (1 + self.weight)

    target = tiny_target()
    weight = torch.linspace(-0.5, 0.5, 32)
    target.model.model.norm = OnePlus(weight)
    model = started("qwen3", target=Target(target.model, path="tiny"))[1]
    effective = 1 + target.model.model.norm.weight
    torch.testing.assert_close(model.norm.weight, effective * FINAL_NORM_SCALE)


def test_the_correction_starts_at_zero():
    _, model = started("qwen3")
    assert model.head.output.weight.abs().sum() > 0
    zero_correction(model)
    assert model.head.output.weight.abs().sum() == 0
