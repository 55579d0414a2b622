"""S3 over a network that fails: what is retried, what is not, and the effect of a lost response."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.errors import (
    AccessDenied,
    AlreadyExists,
    ChecksumMismatch,
    InvalidConfig,
    ObjectNotFound,
    ObjectStoreUnavailable,
    OutOfRange,
    StorageFault,
)
from quire.objects import remote
from quire.objects.api import DeletableStore, ExistingObject, Range, list_objects
from quire.objects.open import open_store
from quire.objects.options import RetryPolicy, StoreOptions
from tests.objects.conftest import BUCKET, QUICK_RETRIES, fresh_url, s3_options
from tests.objects.proxy import Fault, FaultyProxy, ProxiedRequest

KEY = "00000001/0000002a/base:00000003"
BODY = bytes(range(256)) * 40


def count(proxy: FaultyProxy, method: str) -> int:
    return len(proxy.requests(lambda request: request.method == method))


# ── transient faults are retried ──────────────────────────────────────────────────────────────────────────────────────
TRANSIENT_FAULTS = [
    Fault(harm="status", status=500),
    Fault(harm="status", status=503, body=b"<Error><Code>SlowDown</Code></Error>"),
    Fault(harm="status", status=429),
    Fault(harm="drop_before"),
    Fault(harm="drop_after"),
]


@pytest.mark.parametrize("fault", TRANSIENT_FAULTS, ids=lambda fault: f"{fault.harm} {fault.status}")
def test_every_call_survives_one_transient_fault(s3_store: DeletableStore, proxy: FaultyProxy, fault: Fault) -> None:
    proxy.plan(fault)
    s3_store.put(KEY, BODY)
    proxy.plan(fault)
    assert s3_store.get(KEY) == BODY
    proxy.plan(fault)
    assert s3_store.get_range(KEY, 5, 10) == BODY[5:15]
    proxy.plan(fault)
    assert s3_store.get_ranges(KEY, [Range(offset=5, length=10)]) == [BODY[5:15]]
    proxy.plan(fault)
    assert s3_store.head(KEY).size_bytes == len(BODY)
    proxy.plan(fault)
    assert [info.key for info in list_objects(s3_store)] == [KEY]
    proxy.plan(fault)
    assert s3_store.list_prefixes() == ["00000001"]
    proxy.plan(fault)
    s3_store.delete(KEY)
    proxy.plan(fault)
    s3_store.delete_many([KEY, "other"])
    assert list(list_objects(s3_store)) == []


@pytest.mark.parametrize("code", [b"RequestTimeout", b"XAmzContentSHA256Mismatch", b"BadDigest", b"IncompleteBody"])
def test_a_400_that_blames_the_connection_is_retried(s3_store: DeletableStore, proxy: FaultyProxy, code: bytes) -> None:
    proxy.plan(Fault(harm="status", method="PUT", status=400, body=b"<Error><Code>%s</Code></Error>" % code))
    s3_store.put(KEY, BODY)
    assert s3_store.get(KEY) == BODY


@pytest.mark.parametrize("keep_bytes", [0, 1, 5_000, len(BODY) - 1])
def test_a_truncated_body_is_read_again_and_never_returned(
    s3_store: DeletableStore, proxy: FaultyProxy, keep_bytes: int
) -> None:
    s3_store.put(KEY, BODY)
    truncated = Fault(harm="truncate", method="GET", keep_bytes=keep_bytes)
    proxy.plan(truncated, truncated)
    assert s3_store.get(KEY) == BODY
    proxy.plan(truncated)
    assert s3_store.get_range(KEY, 0, len(BODY)) == BODY
    proxy.plan(truncated)
    assert s3_store.get_ranges(KEY, [Range(offset=0, length=len(BODY))]) == [BODY]


def test_a_short_body_that_claims_to_be_complete_is_read_again(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    """As a broken cache in between would send it. A complete `get` only has the length; digests detect it."""
    s3_store.put(KEY, BODY)
    short = Fault(harm="short", method="GET", keep_bytes=100)
    proxy.plan(short)
    assert s3_store.get_range(KEY, 0, 500) == BODY[:500]
    proxy.plan(short)
    assert s3_store.get_ranges(KEY, [Range(offset=0, length=500)]) == [BODY[:500]]
    proxy.plan(short)
    digest = hashlib.sha256(BODY).digest()
    assert s3_store.get_verified(KEY, size_bytes=len(BODY), sha256=digest) == BODY


def test_an_interrupted_listing_is_complete_without_duplicates(
    s3_store: DeletableStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "5")  # keys per response of the server
    keys = [f"{number:03}" for number in range(23)]
    for key in keys:
        s3_store.put(key, b"1")
    proxy.plan(
        Fault(harm="drop_before", part="continuation-token"),
        Fault(harm="status", part="start-after"),
        Fault(harm="truncate", part="continuation-token", keep_bytes=100),
    )
    pages = list(s3_store.list_pages(page_objects=3))
    assert [info.key for page in pages for info in page] == keys


def test_a_body_garbled_in_transit_is_read_again_before_it_is_reported_as_corrupt(
    s3_store: DeletableStore, proxy: FaultyProxy
) -> None:
    s3_store.put(KEY, BODY)
    proxy.plan(Fault(harm="garble", method="GET"))
    digest = hashlib.sha256(BODY).digest()
    assert s3_store.get_verified(KEY, size_bytes=len(BODY), sha256=digest) == BODY
    proxy.plan(Fault(harm="garble", method="GET"), Fault(harm="garble", method="GET"))
    with pytest.raises(ChecksumMismatch, match="two reads"):
        s3_store.get_verified(KEY, size_bytes=len(BODY), sha256=digest)


def test_a_slow_body_is_waited_for_up_to_the_request_timeout(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    s3_store.put(KEY, BODY)
    proxy.plan(Fault(harm="slow", method="GET", seconds=0.2))
    assert s3_store.get(KEY) == BODY
    assert count(proxy, "GET") == 1


def test_a_stalled_body_is_abandoned_at_the_request_timeout_and_read_again(proxy: FaultyProxy) -> None:
    store = open_store(fresh_url(), options=s3_options(proxy.endpoint, request_timeout_seconds=0.4))
    store.put(KEY, BODY)
    proxy.plan(Fault(harm="slow", method="GET", seconds=1.5))
    started = time.monotonic()
    assert store.get(KEY) == BODY
    assert time.monotonic() - started < 1.4
    assert count(proxy, "GET") == 2


# ── permanent faults are reported ─────────────────────────────────────────────────────────────────────────────────────
def test_when_retries_run_out_the_error_has_attempts_and_cause(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    s3_store.put(KEY, BODY)
    attempts = QUICK_RETRIES.attempts_max
    proxy.plan(*[Fault(harm="status", method="GET", status=503)] * attempts)
    with pytest.raises(ObjectStoreUnavailable, match="503") as caught:
        s3_store.get(KEY)
    assert caught.value.where["attempts"] == attempts == count(proxy, "GET")
    assert caught.value.where["key"] == KEY
    assert pickle.loads(pickle.dumps(caught.value)).where == caught.value.where


def test_a_body_that_is_always_truncated_is_unavailable_not_short(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    s3_store.put(KEY, BODY)
    proxy.plan(*[Fault(harm="truncate", method="GET")] * QUICK_RETRIES.attempts_max)
    with pytest.raises(ObjectStoreUnavailable):
        s3_store.get(KEY)


def test_an_unreachable_store_is_unavailable_within_the_deadline() -> None:
    policy = RetryPolicy(attempts_max=1000, deadline_seconds=0.3, backoff_first_seconds=0.01)
    store = open_store("s3://bucket", options=s3_options("http://127.0.0.1:1", retry=policy))
    started = time.monotonic()
    with pytest.raises(ObjectStoreUnavailable) as caught:
        store.get(KEY)
    assert time.monotonic() - started < 5
    assert caught.value.where["attempts"] > 1


# ── final responses are not retried ───────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("status", "error"), [(401, AccessDenied), (403, AccessDenied), (404, ObjectNotFound), (400, StorageFault)]
)
def test_final_responses_are_not_retried(
    s3_store: DeletableStore, proxy: FaultyProxy, status: int, error: type[Exception]
) -> None:
    proxy.plan(Fault(harm="status", status=status, body=b"<Error><Code>Some</Code></Error>"))
    with pytest.raises(error):
        s3_store.get(KEY)
    assert len(proxy.requests()) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_access_denied_in_every_call(
    s3_store: DeletableStore, proxy: FaultyProxy, status: int
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: s3_store.put(KEY, BODY),
        lambda: s3_store.put(KEY, BODY, create_only=True),
        lambda: s3_store.get_range(KEY, 0, 1),
        lambda: s3_store.get_ranges(KEY, [Range(offset=0, length=1)]),
        lambda: s3_store.head(KEY),
        lambda: list(s3_store.list_pages()),
        lambda: s3_store.list_prefixes(),
        lambda: s3_store.delete(KEY),
        lambda: s3_store.delete_many([KEY]),
    ]
    for call in calls:
        proxy.plan(Fault(harm="status", status=status))
        with pytest.raises(AccessDenied, match="credentials"):
            call()
    assert len(proxy.requests()) == len(calls)


def test_a_missing_bucket_is_a_configuration_error_not_an_empty_store(proxy: FaultyProxy) -> None:
    store = open_store("s3://no-such-bucket", options=s3_options(proxy.endpoint))
    for call in (lambda: store.get(KEY), lambda: store.put(KEY, b"1"), lambda: list(store.list_pages())):
        with pytest.raises(InvalidConfig, match="bucket does not exist"):
            call()


def test_plain_http_is_refused_unless_allowed(proxy: FaultyProxy) -> None:
    options = StoreOptions(endpoint=proxy.endpoint, settings={"access_key_id": "a", "secret_access_key": "b"})
    with pytest.raises(InvalidConfig, match=r"plain HTTP.*allow_http = true.*quire.toml"):
        open_store(f"s3://{BUCKET}", options=options)
    assert proxy.requests() == []


def test_plain_http_of_the_environment_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(InvalidConfig, match=r"plain HTTP.*AWS_ALLOW_HTTP=true"):
        open_store(f"s3://{BUCKET}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    open_store(f"s3://{BUCKET}").close()


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "localhost:9000", "http://", "https://bad host/", "htp://x"])
def test_an_invalid_endpoint_is_refused_when_the_store_is_opened(endpoint: str) -> None:
    """obstore would panic at the first request, which no `except Exception` catches."""
    with pytest.raises(InvalidConfig, match="not the URL of a service"):
        open_store(f"s3://{BUCKET}", options=StoreOptions(endpoint=endpoint, allow_http=True))


def test_an_endpoint_with_a_password_is_not_repeated() -> None:
    with pytest.raises(InvalidConfig) as caught:
        open_store(f"s3://{BUCKET}", options=StoreOptions(endpoint="https://me:SECRET@host"))
    assert "SECRET" not in str(caught.value)


# ── create-only and lost responses (P11) ──────────────────────────────────────────────────────────────────────────────
def test_after_a_lost_response_our_own_object_is_adopted(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    proxy.plan(Fault(harm="drop_after", method="PUT"))
    result = s3_store.put(
        KEY, b"body|plan-7", create_only=True, identity=lambda existing: existing.read_tail(6) == b"plan-7"
    )
    assert result.adopted is True
    assert s3_store.get(KEY) == b"body|plan-7"
    assert count(proxy, "PUT") == 2


def test_after_a_lost_response_a_foreign_object_is_not_touched(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    s3_store.put(KEY, b"theirs|plan-6")
    proxy.plan(Fault(harm="drop_after", method="PUT"))
    with pytest.raises(AlreadyExists):
        s3_store.put(
            KEY, b"ours|plan-7", create_only=True, identity=lambda existing: existing.read_tail(6) == b"plan-7"
        )
    assert s3_store.get(KEY) == b"theirs|plan-6"


def test_a_create_whose_request_was_lost_creates(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    proxy.plan(Fault(harm="drop_before", method="PUT"), Fault(harm="status", method="PUT", status=500))
    assert s3_store.put(KEY, BODY, create_only=True).adopted is False
    assert s3_store.get(KEY) == BODY


def test_a_conflict_with_a_running_create_is_not_taken_for_an_object(
    s3_store: DeletableStore, proxy: FaultyProxy
) -> None:
    """S3 responds with 409 while another create of the name is running; that one may still fail."""
    proxy.plan(
        Fault(harm="status", method="PUT", status=409, body=b"<Error><Code>ConditionalRequestConflict</Code></Error>")
    )
    assert s3_store.put(KEY, BODY, create_only=True).adopted is False
    assert s3_store.get(KEY) == BODY


def test_the_identity_check_itself_survives_faults(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    s3_store.put(KEY, b"body|plan-7")
    proxy.plan(Fault(harm="drop_before", method="HEAD"), Fault(harm="truncate", method="GET"))

    def is_same_plan(existing: ExistingObject) -> bool:
        return existing.read_tail(6) == b"plan-7"

    assert s3_store.put(KEY, b"x", create_only=True, identity=is_same_plan).adopted is True


def test_every_create_only_put_is_one_conditional_request(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    s3_store.put(KEY, BODY, create_only=True)
    (request,) = proxy.requests()
    assert (request.method, request.headers["if-none-match"]) == ("PUT", "*")


def test_the_body_sent_is_covered_by_a_checksum_the_server_verifies(
    s3_store: DeletableStore, proxy: FaultyProxy
) -> None:
    s3_store.put(KEY, BODY)
    (request,) = proxy.requests()
    assert len(request.headers["x-amz-content-sha256"]) == 64


# ── large objects ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Multipart from 6 MiB on, in parts of 5 MiB, the minimum of S3."""
    monkeypatch.setattr(remote, "MULTIPART_BYTES_MIN", 6 << 20)
    monkeypatch.setattr(remote, "PART_BYTES", 5 << 20)
    return 11 << 20


