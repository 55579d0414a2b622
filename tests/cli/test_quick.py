"""The quick way shows what the usual way shows, letter by letter, or leaves it to that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from quire.cli import app, jobs, lane, quick, quick_lists, typed
from quire.cli.command import Cli
from quire.cli.values import Value
from quire.core.clock import SystemClock
from quire.durable import names
from quire.manifest import records
from quire.manifest.glance import Unfamiliar
from quire.manifest.records import JobKind, JobState
from tests.cli.conftest import quire_program

COMMANDS = [
    ["ls"],
    ["info"],
    ["tree"],
    ["snapshot", "ls", "shop"],
    ["snapshot", "ls", "shop-test"],
    ["jobs", "ls"],
    ["jobs", "ls", "--limit", "2"],
    *(
        ["jobs", "ls", "--state", state]
        for state in ("pending", "running", "in-flight", "succeeded", "failed", "cancelled")
    ),
    ["feed", "cursors"],
]


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A store with everything that the quick way tells of."""
    root = tmp_path / "store"
    with quire.open(root) as store:
        store.create("shop", "pages", tags={"by": "größe"})
        store.create("clicks", "stream")
        store.create("cart", "lsm")
        with store.sqlite("shop") as db:
            db.execute("create table t(x)")
        for number in range(8):
            store.snapshot("shop", f"s{number}", tags={"n": str(number)})
        store.fork("shop", "shop-test", at="s1")
        store.fork("shop-test", "deeper")
        store.drop("shop-test")
        store.fork("shop", "shop-test")
        store.snapshot("shop-test")
        store.snapshot("cart", "kept")
        fill_lists(store)
    return root


def fill_lists(store: quire.Store) -> None:
    """Jobs in every state, with results and errors, and cursors."""
    queue, shop = store.manifest.jobs, store.database("shop").db_id
    assert store.checkpoint("shop", runner="threads").state is JobState.SUCCEEDED
    queue.cancel(queue.enqueue(JobKind.UPLOAD, shop, {"größe": [1, 2**40, b"x", None, True]}))
    queue.enqueue(JobKind.VERIFY, shop, {"ratio": 1.5, "below": -3}, delay_seconds=3_600)
    failing = queue.claim_job(queue.enqueue(JobKind.SWEEP, 0, max_attempts=1), "tester")
    assert failing is not None
    queue.fail(failing, "the disk is full")
    running = queue.claim_job(queue.enqueue(JobKind.EVICT, shop), "tester")
    assert running is not None
    store.feed.register(name="my-app", ttl_seconds=60)
    store.feed.register()
    for _ in store.feed.follow("reader", timeout=0):
        pass


