"""Handles are bounded, and closed when the last reader releases them."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from quire.durable.files import OsDisk, write_new
from quire.pages.sources import SEGMENTS_MAX, Handles, ReadFile
from tests.pages.engine_harness import Model, Pages, assert_reads, image, small_segments, write


def _descriptors(prefix: str = "") -> int:
    """The number of open files below `prefix`."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith(prefix) for link in links)


def test_an_evicted_handle_is_closed_when_its_reader_is_done(tmp_path: Path) -> None:
    before = _descriptors()
    handles: Handles[ReadFile] = Handles(2)
    for name in "abc":
        write_new(OsDisk(), str(tmp_path / name), name.encode())
    in_use = handles.keep("a", lambda: ReadFile(OsDisk().open(str(tmp_path / "a"))))
    for name in "bc":
        handles.keep(name, lambda name=name: ReadFile(OsDisk().open(str(tmp_path / name))))  # type: ignore[misc]
    assert len(handles) == 2
    assert _descriptors() == before + 3
    assert in_use.read_at(1, 0) == b"a"
    del in_use
    assert _descriptors() == before + 2
    handles.clear()
    assert _descriptors() == before


def test_keys_of_released_handles_are_forgotten() -> None:
    """Hazard: chunks and regions of segments are never checked for use, and every key that they ever had was kept."""
    handles: Handles[int] = Handles(4)
    for number in range(100):
        handles.keep(number, lambda: 1)
    assert len(handles._used) == 4
    handles.drop(99)
    assert len(handles._used) == 3
    handles.clear()
    assert not handles._used


def test_two_threads_that_open_at_once_leave_one_handle(tmp_path: Path) -> None:
    write_new(OsDisk(), str(tmp_path / "a"), b"a")
    before, handles, barrier = _descriptors(), Handles[ReadFile](4), threading.Barrier(8)

    def opener() -> ReadFile:
        return ReadFile(OsDisk().open(str(tmp_path / "a")))

    def work() -> None:
        barrier.wait()
        for _ in range(50):
            assert handles.keep("a", opener).read_at(1, 0) == b"a"
            handles.drop("a")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handles.clear()
    assert _descriptors() == before


def test_reading_many_segments_keeps_a_bounded_number_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted segments used to stay open forever."""
    small_segments(monkeypatch, frames=2)
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    for number in range(SEGMENTS_MAX + 30):
        write(store, model, {number * 2: image(), number * 2 + 1: image()})
    store.wal.publish()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
        assert _descriptors(str(tmp_path / "store")) <= SEGMENTS_MAX + 2
    pages.stop()
    assert _descriptors(str(tmp_path)) == 0
