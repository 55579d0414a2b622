"""Every command that reaches a bucket uses the endpoint: the one it is given, else that of the directory's quire.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.objects.conftest import CREDENTIALS, fresh_url, s3_server  # noqa: F401 - fixtures


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch, s3_server: tuple[str, int]) -> list[str]:  # noqa: F811
    """The options that name the server; nothing in the environment does."""
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS["secret_access_key"])
    return ["--endpoint", "http://{}:{}".format(*s3_server), "--allow-http"]


def ok(run: Run, *arguments: str, at: Path | None = None) -> str:
    result = run(*arguments, at=at)
    assert result.code == 0, result.err
    return result.out


@pytest.fixture
def url(run: Run, tmp_path: Path, reached: list[str]) -> str:
    """The bucket of an archived store in `tmp_path/shop`."""
    url, shop = fresh_url(), tmp_path / "shop"
    ok(run, "init", str(shop), "--object-store", url, *reached, "--region", "us-east-1")
    ok(run, "archive", "on", at=shop)
    ok(run, "kv", "put", "cart", "alice", "3 apples", "--create", at=shop)
    return url


def test_a_standby_remembers_its_endpoint(run: Run, tmp_path: Path, url: str, reached: list[str]) -> None:
    standby = str(tmp_path / "standby")
    ok(run, "standby", url, standby, "--once", *reached)
    ok(run, "standby", url, standby, "--once")
    ok(run, "promote", standby, "--yes")
    assert "3 apples" in ok(run, "kv", "get", "cart", "alice", at=tmp_path / "standby")


def test_a_clone_of_a_directory_uses_its_endpoint(run: Run, tmp_path: Path, url: str) -> None:
    ok(run, "clone", str(tmp_path / "shop"), str(tmp_path / "copy"))
    assert "3 apples" in ok(run, "kv", "get", "cart", "alice", at=tmp_path / "copy")


def test_an_audit_uses_the_endpoint(run: Run, tmp_path: Path, url: str, reached: list[str]) -> None:
    ok(run, "archive", "audit", url, *reached)
    ok(run, "archive", "audit", url, at=tmp_path / "shop")  # the store's own bucket: quire.toml has the endpoint


def test_backup_and_restore_db_use_the_endpoint(run: Run, tmp_path: Path, url: str, reached: list[str]) -> None:
    """Of a store whose own objects are on disk: its quire.toml has no endpoint."""
    local, target = tmp_path / "local", fresh_url()
    ok(run, "init", str(local))
    ok(run, "restore-db", url, "cart", *reached, at=local)
    assert "3 apples" in ok(run, "kv", "get", "cart", "alice", at=local)
    ok(run, "backup", target, *reached, at=local)
    ok(run, "restore-store", target, str(tmp_path / "restored"), *reached)


@pytest.mark.parametrize(
    "command",
    [
        ["init", "{new}", "--object-store", "{url}"],
        ["restore-store", "{url}", "{new}"],
        ["standby", "{url}", "{new}"],
        ["clone", "{url}", "{new}"],
        ["archive", "audit", "{url}"],
    ],
)
def test_a_plain_http_endpoint_names_the_option_that_allows_it(run: Run, tmp_path: Path, command: list[str]) -> None:
    new = tmp_path / "new"
    words = [word.format(new=new, url="s3://bucket/shop") for word in command]
    result = run(*words, "--endpoint", "http://127.0.0.1:9", at=None)
    assert result.code == 2
    assert "`--endpoint` is plain HTTP: add `--allow-http`" in result.err
    assert not new.exists()
