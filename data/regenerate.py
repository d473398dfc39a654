"""Stage `regenerate`: the target answers the prompts, so that a drafter learns the target's own text.

    bash launch.sh regenerate [CONFIG] [--key value ...]
    python -m data.regenerate configs/demo.yaml --num_prompts 128
    torchrun --nproc_per_node 8 -m data.regenerate CONFIG          several GPUs, each its share of the conversations
    bash launch.sh regenerate CONFIG --endpoints http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1

Writes RUN/answers (data/answer_store.py) from RUN/prompts, which the stage `prepare` writes, here too if need be. The
target answers in this process or behind servers (data/engines.py); with keep_features the first stores the taps of
every answer too (data/features.py). Every turn of every prompt is accounted for by id: done + failed + skipped + left
== input, at any time. A killed run goes on where it stopped, failed turns are tried again by the next run.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import islice

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from data import answers, features
from data.answer_store import FAILED, SKIPPED, Accounts, AnswerStore, drop_outcomes, holds_answers, writers
from data.chat import (
    PLAIN,
    ChatFormat,
    TemplateRejected,
    date_warning,
    encode_prompt,
    messages_of,
    template_fingerprint,
)
from data.dialogues import Work, turn_ids
from data.engine_local import LocalEngine
from data.engine_recorded import RecordedEngine
from data.engine_server import ServerEngine
from data.engines import LOCAL, RECORDED, Engine, engine_name, place_in_run
from data.environment import choose_device
from data.fetch_target import resolve_target
from data.masks import closing_token
from data.prepare import prepared
from data.prompt_store import Prepared
from data.settings import RunConfig, run_stage
from models.placement import placement
from models.quantization import precision_name
from models.target import choose_dtype, eos_ids, load_target

# What a manifest of before these options meant.
_BEFORE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "engine": LOCAL, **PLAIN.recorded}
# Prompts whose length tells how much room features need.
_SAMPLE = 4096


@dataclass(frozen=True)
class Asked:
    """The target as far as every engine needs it: where it lies, its tokenizer and configuration, its end tokens."""

    path: str
    tokenizer: object
    model: PreTrainedConfig
    eos_ids: tuple[int, ...]


def main(argv: list[str]) -> int:
    return run_stage("regenerate", argv, regenerate)


def regenerate(config: RunConfig) -> None:
    """Runs the stage. Raises ValueError for a user's mistake, StageError when it cannot go on."""
    folder, engine = config.path("answers"), engine_name(config)
    target = _read_target(config)
    settings = _settings(config, target, engine)
    manifest = answers.read_manifest(folder)
    other = _differing(manifest, settings)
    if other and holds_answers(folder):
        raise ValueError(f"{folder} holds answers made with {other}: delete the folder or choose another run_dir")
    finished = _finished(manifest, config)
    # Answers of before the stage `prepare` do not know of prompts; their sources may be gone.
    prompts = None if finished and "prompts" not in manifest else prepared(config, replaces=False)
    if finished and (prompts is None or manifest["prompts"] == _record_of(prompts)):
        print(f"answers are finished: {manifest['counts']['done']} rows in {folder}")
        return
    answers.make_folder(folder, "run_dir")
    rank, ranks = place_in_run()
    if rank == 0 and not holds_answers(folder) and (other or manifest.get("prompts") != _record_of(prompts)):
        drop_outcomes(folder)
    store = AnswerStore(folder, rank)
    try:
        _check_ids(prompts, store)
        work = Work(config, target.tokenizer, prompts, store, rank, ranks)
        if rank == 0 and (said := date_warning(target.tokenizer, work.form)):
            print(said, file=sys.stderr)
        record = {"num_prompts": config.num_prompts, "settings": settings, "prompts": _record_of(prompts)}
        answers.write_manifest(folder, {"finished": False, **record, "counts": store.counts(prompts.turns)})
        if store.open_turns(prompts.turns):
            answering = _engine(engine, config, target, tuple(settings["tap_ids"] or ()), work)
            with work.shown():
                answering.run(work)
        _finish(record, work, prompts)
    finally:
        store.close()


def _read_target(config: RunConfig) -> Asked:
    path = resolve_target(config)
    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:  # a missing file, an unreachable Hub id, a folder without a model
        raise ValueError(f"target: cannot read {path}: {str(error).splitlines()[0]}") from error
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # a target without the file
        generation = None
    return Asked(path, tokenizer, model, eos_ids(generation, model))


def _settings(config: RunConfig, target: Asked, engine: str) -> dict:
    """Everything that decides an answer or its features; rows made under other settings are never mixed."""
    taps = dtype = None
    if engine == LOCAL:
        wanted = choose_dtype(config.dtype, choose_device(config.device))
        dtype = precision_name(wanted, config.quantization)
        taps = list(features.resolve_taps(config, target.model.num_hidden_layers)) if config.keep_features else None
    return {
        "target": target.path,
        "target_identity": answers.target_identity(target.path),
        "template": template_fingerprint(target.tokenizer, ChatFormat.of(config)),
        **ChatFormat.of(config).recorded,
        "prompts": config.prompts,
        "seed": config.seed,
        "engine": engine,
        "answer_temperature": config.answer_temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "max_prompt_length": config.max_prompt_length,
        "max_answer_length": config.max_answer_length,
        "dtype": dtype,
        "tap_ids": taps,
    }


def _record_of(prompts: Prepared) -> dict:
    """What the answers' manifest keeps of the prompts."""
    return {"fingerprint": prompts.fingerprint, "counts": prompts.counts}


