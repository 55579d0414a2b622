"""The JSON views of a populated store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from msgspec.structs import replace

import quire
from quire.core.settings import StoreSettings, load
from quire.core.timeline import Gap
from quire.durable.names import lsm_home, stream_dir
from quire.manifest.records import JobKind, JobState, RetentionRecord
from quire.service.web import dashboard_state, database, streams
from quire.service.web.dashboard_state import DATABASES, SAMPLES, History
from quire.service.web.overview import JOBS_MAX
from quire.service.web.response_cache import Cached
from quire.service.web.server import WebServer
from quire.store.store import Store
from quire.stream.state import Consumer
from quire.testing.clock import ManualClock
from tests.service.web.http_client import HttpClient, web_served


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition: metrics are cached for a moment, and publication runs in its own thread."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.05)


def test_health_and_readiness(anonymous: HttpClient, web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert anonymous.get("/healthz").json == {"ok": True}
    assert anonymous.get("/readyz").json == {"ready": True}
    queue = web._web.watched.manifest.writer._queue
    monkeypatch.setattr(queue, "refusal", quire.StoreUnusable("the disk said no", path="private"))
    response = anonymous.get("/readyz")
    assert (response.status, response.json) == (503, {"ready": False, "error": "StoreUnusable"})
    assert anonymous.get("/healthz").status == 200


def test_the_overview_lists_every_database(anonymous: HttpClient, populated: Store) -> None:
    response = anonymous.get("/api/overview").json
    rows = {row["name"]: row for row in response["databases"]}
    assert sorted(rows) == sorted(database.name for database in populated.databases())
    assert rows["branch"]["parent"] == "shop"
    assert rows["shop"]["snapshots"] == 1
    assert rows["shop"]["size_bytes"] > 0
    assert rows["sessions"]["size_bytes"] > 0
    assert rows["warehouse"]["size_bytes"] == 40 * (1 << 20) + 3 * 4096 + 2 * 4096
    assert (rows["warehouse"]["chunks"], rows["warehouse"]["deltas"], rows["warehouse"]["damaged"]) == (40, 3, 1)
    assert response["tiers"]["remote_archived"] == {"artifacts": 20, "bytes": 20 << 20}
    assert response["jobs"]["failed"] == 1
    assert [cursor["name"] for cursor in response["cursors"]] == ["search"]
    assert response["store"]["newest_change"] == populated.feed.head()
    assert 0 < response["disk_free_bytes"] < response["disk_bytes"]


def test_readers_hold_the_floor_and_block_segments(anonymous: HttpClient, store: Store) -> None:
    with closing(store.sqlite("shop", create=True)) as shop:
        shop.execute("create table t(x)")
        with store.pages.open("shop").open_snapshot() as reader:
            shop.execute("insert into t values (1)")
            store.snapshot("shop", "after")  # seals the segment; its publication follows
            eventually(
                lambda: any(
                    segment["blocked"] for segment in anonymous.get("/api/databases/shop").json["pages"]["segments"]
                )
            )
            # the connection keeps the version of its last transaction for a second, in case another one follows
            eventually(lambda: len(anonymous.get("/api/databases/shop").json["pages"]["readers"]) == 1)
            response = anonymous.get("/api/databases/shop").json["pages"]
            assert [reader_row["lsn"] for reader_row in response["readers"]] == [reader.lsn]
            assert response["floor_lsn"] == reader.lsn
            assert (response["newest_lsn"], response["size_pages"]) == store.pages.open("shop").durable_version()
            assert [segment["state"] for segment in response["segments"] if segment["blocked"]] == ["indexed"]
            row = next(row for row in anonymous.get("/api/overview").json["databases"] if row["name"] == "shop")
            assert (row["readers"], row["segments_blocked"], row["floor_lsn"]) == (1, 1, reader.lsn)


def test_the_page_of_a_page_database(anonymous: HttpClient, populated: Store) -> None:
    populated.manifest.retention.set("shop", RetentionRecord(keep_last=1))
    response = anonymous.get("/api/databases/shop").json
    assert response["database"]["name"] == "shop"
    assert [(snapshot["name"], snapshot["keep"]) for snapshot in response["snapshots"]] == [("monday", True)]
    assert response["retention"]["keep_last"] == 1
    assert {entry["action"] for entry in response["audit"]} == {"snapshot_created", "forked"}
    assert {holder["kind"] for holder in response["why"]["holders"]} >= {"snapshot", "fork"}
    assert response["jobs"][0]["error"] == "the disk was full"
    assert response["pages"]["wal"]["last_applied_lsn"] > 0
    assert response["pages"]["newest_lsn"] >= response["pages"]["floor_lsn"] > 0
    assert sum(segment["used_bytes"] for segment in response["pages"]["segments"]) > 0


def test_the_chunk_map_and_the_chains(anonymous: HttpClient, populated: Store) -> None:
    response = anonymous.get("/api/databases/warehouse").json["pages"]
    assert [slot["slot"] for slot in response["slots"]] == list(range(40))
    assert Counter(slot["tier"] for slot in response["slots"]) == {"local": 20, "remote_archived": 20}
    assert Counter(slot["generation"] for slot in response["slots"]) == {1: 37, 2: 3}
    assert response["chain_lengths"] == {"1": 37, "2": 3}
    assert [chain["slot"] for chain in response["chains"]] == [0, 1, 2]
    assert [link["kind"] for link in response["chains"][0]["links"]] == ["base", "delta"]
    assert response["chains"][0]["links"][1]["bytes"] == 4096


def test_names_travel_percent_encoded(anonymous: HttpClient, store: Store) -> None:
    for name in ("für élise", "a?b#c", "100%"):
        store.create(name, "pages")
    for info in store.databases():
        assert anonymous.get(f"/api/databases/{quote(info.name, safe='')}").json["database"]["name"] == info.name


def test_unknown_names_and_invalid_parameters_are_refused(anonymous: HttpClient, admin: HttpClient) -> None:
    assert anonymous.get("/api/databases/none").json["error"] == "UnknownDatabase"
    assert anonymous.get("/api/databases/none").status == 404
    assert anonymous.get("/api/databases/").status == 404
    assert anonymous.get("/api/why").status == 400
    assert anonymous.get("/api/why?subject=none").status == 404
    assert anonymous.get("/api/feed?limit=x").status == 400
    assert anonymous.get("/api/feed?" + "a=1&" * 40).status == 400
    assert admin.post("/api/jobs/77/retry").status == 404
    assert admin.post("/api/jobs/seven/cancel").status == 400
    assert admin.post("/api/databases/none/snapshots").status == 404


def test_why_explains_an_object(anonymous: HttpClient, populated: Store) -> None:
    subject = f"{populated.database('warehouse').db_id:08x}/00000000/base:00000001"
    response = anonymous.get(f"/api/why?subject={subject}")
    assert (response.json["kind"], response.json["holders"][0]["name"]) == ("base", "warehouse")


def test_the_lineage_keeps_a_dropped_database_for_its_forks(anonymous: HttpClient, populated: Store) -> None:
    populated.drop("shop", snapshots=True)
    populated.drop("clicks")
    rows = {row["name"] or row["db_id"]: row for row in anonymous.get("/api/lineage").json["databases"]}
    assert rows["branch"]["parent_db_id"] in {row["db_id"] for row in rows.values() if row["status"] == "tombstoned"}
    assert rows["branch"]["parent_snapshot_id"] == 1
    assert "clicks" not in rows


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_jobs_show_progress_and_are_retried_and_cancelled(admin: HttpClient, store: Store) -> None:
    queue = store.manifest.jobs
    running = queue.claim_job(queue.enqueue(JobKind.COMPACTION), "worker-1")
    assert running is not None
    queue.renew(running, "worker-1", done=3, total=12)
    row = admin.get("/api/jobs").json["jobs"][0]
    assert (row["done"], row["total"], row["worker"], row["may_cancel"]) == (3, 12, "worker-1", True)
    assert admin.post(f"/api/jobs/{running.job_id}/retry").json["error"] == "IllegalTransition"
    assert admin.post(f"/api/jobs/{running.job_id}/cancel").status == 200
    assert queue.get(running.job_id).state is JobState.CANCELLED
    retried = admin.post(f"/api/jobs/{running.job_id}/retry")
    assert retried.status == 201
    assert queue.get(retried.json["job_id"]).state is JobState.PENDING
    assert [job["state"] for job in admin.get("/api/jobs").json["jobs"]] == ["pending", "cancelled"]
    assert admin.post(f"/api/jobs/{running.job_id}/cancel").status == 409


def test_a_snapshot_is_created_once_per_name(admin: HttpClient, populated: Store) -> None:
    created = admin.post("/api/databases/shop/snapshots", {"name": "tuesday"})
    assert (created.status, created.json["snapshot"]["name"]) == (201, "tuesday")
    repeated = admin.post("/api/databases/shop/snapshots", {"name": "tuesday"})
    assert (repeated.status, repeated.json["error"]) == (409, "NameTaken")
    nameless = admin.post("/api/databases/sessions/snapshots")
    assert nameless.json["snapshot"]["kind"] == "anonymous"
    snapshots = admin.get("/api/databases/shop").json["snapshots"]
    assert [snapshot["name"] for snapshot in snapshots] == ["monday", "tuesday"]


# ── other views ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_verification_lists_damaged_artifacts(anonymous: HttpClient, populated: Store) -> None:
    response = anonymous.get("/api/verification").json
    assert (response["totals"]["altered"], response["damaged_left_out"]) == (1, 0)
    assert [(artifact["database"], artifact["state"]) for artifact in response["damaged"]] == [("warehouse", "altered")]
    row = next(row for row in response["databases"] if row["name"] == "warehouse")
    assert row["verified"] == {"altered": 1, "unverified": 5, "verified": 39}


def test_the_segments_of_streams_are_verified_too(anonymous: HttpClient, store: Store) -> None:
    clicks = store.stream("clicks", create=True)
    clicks.append([b"one", b"two"]).result()
    clicks.seal()
    clicks.ledger.project_now()
    store.kv("sessions", create=True)
    eventually(lambda: sum(anonymous.get("/api/verification").json["totals"].values()) > 0)
    response = anonymous.get("/api/verification").json
    assert [row["name"] for row in response["databases"]] == ["clicks"]
    assert sum(row["artifacts"] for row in response["databases"]) == sum(response["totals"].values())


def test_the_feed_pages_backwards_and_truncates_long_values(anonymous: HttpClient, store: Store) -> None:
    for number in range(5):
        store.create(f"db{number}", "pages", tags={"long": "x" * 500})
    head = store.feed.head()
    response = anonymous.get("/api/feed?limit=3").json
    assert [change["sequence"] for change in response["changes"]] == [head, head - 1, head - 2]
    assert len(response["changes"][0]["details"][0]["record"]["tags"]["long"]) == 120
    older = anonymous.get(f"/api/feed?limit=2&before={head - 2}").json
    assert [change["sequence"] for change in older["changes"]] == [head - 3, head - 4]
    assert anonymous.get("/api/feed?before=1").json["changes"] == []


def test_a_stream_shows_its_tiers_and_its_manifest_log(anonymous: HttpClient, store: Store, path: Path) -> None:
    stream = store.stream("clicks", create=True)
    stream.append(b"one")
    stream.sync()
    response = anonymous.get("/api/databases/clicks").json["stream"]
    assert response["problem"] == ""
    assert response["records"][-1]["record"] == "SegmentOpened"
    assert response["tiers"] == {"hot": 1, "warm": 0, "remote": 0}
    assert response["files"]["hot"]["files"] >= 1


def test_a_stream_lists_the_segments_that_need_repair(anonymous: HttpClient, store: Store) -> None:
    """Their only copy was an object that is missing."""
    stream = store.stream("clicks", create=True)
    stream.append(b"one").result()
    stream.seal()
    stream.upload()
    stream.evict(warm=True)
    store.delete_objects([segment.key for segment in stream.ledger.view])
    store.streams.close_stream("clicks")
    store.stream("clicks").tick()
    assert store.stream("clicks").info().needs_repair
    eventually(lambda: anonymous.get("/api/databases/clicks").json["stream"]["needs_repair"] == [1])


def test_a_damaged_manifest_log_is_reported_and_the_rest_is_shown(
    anonymous: HttpClient, store: Store, path: Path
) -> None:
    store.create("clicks", "stream")
    assert anonymous.get("/api/databases/clicks").json["stream"]["records"] == []
    folder = path / "streams" / str(store.database("clicks").db_id) / "manifest"
    folder.mkdir(parents=True)
    (folder / "0.mlog").write_bytes(b"not a log at all" * 16_384)
    eventually(lambda: anonymous.get("/api/databases/clicks").json["stream"]["problem"] != "")
    assert anonymous.get("/api/databases/clicks").json["database"]["name"] == "clicks"


def test_the_samples_of_segments_are_bounded() -> None:
    history = History()
    for moment in range(SAMPLES + 40):
        history.sample(moment, {1: {"open": moment}})
    assert len(history.of(1)) == SAMPLES
    assert history.of(1)[0] == (40, {"open": 40})
    history.sample(999, {db_id: {"open": 1} for db_id in range(2, DATABASES + 50)})
    assert history.of(1) == []
    assert sum(bool(history.of(db_id)) for db_id in range(2, DATABASES + 50)) == DATABASES


def test_the_server_samples_segments(path: Path) -> None:
    with web_served(path, http_sample_seconds=0.05) as (store, web):
        with closing(store.sqlite("shop", create=True)) as shop:
            shop.execute("create table t(x)")

        def states() -> list[dict[str, object]]:
            chunk_states: list[dict[str, object]] = (
                HttpClient(web.address).get("/api/databases/shop").json["pages"]["states"]
            )
            return chunk_states

        eventually(lambda: len(states()) >= 2)
        assert states()[-1]["segments"] == {"open": 1}


def test_an_expensive_value_is_cached_for_longer() -> None:
    clock, computed = ManualClock(), []

    def slow() -> int:
        clock.advance(2)
        computed.append(1)
        return len(computed)

    cached = Cached(clock)
    assert [cached.get("a", slow), cached.get("a", slow)] == [1, 1]
    clock.advance(19)
    assert cached.get("a", slow) == 1
    clock.advance(2)
    assert cached.get("a", slow) == 2
    cached.forget()
    assert cached.get("a", slow) == 3


def test_settings_have_their_limits() -> None:
    assert load(b"[service]\nhttp_hosts = ['a.lan']\nhttp_ask_readers = true").service.http_hosts == ("a.lan",)
    assert isinstance(load(b""), StoreSettings)
    for wrong in (
        "http_connections_max = 1",
        "http_events_max = 1024",
        "http_events_max = 0",
        "http_sample_seconds = 0",
    ):
        with pytest.raises(quire.InvalidConfig):
            load(f"[service]\n{wrong}".encode())


def test_open_streams_and_key_value_databases_show_their_figures(anonymous: HttpClient, store: Store) -> None:
    store.create("clicks", "stream")
    store.create("cart", "lsm")
    assert anonymous.get("/api/databases/cart").json["figures"] is None, "it is not open"
    assert anonymous.get("/api/databases/clicks").json["figures"] is None
    store.kv("cart").write({b"ann": b"1"})
    store.stream("clicks").append([b"one", b"two"]).result()
    store.stream("clicks").register("billing")
    eventually(lambda: anonymous.get("/api/databases/cart").json["figures"] is not None)
    eventually(lambda: anonymous.get("/api/databases/clicks").json["figures"] is not None)
    assert anonymous.get("/api/databases/cart").json["figures"]["last_lsn"] == store.kv("cart").stats().last_lsn
    response = anonymous.get("/api/databases/clicks").json["figures"]
    assert response["end_record"] - response["first_record"] == 2
    assert response["consumers"]["billing"]["position"] == response["first_record"]


def test_the_page_reports_truncated_file_lists(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: a truncated list looks complete."""
    watched = web._web.watched
    store = watched.store
    for name in ("clicks", "taps"):
        store.create(name, "stream")
    store.create("cart", "lsm")
    homes = [lsm_home(store.database("cart").db_id), stream_dir(store.database("taps").db_id, "hot")]
    for home in homes:
        Path(store.path, home).mkdir(parents=True, exist_ok=True)
        for number in range(9):
            Path(store.path, home, f"{number}.x").touch()

    def file_counts() -> tuple[int, int, bool]:
        page = database.database_page(watched, "cart")
        return len(page["files"]), page["files_left_out"], page["files_at_least"]

    assert file_counts() == (9, 0, False)
    assert database.database_page(watched, "clicks")["stream"]["files_at_least"] is False
    monkeypatch.setattr(database, "SEGMENTS_MAX", 3)
    assert file_counts() == (3, 6, False)
    for module in (dashboard_state, database, streams):
        monkeypatch.setattr(module, "FILES_MAX", 5)
    assert file_counts() == (3, 2, True)
    assert database.database_page(watched, "taps")["stream"]["files_at_least"] is True


