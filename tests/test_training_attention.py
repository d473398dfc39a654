"""The training mask: one rule against a naive double loop, in both of its forms, and through every kernel."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations import flex_attention as flex

from data.batches import collate, pack_samples
from data.settings import load_config
from models.target import load_target
from tiny import MASK, tiny_drafter, tiny_target
from training import plan
from training.attention import block_rule, choose_attention, dense_mask, flex_mask
from training.forward import block_loss, capture_batch
from training.objective import Objective
from training.rows import TrainingRows
from training_runs import answer_rows, write_run

# anchors * block: 12, 127, 128, 129, 250 (TRAPS 12: builders that pad the query length out of range).
SIZES = pytest.mark.parametrize(("anchors", "block"), [(3, 4), (1, 127), (2, 64), (43, 3), (25, 10)])
CONTEXT = 40


def positions(anchors):
    """Anchors and document starts of two rows: one document, and three that begin at 0, 9 and 25."""
    generator = torch.Generator().manual_seed(anchors)
    anchors_RN = torch.randint(0, CONTEXT, (2, anchors), generator=generator)
    anchors_RN[:, 0] = 0  # a padding anchor sees its own block only
    begins = torch.tensor([0, 9, 25])
    starts_RN = torch.zeros_like(anchors_RN)
    starts_RN[1] = begins[torch.searchsorted(begins, anchors_RN[1], right=True) - 1]
    return anchors_RN, starts_RN


@SIZES
def test_dense_mask_equals_its_definition(anchors, block):
    anchors_RN, starts_RN = positions(anchors)
    expected = torch.zeros(2, 1, anchors * block, CONTEXT + anchors * block, dtype=torch.bool)
    for r in range(2):
        for n in range(anchors):
            rows = slice(n * block, (n + 1) * block)
            for s in range(CONTEXT):
                expected[r, 0, rows, s] = int(starts_RN[r, n]) <= s < int(anchors_RN[r, n])
            expected[r, 0, rows, CONTEXT + n * block : CONTEXT + (n + 1) * block] = True
    mask = dense_mask(anchors_RN, starts_RN, CONTEXT, block)
    assert torch.equal(mask, expected) and mask.any(-1).all()


@SIZES
def test_flex_attention_sees_what_dense_attention_sees(anchors, block):
    """TRAPS 11 and 12 at the kernel: one output to 1e-5 in fp32, tiles that overhang included."""
    anchors_RN, starts_RN = positions(anchors)
    slots = anchors * block
    mask = flex_mask(anchors_RN, starts_RN, CONTEXT, block)
    assert mask.shape == (2, 1, slots, CONTEXT + slots)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, slots, 16, generator=generator)
    key, value = torch.randn(2, 2, 2, CONTEXT + slots, 16, generator=generator)
    dense = dense_mask(anchors_RN, starts_RN, CONTEXT, block)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask), expected, atol=1e-5, rtol=1e-5)


def test_queries_past_the_end_are_answered():
    anchors_RN, starts_RN = positions(3)
    visible = block_rule(anchors_RN, starts_RN, CONTEXT, 4)
    assert visible(torch.tensor(0), 0, torch.tensor(127), torch.tensor(CONTEXT + 127)).ndim == 0


def packed_batch(spec, fixed=False):
    data = TrainingRows(answer_rows(5), 64, 3, seed=0, fixed_shapes=fixed)
    samples = [pack_samples([data[0], data[1], data[2]]), data[3]]
    return collate(samples, spec.block_size, spec.num_proposals, MASK, 4.0)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("head", ["none", "domino", "markov_vanilla", "markov_gated", "markov_rnn"])
@pytest.mark.parametrize("kernel", ["eager", "flex_attention"])
def test_every_kernel_gives_the_states_and_the_loss_of_sdpa(kernel, head, shift, monkeypatch):
    """TRAPS 11 through the whole drafter: each slot's state, which a sum of losses could hide, and the loss."""
    # transformers compiles flex_attention; its eager form runs on every CPU.
    monkeypatch.setattr(flex, "compile_friendly_flex_attention", _uncompiled)
    target = tiny_target()
    model = tiny_drafter(target, head_type=head, shift_label=shift, scale=0.3).model
    batch = packed_batch(model.spec)
    batch = capture_batch(target, batch, model.spec.target_layer_ids, False, None)
    losses, states = [], []
    objective = Objective(target, None, 100)

    def noted(drafter, batch, lam, hidden_RQD):
        states.append(hidden_RQD)
        return objective(drafter, batch, lam, hidden_RQD)

    noted.target = target
    for name in ("sdpa", kernel):
        model.config._attn_implementation = name
        losses.append(block_loss(model, model, noted, batch, 0.3).numerator)
    torch.testing.assert_close(*losses, atol=1e-4, rtol=1e-5)
    assert states[0].shape == (2, batch.block_ids_RNB[0].numel(), 32) and states[0].abs().amax(-1).min() > 0.1
    torch.testing.assert_close(*states, atol=1e-4, rtol=0)


