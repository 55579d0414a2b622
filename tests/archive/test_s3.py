"""The archive over the S3 protocol (moto's server behind a faulty proxy): nothing is lost, and work continues (A9)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import quire
from quire.cli.main import run
from quire.core.errors import StoreFenced
from quire.core.settings import ObjectSettings
from quire.store.store import Store
from tests.archive.archived_store import WAIT, contents, fill, quiet, settings, until
from tests.objects.conftest import CREDENTIALS, _proxy, fresh_url, proxy, s3_options, s3_server  # noqa: F401 - fixtures
from tests.objects.proxy import Fault, FaultyProxy

FAULTS = {
    "responses are lost": [Fault(harm="drop_after", method="PUT") for _ in range(6)],
    "requests are lost": [Fault(harm="drop_before", method="PUT") for _ in range(6)],
    "500": [Fault(harm="status", method="PUT", status=500) for _ in range(12)],
    "throttled": [Fault(harm="status", method="PUT", status=503, body=b"<Error><Code>SlowDown</Code></Error>")] * 5,
    "conflicts": [
        Fault(harm="status", method="PUT", status=409, body=b"<Error><Code>ConditionalRequestConflict</Code></Error>")
    ]
    * 6,
    "slow": [Fault(harm="slow", method="PUT", seconds=0.3) for _ in range(4)],
    "denied": [
        Fault(harm="status", method="PUT", status=403, body=b"<Error><Code>AccessDenied</Code></Error>")
        for _ in range(4)
    ],
}


def s3_settings(proxy: FaultyProxy) -> ObjectSettings:  # noqa: F811
    return ObjectSettings(endpoint=proxy.endpoint, region="us-east-1", allow_http=True, credentials=CREDENTIALS)


@pytest.fixture
def store(proxy: FaultyProxy, tmp_path: Path) -> Iterator[Store]:  # noqa: F811
    url = fresh_url()
    store_settings = msgspec.structs.replace(settings(url), objects=s3_settings(proxy))
    with suppress(StoreFenced), quire.open(tmp_path / "store", settings=store_settings) as store:  # tests take it over
        yield store


def restored(store: Store, proxy: FaultyProxy, target: Path) -> dict[str, object]:  # noqa: F811
    options = s3_options(proxy.endpoint)
    quire.restore(store.settings.object_store, target, options=options)
    store_settings = msgspec.structs.replace(quiet(), objects=s3_settings(proxy))
    with quire.open(target, takeover=True, discard=True, settings=store_settings) as restored_store:
        assert restored_store.manifest.check() == []
        return contents(restored_store)


LONG = {"500", "requests are lost"}
"""Each waits for the client's own retries; lost responses are the hardest of their kind, and stay among the fast
tests."""


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow) if fault in LONG else fault for fault in FAULTS]
)
def test_nothing_is_lost(store: Store, proxy: FaultyProxy, tmp_path: Path, fault: str) -> None:  # noqa: F811
    archive = store.archive
    assert archive is not None
    fill(store, 0)
    archive.wait(WAIT)
    proxy.plan(*FAULTS[fault])
    start = 100
    while unused_faults := proxy.unused():  # work continues whatever the bucket does
        fill(store, start, 5)
        store.kv("pairs").flush()
        start += 100
        until(lambda: proxy.unused() < unused_faults or archive.lag_seconds() == 0.0)
    archive.wait(WAIT)
    assert archive.last_error == ""
    expected = contents(store)
    assert restored(store, proxy, tmp_path / "restored") == expected


@pytest.mark.slow
def test_nothing_is_lost_while_the_bucket_is_unavailable(store: Store, proxy: FaultyProxy, tmp_path: Path) -> None:  # noqa: F811
    """Ten minutes with QUIRE_AWAY_SECONDS=600."""
    archive = store.archive
    assert archive is not None
    fill(store, 0)
    archive.wait(WAIT)
    proxy.plan(*[Fault(harm="drop_before") for _ in range(100_000)])
    deadline, start = time.monotonic() + float(os.environ.get("QUIRE_AWAY_SECONDS", "20")), 100
    while time.monotonic() < deadline:
        fill(store, start, 5)
        store.kv("pairs").flush()
        start += 100
        time.sleep(1.0)
    assert archive.lag_seconds() > 10
    assert archive.status().state == "behind"
    proxy.reset()
    archive.wait(600)  # cuts of 0.02 s: one object per round of the loop, and one per table
    assert archive.last_error == ""
    expected = contents(store)
    assert restored(store, proxy, tmp_path / "restored") == expected


def test_an_access_denial_of_the_bucket_is_reported(store: Store, proxy: FaultyProxy) -> None:  # noqa: F811
    assert store.archive is not None
    fill(store, 0)
    store.archive.wait(WAIT)
    proxy.plan(*FAULTS["denied"])
    store.kv("pairs").put(b"one", b"change")  # only one change: the error disappears when the bucket has accepted it
    until(lambda: store.archive is not None and "denied" in store.archive.last_error.lower())
    assert store.archive.lag_seconds() > 0
    store.archive.wait(WAIT)
    assert store.archive.last_error == ""


def test_archiving_is_not_switched_on_with_credentials_that_may_only_read(
    tmp_path: Path,
    proxy: FaultyProxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: listing the bucket worked, and the command then retried the first upload for a day."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS["secret_access_key"])
    shop = str(tmp_path / "shop")
    reached = ["--endpoint", proxy.endpoint, "--region", "us-east-1", "--allow-http"]
    assert run(["init", shop, "--object-store", fresh_url(), *reached]) == 0
    config = (tmp_path / "shop" / "quire.toml").read_bytes()
    proxy.plan(FAULTS["denied"][0])
    assert run(["archive", "on", "--store", shop]) == 6
    assert "the object store rejected the credentials" in capsys.readouterr().err
    assert (tmp_path / "shop" / "quire.toml").read_bytes() == config, "archiving is still off"
    assert run(["archive", "on", "--store", shop]) == 0


def test_a_lost_disk_is_recovered_by_the_command_line_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    s3_server: tuple[str, int],  # noqa: F811
) -> None:
    """Credentials come from the environment; the endpoint is given once, and later read from quire.toml."""
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS["secret_access_key"])
    endpoint = "http://{}:{}".format(*s3_server)
    url, shop, endpoint_options = fresh_url(), str(tmp_path / "shop"), ["--endpoint", endpoint, "--allow-http"]

    def quire_(*arguments: str) -> str:
        assert run(list(arguments)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    assert run(["init", shop, "--object-store", url, "--endpoint", endpoint]) != 0
    assert "allow" in capsys.readouterr().err
    assert not os.path.exists(shop)
    quire_("init", shop, "--object-store", url, *endpoint_options, "--region", "us-east-1")
    quire_("archive", "on", "--store", shop)
    quire_("kv", "put", "cart", "alice", "3 apples", "--create", "--store", shop)
    shutil.rmtree(shop)
    quire_("restore-store", url, shop, "--takeover", *endpoint_options)
    assert "3 apples" in quire_("kv", "get", "cart", "alice", "--store", shop)
    quire_("kv", "put", "cart", "bob", "4 pears", "--store", shop)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    copy = str(tmp_path / "looked")
    quire_("restore-store", url, copy)
    assert "4 pears" in quire_("kv", "get", "cart", "bob", "--store", copy)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    # the owner's quire.toml still has the endpoint
    assert "4 pears" in quire_("kv", "get", "cart", "bob", "--store", copy)


def test_copies_remember_the_endpoint_that_they_were_made_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3_server: tuple[str, int],  # noqa: F811
) -> None:
    """The owner's environment had the endpoint, and its quire.toml does not."""
    url, endpoint = fresh_url(), "http://{}:{}".format(*s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS["secret_access_key"])
    with monkeypatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", endpoint)
        environment.setenv("AWS_ALLOW_HTTP", "true")
        with quire.open(tmp_path / "store", settings=settings(url)) as owner:
            fill(owner, 0)
            owner.kv("pairs").flush()
            expected = contents(owner)
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    options = s3_options(endpoint)
    quire.clone(url, tmp_path / "clone", options=options)
    with quire.Standby(url, tmp_path / "standby", options=options) as standby:
        standby.poll()
    quire.promote(tmp_path / "standby", options=options)
    for name in ("clone", "standby"):
        with quire.open(tmp_path / name) as store:
            assert contents(store) == expected
