"""What the values of options must be. ValueErrors name the option and its value."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from data.prompt_options import check_prompt_options

if TYPE_CHECKING:
    from data.options import RunConfig

_AT_LEAST_1 = (
    "max_prompt_length max_answer_length answer_batch_size num_draft_layers head_rank gru_hidden_dim "
    "anchors_per_row max_row_length lora_rank train_eval_prompts max_new_tokens budget width candidates "
    "concurrency_prompts concurrency_runs sweep_prompts bench_repeats bench_concurrency bench_processes "
    "server_concurrency server_attempts"
)
_AT_LEAST_0 = (
    "answer_temperature top_k time_budget num_taps draft_vocab_size global_batch_size loss_chunk train_eval_tokens "
    "eval_prompts near_tie trace_prompts agreement_rows"
)


def check_options(options: RunConfig) -> None:
    """Raises ValueError for a value out of range."""
    for limit, names in ((1, _AT_LEAST_1), (0, _AT_LEAST_0)):
        for name in names.split():
            if getattr(options, name) < limit:
                raise ValueError(f"{name} must be at least {limit}, got {getattr(options, name)}")
    for name, values in (("beta", [options.beta]), ("sweep_beta", options.sweep_beta)):
        if any(value > 0 for value in values):
            raise ValueError(
                f"{name} must be <= 0, got {max(values)}: a positive one breaks the closure of the pruned tree"
            )
    for name in ("sweep_budget", "sweep_width", "sweep_candidates"):
        if any(value < 1 for value in getattr(options, name)):
            raise ValueError(f"{name}: every value must be at least 1, got {min(getattr(options, name))}")
    if any(level < 1 for level in options.concurrency):
        raise ValueError(f"concurrency must be at least 1, got {options.concurrency}")
    if options.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", options.push_to_hub):
        raise ValueError(f"push_to_hub must be OWNER/NAME, got {options.push_to_hub!r}")
    if options.max_cache_gb <= 0:
        raise ValueError(f"max_cache_gb must be above 0, got {options.max_cache_gb}")
    if any(t < 0 for t in options.temperatures):
        raise ValueError(f"temperatures must be >= 0, got {options.temperatures}")
    if options.template_args:
        from data.chat import parse_arguments  # imported late: it is seldom needed

        parse_arguments(options.template_args)
    check_prompt_options(options)
    _check_engine(options)
    _check_loss(options)


def _check_engine(options: RunConfig) -> None:
    if not 0 < options.top_p <= 1:
        raise ValueError(f"top_p must lie above 0 and at most at 1, got {options.top_p}")
    if not 0 <= options.min_p <= 1:
        raise ValueError(f"min_p must lie in 0..1, got {options.min_p}")
    for name in ("server_timeout", "server_patience"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{name} must be above 0, got {getattr(options, name)}")
    if options.server_concurrency > 1000:  # connections of the client
        raise ValueError(f"server_concurrency must be at most 1000, got {options.server_concurrency}")
    for endpoint in options.endpoints:
        if not _is_address(endpoint):
            raise ValueError(f"endpoints must be addresses such as http://127.0.0.1:8000/v1, got {endpoint!r}")
    if len({endpoint.rstrip("/") for endpoint in options.endpoints}) < len(options.endpoints):
        raise ValueError("endpoints: one is named twice; server_concurrency sets the requests to each")
    if options.engine == "server" and not options.endpoints:
        raise ValueError("engine server needs endpoints, such as --endpoints http://127.0.0.1:8000/v1")


def _is_address(text: str) -> bool:
    """Whether it is http or https, with a host and a port that can be."""
    try:
        parts = urlsplit(text)
        place = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number or too large, half of a bracket
        return False
    return bool(place) and text.isprintable() and " " not in text and not re.search(r"\][^:]", parts.netloc)


def _check_loss(options: RunConfig) -> None:
    for name in ("ce_weight", "kl_weight", "tv_weight"):
        if getattr(options, name) < 0:
            raise ValueError(f"{name} must be >= 0, got {getattr(options, name)}")
    if options.ce_weight + options.kl_weight + options.tv_weight == 0:
        raise ValueError("ce_weight, kl_weight and tv_weight are all 0: nothing would be learned")
    if options.enable_confidence_head and options.confidence_weight <= 0:
        raise ValueError(f"enable_confidence_head needs a confidence_weight > 0, got {options.confidence_weight}")
    for name in ("lambda_start", "lambda_end", "dpace_alpha", "confidence_threshold"):
        if not 0 <= getattr(options, name) <= 1:
            raise ValueError(f"{name} must lie in 0..1, got {getattr(options, name)}")
    if not 0 < options.lambda_horizon <= 1:
        raise ValueError(f"lambda_horizon must lie above 0 and at most at 1, got {options.lambda_horizon}")
    for name in ("loss_gamma", "calibration_prompts"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{name} must be above 0, got {getattr(options, name)}")