def _uncompiled(query, key, value, training=False, **options):
    return flex_attention(query, key, value, **options)


def test_batches_of_fixed_shapes_compile_the_mask_once():
    """Other anchors, documents and rows are other numbers, not other shapes."""
    data = TrainingRows(answer_rows(12), 64, 3, seed=0, fixed_shapes=True)
    options = dict(block_size=4, depths=3, mask_token_id=MASK, gamma=4.0, **data.collate_options())
    batches = [collate([data[i], data[i + 1]], **options) for i in range(0, 12, 2)]
    assert (
        len({tuple(getattr(b, n).shape for n in ("tokens_RS", "anchors_RN", "position_ids_RP")) for b in batches}) == 1
    )
    ragged = [collate([data[i], data[i + 1]], 4, 3, MASK, 4.0) for i in range(0, 12, 2)]
    assert len({b.tokens_RS.shape for b in ragged}) > 1
    graphs = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()

    def mask_of(anchors_RN, starts_RN, context):
        return dense_mask(anchors_RN, starts_RN, context, 4)

    compiled = torch.compile(mask_of, backend=graphs, dynamic=False)
    for batch in batches:
        compiled(batch.anchors_RN, batch.starts_RN, batch.tokens_RS.shape[1])
    assert graphs.frame_count == 1


def test_the_kernel_is_chosen_by_the_device():
    assert choose_attention("auto", "cpu") == "sdpa" and choose_attention("auto", "cuda:1") == "flex_attention"
    assert choose_attention("sdpa", "cuda:0") == "sdpa"
    with pytest.raises(ValueError, match="attention flex needs a CUDA device, the device is cpu"):
        choose_attention("flex", "cpu")


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"causal": True}, "causal blocks"), ({"sliding_layers": (1,), "sliding_window": 4}, "sliding windows")],
)
def test_narrowed_masks_are_dense_on_a_gpu_too(tmp_path, monkeypatch, fields, what):
    """With a faked device: the plan of a run that starts from such a drafter."""
    config = str(write_run(tmp_path, answer_rows(4), init_from_target=False))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(plan, "rank_device", lambda name: "cuda:0")
    monkeypatch.setattr(plan, "stream_target", lambda *_: None)
    monkeypatch.setattr(plan, "load_target", lambda path, dtype, device, *_, **more: load_target(path, dtype))
    assert kernel_of(config) == "flex_attention"
    tiny_drafter(tiny_target(), block_size=4, **fields).model.save_pretrained(tmp_path / "start")
    start = {"init_drafter": str(tmp_path / "start")}
    assert kernel_of(config, **start) == kernel_of(config, **start, attention="sdpa") == "sdpa"
    with pytest.raises(ValueError, match=f"attention flex does not support the {what} of this drafter"):
        kernel_of(config, **start, attention="flex")


def kernel_of(config, **options):
    return plan.prepare(load_config(config, options)).drafter_config._attn_implementation


@pytest.mark.parametrize("head", ["none", "domino"])
def test_gradient_checkpointing_changes_no_loss_and_no_gradient(head):
    target, results = tiny_target(), []
    for checkpointing in (False, True):
        model = tiny_drafter(target, head_type=head, scale=0.3).model.requires_grad_(True).train()
        calls = []
        model.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            model.activation_checkpointing_enable()
        sums = block_loss(model, model, Objective(target, None, 100), packed_batch(model.spec), 0.3)
        sums.numerator.backward()
        assert len(calls) == 1 + checkpointing  # the layer runs again in the backward pass
        results.append((sums.numerator.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, msg=name)
