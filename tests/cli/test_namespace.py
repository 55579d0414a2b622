"""`quire namespace` and `quire db`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run


def test_a_namespace_from_creation_to_removal(run: Run, tmp_path: Path) -> None:
    created = run("namespace", "create", "cold", str(tmp_path / "cold"), "--json").data
    assert (created["name"], created["url"], created["databases"]) == ("cold", str(tmp_path / "cold"), [])
    assert run("create", "deep", "--namespace", "cold", "--json").data["namespace"] == "cold"
    assert run("ls", "--json").data[1]["namespace"] == "cold"
    shown = run("namespace", "ls")
    assert "cold" in shown.out
    assert "deep" in shown.out
    refused = run("namespace", "drop", "cold", "--yes")
    assert refused.code != 0
    assert "the namespace is in use by databases" in refused.err
    run("drop", "deep", "--yes")
    assert "--now" in run("namespace", "drop", "cold", "--yes").err  # the database can be undropped for a day
    run("drop", "deep", "--now", "--yes")
    run("gc", "--now", "--yes")
    assert run("namespace", "drop", "cold", "--yes", "--json").data["dropped"]["name"] == "cold"
    run("gc", "--now", "--yes")
    run("gc", "--now", "--yes")
    assert run("namespace", "ls", "--json").data == []


def test_backups_of_a_key_value_database_are_in_its_namespace(run: Run, tmp_path: Path) -> None:
    run("namespace", "create", "cold", str(tmp_path / "cold"))
    run("create", "cart", "--kind", "lsm", "--namespace", "cold")
    run("kv", "put", "cart", "k", "v")
    run("kv", "backup", "cart")
    assert any("/backups/kv/cart/" in str(path) for path in (tmp_path / "cold").rglob("*"))
    assert len(run("kv", "backups", "cart", "--json").data) == 1
    run("kv", "restore", "again", "--label", "cart")
    assert run("kv", "get", "again", "k").out.strip() == "v"
    places = {info["name"]: info["namespace"] for info in run("ls", "--json").data}
    assert (places["again"], places["cart"], places["shop"]) == ("cold", "cold", "")
    run("drop", "cart", "--yes")
    assert len(run("kv", "backups", "cart", "--namespace", "cold", "--json").data) == 1
    assert run("verify", "--json").data


def test_a_status_is_set_and_shown(run: Run) -> None:
    run("create", "cart", "--kind", "lsm")
    assert run("db", "set-status", "cart", "read_only", "--json").data["status"] == "read_only"
    refused = run("kv", "put", "cart", "k", "v")
    assert refused.code != 0
    assert "quire db set-status cart active" in refused.err
    run("db", "set-status", "cart", "active")
    run("kv", "put", "cart", "k", "v")


def test_tags_are_set_and_removed(run: Run) -> None:
    run("db", "set", "shop", "--tag", "team=sales", "--tag", "stage=live")
    fork = run("fork", "shop", "trial", "--tag", "stage=trial", "--json").data
    assert fork["tags"] == {"team": "sales", "stage": "trial"}
    changed = run("db", "set", "trial", "--untag", "team", "--json").data
    assert changed["tags"] == {"stage": "trial"}
