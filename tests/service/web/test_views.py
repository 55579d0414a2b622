"""What the JSON says about a store that has something of everything."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

import quire
from quire.core.settings import StoreSettings, load
from quire.durable.names import lsm_home, stream_dir
from quire.manifest.records import JobKind, JobState, RetentionRecord
from quire.service.web import dashboard_state, database, streams
from quire.service.web.history import DATABASES, SAMPLES, History
from quire.service.web.response_cache import Cached
from quire.service.web.server import WebServer
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.service.web.world import Asker, web_served


def eventually(holds: Callable[[], bool]) -> None:
    """Figures are kept for a moment, and publication has a thread of its own."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.05)


def test_health_and_readiness(anybody: Asker, web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert anybody.get("/healthz").json == {"ok": True}
    assert anybody.get("/readyz").json == {"ready": True}
    queue = web._web.watched.manifest.writer._queue
    monkeypatch.setattr(queue, "refusal", quire.StoreUnusable("the disk said no", path="private"))
    told = anybody.get("/readyz")
    assert (told.status, told.json) == (503, {"ready": False, "error": "StoreUnusable"})
    assert anybody.get("/healthz").status == 200


def test_the_overview_has_every_database_and_what_it_needs(anybody: Asker, furnished: Store) -> None:
    told = anybody.get("/api/overview").json
    rows = {each["name"]: each for each in told["databases"]}
    assert sorted(rows) == sorted(each.name for each in furnished.databases())
    assert rows["branch"]["parent"] == "shop"
    assert rows["shop"]["snapshots"] == 1
    assert rows["shop"]["size_bytes"] > 0
    assert rows["sessions"]["size_bytes"] > 0
    assert rows["warehouse"]["size_bytes"] == 40 * (1 << 20) + 3 * 4096 + 2 * 4096
    assert (rows["warehouse"]["chunks"], rows["warehouse"]["deltas"], rows["warehouse"]["damaged"]) == (40, 3, 1)
    assert told["tiers"]["remote_archived"] == {"artifacts": 20, "bytes": 20 << 20}
    assert told["jobs"]["failed"] == 1
    assert [each["name"] for each in told["cursors"]] == ["search"]
    assert told["store"]["newest_change"] == furnished.feed.head()
    assert 0 < told["disk_free_bytes"] < told["disk_bytes"]


def test_readers_hold_the_floor_and_block_segments(anybody: Asker, store: Store) -> None:
    with closing(store.sqlite("shop", create=True)) as shop:
        shop.execute("create table t(x)")
        with store.pages.open("shop").open_snapshot() as reader:
            shop.execute("insert into t values (1)")
            store.snapshot("shop", "after")  # which seals the segment; its publication follows
            eventually(
                lambda: any(each["blocked"] for each in anybody.get("/api/databases/shop").json["pages"]["segments"])
            )
            # the connection keeps the version of its last transaction for a second, in case there is another one
            eventually(lambda: len(anybody.get("/api/databases/shop").json["pages"]["readers"]) == 1)
            told = anybody.get("/api/databases/shop").json["pages"]
            assert [each["lsn"] for each in told["readers"]] == [reader.lsn]
            assert told["floor_lsn"] == reader.lsn
            assert (told["newest_lsn"], told["size_pages"]) == store.pages.open("shop").durable_version()
            assert [each["state"] for each in told["segments"] if each["blocked"]] == ["indexed"]
            row = next(each for each in anybody.get("/api/overview").json["databases"] if each["name"] == "shop")
            assert (row["readers"], row["segments_blocked"], row["floor_lsn"]) == (1, 1, reader.lsn)


def test_the_page_of_a_page_database(anybody: Asker, furnished: Store) -> None:
    furnished.manifest.retention.set("shop", RetentionRecord(keep_last=1))
    told = anybody.get("/api/databases/shop").json
    assert told["database"]["name"] == "shop"
    assert [(each["name"], each["keep"]) for each in told["snapshots"]] == [("monday", True)]
    assert told["retention"]["keep_last"] == 1
    assert {each["action"] for each in told["audit"]} == {"snapshot_created", "forked"}
    assert {each["kind"] for each in told["why"]["holders"]} >= {"snapshot", "fork"}
    assert told["jobs"][0]["error"] == "the disk was full"
    assert told["pages"]["wal"]["last_applied_lsn"] > 0
    assert told["pages"]["newest_lsn"] >= told["pages"]["floor_lsn"] > 0
    assert sum(each["used_bytes"] for each in told["pages"]["segments"]) > 0


def test_the_chunk_map_and_the_chains(anybody: Asker, furnished: Store) -> None:
    told = anybody.get("/api/databases/warehouse").json["pages"]
    assert [each["slot"] for each in told["slots"]] == list(range(40))
    assert Counter(each["tier"] for each in told["slots"]) == {"local": 20, "remote_archived": 20}
    assert Counter(each["generation"] for each in told["slots"]) == {1: 37, 2: 3}
    assert told["chain_lengths"] == {"1": 37, "2": 3}
    assert [each["slot"] for each in told["chains"]] == [0, 1, 2]
    assert [link["kind"] for link in told["chains"][0]["links"]] == ["base", "delta"]
    assert told["chains"][0]["links"][1]["bytes"] == 4096


def test_names_travel_percent_encoded(anybody: Asker, store: Store) -> None:
    for name in ("für élise", "a?b#c", "100%"):
        store.create(name, "pages")
    for each in store.databases():
        assert anybody.get(f"/api/databases/{quote(each.name, safe='')}").json["database"]["name"] == each.name


def test_what_is_not_there_is_told(anybody: Asker, boss: Asker) -> None:
    assert anybody.get("/api/databases/none").json["error"] == "UnknownDatabase"
    assert anybody.get("/api/databases/none").status == 404
    assert anybody.get("/api/databases/").status == 404
    assert anybody.get("/api/why").status == 400
    assert anybody.get("/api/why?subject=none").status == 404
    assert anybody.get("/api/feed?limit=x").status == 400
    assert anybody.get("/api/feed?" + "a=1&" * 40).status == 400
    assert boss.post("/api/jobs/77/retry").status == 404
    assert boss.post("/api/jobs/seven/cancel").status == 400
    assert boss.post("/api/databases/none/snapshots").status == 404


def test_why_explains_a_file_as_well(anybody: Asker, furnished: Store) -> None:
    subject = f"{furnished.database('warehouse').db_id:08x}/00000000/base:00000001"
    told = anybody.get(f"/api/why?subject={subject}")
    assert (told.json["kind"], told.json["holders"][0]["name"]) == ("base", "warehouse")


def test_the_lineage_keeps_a_dropped_database_for_its_forks(anybody: Asker, furnished: Store) -> None:
    furnished.drop("shop", snapshots=True)
    furnished.drop("clicks")
    told = {each["name"] or each["db_id"]: each for each in anybody.get("/api/lineage").json["databases"]}
    assert told["branch"]["parent_db_id"] in {each["db_id"] for each in told.values() if each["status"] == "tombstoned"}
    assert told["branch"]["parent_snapshot_id"] == 1
    assert "clicks" not in told


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_jobs_show_progress_and_are_retried_and_cancelled(boss: Asker, store: Store) -> None:
    queue = store.manifest.jobs
    running = queue.claim_job(queue.enqueue(JobKind.COMPACTION), "worker-1")
    assert running is not None
    queue.renew(running, "worker-1", done=3, total=12)
    row = boss.get("/api/jobs").json["jobs"][0]
    assert (row["done"], row["total"], row["worker"], row["may_cancel"]) == (3, 12, "worker-1", True)
    assert boss.post(f"/api/jobs/{running.job_id}/retry").json["error"] == "IllegalTransition"
    assert boss.post(f"/api/jobs/{running.job_id}/cancel").status == 200
    assert queue.get(running.job_id).state is JobState.CANCELLED
    again = boss.post(f"/api/jobs/{running.job_id}/retry")
    assert again.status == 201
    assert queue.get(again.json["job_id"]).state is JobState.PENDING
    assert [each["state"] for each in boss.get("/api/jobs").json["jobs"]] == ["pending", "cancelled"]
    assert boss.post(f"/api/jobs/{running.job_id}/cancel").status == 409


def test_a_snapshot_is_made_once_per_name(boss: Asker, furnished: Store) -> None:
    made = boss.post("/api/databases/shop/snapshots", {"name": "tuesday"})
    assert (made.status, made.json["snapshot"]["name"]) == (201, "tuesday")
    again = boss.post("/api/databases/shop/snapshots", {"name": "tuesday"})
    assert (again.status, again.json["error"]) == (409, "NameTaken")
    nameless = boss.post("/api/databases/sessions/snapshots")
    assert nameless.json["snapshot"]["kind"] == "anonymous"
    seen = boss.get("/api/databases/shop").json["snapshots"]
    assert [each["name"] for each in seen] == ["monday", "tuesday"]


# ── the rest ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_verification_names_what_is_damaged(anybody: Asker, furnished: Store) -> None:
    told = anybody.get("/api/verification").json
    assert (told["totals"]["altered"], told["damaged_left_out"]) == (1, 0)
    assert [(each["database"], each["state"]) for each in told["damaged"]] == [("warehouse", "altered")]
    row = next(each for each in told["databases"] if each["name"] == "warehouse")
    assert row["verified"] == {"altered": 1, "unverified": 5, "verified": 39}


def test_the_segments_of_streams_are_verified_too(anybody: Asker, store: Store) -> None:
    clicks = store.stream("clicks", create=True)
    clicks.append([b"one", b"two"]).result()
    clicks.seal()
    clicks.ledger.project_now()
    store.kv("sessions", create=True)
    eventually(lambda: sum(anybody.get("/api/verification").json["totals"].values()) > 0)
    told = anybody.get("/api/verification").json
    assert [each["name"] for each in told["databases"]] == ["clicks"]
    assert sum(each["artifacts"] for each in told["databases"]) == sum(told["totals"].values())


def test_the_feed_pages_backwards_and_cuts_what_is_long(anybody: Asker, store: Store) -> None:
    for number in range(5):
        store.create(f"db{number}", "pages", tags={"long": "x" * 500})
    head = store.feed.head()
    told = anybody.get("/api/feed?limit=3").json
    assert [each["sequence"] for each in told["changes"]] == [head, head - 1, head - 2]
    assert len(told["changes"][0]["details"][0]["record"]["tags"]["long"]) == 120
    older = anybody.get(f"/api/feed?limit=2&before={head - 2}").json
    assert [each["sequence"] for each in older["changes"]] == [head - 3, head - 4]
    assert anybody.get("/api/feed?before=1").json["changes"] == []


def test_a_stream_shows_its_tiers_and_its_manifest_log(anybody: Asker, store: Store, path: Path) -> None:
    stream = store.stream("clicks", create=True)
    stream.append(b"one")
    stream.sync()
    told = anybody.get("/api/databases/clicks").json["stream"]
    assert told["problem"] == ""
    assert told["records"][-1]["record"] == "SegmentOpened"
    assert told["tiers"] == {"hot": 1, "warm": 0, "remote": 0}
    assert told["files"]["hot"]["files"] >= 1


def test_a_stream_lists_the_segments_that_need_repair(anybody: Asker, store: Store) -> None:
    """Their only copy was an object, which is gone."""
    stream = store.stream("clicks", create=True)
    stream.append(b"one").result()
    stream.seal()
    stream.upload()
    stream.evict(warm=True)
    store.delete_objects([segment.key for segment in stream.ledger.view])
    store.streams.close_stream("clicks")
    store.stream("clicks").tick()
    assert store.stream("clicks").info().needs_repair
    eventually(lambda: anybody.get("/api/databases/clicks").json["stream"]["needs_repair"] == [1])


def test_a_damaged_manifest_log_is_told_and_the_rest_is_shown(anybody: Asker, store: Store, path: Path) -> None:
    store.create("clicks", "stream")
    assert anybody.get("/api/databases/clicks").json["stream"]["records"] == []
    folder = path / "streams" / str(store.database("clicks").db_id) / "manifest"
    folder.mkdir(parents=True)
    (folder / "0.mlog").write_bytes(b"not a log at all" * 16_384)
    eventually(lambda: anybody.get("/api/databases/clicks").json["stream"]["problem"] != "")
    assert anybody.get("/api/databases/clicks").json["database"]["name"] == "clicks"


def test_the_samples_of_segments_are_bounded() -> None:
    history = History()
    for moment in range(SAMPLES + 40):
        history.sample(moment, {1: {"open": moment}})
    assert len(history.of(1)) == SAMPLES
    assert history.of(1)[0] == (40, {"open": 40})
    history.sample(999, {db_id: {"open": 1} for db_id in range(2, DATABASES + 50)})
    assert history.of(1) == []
    assert sum(bool(history.of(db_id)) for db_id in range(2, DATABASES + 50)) == DATABASES


def test_the_server_takes_samples(path: Path) -> None:
    with web_served(path, http_sample_seconds=0.05) as (store, web):
        with closing(store.sqlite("shop", create=True)) as shop:
            shop.execute("create table t(x)")

        def states() -> list[dict[str, object]]:
            found: list[dict[str, object]] = Asker(web.address).get("/api/databases/shop").json["pages"]["states"]
            return found

        eventually(lambda: len(states()) >= 2)
        assert states()[-1]["segments"] == {"open": 1}


def test_a_costly_value_is_kept_for_longer() -> None:
    clock, made = ManualClock(), []

    def slow() -> int:
        clock.advance(2)
        made.append(1)
        return len(made)

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


def test_open_streams_and_key_value_databases_show_their_figures(anybody: Asker, store: Store) -> None:
    store.create("clicks", "stream")
    store.create("cart", "lsm")
    assert anybody.get("/api/databases/cart").json["figures"] is None, "nobody has opened it"
    assert anybody.get("/api/databases/clicks").json["figures"] is None
    store.kv("cart").write({b"ann": b"1"})
    store.stream("clicks").append([b"one", b"two"]).result()
    store.stream("clicks").register("billing")
    eventually(lambda: anybody.get("/api/databases/cart").json["figures"] is not None)
    eventually(lambda: anybody.get("/api/databases/clicks").json["figures"] is not None)
    assert anybody.get("/api/databases/cart").json["figures"]["last_lsn"] == store.kv("cart").stats().last_lsn
    told = anybody.get("/api/databases/clicks").json["figures"]
    assert told["end_record"] - told["first_record"] == 2
    assert told["consumers"]["billing"]["position"] == told["first_record"]


def test_the_page_says_that_files_are_not_listed_or_not_counted(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a list that was cut looked complete."""
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

    def told() -> tuple[int, int, bool]:
        page = database.database_page(watched, "cart")
        return len(page["files"]), page["files_left_out"], page["files_at_least"]

    assert told() == (9, 0, False)
    assert database.database_page(watched, "clicks")["stream"]["files_at_least"] is False
    monkeypatch.setattr(database, "SEGMENTS_MAX", 3)
    assert told() == (3, 6, False)
    for module in (dashboard_state, database, streams):
        monkeypatch.setattr(module, "FILES_MAX", 5)
    assert told() == (3, 2, True)
    assert database.database_page(watched, "taps")["stream"]["files_at_least"] is True


def test_a_job_says_what_came_of_it(anybody: Asker, store: Store) -> None:
    store.create("shop", "pages")
    with store.sqlite("shop") as db:
        db.execute("create table t(x)")
    store.checkpoint("shop", runner="threads")
    told = next(each for each in anybody.get("/api/jobs").json["jobs"] if each["kind"] == "checkpoint")
    assert told["result"]["slots"] == 1
    assert all(isinstance(each, int) for each in told["result"].values())


def test_databases_are_listed_by_the_page(anybody: Asker, store: Store) -> None:
    store.create_many([f"tenant-{number}" for number in range(5)], tags={"plan": "free"})
    first = anybody.get("/api/databases?prefix=tenant-&limit=3").json
    assert [row["name"] for row in first["databases"]] == ["tenant-0", "tenant-1", "tenant-2"]
    rest = anybody.get(f"/api/databases?prefix=tenant-&limit=3&after={first['after']}&tag=plan%3Dfree").json
    assert [row["name"] for row in rest["databases"]] == ["tenant-3", "tenant-4"]
    assert rest["after"] == ""
