"""Bases: on request, beside another one, beside a break of the log."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.archive import base_writer
from quire.archive.format import BaseEvent
from tests.archive.archived_store import WAIT, archived_store, contents, fill, read, until


def test_a_base_on_request_begins_again_if_the_backlog_overflows_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the call failed with "the base was not uploaded (error='')", although the archiver tried again by itself."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        archiver, attempts = archived.archiver, []

        def write_base(*args: Any) -> BaseEvent:
            attempts.append(1)
            base = base_writer.write_base(*args)
            if len(attempts) == 1:
                with archiver._cutting:
                    archiver._break_chain("the backlog exceeds archive.backlog_bytes")
            return base

        monkeypatch.setattr("quire.archive.archiver.write_base", write_base)
        archiver.base()
        assert len(attempts) >= 2
        assert archived.headers()[-1].restorable == archived.headers()[-1].position.number
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


def test_a_base_is_not_begun_again_while_the_log_does_not_name_it_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a base that took longer than an interval was uploaded twice."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        archiver, bases = archived.archiver, []

        def write_base(*args: Any) -> BaseEvent:
            bases.append(1)
            fill(archived.store, 100)
            number = archived.headers()[-1].position.number
            until(lambda: archived.headers()[-1].position.number > number)
            base = base_writer.write_base(*args)
            archiver._cutting.acquire()  # no cut can name it before the test has looked
            return base

        monkeypatch.setattr("quire.archive.archiver.write_base", write_base)
        with archiver._cutting:
            archiver._needs_base = True
            archiver._begin_base()
            thread = archiver._base_thread
        assert thread is not None
        thread.join()
        archiver._base_began = time.monotonic() - 2  # a base that is needed is tried again after a second
        archiver._begin_base_if_due()
        assert archiver._base_thread is thread
        archiver._cutting.release()
        archived.wait_archived()
        assert len(bases) == 1


def test_standbys_start_again_from_a_base_on_request_even_if_a_cut_has_named_its_files_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a fork during the base gave its tables their new objects, so the base seemed to change no name. The standby kept
    the former objects, which are deleted after the window."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.store.kv("pairs").flush()
        archived.wait_archived()
        with quire.Standby(str(archived.bucket), tmp_path / "standby") as standby:
            standby.poll()
            rebuilds = standby.status.rebuilds

            def fork_and_write_base(*args: Any) -> BaseEvent:
                archived.store.fork("pairs", "twin")
                end = archived.archiver.queue.end
                until(lambda: archived.archiver.archived >= end)
                return base_writer.write_base(*args)

            monkeypatch.setattr("quire.archive.archiver.write_base", fork_and_write_base)
            archived.archiver.base()
            standby.poll()
            assert standby.status.rebuilds == rebuilds + 1


def test_a_base_on_request_follows_one_that_is_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: it waited for the one in progress, which keeps the objects that the request is to replace."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.store.kv("pairs").flush()
        archived.wait_archived()
        files = set((archived.bucket / archived.store_id / "archive").rglob("file/*"))
        may_continue, bases = threading.Event(), []

        def write_base(*args: Any) -> BaseEvent:
            bases.append(1)
            assert may_continue.wait(WAIT)
            return base_writer.write_base(*args)

        monkeypatch.setattr("quire.archive.archiver.write_base", write_base)
        with archived.archiver._cutting:
            archived.archiver._begin_base()
        requested = threading.Thread(target=archived.archiver.base)
        requested.start()
        may_continue.set()
        requested.join()
        assert len(bases) == 2
        assert set((archived.bucket / archived.store_id / "archive").rglob("file/*")) > files
