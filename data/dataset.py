"""Stage `dataset`: the answers of a run as a data set that others can load, with a report on their quality.

    bash launch.sh dataset [CONFIG] [--key value ...]
    bash launch.sh dataset CONFIG --push_to_hub OWNER/NAME --private
    bash launch.sh dataset CONFIG --report_only --agreement_rows 0        the report alone, without the target

Reads RUN/answers and RUN/prompts and writes RUN/dataset: data/train-N-of-N.parquet (data/records.py has the columns),
README.md (the card), manifest.json (where the rows come from; what `train --answers RUN/dataset` checks), report.json,
report.md and report.png. The folder appears whole or not at all; a killed run goes on behind its last whole shard. The
same answers give the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from tqdm import tqdm

from data import card, quality, quality_report
from data.answers import MANIFEST, make_folder, read_manifest
from data.benchmarks import load_benchmark
from data.contamination import Contamination, name_apart
from data.disk import replace_folder, written
from data.filters import language_identifier
from data.hub import check_access, push, without_paths
from data.material import VERSION, Material, collect
from data.records import Record, answered, read_shards
from data.settings import RunConfig, run_stage
from data.shards import count_rows, describe_shard, finished_shards, intact, name_shards, write_shards

FOLDER = "dataset"
REPORT = ("report.json", "report.md", "report.png")
_KEY, _CARD = "key", "README.md"
_FOLDERS = re.compile(r"(?<![^\s'\"(])/\S*/")  # of this machine, in a message
_NEAR = 0.8  # where the run does not say what near duplicates are
# Files that an earlier upload may have left; what others put into the repository stays.
_OWN_FILES = [f"data/train-{'[0-9]' * 5}-of-{'[0-9]' * 5}.parquet", MANIFEST, *REPORT]


def main(argv: list[str]) -> int:
    return run_stage("dataset", argv, dataset)


def dataset(config: RunConfig) -> None:
    """Runs the stage. Raises ValueError for a user's mistake."""
    if config.push_to_hub and config.report_only:
        raise ValueError("push_to_hub: with report_only there is no data set to upload")
    if config.push_to_hub:
        check_access(config.push_to_hub)
    material, folder = collect(config), Path(config.path(FOLDER))
    manifest, wanted = read_manifest(str(folder)), report_settings(config)
    whole = manifest.get(_KEY) == material.key and all(
        intact(folder, shard, thoroughly=bool(config.push_to_hub)) for shard in manifest["shards"]
    )
    reported = all((folder / name).is_file() for name in (*REPORT, _CARD))
    if not whole:
        foreign_files(folder)  # refused before the work
    if whole and reported and manifest["report"] == wanted and not config.report_only:
        print(f"dataset: finished already, {manifest['rows']} rows in {folder}")
    elif whole:
        _renew_report(config, material, folder, manifest | {"report": wanted})
    elif config.report_only:
        _report_alone(config, material, folder)
    else:
        _write(config, material, folder, wanted)
    if config.push_to_hub:
        _write_card(config, read_manifest(str(folder)), json.loads((folder / REPORT[0]).read_text("utf-8")), folder)
        where = push(folder, config.push_to_hub, config.private, "dataset", "data set", _OWN_FILES)
        print(f"uploaded: {where}")


def report_settings(config: RunConfig) -> dict:
    """What decides a report beside the rows."""
    return without_paths(
        {
            "agreement_rows": config.agreement_rows,
            "near_duplicates": config.near_duplicates or _NEAR,
            "benchmarks": list(dict.fromkeys([*config.benchmarks, *config.decontaminate])),
            "eval_prompts": config.eval_prompts,
            "decontaminate_words": config.decontaminate_words,
            "max_row_length": config.max_row_length,
            "seed": config.seed,
        }
    )


def _write(config: RunConfig, material: Material, folder: Path, wanted: dict) -> None:
    make_folder(config.run_dir, "run_dir")
    with _unfinished(folder.with_name(f".{folder.name}.partial"), material.key) as partial:
        shards = finished_shards(partial / "data")
        done, total = count_rows(shards), len(material.rows)
        if done:
            print(f"dataset: goes on behind {done} rows in {len(shards)} whole shards")
        records = answered(material.rows, material.prompts, material.tokenizer, done)
        with tqdm(records, "data set", total, initial=done, unit="row") as bar:
            shards = write_shards(partial / "data", bar)
        report = make_report(config, material, read_shards(shards))
        with written(f"the data set {folder}"):
            shards = name_shards(shards)
            files = [describe_shard(path) for path in shards]
            manifest = {"version": VERSION, "finished": True, "rows": total, "key": material.key}
            manifest |= {"fingerprint": _fingerprint(files, material.about), "report": wanted, "shards": files}
            manifest |= material.about
            _write_report(report, partial, material)
            _write_manifest(manifest, partial)
            _write_card(config, manifest, report, partial)
            (partial / _KEY).unlink()
            replace_folder(partial, folder, foreign_files(folder))
    print(f"dataset: {total} rows in {len(shards)} Parquet files in {folder}, fingerprint {manifest['fingerprint']}")
    _say(report, folder, material)


