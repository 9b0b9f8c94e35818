"""What is particular to tiers of files: damage, abandoned files, full disks, other processes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from splitserve.errors import ConfigError, StoreError
from splitserve.store.catalogue import Catalogue
from splitserve.store.files import ABANDONED_S, ASIDE
from tests.store.places import SIZE, Place, load, make_blocks, make_keys, present, save


@pytest.fixture(params=["disk", "shared_storage"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, tmp_path)
    yield place
    place.close()


def files_in(place: Place) -> list[Path]:
    return [path for path in (place.root / "kv").rglob("*") if path.is_file()]


def test_a_block_is_a_file_of_its_namespace(place: Place) -> None:
    tier = place.open()
    save(tier, 0)
    (path,) = files_in(place)
    namespace, digits, name = path.relative_to(place.root / "kv").parts
    key = make_keys(0)[0].hex()
    assert (len(namespace), digits, Path(name).stem) == (32, key[:2], key)
    assert path.stat().st_mode & 0o077 == 0, "prompts are private"


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 300, 600, SIZE])
def test_a_truncated_file_is_a_miss_and_is_removed(place: Place, num_bytes: int) -> None:
    tier = place.open()
    save(tier, 0, 1, 2)
    os.truncate(place.file_of(tier, 1), num_bytes)
    assert tier.find(make_keys(0, 1, 2)) == 1
    assert load(tier, 0, 1, 2) == 1
    assert tier.stats().corrupt == 1
    assert not place.file_of(tier, 1).exists()
    assert save(tier, 1) == 1
    assert load(tier, 0, 1, 2) == 3


def test_a_truncated_file_is_saved_anew(place: Place) -> None:
    tier = place.open()
    save(tier, 0)
    os.truncate(place.file_of(tier, 0), 100)
    assert save(tier, 0) == 1
    assert load(tier, 0) == 1


@pytest.mark.parametrize("ttl", ["", 3600])
@pytest.mark.parametrize("position", [*range(0, 136, 5), 200, 300, 400, 500])
def test_a_flipped_byte_of_the_head_never_gives_another_block(
    place: Place, position: int, ttl: object
) -> None:
    tier = place.open(**({"ttl": ttl} if ttl else {}))
    save(tier, 0)
    path = place.file_of(tier, 0)
    data = bytearray(path.read_bytes())
    data[position] ^= 0x41
    path.write_bytes(data)
    assert load(tier, 0) in (0, 1)  # padding may be anything
    tier.find(make_keys(0))


def test_a_file_under_another_name_is_a_miss(place: Place) -> None:
    tier = place.open()
    save(tier, 0, 1)
    shutil.copy(place.file_of(tier, 0), place.file_of(tier, 1))
    assert load(tier, 1) == 0
    assert tier.stats().corrupt == 1


@settings(max_examples=60, deadline=None)
@given(head=st.binary(max_size=600))
def test_any_bytes_in_the_place_of_a_block_are_a_miss(
    head: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in ("disk", "shared_storage"):
        place = Place(name, tmp_path_factory.mktemp(name))
        tier = place.open()
        save(tier, 0)
        path = place.file_of(tier, 0)
        path.write_bytes(head.ljust(path.stat().st_size, b"\0"))
        assert load(tier, 0) == 0
        place.close()


def test_an_evicted_file_stays_readable_to_who_reads_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = place.open(limit=2 * SIZE)
    save(tier, 0, 1)
    preadv = os.preadv

    def evict_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        monkeypatch.setattr(os, "preadv", preadv)
        save(place.open(limit=2 * SIZE), 2, 3)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", evict_first)
    assert load(tier, 0) == 1
    assert present(tier, range(4)) == [2, 3]


def test_files_of_dead_writers_are_removed(place: Place) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    aside = place.root / "kv" / ASIDE
    aside.mkdir(parents=True)
    dead, alive, old = (
        aside / f"{pid}-x-0" for pid in (process.pid, os.getpid(), f"{os.getpid()}-old")
    )
    for path in (dead, alive, old):
        path.write_bytes(b"half a block")
    then = time.time() - ABANDONED_S - 1
    os.utime(old, (then, then))
    place.open().close()
    assert alive.exists()
    assert not old.exists()
    assert dead.exists() == (place.name == "shared_storage"), "pids mean nothing between hosts"


def test_a_directory_that_is_removed_is_made_anew(place: Place) -> None:
    tier = place.open(limit=4 * SIZE)
    save(tier, 0, 1, 2)
    shutil.rmtree(place.root / "kv")
    assert load(tier, 0) == 0
    assert save(tier, 0, 1, 2, 3) == 4
    assert load(tier, 0, 1, 2, 3) == 4
    assert tier.stats().num_blocks == 4


def test_another_file_in_the_directory_is_left_alone(place: Place) -> None:
    tier = place.open(limit=2 * SIZE)
    save(tier, 0)
    ours = place.file_of(tier, 0)
    strangers = [place.root / "kv" / "README", ours.parent / "notes.txt"]
    for path in strangers:
        path.write_text("x" * 3 * SIZE)
    save(tier, 1, 2, 3)
    assert all(path.exists() for path in strangers)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("where", ["writev", "close", "replace", "utime"])
def test_what_the_system_refuses_is_an_error_and_leaves_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    tier = place.open()
    save(tier, 0)
    real: Callable[..., object] = getattr(os, where)

    def refuse(*arguments: object, **options: object) -> object:
        if where == "close":
            real(*arguments)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, where, refuse)
        with pytest.raises(StoreError, match=os.strerror(number)):
            save(tier, 1)
    assert files_in(place) == [place.file_of(tier, 0)]
    assert save(tier, 1) == 1
    assert load(tier, 0, 1) == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_file_that_can_not_be_read_is_an_error(
    place: Place, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = place.open()
    save(tier, *range(8))

    def refuse(*arguments: object, **options: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        with pytest.raises(StoreError, match=os.strerror(number)):
            load(tier, *range(8))
    assert load(tier, *range(8)) == 8


def test_what_may_only_be_read_is_loaded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = place.open()
    save(tier, 0, 1)

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert load(tier, 0, 1) == 2


def test_short_reads_and_writes_are_continued(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = place.open()
    writev, preadv = os.writev, os.preadv

    def write_some(fd: int, buffers: list[memoryview]) -> int:
        return os.write(fd, b"".join(bytes(buffer) for buffer in buffers)[:5000])

    def read_some(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [*buffers[:-1], memoryview(buffers[-1])[:5000]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", write_some)
        patch.setattr(os, "preadv", read_some)
        assert save(tier, 0) == 1
        assert load(tier, 0) == 1
    assert os.writev is writev


def test_a_file_below_which_a_directory_is_asked_for_is_refused(place: Place) -> None:
    (place.root / "kv").touch()
    with pytest.raises(ConfigError, match="is a file"):
        place.open()


def test_what_others_write_counts(place: Place) -> None:
    """Each process evicts for all, without having been told of the others' blocks."""
    first, second = (place.open(limit=4 * SIZE) for _ in range(2))
    save(first, 0, 1, 2)
    save(second, 3, 4, 5)
    assert second.stats().num_blocks == 4
    save(first, 6)
    assert len(files_in(place)) == 4
    assert present(first, range(7)) == [3, 4, 5, 6]


