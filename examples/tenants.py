"""A small service with a database for each customer and objects in a bucket.

A tenant is a SQLite database of one store, created as a fork of a template, so a new customer starts with the schema
and the default data within milliseconds. Tenants are isolated: no query needs `where tenant = ?`. Every night, each
database is checkpointed to the bucket and snapshotted. If a customer deletes too much, the snapshot is attached to the
current database, and the missing rows are copied back.

    python examples/tenants.py                                        objects in a directory
    python examples/tenants.py --objects s3://my-bucket/tenants       objects on S3, configured by AWS_* in the environment

For other S3-compatible services, over TLS: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import apsw

import quire
from quire.objects import list_objects

TEMPLATE = "template"
SCHEMA = """
create table if not exists folder(id integer primary key, name text unique);
create table if not exists note(id integer primary key, folder integer not null references folder, text text not null);
create virtual table if not exists search using fts5(text, content=note, content_rowid=id);
create trigger if not exists added after insert on note begin insert into search(rowid, text) values (new.id, new.text); end;
create trigger if not exists gone after delete on note
    begin insert into search(search, rowid, text) values ('delete', old.id, old.text); end;
insert or ignore into folder values (1, 'inbox'), (2, 'archive');
"""


class Tenants:
    """All customers of the service; any number of threads can use it."""

    def __init__(self, store: quire.Store) -> None:
        self._store = store
        with contextlib.closing(store.sqlite(TEMPLATE, create=True)) as connection:
            connection.execute(SCHEMA)

    def names(self) -> list[str]:
        """The names of all customers."""
        return [info.name for info in self._store.databases() if info.name.startswith("tenant.")]

    def welcome(self, name: str) -> str:
        """Create the database of a new customer."""
        tenant = f"tenant.{name}"
        self._store.fork(TEMPLATE, tenant)
        return tenant

    @contextlib.contextmanager
    def database(self, tenant: str, at: str | None = None) -> Iterator[apsw.Connection]:
        """A connection for one request; with `at`, read-only to an earlier version."""
        with contextlib.closing(self._store.sqlite(tenant, at=at)) as connection:
            yield connection

    def write(self, tenant: str, texts: Sequence[str]) -> None:
        """Add notes to the inbox."""
        with self.database(tenant) as connection, connection:
            connection.executemany("insert into note(folder, text) values (1, ?)", [(text,) for text in texts])

    def find(self, tenant: str, words: str) -> list[str]:
        """Notes that contain all of these words."""
        with self.database(tenant) as connection:
            query = "select text from note where id in (select rowid from search where search match ?) order by id"
            return [str(text) for (text,) in connection.execute(query, (words,))]

    def evening(self, label: str) -> int:
        """Checkpoint and snapshot every tenant; return their number."""
        tenants = self.names()
        for job in self._store.heavy.checkpoint_all(tenants):
            assert job.state.name == "SUCCEEDED", job.record.error
        for tenant in tenants:
            self._store.snapshot(tenant, label)
        return len(tenants)

    def bring_back(self, tenant: str, label: str) -> int:
        """Copy back the notes of a snapshot that a tenant no longer has; return their number."""
        with self.database(tenant) as connection:
            connection.execute("attach ? as evening", (f"file:{tenant}?at={label}",))
            missing = "select * from evening.note where id not in (select id from note)"
            connection.execute(f"insert into note {missing}")
            return connection.changes()


def work_a_day(tenants: Tenants, tenant: str, notes: int) -> None:
    """Write notes as a customer."""
    rng = random.Random(tenant)
    verbs, things = ("buy", "call", "write to", "remember"), ("milk", "the bank", "Ada", "the garden", "tickets")
    for _ in range(0, notes, 10):
        tenants.write(tenant, [f"{rng.choice(verbs)} {rng.choice(things)}, {rng.random():.6f}" for _ in range(10)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a day of the service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", default="", help="URL of the object store; a directory of the store if not given")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--notes", type=int, default=200, help="notes that each tenant writes")
    given = parser.parse_args(arguments)
    settings = quire.StoreSettings(object_store=given.objects, maintenance=quire.MaintenanceSettings(enabled=False))
    with tempfile.TemporaryDirectory() as directory, quire.open(directory, settings=settings) as store:
        tenants = Tenants(store)
        names = [tenants.welcome(f"customer-{number}") for number in range(given.tenants)]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda name: work_a_day(tenants, name, given.notes), names))
        print(f"{tenants.evening('monday')} tenants, each with a snapshot: monday")
        objects = list(list_objects(store.objects))
        print(f"in {store.objects_url}: {len(objects)} objects, {sum(item.size_bytes for item in objects):,} bytes")

        unlucky = names[0]
        before = len(tenants.find(unlucky, "milk"))
        with tenants.database(unlucky) as connection:
            connection.execute("delete from note where text like '%milk%'")
        print(f"{unlucky} deletes {before} notes about milk: {len(tenants.find(unlucky, 'milk'))} left")
        back = tenants.bring_back(unlucky, "monday")
        print(f"restored from monday: {back}; there are {len(tenants.find(unlucky, 'milk'))} again")
        others = {name: len(tenants.find(name, "milk")) for name in names[1:3]}
        print("other tenants are unchanged:", ", ".join(f"{name} has {count}" for name, count in others.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
