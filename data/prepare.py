"""Stage `prepare`: sources of any form become the prompts of a run, filtered, counted and stored.

    bash launch.sh prepare [CONFIG] [--key value ...]
    python -m data.prepare configs/demo.yaml --prompts HuggingFaceH4/ultrachat_200k@train_sft --num_prompts 0

Reads the sources in turn and writes RUN/prompts: prompts.arrow (what is kept), skipped.jsonl (what is not: source,
where, id, reason, detail, the beginning of its text) and, last, manifest.json. A run that is killed leaves no manifest
or that of the store before it, and the next one starts over. More prompts than before begin with the same ones.
`regenerate` calls `prepared` itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from data.answer_store import holds_answers
from data.answers import MANIFEST, make_folder, read_manifest, write_manifest
from data.benchmarks import load_benchmark
from data.contamination import Contamination, name_apart
from data.conversations import Columns
from data.disk import written
from data.filters import Filters
from data.local_files import files_of, identity
from data.near_duplicates import NearDuplicates
from data.prompt_store import NEEDED, PROMPTS, SKIPPED, Prepared, Writer
from data.prompts import Reading, Skipped
from data.settings import RunConfig, run_stage
from data.sources import BUILTIN, Source, open_source

VERSION = 1  # of what decides which prompts are kept: another one makes other stores of the same settings
_SHOWN = 10


def main(argv: list[str]) -> int:
    return run_stage("prepare", argv, prepare)


def prepare(config: RunConfig) -> None:
    """Runs the stage. Raises ValueError for a user's mistake."""
    _report(prepared(config))


def prepared(config: RunConfig, replaces: bool = True) -> Prepared:
    """The run's prompts: those of RUN/prompts, which is written first unless it is what the config asks for.

    Several processes may call it at once: one of them writes, the others wait.

    Args:
        replaces: whether prompts of other options, or more prompts, give way where nothing is answered yet.

    Raises ValueError for sources that cannot be read or hold nothing usable, and where RUN/answers holds answers to
    prompts that were prepared with other settings.
    """
    folder = config.path("prompts")
    make_folder(folder, "run_dir")
    with _alone(folder):
        old = read_manifest(folder, *NEEDED, "num_prompts", "settings", "sources")
        settings = _settings(config, old)
        whole = Path(folder, PROMPTS).is_file()
        if old.get("settings") != settings or not whole or not _suffices(old, config.num_prompts):
            _refuse_change(config, old, settings)
            if old and not replaces:
                _refuse_other_options(config, old, settings)
            _write(config, folder, settings, old)
    return Prepared(folder)


