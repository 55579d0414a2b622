"""How sources find objects: locations of namespaces, endpoint and credentials of quire.toml, former owner epochs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from quire.objects.api import list_objects
from quire.spark.access import access_of, object_options, options_of
from quire.spark.sources import manifest_log, pages, stream, stream_records
from quire.spark.sources.base import Options, QuireSource
from tests.objects.conftest import fresh_url, s3_server
from tests.spark.test_source_records import SETTINGS

__all__ = ["s3_server"]  # a fixture


def rows(reader: Any) -> list[dict[str, Any]]:
    """The rows of a reader that was pickled, as for executors."""
    parts = pickle.loads(pickle.dumps(list(reader.partitions())))
    return [
        row for part in parts for batch in pickle.loads(pickle.dumps(reader)).read(part) for row in batch.to_pylist()
    ]


def options_for(source: type[QuireSource], options: dict[str, str], **more: str) -> Options:
    return source.parse({**options, **more})


def test_a_store_is_given_open_by_path_or_by_options(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store:
        for argument in (store, str(tmp_path), tmp_path, {"store": str(tmp_path)}):
            assert options_of(argument) == {"store": str(tmp_path)}
            with access_of(options_of(argument)).connect() as client:
                assert client.server.path == store.path


def test_sources_use_the_endpoint_and_credentials_of_quire_toml(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = "http://{}:{}".format(*request.getfixturevalue("s3_server"))
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KEY_OF_COLD", "testing")
    reached = [f'endpoint = "{endpoint}"', "allow_http = true", 'region = "us-east-1"']
    (tmp_path / "store").mkdir()
    lines = [
        f'object_store = "{fresh_url()}"',
        *("[objects]", *reached, 'credentials = { access_key_id = "testing", secret_access_key = "testing" }'),
        *("[namespaces.cold]", *reached),
        'credentials = { access_key_id = "testing", secret_access_key = "env:KEY_OF_COLD" }',
    ]
    (tmp_path / "store" / "quire.toml").write_text("\n".join(lines) + "\n")
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        cold = fresh_url()
        store.namespaces.create("cold", cold)
        store.create("clicks", "stream", namespace="cold")
        clicks = store.stream("clicks")
        clicks.append([b"one", b"two"]).result()
        clicks.seal()
        clicks.upload()
        clicks.evict(warm=True)
        clicks.ledger.log.rotate()
        clicks.tick()
        assert list_objects(clicks.store), "the objects are in the namespace's location"
        with store.sqlite("shop", create=True) as db:
            db.execute("create table t(x)")
        store.checkpoint("shop")
        options = options_of(store)

        records = stream.RecordsReader(
            parsed := options_for(stream.StreamSource, options, stream="clicks"), stream_records.shape(parsed)
        )
        assert [row["payload"] for row in rows(records)] == [b"one", b"two"]
        logs = manifest_log.ManifestLogTable(
            options_for(manifest_log.ManifestLogSource, options, tier="object"), manifest_log.SCHEMA
        )
        assert "UploadDone" in {row["type"] for row in rows(logs)}
        source = pages.PagesSource(dict(options, database="shop", upload="true"))
        assert rows(source.reader(source.schema()))

        with quire.connect(store.path) as client:
            by_url = object_options(client.server)
            assert by_url[cold].settings["secret_access_key"] == "testing"
            assert "testing" not in repr(by_url[cold])
            elsewhere = msgspec.structs.replace(client.server, path=str(tmp_path / "not-here"))
            assert object_options(elsewhere) == {}


def test_a_log_of_a_former_owner_epoch_is_read_up_to_the_takeover(tmp_path: Path) -> None:
    """stream.json has the position: later records of a deposed owner are not part of the log."""
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        clicks = store.stream("clicks", create=True)
        log = clicks.ledger.log
        clicks.append(b"x").result()
        clicks.seal()
        log.rotate()
        log.upload()
        count, first = log.index.records, log.objects
        assert first is not None
        foreign = first.store.get(first.chunk_key(0))
        store.streams.close()
        store.manifest.begin_owner_epoch()
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        clicks = store.stream("clicks")
        (begin,) = clicks.ledger.log.objects.begins  # type: ignore[union-attr]
        clicks.store.put(first.chunk_key(begin.chunk), foreign)  # the deposed owner continues to write
        options = options_of(store)
        logs = manifest_log.ManifestLogTable(
            options_for(manifest_log.ManifestLogSource, options, tier="object"), manifest_log.SCHEMA
        )
        records = rows(logs)
        assert [row["ordinal"] for row in records] == list(range(count))