def foreign_files(folder: Path) -> list[Path]:
    """Files in RUN/dataset, relative to it, that others put beside ours.

    Raises ValueError where the folder is no data set of ours: replacing it would delete another's.
    """
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()]
    ours = _KEY in read_manifest(str(folder))
    known = [*_OWN_FILES, _CARD] if ours else REPORT  # --report_only writes no more than a report
    foreign = [file for file in files if not any(fnmatch(file.as_posix(), pattern) for pattern in known)]
    if foreign and not ours:
        raise ValueError(
            f"run_dir: {folder} holds {foreign[0]}, which this stage did not write: move the folder away or choose "
            "another run_dir"
        )
    return foreign


@contextlib.contextmanager
def _unfinished(partial: Path, key: str) -> Iterator[Path]:
    """The folder under work, emptied when it was begun with other rows. Raises ValueError while another process has it.

    It stays when the work fails, so that the next run goes on.
    """
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial.with_suffix(".lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run_dir: another process is writing the data set in {partial}") from None
        begun = partial / _KEY
        if not begun.is_file() or begun.read_text() != key:
            shutil.rmtree(partial)
            partial.mkdir()
            begun.write_text(key)
        yield partial


def _fingerprint(files: list[dict], about: dict) -> str:
    """Of the rows and of where they come from."""
    told = [[file["sha256"] for file in files], about]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def make_report(config: RunConfig, material: Material, records: Iterable[Record]) -> dict:
    """The quality report of the rows."""
    contamination, missing = evaluation_prompts(config)
    # Without languages wanted the preparation has detected none.
    identify = language_identifier()
    with tqdm(records, "quality", len(material.rows), unit="row") as bar:
        report = quality.measure(
            bar,
            len(material.rows),
            config.max_row_length,
            config.near_duplicates or _NEAR,
            contamination,
            identify,
            config.agreement_rows,
            (lambda rows: quality.target_agreement(config, material.path, rows)) if config.agreement_rows else None,
        )
    return report | {"not_looked_for": missing}


def evaluation_prompts(config: RunConfig) -> tuple[Contamination | None, dict[str, str]]:
    """An index of what evaluation asks, and why a benchmark is not in it (the Hub cannot be reached)."""
    found, missing = {}, {}
    for name in dict.fromkeys([*config.benchmarks, *config.decontaminate]):
        try:
            loaded = load_benchmark(name, config.eval_prompts, config.seed, config.benchmark_dir)
            found[name_apart(loaded.name, found)] = loaded.prompts
        except ValueError as error:
            missing[without_paths(name)] = _FOLDERS.sub("", " ".join(str(error).split()))[:160]
    return Contamination(found, config.decontaminate_words) if found else None, missing


def _write_report(report: dict, folder: Path, material: Material) -> None:
    text, table, picture = (folder / name for name in REPORT)
    text.write_text(json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    table.write_text(quality_report.markdown(report, _greedy(material)), encoding="utf-8")
    quality_report.draw(report, picture)


def _renew_report(config: RunConfig, material: Material, folder: Path, manifest: dict) -> None:
    """Another report on a data set that is there: its rows stay as they are."""
    report = make_report(config, material, read_shards([folder / shard["file"] for shard in manifest["shards"]]))
    with written(f"the report in {folder}"):
        _write_report(report, folder, material)
        _write_card(config, manifest, report, folder)
        _write_manifest(manifest, folder)
    _say(report, folder, material)


def _report_alone(config: RunConfig, material: Material, folder: Path) -> None:
    """report.* in RUN/dataset, which holds no data set of these answers."""
    report = make_report(config, material, answered(material.rows, material.prompts, material.tokenizer))
    make_folder(str(folder), "run_dir")
    with written(f"the report in {folder}"):
        _write_report(report, folder, material)
    _say(report, folder, material)


def _write_card(config: RunConfig, manifest: dict, report: dict, folder: Path) -> None:
    """README.md, with the Hub id under which the folder is about to lie, if any."""
    text = card.dataset_card(manifest, report, config.target, config.push_to_hub)
    (folder / _CARD).write_text(text, encoding="utf-8")


def _write_manifest(manifest: dict, folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _greedy(material: Material) -> bool:
    return not material.about["settings"].get("answer_temperature")


def _say(report: dict, folder: Path, material: Material) -> None:
    share = quality_report.agreement_share(report)
    agreement = "" if share is None else f", {share:.1%} of sampled labels are the target's argmax"
    eos = report["stops"].get("eos", 0) / report["rows"]
    print(
        f"report: {report['supervised_tokens']} supervised tokens, {eos:.0%} end by eos{agreement}; "
        f"{folder / 'report.md'}"
    )
    for line in quality_report.warnings(report, _greedy(material)):
        print(f"  warning: {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
