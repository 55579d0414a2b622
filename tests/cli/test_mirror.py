"""`quire mirror`: from creation to removal, as text and JSON."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import quire
from quire.core.clock import SystemClock
from quire.testing.clock import ManualClock
from tests.cli.conftest import Run
from tests.jobs.mirrored_store import quiet_settings


def test_a_mirror_from_creation_to_removal(run: Run, path: Path, tmp_path: Path) -> None:
    with quire.open(path) as store, closing(store.sqlite("shop")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
        connection.execute("INSERT INTO orders VALUES (1, 'lamp'), (2, 'desk')")
    target = f"parquet:{tmp_path}/lake"
    created = run(
        "mirror", "create", "lake", "--databases", "sh*", "--table", "orders", "--to", target, "--every", "1h", "--json"
    ).data
    assert (created["databases"], created["target"], created["every_seconds"], created["changed"]) == (
        ["sh*"],
        target,
        3600,
        1,
    )
    assert "loaded lake: 1 database of 1 written; 2 rows" in run("mirror", "run", "lake").out
    assert "up to date" in run("mirror", "run", "lake").out
    assert run("mirror", "run", "lake", "--full", "--json").data["rows_written"] == 2
    shown = run("mirror", "status", "lake").out
    assert "every 1h" in shown
    assert "2 rows of 1 database" in shown
    (listed,) = run("mirror", "ls", "--json").data
    assert (listed["name"], listed["rows"], listed["changed"]) == ("lake", 2, 0)
    assert "lake" in run("mirror", "ls").out
    assert len(json.loads((tmp_path / "lake" / "manifest.json").read_text())["files"]) == 1
    assert run("mirror", "drop", "lake", "--yes", "--json").data["dropped"]["name"] == "lake"
    assert run("mirror", "ls", "--json").data == []
    assert (tmp_path / "lake" / "manifest.json").exists()


def test_a_misspelt_table_or_pattern_is_reported(run: Run, path: Path, tmp_path: Path) -> None:
    with quire.open(path) as store, closing(store.sqlite("shop")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    for name, pattern, table in (("one", "sh*", "ordres"), ("two", "tenant-*", "orders")):
        destination = f"parquet:{tmp_path}/{name}"
        run("mirror", "create", name, "--databases", pattern, "--table", table, "--to", destination)
    assert run("mirror", "run", "one").out.strip().endswith("; none of them has a row in a table ordres")
    assert "two has nothing to follow: no database matches tenant-* yet" in run("mirror", "run", "two").out


def test_a_late_or_failing_mirror_is_shown(run: Run, tmp_path: Path) -> None:
    assert "mirrors" not in {row["check"] for row in run("doctor", "--json").data}
    path, yesterday = tmp_path / "old", ManualClock(SystemClock().now_ms() - 86_400_000)
    with quire.open(path, settings=quiet_settings(), clock=yesterday) as store:
        with closing(store.sqlite("shop", create=True)) as connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, pieces INTEGER)")
        store.mirrors.create("lake", "shop", "orders", f"parquet:{tmp_path}/lake", every_seconds=3600)
        store.mirrors.run("lake", runner="threads")

    def doctor() -> dict[str, str]:
        rows: list[dict[str, str]] = run("doctor", "--json", at=path).data
        return next(row for row in rows if row["check"] == "mirrors")

    assert (doctor()["state"], doctor()["detail"]) == ("ok", "1 mirror, 0 behind, none late")
    assert "lake: up to date" in run("info", at=path).out
    with quire.open(path, settings=quiet_settings()) as store, closing(store.sqlite("shop")) as connection:
        connection.execute("INSERT INTO orders VALUES (1, 'no number')")
    assert (doctor()["state"], doctor()["detail"]) == ("warn", "lake: 1 database changed in the last 24 h")
    assert "lake: 1 database changed in the last 24 h" in run("info", at=path).out
    (mirror,) = run("info", "--json", at=path).data["mirrors"]
    assert mirror["lag_seconds"] >= 86_400
    assert run("mirror", "run", "lake", at=path).code != 0
    assert "1 failed run" in run("info", at=path).out
    assert doctor()["detail"].startswith("lake: 1 run failed: ")
    assert "1 run; the last: " in run("mirror", "status", "lake", at=path).out


def test_errors_are_sentences(run: Run, tmp_path: Path) -> None:
    assert "needs --databases, --table and --to" in run("mirror", "create", "lake").err
    command = ["mirror", "create", "lake", "--databases", "a*", "--table", "t"]
    assert "not a mirror target" in run(*command, "--to", "s3://bucket").err
    assert "an option is a key and a value" in run(*command, "--to", f"parquet:{tmp_path}/x", "--option", "red").err
    assert "`quire mirror ls` lists them" in run("mirror", "run", "lake").err
    assert run("mirror", "status", "lake").code == run("mirror", "drop", "lake", "--yes").code != 0
