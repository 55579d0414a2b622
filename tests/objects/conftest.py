"""The stores under test: a directory, memory, and S3 over HTTP (moto's server), the latter also behind a faulty
proxy."""

from __future__ import annotations

import http.client
import itertools
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.objects.options import RetryPolicy, StoreOptions
from tests.objects.proxy import FaultyProxy

BUCKET = "quire-tests"
CREDENTIALS = {"access_key_id": "testing", "secret_access_key": "testing"}
QUICK_RETRIES = RetryPolicy(
    attempts_max=4, deadline_seconds=10.0, backoff_first_seconds=0.001, backoff_max_seconds=0.01
)

_prefixes = itertools.count()


def s3_options(
    endpoint: str, *, retry: RetryPolicy = QUICK_RETRIES, request_timeout_seconds: float = 20.0
) -> StoreOptions:
    return StoreOptions(
        endpoint=endpoint,
        region="us-east-1",
        allow_http=True,
        retry=retry,
        request_timeout_seconds=request_timeout_seconds,
        settings=CREDENTIALS,
    )


def fresh_url() -> str:
    """A separate prefix for each test, so that the server is started only once."""
    return f"s3://{BUCKET}/t{next(_prefixes)}/objects"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of moto and its dependencies
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    host, port = server.get_host_and_port()
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().status == 200
    connection.close()
    yield host, port
    server.stop()


@pytest.fixture(scope="session")
def _proxy(s3_server: tuple[str, int]) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(s3_server)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(_proxy: FaultyProxy) -> Iterator[FaultyProxy]:
    _proxy.reset()
    yield _proxy
    assert _proxy.unused() == 0, "a planned fault never happened: the test tested nothing"


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    """Each implementation, empty."""
    if request.param == "local":
        store = open_store(tmp_path / "objects")
    elif request.param == "memory":
        store = open_store("memory:///some/prefix")
    else:
        host, port = request.getfixturevalue("s3_server")
        store = open_store(fresh_url(), options=s3_options(f"http://{host}:{port}"))
    yield store
    store.close()


@pytest.fixture
def s3_store(proxy: FaultyProxy) -> ObjectStore:
    """S3 behind the faulty proxy, with quick retries."""
    return open_store(fresh_url(), options=s3_options(proxy.endpoint))