def test_a_job_shows_its_result(anonymous: HttpClient, store: Store) -> None:
    store.create("shop", "pages")
    with store.sqlite("shop") as db:
        db.execute("create table t(x)")
    store.checkpoint("shop", runner="threads")
    checkpoint = next(job for job in anonymous.get("/api/jobs").json["jobs"] if job["kind"] == "checkpoint")
    assert checkpoint["result"]["slots"] == 1
    assert all(isinstance(value, int) for value in checkpoint["result"].values())


def test_databases_are_listed_by_the_page(anonymous: HttpClient, store: Store) -> None:
    store.create_many([f"tenant-{number}" for number in range(5)], tags={"plan": "free"})
    first = anonymous.get("/api/databases?prefix=tenant-&limit=3").json
    assert [row["name"] for row in first["databases"]] == ["tenant-0", "tenant-1", "tenant-2"]
    rest = anonymous.get(f"/api/databases?prefix=tenant-&limit=3&after={first['after']}&tag=plan%3Dfree").json
    assert [row["name"] for row in rest["databases"]] == ["tenant-3", "tenant-4"]
    assert rest["after"] == ""


def test_a_page_of_no_databases_is_a_page_of_all(anonymous: HttpClient, populated: Store) -> None:
    """It was empty, and named the first database as the last one shown: a client that paged lost it."""
    page = anonymous.get("/api/databases?limit=0").json
    assert len(page["databases"]) == len(populated.databases())
    assert page["after"] == ""


