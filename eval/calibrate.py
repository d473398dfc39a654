"""Stage `calibrate`: how often a drafted token is accepted at a given confidence, on held-out prompts.

    bash launch.sh calibrate [CONFIG] [--key value ...]

Decodes prompts that neither trained the drafter nor are reported (`eval/held_out.py`) with the head's chain, uncut, and
compares the confidence head with what the target accepts: on the prompts that trained it, it would look too good.
Every second prompt fits a temperature, the others measure it. Writes RUN/calibration.json and
RUN/plots/calibration.png; `eval --confidence_threshold X` then cuts chains by the calibrated confidence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from data.answers import target_identity
from data.settings import RunConfig, run_stage
from eval.calibration import CALIBRATION, Sighting, calibrate_on
from eval.decoding.confidence import chain_confidence
from eval.decoding.loop import generate
from eval.decoding.request import Answer, Request
from eval.held_out import held_out
from eval.session import Session, load_session
from models.checkpoint import finished_drafter

# The method whose proposals are the drafter's final logits, by head.
_CHAINS = {"none": "dflash_chain", "domino": "domino_chain"}


def main(argv: list[str]) -> int:
    return run_stage("calibrate", argv, calibrate)


def calibrate(config: RunConfig) -> dict:
    """Measures, writes and returns the report. Raises ValueError for a drafter without a confidence head."""
    folder = finished_drafter(config.run_dir, config.drafter)
    session = load_session(replace(config, confidence_threshold=0.0), folder)
    if session.drafter.model.confidence_head is None:
        raise ValueError(f"drafter: {folder} has no confidence head; train with --enable_confidence_head")
    prompts = held_out(config, session.usable_ids, config.calibration_prompts)
    if len(prompts) < 2:
        raise ValueError("calibration_prompts: at least 2 usable held-out prompts are needed")
    method, temperature = _CHAINS.get(session.drafter.spec.head_type, "markov_chain"), config.temperatures[0]
    asked = [session.usable_ids(prompt.turns[:1], [], prompt.tools) for prompt in prompts]
    seen = [sightings(session, method, ids, temperature) for ids in tqdm(asked, desc="calibrate")]
    fitted, tested = ([s for found in seen[half::2] for s in found] for half in (0, 1))
    if not fitted or not tested:
        raise ValueError("calibration_prompts: the answers ended before anything was drafted; give more prompts")
    report = {
        "drafter": target_identity(folder),
        "method": method,
        "decoding_temperature": temperature,
        "prompts": len(prompts),
    } | calibrate_on(fitted, tested)
    write_report(config, report)
    return report


class Recorder:
    """A proposer that notes the confidence of every token it proposes, for one request at a time.

    Attributes: logits: one list a round.
    """

    def __init__(self, proposer):
        self._proposer, self.logits = proposer, []

    def __getattr__(self, name: str):
        return getattr(self._proposer, name)

    def build(self, draft):
        tree = self._proposer.build(draft)
        self.logits.append(chain_confidence(draft, self._proposer.drafter, tree.tokens_RN)[0].tolist())
        return tree


def sightings(session: Session, method: str, ids: list[int], temperature: float) -> list[Sighting]:
    """Every drafted token of one answer that the target looked at."""
    recorder = Recorder(session.proposer(method))
    request = Request(ids, session.config.max_new_tokens, f"calibrate/{session.config.seed}")
    answer = generate(session.target, recorder, [request], temperature)[0]
    return sightings_of(answer, recorder.logits)


def sightings_of(answer: Answer, logits: Sequence[Sequence[float]]) -> list[Sighting]:
    """The accepted tokens of each round and the one that was rejected, none of them behind the answer's end."""
    found = []
    for record, row in zip(answer.rounds, logits, strict=True):
        # A round emits its accepted tokens and one more, unless the answer ends before: `accepted` does not know that.
        found += [Sighting(t + 1, row[t], t < record.accepted) for t in range(min(record.emitted, len(row)))]
    return found


def write_report(config: RunConfig, report: dict) -> None:
    """RUN/calibration.json, the reliability diagram, and a few lines for people."""
    path = Path(config.path(CALIBRATION))
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(path)
    plot = draw(report, Path(config.path("plots")))
    before, after = report["uncalibrated"], report["calibrated"]
    print(
        f"calibrate: temperature {report['temperature']:.3f} from {report['fitted_tokens']} drafted tokens; on "
        f"{report['tested_tokens']} others ECE {before['ece']:.3f} -> {after['ece']:.3f}, "
        f"Brier {before['brier']:.3f} -> {after['brier']:.3f}; {path}, {plot}"
    )
    for row in after["by_depth"]:
        print(
            f"  depth {row['depth']:2}: {row['tokens']:5} tokens, {row['acceptance']:.1%} accepted, "
            f"ECE {row['ece']:.3f}, Brier {row['brier']:.3f}"
        )


def draw(report: dict, folder: Path) -> Path:
    """The reliability diagram, and the errors by depth. Returns the PNG's path."""
    from eval.plots import plt  # matplotlib is slow to import, and --help does not need it

    folder.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    left.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    for name in ("uncalibrated", "calibrated"):
        bins = report[name]["bins"]
        label = f"{name}, ECE {report[name]['ece']:.3f}"
        left.plot([b["confidence"] for b in bins], [b["acceptance"] for b in bins], marker="o", ms=4, label=label)
    left.set(xlabel="confidence", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    left.legend(fontsize=8)
    rows = report["calibrated"]["by_depth"]
    for name in ("acceptance", "ece", "brier"):
        right.plot([row["depth"] for row in rows], [row[name] for row in rows], marker="o", ms=4, label=name)
    right.set(xlabel="depth", ylim=(0, 1))
    right.legend(fontsize=8)
    figure.suptitle(f"{report['method']}, {report['prompts']} held-out prompts, T={report['decoding_temperature']:g}")
    figure.tight_layout()
    path = folder / "calibration.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
