"""Which rows a step sees: a function of (seed, epoch), the same when resumed, shared out to ranks without a rest."""

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader, RandomSampler

from trainers import make_trainer
from training.order import Shuffled, shuffled_in_place
from training.rows import TrainingRows
from training_runs import answer_rows


class Watched(TrainingRows):
    """Notes which rows are read."""

    def __getitem__(self, index):
        self.read.append(f"row-{index}")
        return super().__getitem__(index)


def watched(count=16):
    data = Watched(answer_rows(count), 64, 6, seed=0)
    data.read = []
    return data


def prepared(count, rank, ranks, batch, epoch=0, skip=0, seed=7):
    """The loader that a rank gets, as transformers asks accelerate for it; a resumed one skips."""
    data = watched(count)
    loader = DataLoader(data, batch_size=batch, sampler=RandomSampler(data), collate_fn=lambda s: [x.id for x in s])
    loader = shuffled_in_place(
        prepare_data_loader(
            loader,
            num_processes=ranks,
            process_index=rank,
            put_on_device=False,
            use_seedable_sampler=True,
            data_seed=seed,
        )
    )
    loader = skip_first_batches(loader, skip) if skip else loader
    loader.set_epoch(epoch)
    return loader, data


def batches(*options, **more):
    return list(prepared(*options, **more)[0])


@pytest.mark.parametrize("count", [1, 3, 10000])
def test_the_order_is_accelerates(count):
    """Runs that began before keep their order."""
    theirs, ours = (kind(range(count), data_seed=5) for kind in (SeedableRandomSampler, Shuffled))
    for epoch in (0, 1, 4):
        theirs.set_epoch(epoch), ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert ours.epoch == epoch + 1 and sorted(ours) == list(range(count))


def test_seed_and_epoch_decide_the_order():
    first = batches(50, 0, 1, 4)
    torch.manual_seed(99)
    assert batches(50, 0, 1, 4) == first and len({row for batch in first for row in batch}) == 50
    assert batches(50, 0, 1, 4, epoch=1) != first != batches(50, 0, 1, 4, seed=8)


@pytest.mark.parametrize(
    ("count", "ranks", "batch"), [(48, 2, 4), (48, 3, 4), (50, 2, 4), (7, 4, 1), (3, 2, 1), (3, 2, 4)]
)
def test_ranks_share_the_rows_and_make_as_many_steps(count, ranks, batch):
    """TRAPS 48. What fills up the last step are the first rows of the epoch once more."""
    shares = [batches(count, rank, ranks, batch, epoch=2) for rank in range(ranks)]
    steps = -(-count // (ranks * batch))
    assert [len(share) for share in shares] == [steps] * ranks
    seen = [row for step in zip(*shares, strict=True) for part in step for row in part]
    assert len(set(seen)) == count and len(set(seen[:count])) == count
    if count % (ranks * batch) == 0:
        assert len(seen) == count
    # One rank with the same number of rows a step meets them in the same order.
    assert seen[:count] == [row for part in batches(count, 0, 1, batch, epoch=2) for row in part]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_epoch_goes_on_with_the_next_batch_and_reads_no_earlier_row(rank):
    whole = batches(50, rank, 2, 4, epoch=3)
    loader, data = prepared(50, rank, 2, 4, epoch=3, skip=5)
    assert list(loader) == whole[5:] and len(whole) == 7
    assert data.read == [row for batch in whole[5:] for row in batch]


def trained(trainer, checkpoint=None):
    """Ids of the rows of each step."""
    seen, step = [], trainer.training_step
    trainer.training_step = lambda model, inputs, count: seen.append(inputs["ids"]) or step(model, inputs, count)
    trainer.train(resume_from_checkpoint=checkpoint)
    return seen


def test_a_resumed_run_sees_the_rows_that_the_straight_one_saw(tmp_path):
    """Stopped in the middle of the second epoch: 16 rows, 3 a step, 6 steps an epoch."""
    options = dict(per_device_train_batch_size=3, max_steps=14, save_strategy="steps", save_steps=8)
    trainer = make_trainer(tmp_path / "a", **options)
    assert isinstance(trainer.get_train_dataloader().get_sampler(), Shuffled)
    straight = trained(trainer)
    first, second = (sum(straight[start : start + 6], []) for start in (0, 6))
    assert first != second and sorted(first) == sorted(second) == sorted(f"row-{n}" for n in range(16))
    checkpoint = str(tmp_path / "a" / "checkpoints" / "checkpoint-8")
    assert trained(make_trainer(tmp_path / "b", **options), checkpoint) == straight[8:]