def uploads(proxy: FaultyProxy) -> list[ProxiedRequest]:
    return proxy.requests(lambda request: "uploadId=" in request.path or "?uploads" in request.path)


def test_large_puts_are_multipart(
    s3_store: DeletableStore, proxy: FaultyProxy, small_parts: int, tmp_path: Path
) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(small_parts))
    assert s3_store.put_file("file", str(path)).size_bytes == small_parts
    assert len(uploads(proxy)) == 5  # begin, three parts, complete
    s3_store.put("buffer", memoryview(bytes(small_parts)))
    assert len(uploads(proxy)) == 10
    assert s3_store.get("file") == s3_store.get("buffer") == bytes(small_parts)


def test_a_failed_multipart_put_is_aborted_and_restarted(
    s3_store: DeletableStore, proxy: FaultyProxy, small_parts: int
) -> None:
    proxy.plan(Fault(harm="status", method="PUT", part="partNumber=2", status=500))
    s3_store.put("large", bytes(small_parts))
    assert s3_store.head("large").size_bytes == small_parts
    methods = [request.method for request in uploads(proxy)]
    assert methods.count("DELETE") == 1, "the first upload must not remain, invisible and billed"


def test_a_multipart_put_whose_completion_response_was_lost_succeeds(
    s3_store: DeletableStore, proxy: FaultyProxy, small_parts: int
) -> None:
    proxy.plan(Fault(harm="drop_after", method="POST", part="uploadId="))
    s3_store.put("large", bytes(small_parts))
    assert s3_store.head("large").size_bytes == small_parts


