"""The demo's real target, when `bash launch.sh target` has put it into the cache: exactness with a random drafter."""

import pytest
import torch

from data.chat import encode_prompt, messages_of
from data.fetch_target import resolve_target
from data.prompts import load_prompts
from data.settings import RunConfig
from eval.baseline import time_generate
from eval.decoding.loop import Request, generate
from eval.decoding.proposals import NoProposer, TreeOptions, available_methods, make_proposer
from models.checkpoint import Drafter
from models.configuration import DrafterSpec, build_drafter_config, default_taps
from models.drafter import DFlashDraftModel
from models.target import load_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real():
    try:
        path = resolve_target(RunConfig())
    except ValueError as error:
        pytest.skip(str(error))
    torch.set_num_threads(2)
    target = load_target(path, torch.float32)
    taps = default_taps(target.num_layers, 5)
    spec = DrafterSpec(8, 16, taps, target.num_layers, gru_hidden_dim=64, head_rank=32, draft_vocab_size=4096)
    torch.manual_seed(0)
    model = DFlashDraftModel(build_drafter_config(target.config, spec, 2)).eval().requires_grad_(False)
    return target, Drafter(model, torch.arange(100, 4196))


def test_every_method_emits_the_real_targets_tokens(real):
    target, drafter = real
    prompt = load_prompts("builtin", 1, 5, "eval")[0]
    ids = encode_prompt(target.tokenizer, messages_of(prompt.turns, []))
    expected = target.model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0, len(ids) :].tolist()
    assert generate(target, NoProposer(), [Request(ids, 10)])[0].tokens == expected
    for method in available_methods("domino")[1:]:
        answer = generate(target, make_proposer(target, drafter, method, TreeOptions(16, 4, 16)), [Request(ids, 10)])[0]
        assert answer.tokens == expected, method
        assert answer.rounds, method


def test_generate_is_timed_on_the_same_tokens(real):
    target, _ = real
    ids = encode_prompt(target.tokenizer, messages_of(["Name three colours."], []))
    tokens, seconds = time_generate(target, ids, 6)
    assert tokens == 5
    assert seconds > 0
