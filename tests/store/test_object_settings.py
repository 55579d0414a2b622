"""quire.toml determines how objects are accessed: no environment variable is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidConfig
from quire.core.settings import StoreSettings
from tests.objects.conftest import fresh_url, s3_server

__all__ = ["s3_server"]  # a fixture


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)


def configure(path: Path, url: str, *lines: str) -> None:
    path.mkdir()
    (path / "quire.toml").write_text("\n".join([f'object_store = "{url}"', *lines]) + "\n")


def test_endpoint_plain_http_and_credentials_are_settings(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    endpoint = "http://{}:{}".format(*request.getfixturevalue("s3_server"))
    configure(
        tmp_path / "store",
        fresh_url(),
        "[objects]",
        f'endpoint = "{endpoint}"',
        "allow_http = true",
        'region = "us-east-1"',
        'credentials = { access_key_id = "testing", secret_access_key = "testing" }',
    )
    with quire.open(tmp_path / "store") as store:
        with store.sqlite("shop", create=True) as db:
            db.execute("create table t(x)")
        store.snapshot("shop", "one")
        store.checkpoint("shop")
        assert list(store.objects.list_pages())
        with store.sqlite("shop", at="one") as db:
            assert db.execute("select count(*) from t").fetchone() == (0,)


def test_settings_given_to_open_keep_the_access_options(tmp_path: Path) -> None:
    configure(tmp_path / "store", "memory://x", "[objects]", 'region = "eu"', "[namespaces.cold]", 'region = "us"')
    with quire.open(tmp_path / "store", settings=StoreSettings(open_files_max=8)) as store:
        assert store.settings.objects.region == "eu"
        assert store.settings.namespaces["cold"].region == "us"


def test_plain_http_without_permission_is_refused_when_the_store_is_opened(tmp_path: Path) -> None:
    configure(tmp_path / "store", "s3://bucket", "[objects]", 'endpoint = "http://127.0.0.1:9"')
    with pytest.raises(InvalidConfig, match=r"objects\.endpoint is plain HTTP: set `allow_http = true`"):
        quire.open(tmp_path / "store")