@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_uses_are_remembered_across_restarts(place: Place, policy: str) -> None:
    tier = place.open(limit=4 * SIZE, policy=policy)
    save(tier, 0, 1, 2, 3)
    for _ in range(3):
        load(tier, 3)
    tier.close()
    tier = place.open(limit=4 * SIZE, policy=policy)
    save(tier, 4)
    save(tier, 5)
    assert 3 in present(tier, range(6))
    assert len(present(tier, range(6))) == 4


def test_a_lower_limit_applies_from_the_next_save(place: Place) -> None:
    save(place.open(), *range(8))
    tier = place.open(limit=3 * SIZE)
    save(tier, 9)
    assert len(files_in(place)) == 3


def test_the_start_counts_what_is_there(place: Place) -> None:
    save(place.open(), *range(8))
    tier = place.open()
    tier.close()
    assert (tier.stats().num_blocks, tier.stats().num_bytes) == (8, 8 * SIZE)


def test_a_change_in_the_same_tick_is_seen(tmp_path: Path) -> None:
    """A folder's mtime may be the same before and after: it is listed again until it is old."""
    folder = tmp_path / ("0" * 32) / "ab"
    folder.mkdir(parents=True)
    catalogue = Catalogue(tmp_path, ".kv", 0, settled_s=3600)
    (folder / "one.kv").write_bytes(b"x")
    status = folder.stat()
    catalogue.refresh()
    (folder / "two.kv").write_bytes(b"x")
    os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
    catalogue.refresh()
    assert (catalogue.num_blocks, catalogue.num_bytes) == (2, 2)


def test_a_folder_that_did_not_change_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("0" * 32) / "ab"
    folder.mkdir(parents=True)
    (folder / "one.kv").write_bytes(b"x")
    os.utime(folder, (0, 0))
    catalogue = Catalogue(tmp_path, ".kv", 0, settled_s=1)
    catalogue.refresh()
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    catalogue.refresh()
    assert str(folder) not in listed
    assert catalogue.num_blocks == 1


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    place = Place("shared_storage", tmp_path)
    tier = place.open()
    save(tier, 0)
    with safe_open(place.file_of(tier, 0), "np") as file:
        assert list(file.keys()) == ["kv"]
        assert np.array_equal(file.get_tensor("kv"), make_blocks(0)[0])
        metadata = file.metadata()
    assert metadata["key"] == make_keys(0)[0].hex()
    assert metadata["version"] == "1"
    assert set(metadata) == {"key", "namespace", "digest", "version", "saved_s"}
    place.close()
