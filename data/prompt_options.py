"""Options of where prompts come from, how their rows are read, and which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass

from data.option import option


@dataclass
class PromptOptions:
    """Part of `RunConfig`."""

    prompts: list[str] = option(
        ["builtin"],
        "sources in equal parts and in turn (one that ends leaves the others): builtin (own generator); files or "
        "folders of .jsonl, .json, .parquet, .arrow, also FOLDER/*.jsonl; Hub ids NAME[:CONFIG][@SPLIT][#REVISION]",
        "prepare regenerate eval demo bench",
    )
    num_prompts: int = option(
        1536, "training prompts to answer; 0 takes all rows of the sources", "prepare regenerate demo setup train"
    )
    messages_column: str = option(
        "",
        "column of the messages or turns (default: turns, messages, conversations, conversation, data)",
        "prepare regenerate eval bench",
    )
    prompt_column: str = option(
        "",
        "column of a prompt's text (default: instruction with input, prompt, question, query, problem, input, text)",
        "prepare regenerate eval bench",
    )
    answer_column: str = option(
        "",
        "column of the data set's own answer (default: response, answer, output, completion, solution)",
        "prepare regenerate eval bench",
    )
    system_column: str = option(
        "", "column of the system prompt (default: system, system_prompt)", "prepare regenerate eval bench"
    )
    tools_column: str = option(
        "",
        "column of function definitions, a list or JSON (default: tools, functions)",
        "prepare regenerate eval bench",
    )
    domain_column: str = option(
        "",
        "column of a prompt's kind, by which reports are broken down (default: domain, category, or the source's name)",
        "prepare regenerate eval bench",
    )
    role_key: str = option(
        "", "key of a message that says who speaks (default: role, from)", "prepare regenerate eval bench"
    )
    content_key: str = option(
        "", "key of a message that holds its text (default: content, value)", "prepare regenerate eval bench"
    )
    shuffle_buffer: int = option(
        0, "rows of each source that are held in memory to shuffle it; 0 keeps its order", "prepare regenerate"
    )
    min_prompt_characters: int = option(
        0, "shorter prompts are left out (characters of all turns)", "prepare regenerate"
    )
    max_prompt_characters: int = option(0, "longer prompts are left out; 0 is no limit", "prepare regenerate")
    languages: list[str] = option(
        [],
        "languages that are kept, such as en de, and und for texts too short to tell (default: all, none is detected)",
        "prepare regenerate",
    )
    drop_duplicates: bool = option(
        True, "leave out prompts that repeat a kept one but for case and white space", "prepare regenerate"
    )
    near_duplicates: float = option(
        0.0,
        "leave out prompts whose word 3-grams agree with a kept one's to this share, such as 0.8 (Jaccard similarity, "
        "by MinHash); 0 is off",
        "prepare regenerate dataset",
    )
    decontaminate: list[str] = option(
        [],
        "leave out prompts that share words in a row with the prompts of these benchmarks: names or files, as for "
        "benchmarks",
        "prepare regenerate dataset",
    )
    decontaminate_words: int = option(
        13,
        "how many words in a row; a shorter benchmark prompt is found where it is held whole",
        "prepare regenerate dataset",
    )


def check_prompt_options(options: PromptOptions) -> None:
    """Raises ValueError for a value out of range."""
    for name in ("num_prompts", "shuffle_buffer", "min_prompt_characters", "max_prompt_characters"):
        if getattr(options, name) < 0:
            raise ValueError(f"{name} must be at least 0, got {getattr(options, name)}")
    if options.decontaminate_words < 1:
        raise ValueError(f"decontaminate_words must be at least 1, got {options.decontaminate_words}")
    if not 0 <= options.near_duplicates <= 1:
        raise ValueError(f"near_duplicates must lie in 0..1, got {options.near_duplicates}")
    shortest, longest = options.min_prompt_characters, options.max_prompt_characters
    if longest and shortest > longest:
        raise ValueError(f"min_prompt_characters {shortest} is more than max_prompt_characters {longest}")
    if not options.prompts:
        raise ValueError("prompts must name at least one source")
    if len(set(options.prompts)) < len(options.prompts):
        raise ValueError("prompts: one source is named twice")