def usual(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert typed.run_app(app.app_for(arguments), arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_quick_way_shows_what_the_usual_way_shows(
    family: Path,
    words: list[str],
    as_json: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = [*words, "--store", str(family), *as_json]
    now = SystemClock().now_ms()
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: now)  # ages are shown
    expected = usual(arguments, capsys)
    with monkeypatch.context() as patch:
        patch.setattr(Cli, "reader", None)  # the usual way would need it
        patch.setattr("quire.store.info.Glance", None)
        assert lane.run(arguments) == 0, "the quick way took it"
    shown = capsys.readouterr().out
    if words == ["info"]:  # the reader counts itself
        expected, shown = (
            text.replace('"readers": 2', '"readers": 1').replace("2 slots", "1 slot") for text in (expected, shown)
        )
    assert shown == expected


def test_the_fields_and_names_are_those_of_the_records() -> None:
    for mine, theirs in (
        (quick_lists.JOB, records.JobRecord),
        (quick_lists.LEASE, records.JobLeaseRecord),
        (quick_lists.CURSOR, records.CursorRecord),
    ):
        fields = msgspec.structs.fields(theirs)
        assert list(mine) == [each.encode_name for each in fields]
        assert [mine[each.name] for each in fields if not each.required] == [
            each.default for each in fields if not each.required
        ]
        assert {mine[each.name] for each in fields if each.required} == {quick_lists._REQUIRED}
    for names_, enumeration in (
        (quick_lists.JOB_KINDS, JobKind),
        (quick_lists.JOB_STATES, JobState),
        (quick_lists.CURSOR_STATES, records.CursorState),
    ):
        assert dict(enumerate(names_, 1)) == {each.value: each.name for each in enumeration}
    assert records.JobLeaseRecord.__struct_fields__ == jobs.LEASE_FIELDS


def test_what_the_quick_way_does_not_know_goes_the_usual_way(
    family: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--store", str(family)]
    assert lane.run(["jobs", "ls", "--db", "shop", *where]) == 0
    assert "checkpoint" in capsys.readouterr().out
    assert lane.run(["jobs", "ls", "--state", "nonsense", *where]) == 2
    assert "a job has no such state" in capsys.readouterr().err
    monkeypatch.setattr(quick_lists, "JOBS_MAX", 1)
    with pytest.raises(Unfamiliar):
        quick_lists.jobs_ls(Cli(str(family)), "", 0)
    assert lane.run(["jobs", "ls", *where]) == 0
    with pytest.raises(Unfamiliar):
        quick_lists._named(quick_lists.JOB_STATES, 0)
    with pytest.raises(IndexError):
        quick_lists._named(quick_lists.JOB_STATES, 6)


def test_the_list_of_commands_is_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert quick.help_text() == usual(["--help"], capsys), "write src/quire/cli/help.txt again: `quire --help` of typer"
    monkeypatch.setenv("COLUMNS", "60")
    assert lane.run(["--help"]) is None, "typer breaks the lines"
    narrow = usual(["--help"], capsys)
    assert max(map(len, narrow.splitlines())) <= 60
    monkeypatch.setenv("COLUMNS", "200")
    assert quick.help_text() == usual(["--help"], capsys)


def test_every_first_word_has_its_module() -> None:
    for module, words in app.MODULES.items():
        one = app.assembled([module])
        assert {*one.commands, *one.groups} == set(words), module


def test_the_names_are_those_of_the_store() -> None:
    assert (quick.CONFIG, quick.MANIFEST, quick.OBJECTS) == (names.CONFIG, names.MANIFEST, names.OBJECTS)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('object_store = "elsewhere"', "elsewhere"),
        ('object_store = "s3://bucket/prefix"', None),
        ("[manifest]\nmap_bytes = 1073741824", None),
        ("object_store = 'quoted otherwise'", None),
        ('object_store = "ftp://x"', None),
        ("no toml at all", None),
    ],
)
def test_what_quire_toml_says(family: Path, line: str, told: str | None) -> None:
    (family / "quire.toml").write_text(line + "\n", "utf-8")
    if told is None:
        with pytest.raises(Unfamiliar):
            quick.info(Cli(str(family)))
    else:
        assert dict(quick.info(Cli(str(family))).lines)["objects"].endswith(told)


def test_what_is_wrong_is_told_by_the_usual_way(family: Path) -> None:
    assert lane.run(["snapshot", "ls", "nobody", "--store", str(family)]) == 3
    ended = quire_program("snapshot", "ls", "nobody", "--store", str(family))
    assert (ended.returncode, "no database has this name" in ended.stderr) == (3, True)
    (family / "manifest.lmdb").write_bytes(os.urandom(64 * 1024))
    assert lane.run(["ls", "--store", str(family)]) == 7
    assert quire_program("ls", "--store", str(family)).returncode == 7


def test_values_are_frozen_and_say_what_is_missing() -> None:
    class Point(Value):
        x: int
        y: int = 0

    point = Point(1)
    assert (point, hash(point)) == (Point(x=1, y=0), hash(Point(1, 0)))
    assert point != Point(2)
    with pytest.raises(AttributeError):
        point.x = 3  # type: ignore[misc]
    make: Any = Point
    for given, named in (((), {}), ((1, 2, 3), {}), ((1,), {"x": 1}), ((1,), {"z": 1})):
        with pytest.raises(TypeError):
            make(*given, **named)