def test_create_only_is_one_request_whatever_its_size(
    s3_store: DeletableStore, proxy: FaultyProxy, small_parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(small_parts))
    s3_store.put_file("file", str(path), create_only=True)
    s3_store.put("buffer", bytes(small_parts), create_only=True)
    assert uploads(proxy) == []
    assert count(proxy, "PUT") == 2
    assert s3_store.get("file") == bytes(small_parts)
    monkeypatch.setattr(remote, "SINGLE_PUT_BYTES_MAX", small_parts - 1)
    with pytest.raises(OutOfRange, match="split"):
        s3_store.put_file("other", str(path), create_only=True)


# ── costs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_requests_per_call_are_as_documented(s3_store: DeletableStore, proxy: FaultyProxy) -> None:
    def requests_of(call: object) -> list[str]:
        proxy.reset()
        assert callable(call)
        call()
        return [request.method for request in proxy.requests()]

    far_apart = [Range(offset=0, length=1), Range(offset=3 << 20, length=1)]
    assert requests_of(lambda: s3_store.put(KEY, bytes(4 << 20))) == ["PUT"]
    assert requests_of(lambda: s3_store.get(KEY)) == ["GET"]
    assert requests_of(lambda: s3_store.get_range(KEY, 7, 9)) == ["GET"]
    assert requests_of(lambda: s3_store.get_ranges(KEY, [Range(offset=n * 100, length=9) for n in range(9)])) == ["GET"]
    assert requests_of(lambda: s3_store.get_ranges(KEY, far_apart)) == ["GET", "GET"]
    assert requests_of(lambda: s3_store.head(KEY)) == ["HEAD"]
    assert requests_of(lambda: list(s3_store.list_pages())) == ["GET"]
    assert requests_of(lambda: s3_store.put(KEY, b"", create_only=True, identity=lambda _: True)) == ["PUT", "HEAD"]
    assert requests_of(lambda: s3_store.delete_many([KEY, "a", "b"])) == ["POST"]
    assert requests_of(lambda: s3_store.delete(KEY)) in (["POST"], ["DELETE"])


