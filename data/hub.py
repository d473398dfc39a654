"""Uploads a folder, an export or a data set, to a repository on the Hub: `--push_to_hub OWNER/NAME [--private]`.

huggingface_hub does the work; an upload that was interrupted goes on when it is repeated, and one whose files are all
there already sends nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from data.settings import StageError

_REFUSED = (401, 403)


def check_access(repository: str) -> None:
    """Asks the Hub who we are, before any work is done.

    Raises ValueError without a valid token or repository name, StageError when the Hub cannot be reached.
    """
    try:
        validate_repo_id(repository)
        HfApi().whoami()
    except LocalTokenNotFoundError:
        raise ValueError("push_to_hub: no token; log in with `hf auth login` or set HF_TOKEN") from None
    except (HTTPError, OSError) as error:
        raise _in_one_line(error, "") from None


def push(
    folder: Path,
    repository: str,
    private: bool,
    kind: Literal["model", "dataset"],
    what: str,
    own_files: Sequence[str],
) -> str:
    """Creates the repository unless it is there, makes it hold the folder's files, and returns its address.

    Args:
        private: whether a new repository is private; one that exists stays as it is.
        what: is uploaded, for the commit's message.
        own_files: patterns of files that an earlier upload may have left; those that the folder lacks are removed.

    Raises ValueError for a refusal and StageError for any other failure, both with the command that goes on: the folder
    stays as it is.
    """
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, repo_type=kind, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            repo_type=kind,
            commit_message=f"Upload {what}",
            delete_patterns=list(own_files),
        )
    except (HTTPError, OSError, RuntimeError) as error:
        words = ["--repo-type dataset"] * (kind == "dataset") + ["--private"] * private
        again = " ".join([f"hf upload {repository} {folder}", *words])
        raise _in_one_line(error, f"; {folder} is whole, go on with: {again}") from None
    return str(url)


def _in_one_line(error: Exception, then: str) -> Exception:
    """A refusal of the Hub as the user's mistake, anything else (no network, a full disk) as a failure."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.response.status_code in _REFUSED:
        return ValueError(f"push_to_hub: the Hub refuses: {reason}{then}")
    return StageError(f"push_to_hub: the upload failed: {reason}{then}")


def without_paths(value):
    """A JSON value with absolute paths cut to their last part: what is published tells nothing of this machine."""
    if isinstance(value, dict):
        return {key: without_paths(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(v) for v in value]
    return os.path.basename(value.rstrip("/")) if isinstance(value, str) and os.path.isabs(value) else value
