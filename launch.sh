#!/usr/bin/env bash
# Sets up the environment and runs a stage. `bash launch.sh --help`.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash launch.sh STAGE [CONFIG] [--key value ...]     (no CONFIG: configs/demo.yaml)

  demo        set-up and all stages from target to export, then the table
  setup       creates the environment and checks the machine
  target      gets the demo's model into the cache
  prepare     reads and filters the prompts          -> RUN/prompts (regenerate does it by itself)
  regenerate  the target answers the prompts         -> RUN/answers, here or by --endpoints of its servers
  data-status prints what became of every prompt and turn so far, also while regenerate is at work
  dataset     answers as Parquet, with a quality report -> RUN/dataset, also to the Hub
  features    the target reads its answers once      -> RUN/cache, what train --features offline reads
  train       trains the drafter through DeepSpeed   -> RUN/drafter
  eval        decodes and measures                   -> RUN/results.json, RUN/report.md
  compare     sets the drafters of several evaluations side by side, paired by prompt (RUN RUN ... in place of CONFIG,
              each looked for from where the command is typed, then in this folder)
  calibrate   compares confidence with acceptance    -> RUN/calibration.json, used by eval --confidence_threshold
  export      writes a folder for other programs     -> RUN/export, any public format, also to the Hub (CONFIG or a drafter)
  inspect     says what a drafter checkpoint is and, with --target, whether it drafts (CONFIG or a drafter)
  verify      proves equality with the target's own text
  bench       times tree building, a round's overhead and batching; with --training the loss and the training step,
              with --data how many conversations a minute become tokens with masks
  test        the test suite; words go to pytest

  bash launch.sh STAGE --help lists a stage's options.

Environment: PYTHON (interpreter that creates the environment, default python3), VENV (environment to create or reuse,
default .venv in this folder). pip's own settings (index, cache) are used as they are.
TEXT
}

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
VENV=${VENV:-.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV
py=$VENV/bin/python
python=${PYTHON:-python3}
# Looked up before PATH changes: the environment may be half made.
base=$(command -v "$python" || true)
# DeepSpeed builds its operator with `ninja`, which it looks for in PATH.
export PATH=$VENV/bin:$PATH
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Two environments that share torch's extension folder would rebuild DeepSpeed's operator for each other at every start.
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$VENV/torch_extensions}

fail() { # one line for the user, exit code 2
  echo "setup: $*" >&2
  exit 2
}

# Installs the project into VENV unless the same dependencies were installed there before. $1: "" or "[test]".
install() {
  local stamp
  stamp=$VENV/.dartree-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)${1:+-test}
  if [[ -e $stamp || (-z $1 && -e $stamp-test) ]]; then return; fi
  if "$py" -m pip --version >/dev/null 2>&1; then base=$py; fi
  [[ -n $base ]] || fail "no Python ($python); set PYTHON to an interpreter"
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, $base is $("$base" -V 2>&1)"
  "$base" -m data.environment compiler
  [[ $base == "$py" ]] || create
  echo "installing the dependencies of pyproject.toml as pinned in constraints.txt"
  "$py" -m pip install --quiet --quiet --no-compile --disable-pip-version-check \
    --constraint constraints.txt --editable ".$1"
  echo "building DeepSpeed's CPU communication operator"
  "$py" -m training.operators >/dev/null
  touch "$stamp"
}

# Creates VENV, or makes a half-made one whole: one without pip, or whose Python is gone (then nothing in it can be used).
create() {
  local new= clear=
  [[ -e $VENV ]] || new=yes
  if [[ -f $VENV/pyvenv.cfg ]] && ! "$py" -c "" 2>/dev/null; then clear=--clear; fi
  echo "creating $VENV"
  "$base" -m venv $clear "$VENV" && return
  if [[ -n $new ]]; then rm -rf "$VENV"; fi
  fail "cannot create $VENV with $base -m venv; on Debian or Ubuntu: apt-get install python3-venv"
}

stage=${1:-}
case $stage in
  "") usage >&2 && exit 2 ;;
  -h | --help | help) usage && exit 0 ;;
  setup | target | prepare | regenerate | data-status | dataset | features | train | eval | calibrate | compare | export | inspect | verify | bench | demo | test) shift ;;
  *) echo "launch.sh: unknown stage '$stage'; bash launch.sh --help lists them" >&2 && exit 2 ;;
esac

if [[ $stage == test ]]; then
  install "[test]"
  # A worker a core, at most eight; tests of one file share their fixtures.
  workers=$(nproc)
  exec "$py" -m pytest --numprocesses $((workers < 8 ? workers : 8)) --dist loadfile --durations=10 "$@"
fi

install ""
if [[ $stage == compare ]]; then
  cd "$called_from"
  # -P: the project's eval, not one of the folder where the command was typed.
  exec "$py" -P -m eval.compare "$@"
fi
# CONFIG (or a drafter in its place) is meant from where the command was typed; everything else from this folder.
config=configs/demo.yaml
if [[ $# -gt 0 && $1 != -* ]]; then
  config=$1
  shift
  [[ $config == /* || ! -e $called_from/$config ]] || config=$called_from/$config
fi
set -- "$config" "$@"

wants_help() { [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; }

case $stage in
  setup) exec "$py" -m data.environment report "$@" ;;
  target) exec "$py" -m data.fetch_target "$@" ;;
  prepare) exec "$py" -m data.prepare "$@" ;;
  data-status) exec "$py" -m data.status "$@" ;;
  dataset) exec "$py" -m data.dataset "$@" ;;
  calibrate) exec "$py" -m eval.calibrate "$@" ;;
  export) exec "$py" -m eval.export "$@" ;;
  inspect) exec "$py" -m eval.inspection "$@" ;;
  verify) exec "$py" -m eval.verify "$@" ;;
  bench)
    # --training and --data are no options of the config: they choose the program.
    module=eval.bench words=()
    for word in "$@"; do
      case $word in
        --training) module=training.bench ;;
        --data) module=eval.bench_data ;;
        *) words+=("$word") ;;
      esac
    done
    exec "$py" -m "$module" "${words[@]}"
    ;;
  demo)
    wants_help "$@" || "$py" -m data.environment report "$@"
    exec "$py" -m data.demo "$@"
    ;;
  train | eval | features | regenerate)
    # Of a machine without NVIDIA's tools there is nothing to ask: one process answers.
    if wants_help "$@" || [[ $stage == regenerate && ! $(command -v nvidia-smi) ]]; then
      case $stage in
        regenerate) exec "$py" -m data.regenerate "$@" ;;
        train) exec "$py" training/train_drafter.py "$@" ;;
        eval) exec "$py" -m eval.run_eval "$@" ;;
        features) exec "$py" -m data.make_features "$@" ;;
      esac
    fi
    command=$("$py" -m data.environment launcher "$stage" "$@") || exit $?
    mapfile -t words <<<"$command"
    exec "${words[@]}" "$@"
    ;;
esac
