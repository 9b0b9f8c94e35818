"""The Hugging Face hub: does it answer, and one repository's safetensors model.

`huggingface_hub` is imported where it is used: it is not needed to serve a local directory.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitserve.errors import ModelUnavailable
from splitserve.model.meter import SizeMeter, megabytes

ALLOWED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""Files that are fetched: never pickles, never code."""
IGNORED = ("*/*",)
_OFFLINE_ADVICE = (
    "Check the network (HF_ENDPOINT names another hub, HF_HUB_OFFLINE=1 forbids it), or name a "
    "local directory, or smollm2-135m-q4, which comes from the package index."
)


def problem(repo_id: str, timeout_s: float) -> str | None:
    """Why the hub can't be asked for repo_id, or None if it answered within timeout_s."""
    result: list[str | None] = []
    # in a thread of its own: resolving a name knows no timeout
    thread = threading.Thread(
        target=lambda: result.append(_problem(repo_id, timeout_s)), daemon=True
    )
    thread.start()
    thread.join(timeout_s)
    return result[0] if result else f"the hub did not answer within {timeout_s:g} s"


def _problem(repo_id: str, timeout_s: float) -> str | None:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        url = f"{constants.ENDPOINT}/api/models/{repo_id}"
        response = get_session().head(url, timeout=timeout_s)
    except Exception as error:  # the HTTP library is huggingface_hub's choice
        return f"the hub can't be reached ({_first_line(error)})"
    if response.status_code >= 500:
        return f"the hub answered {response.status_code}"
    return None


def in_hub_cache(repo_id: str) -> Path | None:
    """The snapshot that another program already fetched, or None; it may be incomplete."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, local_files_only=True))
    except Exception:  # many kinds, all meaning no
        return None


def download(repo_id: str, out_dir: Path, progress: Callable[[str], None]) -> str:
    """Fetch the model's files into out_dir; returns the commit. Raises ModelUnavailable."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    try:
        info = HfApi().model_info(repo_id, files_metadata=True, timeout=10)
        total_bytes = _size_of(info.siblings or [], repo_id)
        require_space(out_dir, total_bytes)
        disable_progress_bars()
        with SizeMeter(f"Fetching {repo_id} from the hub", out_dir, total_bytes, progress):
            snapshot_download(
                repo_id,
                revision=info.sha,
                local_dir=out_dir,
                allow_patterns=list(ALLOWED),
                ignore_patterns=list(IGNORED),
            )
    except ModelUnavailable:
        raise
    except OSError as error:
        if error.errno is not None:  # of the file system; the hub's errors are OSErrors too
            raise
        raise _translated(error, repo_id) from error
    except Exception as error:
        raise _translated(error, repo_id) from error
    shutil.rmtree(out_dir / ".cache", ignore_errors=True)
    return str(info.sha)


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raises ModelUnavailable if the file system has less than needed_bytes left."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ModelUnavailable(
            f"{megabytes(needed_bytes)} are needed in {directory.parent}, "
            f"{megabytes(free_bytes)} are free.",
            advice="Make room, or set XDG_CACHE_HOME to a larger disk.",
        )


def _size_of(siblings: list[Any], repo_id: str) -> int:
    wanted = [s for s in siblings if "/" not in s.rfilename and s.rfilename.endswith(_suffixes())]
    if not any(s.rfilename.endswith(".safetensors") for s in wanted):
        raise ModelUnavailable(
            f"{repo_id} offers no safetensors weights.",
            advice="Pickled weights can run code and are never fetched: convert them elsewhere "
            "with save_pretrained(…, safe_serialization=True).",
        )
    return sum(s.size or 0 for s in wanted)


def _suffixes() -> tuple[str, ...]:
    return tuple(pattern.removeprefix("*") for pattern in ALLOWED)


def _translated(error: Exception, repo_id: str) -> ModelUnavailable:
    from huggingface_hub import errors

    token = "has" if os.environ.get("HF_TOKEN") else "needs"
    if isinstance(error, errors.GatedRepoError):
        return ModelUnavailable(
            f"{repo_id} is gated.",
            advice=f"Accept its terms on the hub; this process {token} an HF_TOKEN.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelUnavailable(
            f"The hub has no model {repo_id}, or it is private.",
            advice="Check the spelling; a private model needs HF_TOKEN.",
        )
    return ModelUnavailable(
        f"{repo_id} can't be fetched from the hub: {_first_line(error)}.", advice=_OFFLINE_ADVICE
    )


def unreachable(repo_id: str, reason: str) -> ModelUnavailable:
    return ModelUnavailable(f"{repo_id} can't be fetched: {reason}.", advice=_OFFLINE_ADVICE)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")
