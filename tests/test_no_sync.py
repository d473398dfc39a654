"""No step waits for the device: nothing that the host computes with is read from a tensor, and no size depends on one.

Two stand-ins for a GPU. `NoSync` raises on the operations that a GPU's host would wait in; they are dispatched on a CPU
too. torch's meta device has sizes and no data at all, so that whatever reads some fails, plain copies to the host too.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data.batches import collate, supervised_slots
from data.feature_cache import capture
from data.settings import RunConfig
from models.heads import head_types
from tiny import FAMILIES, MASK, VOCAB, tiny_drafter, tiny_target
from trainers import make_trainer
from training.arguments import check_training_options
from training.forward import block_loss
from training.objective import Objective, Terms
from training.rows import PackedRows, TrainingRows
from training.slot_loss import Mixture
from training_runs import answer_rows

aten = torch.ops.aten
# What hands a value to the host, gives a result whose size is a value, or (lift_fresh) is a tensor of the host's data,
# which is copied to a GPU after all that the GPU has still to do.
READS = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.unique_dim,
    aten._unique2, aten.unique_consecutive, aten.bincount, aten.lift_fresh,
}  # fmt: skip
WITH_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class NoSync(TorchDispatchMode):
    """Raises where the host would wait, and counts what else is done."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, kind = kwargs or {}, func.overloadpacket
        self.operations += 1
        boolean = kind in WITH_INDEX and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if kind in READS or boolean or func == aten.repeat_interleave.Tensor:
            raise AssertionError(f"the host waits for {func}")
        given = [x.device for x in args if isinstance(x, Tensor)] + [kwargs.get("device")]
        devices = {torch.device(device).type for device in given if device is not None}
        if kind in (aten._to_copy, aten.copy_) and len(devices) > 1:
            raise AssertionError(f"{func} copies between host and device")
        return func(*args, **kwargs)


READING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "boolean index": lambda x: x[x > 0],
    "boolean assignment": lambda x: x.clone().__setitem__(x > 0, torch.ones(2)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "tensor of a list": lambda x: torch.tensor([1.0, 2.0]) + x.sum(),
}


@pytest.mark.parametrize("name", READING)
def test_every_way_of_reading_is_noticed(name):
    values = torch.tensor([0.0, 1.0, 2.0])
    READING[name](values)
    with pytest.raises(AssertionError, match="the host waits for"), NoSync():
        READING[name](values)
    with NoSync() as watch:  # an index of numbers has the size that it has
        values[torch.arange(2)] += values.where(values > 0, 1.0).cumsum(0)[:2].to(torch.float64).float()
    assert watch.operations > 5


# Options of a run, as in test_trained_heads.
OBJECTIVES = {
    "ce": {},
    "all terms": dict(
        ce_weight=0.1, kl_weight=0.3, tv_weight=0.9, enable_confidence_head=True, position_weights="dpace"
    ),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("head", head_types())
def test_forward_and_backward_of_a_micro_step_read_nothing(tmp_path, head, objective):
    """The trainer's own step, all that stands between a batch and the optimizer; the target captures features."""
    options, ids = OBJECTIVES[objective], torch.tensor([1, *range(3, VOCAB, 2)])
    spec = dict(head_type=head, confidence_head=bool(options), confidence_with_markov=bool(options) and "mark" in head)
    steps = dict(gradient_accumulation_steps=2, max_steps=1)
    trainer = make_trainer(tmp_path, head=spec, options=options, draft_ids=ids, **steps)
    step, operations = trainer.training_step, []

    def watched(*args):
        with NoSync() as watch:
            loss = step(*args)
        operations.append(watch.operations)
        return loss

    trainer.training_step = watched
    trainer.train()
    assert len(operations) == 2 and min(operations) > 200
    assert all(p.grad is None for p in trainer.target.model.parameters())


def on_meta(head, terms, packed=False):
    """Target, drafter, objective and a batch without data."""
    target = tiny_target()
    markov = head.startswith("markov")
    confidence = dict(confidence_head=terms.confidence > 0, confidence_with_markov=terms.confidence > 0 and markov)
    model = tiny_drafter(target, block_size=4, head_type=head, **confidence).model.requires_grad_(True)
    data = TrainingRows(answer_rows(5), 64, 4, seed=0)
    data = PackedRows(data) if packed else data
    gamma = math.inf if terms.weights == "dpace" else 4.0
    batch = collate([data[0], data[1]], 4, 3, MASK, gamma, teacher=True)
    target.model.to("meta"), model.to("meta")
    moved = {name: value.to("meta") for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return model, Objective(target, None, 16, terms), replace(batch, **moved)


TERMS = {
    "ce": Terms(),
    "all terms": Terms(Mixture(0.1, 0.3, 0.9), confidence=1.0, detach=False, weights="dpace"),
}


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("head", head_types())
def test_the_loss_needs_no_data_on_the_host(head, terms):
    model, objective, batch = on_meta(head, TERMS[terms], packed=head == "domino")
    assert (len(batch.documents[0]) > 1) == (head == "domino")
    with NoSync() as watch:
        sums = block_loss(model, model, objective, batch, 0.4)
        sums.numerator.backward()
    assert sums.numerator.device.type == "meta" and watch.operations > 200
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_captured_without_waiting_and_as_transformers_gives_them(family, packed):
    """transformers finds packed documents by reading the positions; windows are counted inside a document."""
    target = tiny_target(family)
    data = TrainingRows(answer_rows(4), 64, 4, seed=0)
    data = PackedRows(data) if packed else data
    batch = collate([data[0], data[1]], 4, 3, MASK, 4.0, whole=True)
    real_RS, positions_RS = batch.context_mask_RS, batch.position_ids_RP[:, : batch.tokens_RS.shape[1]]
    assert (max(map(len, batch.documents)) > 1) == packed
    with NoSync():
        taps, final = capture(target, batch.tokens_RS, (0, 2), positions_RS if packed else None, with_final=True)
    theirs = target.model.get_decoder()(
        batch.tokens_RS, position_ids=positions_RS if packed else None, output_hidden_states=True, use_cache=False
    )
    torch.testing.assert_close(final[real_RS], theirs.last_hidden_state[real_RS], rtol=1e-5, atol=1e-5)
    expected = torch.cat([theirs.hidden_states[1], theirs.hidden_states[3]], dim=-1)
    torch.testing.assert_close(taps[real_RS], expected[real_RS], rtol=1e-5, atol=1e-5)


def test_batches_go_to_a_gpu_without_waiting(tmp_path):
    """From pinned memory alone: transformers has none on a CPU, and warns."""
    run, unpinned = (RunConfig(training=options) for options in ({}, {"dataloader_pin_memory": False}))
    assert check_training_options(run, "cuda:0").accelerator_config == {"non_blocking": True}
    assert check_training_options(run, "cpu").accelerator_config is None
    assert check_training_options(unpinned, "cuda:0").accelerator_config is None
    assert make_trainer(tmp_path, accelerator_config={"non_blocking": True}).accelerator.non_blocking


def test_places_of_supervised_slots():
    """Depth by depth, rows and anchors in order inside; their numbers are plain."""
    weights = torch.tensor([[[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0], [1.0, 0.5, 0.2]]])
    places, counts = supervised_slots(weights)
    assert places.tolist() == [0, 6, 9, 1, 10, 11] and counts == [3, 2, 1]
    places, counts = supervised_slots(torch.zeros(2, 2, 3))
    assert len(places) == 0 and counts == [0, 0, 0]