def test_the_jobs_of_a_database_are_found_below_newer_ones_of_others(anonymous: HttpClient, store: Store) -> None:
    """Its page said that there are no jobs yet, once the store had 200 newer ones."""
    store.create("quiet", "stream")
    jobs = store.manifest.jobs
    job_id = jobs.enqueue(JobKind.CHECKPOINT, store.database("quiet").db_id)
    jobs.cancel(job_id)
    store.create("busy", "stream")
    for _ in range(JOBS_MAX):
        jobs.cancel(jobs.enqueue(JobKind.CHECKPOINT, store.database("busy").db_id))
    assert [job["job_id"] for job in anonymous.get("/api/databases/quiet").json["jobs"]] == [job_id]


def test_figures_of_a_stream_leave_out_the_ids_that_a_takeover_has_skipped(tmp_path: Path) -> None:
    """The page showed 630 billion records, and a consumer as far behind."""
    store = quire.open(tmp_path)
    with closing(store):
        stream = store.stream("clicks", create=True)
        stream.append([b"a", b"b", b"c"]).result()
        info = stream.info()
    gaps, consumers = (Gap(2, 100),), {"app": Consumer(2, 0)}
    before = streams.stream_figures(replace(info, gaps=gaps, end_record=100, consumers=consumers))
    assert (before["records"], before["last_record"], before["consumers"]["app"]["behind"]) == (2, 2, 1)
    after = streams.stream_figures(replace(info, gaps=gaps, end_record=101, consumers=consumers))
    assert (after["records"], after["last_record"], after["consumers"]["app"]["behind"]) == (3, 100, 2)
