"""Held-out prompts beyond those that the eval stage reports, for choices made before it: the best checkpoint of a run,
and the temperature of its confidence head. Neither may be fitted to what trained the drafter, nor to what is reported.
"""

from __future__ import annotations

from collections.abc import Callable

from data.benchmarks import BUILTIN, BUILTIN_COUNT, load_benchmark
from data.prompts import Prompt
from data.settings import RunConfig


def held_out(config: RunConfig, usable: Callable, count: int, otherwise: str = "") -> list[Prompt]:
    """Up to `count` prompts in equal parts from `train_eval_sources` or the benchmarks.

    Args:
        usable: of `Session.usable_ids`: None for a conversation that cannot be answered.
        otherwise: what else a user without such prompts can do, for the message.

    Raises ValueError when none is left.
    """
    sources = config.train_eval_sources or config.benchmarks
    share = -(-count // len(sources))
    prompts: dict[str, Prompt] = {}
    for source in sources:
        # Twice as many, since some may be too long.
        benchmark = load_benchmark(source, reported(config, source) + 2 * share, config.seed, config.benchmark_dir)
        fit = [p for p in benchmark.prompts if usable(p.turns[:1], [], p.tools) is not None]
        first = reported(config, source, benchmark.count)
        prompts |= {p.id: p for p in fit[first : first + share]}
    if not prompts:
        several = f" or {config.concurrency_prompts} (concurrency_prompts)" if config.concurrency else ""
        raise ValueError(
            f"no usable held-out prompt of {' '.join(sources)} is left beyond the first "
            f"{config.eval_prompts or 'published'} (eval_prompts){several} that the report uses: lower eval_prompts or "
            f"give --train_eval_sources{otherwise}"
        )
    return list(prompts.values())[:count]


def reported(config: RunConfig, source: str, published: int = 0) -> int:
    """Prompts of a source that the eval stage reports; `published` stands for all that the published tables use."""
    if source not in config.benchmarks:
        return 0
    count = config.eval_prompts or (BUILTIN_COUNT if source == BUILTIN else published)
    # Several at once are measured on prompts of the first benchmark, which may be more.
    loaded = config.concurrency and source == config.benchmarks[0]
    return max(count, config.concurrency_prompts) if loaded else count
