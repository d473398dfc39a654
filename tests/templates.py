"""Chat formats of well-known models, re-stated here in their simplest form from their public documentation.

These are our own words for Qwen3's, Llama 3's, Gemma 3's and Mistral's formats, not the models' files: what is kept is
what decides where an answer begins and ends, and what happens to reasoning. A tokenizer of single characters (and of
two line ends in a row, as large vocabularies have) goes with them, so that spans can be counted by eye.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Reasoning stands in <think> tags before an answer; only what follows the last user's message keeps it. With thinking
# off the prompt ends in an empty pair of tags.
QWEN3 = """
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set reasoning, content = m.reasoning_content or '', m.content or '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.query and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + (call | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
# A header, an empty line, the trimmed text, <|eot_id|>; nothing after it.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# user and model in turn, the system's words in front of the first user's; <end_of_turn> and a line end after it.
GEMMA3 = """{{ bos_token }}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{%- if loop.first %}{{ system }}{% endif %}{{ m.content | trim }}{{ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
# [INST] words[/INST], a space and the answer, </s>: the space is the answer's.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Messages between tags as in Qwen's format, with marks around what is generated: the text and the closing token.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Marks that are too wide, as some models have them: the header and the line end after the answer are marked too.
WIDE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Each format with its first, closing and other special tokens.
FORMATS = {
    "qwen3": (QWEN3, None, "<|im_end|>", ["<|im_start|>"]),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    # The tokenizer's own end token is another one than that which closes an answer.
    "gemma3": (GEMMA3, "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"]),
    "marked": (MARKED, None, "<|im_end|>", ["<|im_start|>"]),
    "wide": (WIDE, None, "<|im_end|>", ["<|im_start|>"]),
}


def characters_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A token for every ASCII character, for two line ends in a row and for each special word of the format."""
    template, first, last, others = FORMATS[name]
    special = [word for word in (first, last, *others) if word]
    words = ["<pad>", "<unk>", *special, "\n\n", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n\n|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", bos_token=first, eos_token=last,
        chat_template=template,
    )  # fmt: skip


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, as byte-level vocabularies spell what they have no word for; ChatML without marks.

    Its tokens' places leave spaces out, as those of some models do.
    """
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """Mistral's format with spaces as SentencePiece writes them: a mark in front of a word, which decoding drops at the
    beginning of a text."""
    template, first, last, others = FORMATS["mistral"]
    words = ["<unk>", first, last, *others, "\u2581", *map(chr, range(33, 127))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens([first, last, *others])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token=first, eos_token=last, chat_template=template
    )