def _suffices(old: dict, wanted: int) -> bool:
    """Whether a store of the same settings holds what is wanted: as many prompts, or all that there are."""
    asked, kept = old["num_prompts"], old["counts"]["kept"]
    return wanted == asked or (asked == 0 or kept < asked) and (wanted == 0 or wanted >= kept)


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """One process at a time; the lock of one that is killed is free again."""
    with open(Path(folder, "lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _settings(config: RunConfig, old: dict) -> dict:
    """All that decides which prompts are kept, and in which order, but for how many."""
    drawn = config.shuffle_buffer or BUILTIN in config.prompts or config.decontaminate
    return {
        "version": VERSION,
        "prompts": [_source_key(name, old) for name in config.prompts],
        "columns": {kind: name for kind, name in asdict(Columns.of(config)).items() if name},
        "shuffle_buffer": config.shuffle_buffer,
        "min_prompt_characters": config.min_prompt_characters,
        "max_prompt_characters": config.max_prompt_characters,
        "languages": sorted(config.languages),
        "drop_duplicates": config.drop_duplicates,
        "near_duplicates": config.near_duplicates,
        "decontaminate": config.decontaminate,
        "decontaminate_words": config.decontaminate_words if config.decontaminate else None,
        "seed": config.seed if drawn else None,
    }


def _source_key(name: str, old: dict) -> list[str]:
    """A source's name, and for files what is in them; files that are gone are those that the store was made from."""
    paths = files_of(name)
    if not paths:
        return next((key for key in old.get("settings", {}).get("prompts", []) if key[0] == name), [name])
    return [name, identity(paths)]


def _refuse_change(config: RunConfig, old: dict, settings: dict) -> None:
    if not holds_answers(config.path("answers")):
        return
    for name, value in settings.items():
        if old and old["settings"].get(name) != value:
            raise ValueError(
                f"{config.path('answers')} holds answers to prompts prepared with {name} = "
                f"{old['settings'].get(name)!r}, this run has {value!r}: delete RUN/prompts and RUN/answers, or choose "
                "another run_dir"
            )
    # RUN/prompts may be gone: the answers know how many prompts they belong to.
    kept = max(known.get("counts", {}).get("kept", 0) for known in (old, _answered(config)))
    if 0 < config.num_prompts < kept:
        raise ValueError(
            f"num_prompts {config.num_prompts} is less than the {kept} prompts that "
            f"{config.path('answers')} holds answers to: delete that folder or choose another run_dir"
        )


def _answered(config: RunConfig) -> dict:
    """The fingerprint and counts of the prompts that RUN/answers holds answers to; {} when it does not say."""
    folder = config.path("answers")
    return read_manifest(folder).get("prompts") or {} if holds_answers(folder) else {}


def _refuse_other_options(config: RunConfig, old: dict, settings: dict) -> None:
    """Raises ValueError where the user has prepared prompts by other options than those of now, or more of them."""
    was, now = _options(old["settings"]), _options(settings)
    names = [name for name in now if name in was and was[name] != now[name]]
    was["num_prompts"], now["num_prompts"] = old["num_prompts"], config.num_prompts
    if 0 < config.num_prompts < old["counts"]["kept"] or names and was["num_prompts"] != now["num_prompts"]:
        names.append("num_prompts")
    if names:
        differing = ", ".join(f"{name} {was[name]!r} (this run has {now[name]!r})" for name in names)
        raise ValueError(
            f"{config.path('prompts')} was prepared with {differing}: give the same here too or write it into CONFIG, "
            "or replace these prompts by: bash launch.sh prepare CONFIG with the options of this run"
        )


def _options(settings: dict) -> dict:
    """The settings by their options' names, without what files hold; what is not in use is left out."""
    columns = {
        f"{kind}_{'key' if kind in ('role', 'content') else 'column'}": settings["columns"].get(kind, "")
        for kind in asdict(Columns())
    }
    rest = {name: value for name, value in settings.items() if name not in ("version", "columns") and value is not None}
    return {**rest, **columns, "prompts": [key[0] for key in settings["prompts"]]}


def _write(config: RunConfig, folder: str, settings: dict, old: dict) -> None:
    """Reads the sources and writes the store, beside the old one until it is whole."""
    if not config.num_prompts and BUILTIN in config.prompts:
        raise ValueError("num_prompts 0 takes all rows of all sources, and the generator (builtin) has no last one")
    started = time.monotonic()
    grows = old.get("settings") == settings
    # The same commit as before, or the first prompts of a longer run would be other ones.
    versions = {s["name"]: s["version"] for s in old["sources"]} if grows else {}
    sources = [open_source(name, "train", config.seed, versions.get(name, "")) for name in config.prompts]
    filters, evaluated = _filters(config)
    fingerprint = _hash([settings, [[source.name, source.version] for source in sources], evaluated])
    answered = _answered(config).get("fingerprint") or old.get("fingerprint", fingerprint)
    if fingerprint != answered and holds_answers(config.path("answers")):
        raise ValueError(
            f"{config.path('answers')} holds answers to other prompts: a source or benchmark is no longer the version "
            "of then, or other options; delete RUN/prompts and RUN/answers, or choose another run_dir"
        )
    paths = {name: Path(folder, f"{name}.partial") for name in (PROMPTS, SKIPPED)}
    try:
        with written("the prompts"):
            reading, writer, content = _fill(config, sources, filters, paths)
            manifest = {
                "version": VERSION,
                "num_prompts": config.num_prompts,
                "settings": settings,
                "fingerprint": fingerprint,
                "content": content,
                "sources": [
                    {"name": s.name, "version": s.version, "rows": s.count, "kept": writer.sources[s.name]}
                    for s in sources
                ],
                "counts": {"read": reading.read, "kept": reading.kept, "skipped": dict(reading.skipped.most_common())},
                "turns": writer.turns,
                "domains": dict(writer.domains.most_common()),
                "languages": dict(writer.languages.most_common()) if config.languages else {},
                "evaluated": evaluated,
                "contaminated": {name: filters.contaminated[name] for name in evaluated},
                "seconds": round(time.monotonic() - started, 1),
            }
            _put_in_place(folder, paths, manifest)
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def _put_in_place(folder: str, paths: dict[str, Path], manifest: dict) -> None:
    """Replaces the old store. Raises ValueError, leaving the side file alone, when nothing was kept."""
    Path(folder, MANIFEST).unlink(missing_ok=True)
    paths[SKIPPED].replace(Path(folder, SKIPPED))
    counts = manifest["counts"]
    if not counts["kept"]:
        reason, count = next(iter(counts["skipped"].items()), ("no row", 0))
        raise ValueError(
            f"prompts: {' '.join(s['name'] for s in manifest['sources'])}: no usable row among {counts['read']} "
            f"({count} times: {reason}); {Path(folder, SKIPPED)} lists them"
        )
    paths[PROMPTS].replace(Path(folder, PROMPTS))
    write_manifest(folder, manifest)


def _fill(config: RunConfig, sources: list[Source], filters: Filters, paths: dict) -> tuple[Reading, Writer, str]:
    """One pass over the sources into the two files."""
    known = None if any(source.count is None for source in sources) else sum(source.count for source in sources)
    # With all rows wanted, what is read tells the time left; else what is kept.
    wanted = config.num_prompts
    with (
        open(paths[SKIPPED], "w", encoding="utf-8", errors="backslashreplace") as side,
        tqdm(total=wanted or known, desc="prompts", unit="row", mininterval=1.0) as bar,
    ):

        def note(skipped: Skipped) -> None:
            side.write(json.dumps(asdict(skipped), ensure_ascii=False) + "\n")
            bar.set_postfix_str(f"{reading.skipped.total()} skipped", refresh=False)
            bar.update(not wanted)

        reading = Reading(sources, Columns.of(config), filters, note, config.shuffle_buffer, config.seed)
        writer = Writer(str(paths[PROMPTS]))
        for kept in itertools.islice(reading, wanted or None):
            writer.add(kept)
            bar.update()
        content = writer.close()
        side.flush()
        os.fsync(side.fileno())
    return reading, writer, content


def _filters(config: RunConfig) -> tuple[Filters, dict]:
    """The filters, and {benchmark: hash of its prompts} of what they look for."""
    benchmarks = {}
    for name in dict.fromkeys(config.decontaminate):
        loaded = load_benchmark(name, config.eval_prompts, config.seed, config.benchmark_dir)
        benchmarks[name_apart(loaded.name, benchmarks)] = loaded.prompts
    filters = Filters(
        config.min_prompt_characters,
        config.max_prompt_characters,
        tuple(config.languages),
        config.drop_duplicates,
        NearDuplicates(config.near_duplicates) if config.near_duplicates else None,
        Contamination(benchmarks, config.decontaminate_words) if benchmarks else None,
    )
    return filters, {name: _hash(sorted(p.id for p in prompts)) for name, prompts in benchmarks.items()}


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _report(store: Prepared) -> None:
    counts, manifest = store.counts, store.manifest
    skipped = sum(counts["skipped"].values())
    print(
        f"{store.folder}: {counts['read']} rows read, {counts['kept']} prompts kept with {store.turns} turns, "
        f"{skipped} skipped ({manifest['seconds']} s)"
    )
    for reason, count in list(counts["skipped"].items())[:_SHOWN]:
        print(f"  skipped {count:>9}  {reason}")
    for name, count in manifest["contaminated"].items():
        print(f"  hold prompts of {name}: {count}")
    if len(manifest["sources"]) > 1:
        print("  kept of " + ", ".join(f"{s['name']}: {s['kept']}" for s in manifest["sources"]))
    if skipped:
        print(f"  each of them: {Path(store.folder, SKIPPED)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
