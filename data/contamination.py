"""Prompts that evaluation asks, found in other text: word n-grams that a text shares with a benchmark's prompts.

n = 13 words by default, as GPT-3 chose it (Brown et al. 2020, appendix C): shorter runs are common phrases. A prompt of
fewer words has no such run; it counts as found where the text holds it whole. Under SHORTEST words even that says
little ("What is it?"): such a prompt is found only where a turn is nothing else. N-grams that many prompts of one
benchmark share are the words around the task ("Write a solution to the following problem ..."), not the task, and are
left out.

Shapes: G grams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from data.chat import turn_text
from data.prompt import Prompt
from data.words import gram_hashes, hash_of, normalised, word_ids, words

WORDS = 13
SHORTEST = 5
_SHARED = 3, 0.05  # in more prompts than this, and than this share of all, an n-gram belongs to the form


class Contamination:
    """An index of benchmarks' prompts.

    Args:
        benchmarks: prompts by the name of their benchmark; at most 64 of them.
        n: words in a row that a text must share.
    """

    def __init__(self, benchmarks: Mapping[str, Sequence[Prompt]], n: int = WORDS):
        assert len(benchmarks) <= 64
        self.names, self.n = list(benchmarks), n
        self._whole: dict[int, int] = {}  # hash of a very short prompt -> bits of the benchmarks that ask it
        found: dict[int, dict[int, int]] = {}  # length -> hash -> bits
        for number, prompts in enumerate(benchmarks.values()):
            self._add(1 << number, [turn_text(turn) for prompt in prompts for turn in prompt.turns], found)
        self._grams = {length: _arrays(hashes) for length, hashes in sorted(found.items())}

    def _add(self, bit: int, texts: list[str], found: dict[int, dict[int, int]]) -> None:
        counts: Counter[tuple[int, int]] = Counter()
        for text in dict.fromkeys(texts):
            ids = word_ids(words(text))
            if len(ids) < min(SHORTEST, self.n):
                key = hash_of(normalised(text))
                self._whole[key] = self._whole.get(key, 0) | bit
                continue
            length = min(self.n, len(ids))
            counts.update((length, int(gram)) for gram in np.unique(gram_hashes(ids, length)))
        limit = max(_SHARED[0], _SHARED[1] * len(texts))
        for (length, gram), count in counts.items():
            if count <= limit:
                hashes = found.setdefault(length, {})
                hashes[gram] = hashes.get(gram, 0) | bit

    def found_in(self, texts: Iterable[str]) -> list[str]:
        """Names of the benchmarks that these texts hold prompts of."""
        bits = 0
        for text in texts:
            ids = word_ids(words(text))
            for length, (hashes, marks) in self._grams.items():
                grams_G = gram_hashes(ids, length)
                if len(grams_G):
                    place_G = np.minimum(np.searchsorted(hashes, grams_G), len(hashes) - 1)
                    bits |= int(np.bitwise_or.reduce(marks[place_G[hashes[place_G] == grams_G]], initial=0))
            bits |= self._whole.get(hash_of(normalised(text)), 0) if self._whole else 0
        return [name for number, name in enumerate(self.names) if bits >> number & 1]


def _arrays(hashes: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.array(list(hashes), dtype=np.uint64)
    order = np.argsort(keys)
    return keys[order], np.array(list(hashes.values()), dtype=np.uint64)[order]
