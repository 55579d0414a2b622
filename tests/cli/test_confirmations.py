"""Hazard: a command that the owner runs for a client is run again with the user's answer. If the store had changed in the
meantime, it dropped snapshots that the question did not show, or another database of the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import quire
from quire.cli import prompts, quarantine, remote, stores
from quire.cli.main import run
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.files import OsDisk
from quire.durable.quarantine import entries
from quire.manifest.records import RetentionRecord
from quire.service.commands import RemoteCommand
from quire.store.store import Store
from tests.cli.test_quarantine import quarantine_file
from tests.service.owners import served

Change = Callable[[Store], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty place, unlike that of the other tests."""
    return tmp_path / "store"


@pytest.fixture
def store(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store whose owner runs commands."""
    monkeypatch.setattr("quire.service.commands._installed", [remote.run_for_client])
    with quire.open(path, settings=StoreSettings(maintenance=MaintenanceSettings(enabled=False))) as filled:
        filled.create("shop", "pages")
        filled.snapshot("shop", "monday")
        filled.snapshot("shop", "")
        filled.snapshot("shop", "")
        filled.manifest.retention.set("shop", RetentionRecord(keep_last=1))
        filled.feed.register(name="my-app")
        filled.create("gone", "pages")
        filled.drop("gone", undoable=True)
    with served(path) as (owner, _):
        yield owner


def asked(store: Store, monkeypatch: pytest.MonkeyPatch, change: Change, *words: str) -> list[str]:
    """Run a command whose user agrees after `change`, and then refuses. Return the questions."""
    questions: list[str] = []

    def answer(question: str, _: str) -> bool:
        questions.append(question)
        if len(questions) == 1:
            change(store)
        return len(questions) == 1

    monkeypatch.setattr(remote, "agreed", answer)
    code = run([*words, "--store", store.path])
    assert code == len(questions) - 1, "the last answer is no"
    return questions


def recreate(store: Store) -> None:
    store.drop("shop", snapshots=True)
    store.create("shop", "pages")


def drop_again(store: Store) -> None:
    store.create("gone", "pages")
    store.drop("gone", undoable=True)


def rename_snapshots(store: Store) -> None:
    store.drop_snapshot("shop", "monday")
    store.snapshot("shop", "monday")


def replace_cursor(store: Store) -> None:
    store.feed.drop("my-app")
    store.feed.register(name="my-app")


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("snapshot drop shop monday --now", rename_snapshots),
        ("retention apply shop", lambda store: store.snapshot("shop", "")),
        ("retention apply --all", lambda store: store.snapshot("shop", "")),
        ("feed drop my-app", replace_cursor),
    ],
)
def test_an_answer_about_something_else_is_asked_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, words: str, change: Change
) -> None:
    after: list[object] = []

    def state() -> object:
        return (
            [snapshot.snapshot_id for snapshot in store.manifest.snapshots.of("shop")],
            [cursor.cursor_id for cursor in store.feed.cursors()],
        )

    def change_and_look(owner: Store) -> None:
        change(owner)
        after.append(state())

    assert len(asked(store, monkeypatch, change_and_look, *words.split())) == 2
    assert [state()] == after, "nothing was dropped"


def test_an_answer_is_not_asked_again_because_of_numbers_that_always_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (question,) = asked(store, monkeypatch, lambda owner: owner.create("new", "pages"), "feed", "drop", "my-app")
    assert "behind" in question
    assert not store.feed.cursors()


def test_an_answer_of_an_older_client_is_accepted(store: Store) -> None:
    command = RemoteCommand("feed.drop", b'{"cursor": "my-app"}', b"k" * 16, 0, answer="yes")
    assert remote.run_for_client(store, command).out.startswith("dropped cursor my-app")


@pytest.mark.parametrize("change", [recreate, lambda store: store.snapshot("shop", "new")])
def test_a_database_that_was_changed_while_the_user_of_a_client_was_asked_is_not_dropped(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Change
) -> None:
    """`drop` is a call, not a command, of a client: it asks, and calls afterwards."""
    monkeypatch.setattr(stores, "confirm", lambda *_, **__: change(store))
    assert run(["drop", "shop", "--snapshots", "--store", store.path]) not in (0, 1)
    assert "was changed in the meantime" in capsys.readouterr().err
    assert [info.name for info in store.databases()] == ["shop"]


def test_the_dropped_database_that_was_shown_is_removed_for_good(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = store.dropped()
    monkeypatch.setattr(stores, "confirm", lambda *_, **__: drop_again(store))
    assert run(["drop", "gone", "--now", "--store", store.path]) == 0
    (left,) = store.dropped()
    assert left.db_id != shown.db_id


def test_no_file_takes_the_number_of_another_while_the_user_is_asked(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hazard: the question was asked before the lock was taken; the number was then that of another file."""
    with quire.open(path):
        pass
    quarantine_file(path)

    def remove_meanwhile(*_: object) -> None:
        monkeypatch.setattr(quarantine, "confirm", prompts.confirm)
        assert run(["quarantine", "rm", "1", "--yes", "--store", str(path)]) not in (0, 1)

    monkeypatch.setattr(quarantine, "confirm", remove_meanwhile)
    assert run(["quarantine", "rm", "1", "--store", str(path)]) == 0
    assert not entries(OsDisk(), str(path))
    assert "StoreLocked" not in capsys.readouterr().out
