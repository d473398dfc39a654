"""transformers' own loop, `speculation_type="dflash"`, and ours accept the same tokens round by round in fp32."""

import pytest
import torch

from data.chat import encode_prompt, messages_of
from data.fetch_target import resolve_target
from data.prompts import load_prompts
from data.settings import RunConfig
from eval.decoding.loop import generate
from eval.decoding.policy import TreeOptions
from eval.decoding.proposals import make_proposer
from eval.decoding.request import Request
from models.bundle import Drafter
from models.checkpoint import finished_drafter, load_drafter
from models.target import load_target
from test_export import NEW_TOKENS, PROMPT, overfit
from tiny import tiny_drafter, tiny_target


class Rounds:
    """A streamer that keeps what each round emits; the prompt comes first."""

    def __init__(self):
        self.emitted = []

    def put(self, tokens):
        self.emitted.append(tokens.flatten().tolist())

    def end(self):
        return


def their_rounds(target, model, ids, new_tokens):
    """Tokens of the prefill and of each round of transformers' loop."""
    seen, prompt = Rounds(), torch.tensor([ids])
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, streamer=seen)
    target.model.generate(prompt, assistant_model=model, speculation_type="dflash", **options)
    return seen.emitted[1:]


def our_rounds(target, model, ids, new_tokens):
    """Likewise of our loop, with the backbone's chain over the whole vocabulary, as transformers drafts."""
    proposer = make_proposer(target, Drafter(model), "dflash_chain", TreeOptions())
    answer = generate(target, proposer, [Request(ids, new_tokens)])[0]
    rounds, at = [answer.tokens[:1]], 1
    for record in answer.rounds:
        rounds.append(answer.tokens[at : at + record.emitted])
        at += record.emitted
    assert at == len(answer.tokens)
    return rounds


@pytest.mark.parametrize(("steps", "least"), [(60, 4.0), (12, 1.2)])
def test_a_learned_drafter_is_accepted_alike(steps, least):
    target = tiny_target()
    drafter = tiny_drafter(target, scale=0.3)
    overfit(target, drafter, steps)
    theirs = their_rounds(target, drafter.model, PROMPT, NEW_TOKENS)
    assert our_rounds(target, drafter.model, PROMPT, NEW_TOKENS) == theirs
    mean = NEW_TOKENS / len(theirs)
    assert mean >= least and (steps == 60 or len({len(tokens) for tokens in theirs}) > 1)


def compare(target, drafter, prompts, new_tokens):
    """Round by round on real prompts; returns (rounds, tokens) over all of them."""
    rounds = tokens = 0
    for prompt in prompts:
        ids = encode_prompt(target.tokenizer, messages_of(prompt.turns, []))
        theirs = their_rounds(target, drafter.model, ids, new_tokens)
        assert our_rounds(target, drafter.model, ids, new_tokens) == theirs, prompt.turns
        rounds, tokens = rounds + len(theirs) - 1, tokens + sum(map(len, theirs[1:]))
    return rounds, tokens


@pytest.mark.slow
def test_the_demos_drafter_is_accepted_alike():
    config = RunConfig()
    try:
        target = load_target(resolve_target(config), torch.float32)
        drafter = load_drafter(finished_drafter(config.run_dir))
    except ValueError as error:
        pytest.skip(str(error))
    rounds, tokens = compare(target, drafter, load_prompts("builtin", 3, 5, "eval"), 24)
    assert tokens / rounds > 1.2
