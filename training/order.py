"""The order of a training set's rows: a permutation that follows from (seed, epoch), the same on all ranks.

transformers and accelerate make it, give each rank its batches of it, loop back at its end until all ranks have the
same number, and skip the batches that a resumed epoch has seen by their numbers, without loading a row. What is changed
here is that the permutation stays a tensor: as a list it takes 40 bytes a row of Python objects in every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader

_PIECE = 4096  # row numbers that are Python objects at once


class Shuffled(SeedableRandomSampler):
    """accelerate's sampler, number for number."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch + self.initial_seed)
        for piece in torch.randperm(len(self.data_source), generator=generator).split(_PIECE):
            yield from piece.tolist()
        self.set_epoch(self.epoch + 1)


def shuffled_in_place(loader: DataLoader) -> DataLoader:
    """The loader that accelerate prepared, with `Shuffled` where it has its own sampler."""
    sampler = loader.get_sampler()
    if type(sampler) is SeedableRandomSampler:
        ours = Shuffled(sampler.data_source, data_seed=sampler.initial_seed)
        ours.set_epoch(sampler.epoch)
        loader.set_sampler(ours)
    return loader
