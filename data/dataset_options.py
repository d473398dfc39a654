"""Options of the stage `dataset`: what is written of the answers, and what its report looks at."""

from __future__ import annotations

from dataclasses import dataclass

from data.option import option


@dataclass
class DatasetOptions:
    """Part of `RunConfig`."""

    allow_partial: bool = option(
        False, "write a data set of the answers that are there although some are left", "dataset"
    )
    report_only: bool = option(False, "write the quality report alone, to RUN/dataset", "dataset")
    agreement_rows: int = option(
        32,
        "answers whose tokens are compared with the target's own argmax, which loads the target; 0 leaves it out",
        "dataset",
    )
    push_to_hub: str = option("", "OWNER/NAME of the Hub repository to upload the written folder to", "export dataset")
    private: bool = option(False, "create that repository as a private one", "export dataset")