def _differing(manifest: dict, settings: dict) -> str:
    """The first setting that is another one than the manifest's, with both values; "" when there is none."""
    old = _BEFORE | (manifest.get("settings") or settings)
    for name, value in settings.items():
        # A target is known by its weights, wherever they lie.
        if name != "target" and old.get(name) != value:
            return f"{name} = {old.get(name)!r}, this run has {value!r}"
    return ""


def _finished(manifest: dict, config: RunConfig) -> bool:
    # Answers cut by a time budget go on under another one, or none; what failed is tried again.
    cut = manifest.get("out_of_time") and manifest.get("time_budget") != config.time_budget
    done = manifest.get("finished") and manifest.get("num_prompts") == config.num_prompts and "counts" in manifest
    return bool(done and not cut and not manifest["counts"]["failed"])


def _check_ids(prompts: Prepared, store: AnswerStore) -> None:
    """Raises ValueError for rows of other prompts."""
    known = set(turn_ids(prompts))
    assert len(known) == prompts.turns  # no conversation may be named like a turn of another
    strange = sum(key not in known for key in (*store.places, *store.dropped))
    if strange:
        raise ValueError(
            f"{store.folder} holds {strange} answers to other prompts (fewer num_prompts or a changed file): "
            "delete the folder or choose another run_dir"
        )


def _engine(name: str, config: RunConfig, target: Asked, taps: tuple[int, ...], work: Work) -> Engine:
    if name == LOCAL:
        return _local_engine(config, target, taps, work)
    if config.keep_features:
        print("no features are kept: this process does not see the target's hidden states (launch.sh features does)")
    if not target.eos_ids:
        raise ValueError(f"target: neither config.json nor generation_config.json of {target.path} has an eos_token_id")
    if name == RECORDED:
        return RecordedEngine(target.tokenizer, target.eos_ids, config.max_answer_length)
    closing = closing_token(target.tokenizer, work.form, target.eos_ids)
    closing = target.eos_ids[0] if closing is None else closing
    return ServerEngine(config, target.tokenizer, target.eos_ids, closing, target.model.vocab_size)


def _local_engine(config: RunConfig, target: Asked, taps: tuple[int, ...], work: Work) -> LocalEngine:
    device = choose_device(config.device)
    dtype, placed = choose_dtype(config.dtype, device), placement(config.device_map)
    if device != "cpu" and work.ranks > 1:
        device = f"{device}:{work.local_rank}"
    loaded = load_target(target.path, dtype, device, config.trust_remote_code, config.quantization, placed)
    writer = None
    if taps:
        if work.rank == 0:
            _check_space(config, work, len(taps) * loaded.config.hidden_size)
        writer = features.FeatureWriter(work.store.folder, work.store.own(), work.rank)
    return LocalEngine(config, loaded, taps, writer)


def _check_space(config: RunConfig, work: Work, width: int) -> None:
    """First turns are as long as the first some thousand are on average; later ones as long as they may be."""
    prompts, lengths = work.prompts, []
    for prompt in islice(prompts, _SAMPLE):
        if work.store.status(prompt.id) in ("done", SKIPPED):
            continue
        try:
            ids = encode_prompt(work.tokenizer, messages_of(prompt.turns[:1], []), prompt.tools, work.form)
        except TemplateRejected:
            continue
        if len(ids) <= config.max_prompt_length:
            lengths.append(len(ids) + config.max_answer_length)
    firsts = sum(lengths) * max(1.0, len(prompts) / _SAMPLE)
    later = (prompts.turns - len(prompts)) * (config.max_prompt_length + config.max_answer_length)
    features.check_space(work.store.folder, int(firsts) + later, width, "keep_features", "pass --keep_features false")


def _finish(record: dict, work: Work, prompts: Prepared) -> None:
    """Writes the manifest. The last rank to end marks the answers finished; none waits for another."""
    work.store.close()  # first: of several ranks that end at once, the last one must find no other
    alone = not writers(work.store.folder)
    store = Accounts(work.store.folder) if work.ranks > 1 else work.store
    counts = store.counts(prompts.turns)
    manifest = {"finished": not counts["left"] or work.out_of_time and alone, **record, "counts": counts}
    assert manifest["finished"] or work.ranks > 1, counts
    reasons = {status: store.reasons(status) for status in (SKIPPED, FAILED)}
    seconds = time.monotonic() - work.started
    if manifest["finished"]:
        manifest |= answers.describe(answers.iterate_rows(store.folder))
        manifest |= {"out_of_time": work.out_of_time, "time_budget": work.config.time_budget, **reasons}
        manifest |= {"last_run": {"seconds": seconds, "tokens_per_second": work.new_tokens / seconds}}
        _report(manifest, store.folder)
        if not counts["done"]:
            reason = next(iter({**reasons[SKIPPED], **reasons[FAILED]}))
            raise ValueError(f"no prompt could be answered; the most frequent reason: {reason}")
    else:
        print(f"rank {work.rank} is done, {counts['left']} turns are left to other ranks")
    answers.write_manifest(store.folder, manifest)


def _report(manifest: dict, folder: str) -> None:
    print(f"{folder}: " + ", ".join(f"{value} {name}" for name, value in manifest["counts"].items()))
    for status in (SKIPPED, FAILED):
        for reason, count in list(manifest[status].items())[:5]:
            print(f"  {status} {count}: {reason}")
    if manifest["counts"]["failed"]:
        print("  the same command tries the failed ones again")
    if manifest["counts"]["done"]:
        print(
            f"  {manifest['share_eos']:.0%} end in eos, {manifest['share_exact']:.0%} with the target's own token ids, "
            f"distinct 4-grams {manifest['distinct_4grams']:.3f}, {manifest['last_run']['tokens_per_second']:.0f} "
            "tokens/s"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
