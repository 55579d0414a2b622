"""The archive over the S3 protocol (moto's server behind a proxy that does harm): nothing is lost, and work goes on (A9)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import quire
from quire.core.errors import StoreFenced
from quire.core.settings import ObjectSettings
from quire.store.store import Store
from tests.archive.world import WAIT, contents, fill, quiet, settings, until
from tests.objects.conftest import CREDENTIALS, _proxy, fresh_url, proxy, s3_options, s3_server  # noqa: F401 - fixtures
from tests.objects.proxy import Fault, FaultyProxy

FAULTS = {
    "answers are lost": [Fault(harm="drop_after", method="PUT") for _ in range(6)],
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
    given = msgspec.structs.replace(settings(url), objects=s3_settings(proxy))
    with suppress(StoreFenced), quire.open(tmp_path / "store", settings=given) as opened:  # tests take it over
        yield opened


def restored(store: Store, proxy: FaultyProxy, target: Path) -> dict[str, object]:  # noqa: F811
    options = s3_options(proxy.endpoint)
    quire.restore(store.settings.object_store, target, options=options)
    given = msgspec.structs.replace(quiet(), objects=s3_settings(proxy))
    with quire.open(target, takeover=True, discard=True, settings=given) as made:
        assert made.manifest.check() == []
        return contents(made)


LONG = {"500", "requests are lost"}
"""Each waits for the client's own retries; lost answers are the hardest of their kind, and stay among the fast tests."""


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow) if fault in LONG else fault for fault in FAULTS]
)
def test_nothing_is_lost(store: Store, proxy: FaultyProxy, tmp_path: Path, fault: str) -> None:  # noqa: F811
    assert store.archive is not None
    fill(store, 0)
    store.archive.wait(WAIT)
    proxy.plan(*FAULTS[fault])
    start = 100
    while proxy.unused():  # work goes on whatever the bucket does
        fill(store, start, 5)
        store.kv("pairs").flush()
        start += 100
        assert start < 20_000, "the faults were not met"
        until(lambda: (store.archive is not None and store.archive.lag_seconds() < 3.0) or not proxy.unused())
    store.archive.wait(WAIT)
    assert store.archive.last_error == ""
    expected = contents(store)
    assert restored(store, proxy, tmp_path / "restored") == expected


def test_a_bucket_that_denies_is_shown(store: Store, proxy: FaultyProxy) -> None:  # noqa: F811
    assert store.archive is not None
    fill(store, 0)
    store.archive.wait(WAIT)
    proxy.plan(*FAULTS["denied"])
    store.kv("pairs").put(b"one", b"change")  # no more: the error is gone when the bucket has accepted it
    until(lambda: store.archive is not None and "denied" in store.archive.last_error.lower())
    assert store.archive.lag_seconds() > 0
    store.archive.wait(WAIT)
    assert store.archive.last_error == ""
