"""What is supervised in whole conversations: exact spans in the formats of well-known models (tests/templates.py)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.answer_tokens import Recorded, tokenise_answers
from data.chat import PLAIN, ChatFormat, TemplateRejected, encode_prompt, messages_of, render
from data.fetch_target import resolve_target
from data.masks import closing_token, mask_conversations
from data.settings import RunConfig
from templates import bytes_tokenizer, characters_tokenizer, pieces_tokenizer
from tiny_tokenizer import tiny_tokenizer

THINKING = ChatFormat(thinking=True)


def talk(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def spans_in_words(name, messages, form=PLAIN, tools=None):
    """The text of each span, and all text outside of spans."""
    tokenizer = characters_tokenizer(name)
    (masked,) = mask_conversations(tokenizer, [messages], form, [tools])
    assert not masked.reason, masked.reason
    inside = [tokenizer.decode(masked.ids[start:end]) for start, end in masked.spans]
    outside = tokenizer.decode([i for i, on in zip(masked.ids, masked.supervised, strict=True) if not on])
    assert tokenizer.decode(masked.ids) == render(tokenizer, messages, tools, form)
    return inside, outside


def reason(name, messages, form=PLAIN, **more):
    (masked,) = mask_conversations(characters_tokenizer(name), [messages], form, **more)
    assert masked.ids == [] and masked.spans == []
    return masked.reason


def test_chatml_spans_end_with_the_closing_token_and_not_the_line_end_after_it():
    (masked,) = mask_conversations(characters_tokenizer("marked"), [talk("hi", "yo", "so?", "no")])
    # <|im_start|> user\n hi <|im_end|> \n: 1 + 5 + 2 + 1 + 1; <|im_start|> assistant\n: 1 + 10; yo <|im_end|>: 2 + 1;
    # then \n, the second question 1 + 5 + 3 + 1 + 1, the header 1 + 10: 24 + 23 = 47
    assert masked.spans == [(21, 24), (47, 50)]
    assert len(masked.ids) == 51 and sum(masked.supervised) == 6


def test_llama_3():
    inside, outside = spans_in_words("llama3", [{"role": "system", "content": "S"}, *talk("a", " b ", "c", "d")])
    assert inside == ["b<|eot_id|>", "d<|eot_id|>"]
    assert outside == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_gemma_3_closes_with_another_token_than_the_tokenizers_end():
    inside, outside = spans_in_words("gemma3", [{"role": "system", "content": "S"}, *talk("a", "b", "c", "d")])
    assert inside == ["b<end_of_turn>", "d<end_of_turn>"]
    assert outside == (
        "<bos><start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\n\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n\n"
    )


def test_mistral_writes_the_space_before_an_answer():
    inside, outside = spans_in_words("mistral", talk("a", "b", "c", "d"))
    assert inside == [" b</s>", " d</s>"] and outside == "<s>[INST] a[/INST][INST] c[/INST]"


def test_qwen_3_reasoning_is_supervised_when_it_was_generated():
    thought = "<think>\nwhy\n</think>\n\nb"
    for answer in ({"content": thought}, {"content": "b", "reasoning_content": "why"}):
        inside, outside = spans_in_words("qwen3", [*talk("a"), {"role": "assistant", **answer}], THINKING)
        assert inside == [f"{thought}<|im_end|>"]
        assert outside == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\n"


def test_qwen_3_empty_tags_are_the_prompts_with_thinking_off():
    inside, outside = spans_in_words("qwen3", talk("a", "b"))
    assert inside == ["b<|im_end|>"]
    assert outside == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"


def test_tool_calls_are_not_supervised_and_what_follows_the_results_is():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    messages = [*talk("a"), call, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "b"}]
    inside, outside = spans_in_words("qwen3", messages, tools=[{"name": "f"}])
    assert inside == ["b<|im_end|>"]
    assert '<tool_call>{"name": "f"}</tool_call>' in outside and '# Tools\n{"name": "f"}' in outside


@pytest.mark.parametrize("name", ["marked", "wide"])
def test_marks_are_used_but_hold_no_header_and_no_line_end(name):
    inside, outside = spans_in_words(name, talk("a", "b", "c", "d e"))
    assert inside == ["b<|im_end|>", "d e<|im_end|>"]
    head = "<|im_start|>assistant\n"
    assert outside == f"<|im_start|>user\na<|im_end|>\n{head}\n<|im_start|>user\nc<|im_end|>\n{head}\n"


@pytest.mark.parametrize(
    "name, messages, form, said",
    [
        # Qwen3 drops the reasoning of an answer when the next question comes ...
        ("qwen3", talk("a", "<think>\nwhy\n</think>\n\nb", "c", "<think>\nx\n</think>\n\nd"), THINKING,
         "the template rewrites answer 1"),
        # ... and, thinking off, the empty tags that its prompt ended in.
        ("qwen3", talk("a", "b", "c", "d"), PLAIN, "the template rewrites what stands before answer 1"),
        # Tags that the target did not write.
        ("qwen3", talk("a", "b"), THINKING, "the template rewrites answer 1"),
        ("gemma3", talk("a", "b")[::-1], PLAIN, "no answer of the assistant"),
        ("gemma3", [*talk("a"), *talk("a", "b")], PLAIN, "the chat template rejects the messages: roles must"),
        ("llama3", talk("a"), PLAIN, "no answer of the assistant"),
        ("llama3", talk("a", " "), PLAIN, "the template rewrites answer 1"),
        ("llama3", talk("a", "b<|eot_id|>c"), PLAIN, "the template rewrites answer 1"),
        ("llama3", talk("a", "caf\xe9"), PLAIN, "the tokens of answer 1 decode to another text"),
        ("llama3", [*talk("a"), {"role": "assistant"}], PLAIN, "the template rewrites answer 1"),
        # The line end of the header and that of the answer are one token, which no generation begins with.
        ("qwen3", talk("a", "\nb"), THINKING, "the template rewrites answer 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_comes_with_its_reason(name, messages, form, said):
    assert reason(name, messages, form).startswith(said)


def test_a_token_across_the_start_of_an_answer():
    tokenizer = characters_tokenizer("marked")
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (masked,) = mask_conversations(tokenizer, [talk("a", "\nb")])
    assert masked.reason == "a token joins answer 1 with what stands before it"
    (told,) = tokenise_answers(tokenizer, [Recorded(talk("a"), "\nb")])
    assert told.prompt_ids == encode_prompt(tokenizer, talk("a"))
    assert tokenizer.convert_ids_to_tokens(told.answer_ids) == ["\n", "b", "<|im_end|>"]
    (told,) = tokenise_answers(tokenizer, [Recorded(talk("a"), " b \n")])
    assert tokenizer.decode(told.answer_ids) == " b \n<|im_end|>"


def test_a_bad_row_does_not_disturb_its_neighbours():
    tokenizer = characters_tokenizer("llama3")
    rows = [talk("a", "b"), talk("a"), [{"content": "a"}, *talk("a", "b")], talk("c", "d")]
    together = mask_conversations(tokenizer, rows)
    assert [bool(masked.reason) for masked in together] == [False, True, True, False]
    assert together[3] == mask_conversations(tokenizer, rows[3:])[0]


def test_the_closing_token_is_one_at_which_the_target_stops():
    tokenizer = characters_tokenizer("gemma3")
    end, other = tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<eos>"])
    assert closing_token(tokenizer) == closing_token(tokenizer, eos_ids=[other, end]) == end
    assert closing_token(tokenizer, eos_ids=[other]) is None
    said = "the template closes an answer with no token at which the target stops"
    assert reason("gemma3", talk("a", "b"), eos_ids=[other]) == said
    # The tiny template closes with a plain character.
    assert closing_token(tiny_tokenizer()) is None
    assert mask_conversations(tiny_tokenizer(), [talk("a", "b")])[0].reason == said


@pytest.mark.parametrize("form", [PLAIN, THINKING], ids=["off", "on"])
def test_recorded_answers_follow_exactly_the_prompt_that_regeneration_asks(form):
    """A row of each turn, so that a template which rewrites history loses none."""
    tokenizer = characters_tokenizer("qwen3")
    turns, answers = ["a", "c"], ["b", "<think>\nx\n</think>\n\nd"]
    rows = [Recorded(messages_of(turns[: k + 1], answers[:k]), answers[k]) for k in range(2)]
    told = tokenise_answers(tokenizer, rows, form)
    for k, (row, answer) in enumerate(zip(told, answers, strict=True)):
        assert row.reason == ""
        assert row.prompt_ids == encode_prompt(tokenizer, messages_of(turns[: k + 1], answers[:k]), form=form)
        assert tokenizer.decode(row.answer_ids) == f"{answer}<|im_end|>"


def test_recorded_answers_that_were_cut_are_not_closed_and_empty_ones_are_named():
    tokenizer = characters_tokenizer("mistral")
    rows = [Recorded(talk("a"), "b", whole=False), Recorded(talk("a"), " \n"), Recorded([{"role": "x"}], "b")]
    cut, empty, refused = tokenise_answers(tokenizer, [*rows, Recorded(talk("a"), "caf\xe9")])[:3]
    assert tokenizer.decode(cut.answer_ids) == " b"
    assert empty.reason == "an empty answer" and refused.reason.startswith("the chat template rejects the messages")
    assert refused.answer_ids == refused.prompt_ids == []
    assert tokenise_answers(tokenizer, [Recorded(talk("a"), "caf\xe9")])[0].reason == (
        "the answer's tokens decode to another text"
    )


def test_an_answer_that_names_a_stop_token_is_no_answer_of_the_target():
    """Generation would have ended there."""
    tokenizer = characters_tokenizer("llama3")
    rows = [Recorded(talk("a"), "b<|eot_id|>c"), Recorded(talk("a"), "b")]
    named, plain = tokenise_answers(tokenizer, rows)
    assert named.reason == "a token at which the target stops stands in the answer" and named.answer_ids == []
    assert tokenizer.decode(plain.answer_ids) == "b<|eot_id|>"


def test_half_a_surrogate_pair_costs_its_own_row_only():
    tokenizer = characters_tokenizer("llama3")
    bad, good = mask_conversations(tokenizer, [talk("a\ud83d", "b"), talk("a", "b")])
    assert bad.reason == "half a surrogate pair in a text"
    assert [tokenizer.decode(good.ids[a:b]) for a, b in good.spans] == ["b<|eot_id|>"]
    bad, good = tokenise_answers(tokenizer, [Recorded(talk("a"), "b\ud83d"), Recorded(talk("a"), "b")])
    assert bad.reason == "half a surrogate pair in a text" and tokenizer.decode(good.answer_ids) == "b<|eot_id|>"
    with pytest.raises(TemplateRejected):
        encode_prompt(tokenizer, talk("a\ud83d"))


def test_characters_of_several_bytes_and_spaces_that_no_token_claims():
    tokenizer = bytes_tokenizer()
    answers = [" na\u00efve \U0001f642", "\u4f60\u597d  ", "e\u0301."]
    (masked,) = mask_conversations(tokenizer, [talk("\u00fc", answers[0], "b ", answers[1], " c", answers[2])])
    assert masked.reason == ""
    assert [tokenizer.decode(masked.ids[a:b]) for a, b in masked.spans] == [f"{text}<|im_end|>" for text in answers]
    # A byte a token: 1 space, 5 letters of which one has two bytes, 1 space, 4 bytes, the closing token.
    assert masked.spans[0][1] - masked.spans[0][0] == 1 + 6 + 1 + 4 + 1


def test_spaces_as_sentencepiece_writes_them():
    tokenizer = pieces_tokenizer()
    (masked,) = mask_conversations(tokenizer, [talk("a", "b c", "d", "e")])
    pieces = [tokenizer.convert_ids_to_tokens(masked.ids[a:b]) for a, b in masked.spans]
    assert pieces == [["\u2581", "b", "\u2581", "c", "</s>"], ["\u2581", "e", "</s>"]]
    (told,) = tokenise_answers(tokenizer, [Recorded(talk("a"), "b c")])
    assert told.prompt_ids + told.answer_ids == masked.ids[: masked.spans[0][1]]
    assert told.prompt_ids == encode_prompt(tokenizer, talk("a"))


@pytest.mark.parametrize("name", ["llama3", "gemma3", "mistral", "marked", "wide", "qwen3"])
@given(texts=st.lists(st.text("ab <|/>\n", min_size=1, max_size=12), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_spans_hold_the_answers_whatever_they_are(name, texts):
    """Or there is a reason, which clean texts give none for."""
    tokenizer, messages = characters_tokenizer(name), talk(*texts[: len(texts) // 2 * 2])
    (masked,) = mask_conversations(tokenizer, [messages], PLAIN)
    answers = [m["content"] for m in messages[1::2]]
    rewrites = name == "qwen3" and len(answers) > 1
    if masked.reason:
        assert rewrites or any(text != text.strip() for text in answers)
    else:
        assert tokenizer.decode(masked.ids) == render(tokenizer, messages)
        spans = [tokenizer.decode(masked.ids[a : b - 1]) for a, b in masked.spans]
        assert [span.strip() for span in spans] == [text.strip() for text in answers] and not rewrites
        assert {masked.ids[b - 1] for _, b in masked.spans} == {closing_token(tokenizer)}
    rows = [Recorded(messages[: 2 * n + 1], text) for n, text in enumerate(answers)]
    for row, told in zip(rows, tokenise_answers(tokenizer, rows), strict=True):
        if told.reason:
            assert told.reason == "an empty answer" and not row.answer.strip()
        else:
            assert told.prompt_ids == encode_prompt(tokenizer, row.messages)
            assert tokenizer.decode(told.answer_ids[:-1]).strip() == row.answer.strip()


@pytest.mark.slow
def test_the_demos_own_template():
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_target(RunConfig()))
    except ValueError as error:
        pytest.skip(str(error))
    messages = talk("What is 2 + 2?", "It is 4.\n", "And  3 x 14?", "That is 42 \u2014 na\u00efve, isn't it?")
    (masked,) = mask_conversations(tokenizer, [messages])
    assert [tokenizer.decode(masked.ids[a:b]) for a, b in masked.spans] == [
        "It is 4.\n<|im_end|>",
        "That is 42 \u2014 na\u00efve, isn't it?<|im_end|>",
    ]
    start = masked.spans[1][0]
    assert masked.ids[:start] == encode_prompt(tokenizer, messages[:3])
    (told,) = tokenise_answers(tokenizer, [Recorded(messages[:3], messages[3]["content"])])
    assert told.prompt_ids + told.answer_ids == masked.ids[: masked.spans[1][1]]