def test_pickling_a_store_fails_with_an_alternative(s3_store: DeletableStore) -> None:
    with pytest.raises(TypeError, match="open_store"):
        pickle.dumps(s3_store)


# ── a process without descriptors ─────────────────────────────────────────────────────────────────────────────────────
NO_DESCRIPTOR_LEFT = """
import os, resource, sys
from quire.core.errors import ObjectNotFound, QuireError
from quire.objects.open import open_store
from quire.objects.options import StoreOptions

options = StoreOptions(endpoint=sys.argv[1], allow_http=True, settings={"access_key_id": "a", "secret_access_key": "b"})
stores = [open_store(f"s3://quire-tests/{number}", options=options) for number in range(9)]
try:
    stores[0].head("x")  # obstore's own threads and descriptors are there from now on
except ObjectNotFound:
    pass
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
for store in stores[1:]:
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError:
        pass
    try:
        store.head("x")
    except ObjectNotFound:  # the server has hung up meanwhile, which gave a descriptor back
        continue
    except QuireError as error:
        print(type(error).__name__, error)
        break
"""


def test_a_connection_without_a_descriptor_is_reported_as_such_and_not_retried_for_a_minute(
    s3_server: tuple[str, int],
) -> None:
    """The text is obstore's own: this test fails when another version words it differently."""
    endpoint = "http://{}:{}".format(*s3_server)
    process = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTOR_LEFT, endpoint], capture_output=True, text=True, timeout=50, check=False
    )
    assert process.stdout.startswith("TooManyOpenFiles too many open files"), process.stdout + process.stderr[-2000:]
    assert "ulimit -n" in process.stdout
