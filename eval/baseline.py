"""transformers' own greedy loop, timed like ours: the yardstick that keeps our AR baseline honest."""

from __future__ import annotations

import torch

from models.target import Target

from .decoding.loop import Clock


class _Stamps:
    """A streamer that only notes when tokens arrive: first the prompt, then each token."""

    def __init__(self, clock: Clock):
        self.clock, self.times = clock, []

    def put(self, value) -> None:
        self.times.append(self.clock.now())

    def end(self) -> None:
        return None


@torch.inference_mode()
def greedy(target: Target, prompt_ids: list[int], max_new_tokens: int, streamer=None) -> list[int]:
    """Greedy text of `target.generate`, without the repetition penalties that a generation_config may set."""
    ids = torch.tensor([prompt_ids], device=target.device)
    output = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
        streamer=streamer,
    )
    return output[0, len(prompt_ids) :].tolist()


def time_generate(target: Target, prompt_ids: list[int], max_new_tokens: int) -> tuple[int, float]:
    """(tokens after the first, seconds from the first token to the last) of `greedy`."""
    stamps = _Stamps(Clock(target.device))
    greedy(target, prompt_ids, max_new_tokens, stamps)
    arrivals = stamps.times[1:]
    return len(arrivals) - 1, arrivals[-1] - arrivals[0]
