"""Access control: tokens, TLS, protocol versions. Every refusal is counted and logged."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import quire
from quire.service import admission, wire
from quire.service.client import Client
from quire.service.grants import Grant
from quire.service.signed_tokens import create_token
from quire.service.tokens import Tokens, bearer, ensure_token, read_token
from quire.sqlite import dbapi
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.service.owners import reserve, settings

LOCAL = "127.0.0.1:0"


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate for this machine, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quire test")])
    now = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    command = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=36_500))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    cert_file.write_bytes(command.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
    return str(cert_file), str(key_file)


@pytest.fixture
def owned(path: Path) -> Iterator[Store]:
    with quire.open(path, settings=settings()) as store:
        yield store


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The logged refusals."""
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(admission, "emit", lambda _, event, **fields: events.append({"event": event, **fields}))
    return events


def connected(address: str, token_file: str = "", **more: Any) -> Client:
    return quire.connect(address, token_file=token_file, timeout=5, **more)


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_over_tcp_a_token_is_needed_and_defines_the_permissions(owned: Store, refused: list[dict[str, Any]]) -> None:
    with owned.serve(f"grpc://{LOCAL}") as server:
        admin, read = (os.path.join(owned.path, name) for name in ("admin.token", "read.token"))
        for token_file in (admin, read):
            assert stat.S_IMODE(os.stat(token_file).st_mode) == 0o600
        with connected(server.address, admin) as client:
            assert client.server.role == "admin"
            client.create("shop", "pages")
        with connected(server.address, read) as client:
            assert client.server.role == "read"
            assert client.database("shop").name == "shop"
            assert client.table("db").num_rows == 1
            client.renew_lease(
                client.lend(["shop"], 60).lease_id
            )  # reading a version needs no more than read permission
            for call in (
                lambda: client.create("other", "pages"),
                lambda: client.drop("shop"),
                lambda: client.feed.register(),
                lambda: client.submit(reserve(1)).result(60),
                lambda: client.jobs.claim("w"),
                lambda: client.lend(["shop"], 3_601),
                lambda: client.lend(["shop"], 60, upload=True),
            ):
                with pytest.raises(quire.AccessDenied, match="admin token"):
                    call()
        assert server.figures().refused == 5
        assert [event["call"] for event in refused][:2] == ["create", "drop"]
        assert all(event["peer"].startswith("ipv4:127.0.0.1") for event in refused)
        assert [database.name for database in owned.databases()] == ["shop"]


def test_missing_wrong_and_truncated_tokens_are_refused_and_logged(
    owned: Store, tmp_path: Path, refused: list[dict[str, Any]]
) -> None:
    with owned.serve(f"grpc://{LOCAL}") as server:
        good = Path(owned.path, "admin.token").read_text().strip()
        for number, wrong in enumerate(("", "x" * 43, good[:-1], good + "x", good.upper() + "!")):
            file = tmp_path / f"token{number}"
            if wrong:
                file.touch(0o600)
                file.write_text(wrong)
            with pytest.raises(quire.Unauthenticated):
                connected(server.address, str(file) if wrong else "")
        assert server.figures().refused == len(refused) == 5
        assert [event["reason"] for event in refused] == ["the call has no token"] + ["the token is wrong"] * 4
        assert all(good not in str(event) for event in refused)
        assert server.figures().calls == 0


@pytest.fixture
def signed(owned: Store, tmp_path: Path) -> Callable[..., str]:
    """Creates a file with a signed token."""

    def make(*databases: str, **more: Any) -> str:
        file = tmp_path / f"{'-'.join(databases)}{more}.token"
        file.touch(0o600)
        file.write_text(create_token(owned.path, databases, **more))
        return str(file)

    return make


def test_a_signed_token_allows_only_its_databases(owned: Store, signed: Callable[..., str]) -> None:
    owned.sqlite("shop", create=True).execute("create table t(x); insert into t values (1)")
    for name in ("clicks", "other"):
        owned.create(name, "stream")
    for name in ("sessions", "secret"):
        owned.create(name, "lsm")
    with owned.serve(f"grpc://{LOCAL}") as server:
        with connected(server.address, signed("shop", "clicks", "sessions", "planned")) as client:
            assert client.server.role == "jwt"
            assert (client.path, client.objects_url) == ("", "")  # not covered by its token
            shop = client.sqlite("shop")
            shop.execute("insert into t values (2)")
            shop.commit()
            assert shop.execute("select sum(x) from t").fetchone() == (3,)
            client.stream("clicks").append([b"a"]).result()
            client.kv("sessions").put(b"k", b"v")
            assert client.database("shop").name == "shop"
            refused: list[Callable[[], object]] = [
                lambda: client.stream("other"),
                lambda: client.kv("secret"),
                lambda: client.sqlite("missing").execute("select 1"),
                lambda: client.database("other"),
                client.databases,
                client.info,
                client.feed.head,
                lambda: client.table("db"),
                lambda: client.drop("shop"),
                lambda: client.snapshot("shop"),
                lambda: client.lend(["shop"], 1),
                lambda: client.sqlite("planned", create=True).execute("select 1"),
            ]
            for call in refused:
                with pytest.raises((quire.AccessDenied, dbapi.Error), match="token"):
                    call()
        with connected(server.address, signed("shop", "clicks", "sessions", read_only=True)) as client:
            assert client.sqlite("shop").execute("select sum(x) from t").fetchone() == (3,)
            with pytest.raises(dbapi.OperationalError, match="readonly"):
                client.sqlite("shop").execute("insert into t values (4)")
            for write in (
                lambda: client.stream("clicks").append([b"b"]).result(),
                lambda: client.kv("sessions").put(b"k", b"w"),
            ):
                with pytest.raises(quire.AccessDenied, match="written"):
                    write()


def test_a_signed_token_that_has_expired_is_refused_at_the_next_call(owned: Store, signed: Callable[..., str]) -> None:
    owned.create("clicks", "stream")
    with owned.serve(f"grpc://{LOCAL}") as server, pytest.raises(quire.Unauthenticated, match="expired"):
        connected(server.address, signed("clicks", ttl_seconds=60, clock=ManualClock(now_ms=0)))


def test_a_token_from_the_environment_and_own_token_files(
    owned: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, read = str(tmp_path / "a"), str(tmp_path / "r")
    with owned.serve(f"grpc://{LOCAL}", admin_token_file=admin, read_token_file=read) as server:
        monkeypatch.setenv("QUIRE_TOKEN_FILE", read)
        with quire.connect(server.address, timeout=5) as client:
            assert client.server.role == "read"
        assert not os.path.exists(os.path.join(owned.path, "admin.token"))


def test_token_files_that_others_can_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = ensure_token(str(file))
    assert ensure_token(str(file)) == read_token(str(file)) == token
    file.chmod(0o644)
    with pytest.raises(quire.InvalidConfig, match="other users can read"):
        read_token(str(file))
    file.chmod(0o600)
    for text in ("", "short", "x" * 15, "é" * 30, "a" * 20_000, "two\nlines of a token"):
        file.write_text(text)
        with pytest.raises(quire.InvalidConfig):
            read_token(str(file))
    with pytest.raises(quire.InvalidConfig, match="does not exist"):
        read_token(str(tmp_path / "none"))


def test_the_two_tokens_differ() -> None:
    with pytest.raises(quire.InvalidConfig):
        Tokens(admin="same", read="same")
    tokens = Tokens(admin="a" * 20, read="r" * 20)
    assert tokens.grant(bearer("Bearer " + "a" * 20)) is Grant.ADMIN
    assert tokens.grant(bearer("bearer " + "r" * 20)) is Grant.READ
    for header in ("", "Bearer", "Bearer ", "Basic " + "a" * 20, "a" * 20, "Bearer é"):
        assert tokens.grant(bearer(header)) is None


def test_a_flood_of_refusals_is_counted_and_logged_in_part(refused: list[dict[str, Any]]) -> None:
    class FixedClock:
        now = 5.0

        def monotonic(self) -> float:
            return self.now

        def now_ms(self) -> int:
            return 0

    clock = FixedClock()
    refusals = admission.Refusals(clock)
    for _ in range(100):
        refusals.add(quire.AccessDenied("no"))
    assert (refusals.count, len(refused)) == (100, admission.LOGGED_PER_SECOND)
    clock.now = 6.0
    refusals.add(quire.AccessDenied("no"))
    assert refused[-1]["left_out"] == 80


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_tls_with_the_right_and_the_wrong_certificate(owned: Store, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    token = os.path.join(owned.path, "admin.token")
    with owned.serve(f"grpc+tls://{LOCAL}", tls_cert_file=cert, tls_key_file=key) as server:
        assert server.address.startswith("grpc+tls://127.0.0.1:")
        with connected(server.address, token, tls_ca_file=cert) as client:
            client.create("shop", "pages")
            assert client.table("db").num_rows == 1
        with pytest.raises(quire.Unauthenticated):
            connected(server.address, tls_ca_file=cert)
        for wrong in (other, ""):
            with pytest.raises(quire.Unavailable):
                quire.connect(server.address, token_file=token, tls_ca_file=wrong, timeout=1)
        with pytest.raises(quire.Unavailable):
            quire.connect(server.address.replace("grpc+tls", "grpc"), token_file=token, timeout=1)


def test_tls_needs_both_files_and_a_tls_address(owned: Store, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    for address, options in (
        (f"grpc+tls://{LOCAL}", {}),
        (f"grpc+tls://{LOCAL}", {"tls_cert_file": cert}),
        (f"grpc+tls://{LOCAL}", {"tls_cert_file": cert, "tls_key_file": str(tmp_path / "none")}),
        (f"grpc+tls://{LOCAL}", {"tls_cert_file": cert, "tls_key_file": os.path.join(owned.path, "quire.toml")}),
        (f"grpc://{LOCAL}", {"tls_cert_file": cert, "tls_key_file": key}),
        (None, {"tls_cert_file": cert, "tls_key_file": key}),
        (None, {"admin_token_file": cert}),
        ("http://127.0.0.1:1", {}),
        ("grpc://127.0.0.1", {}),
        ("grpc://127.0.0.1:99999", {}),
    ):
        with pytest.raises(quire.InvalidInput):
            owned.serve(address, **options)
    assert not os.path.exists(os.path.join(owned.path, "quire.sock"))


def test_a_port_in_use_is_reported(owned: Store) -> None:
    with owned.serve(f"grpc://{LOCAL}") as server, pytest.raises(quire.InvalidInput, match="cannot listen"):
        owned.serve(server.address)


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("version", ["2", "", "nonsense"])
def test_another_protocol_version_is_reported(server: Any, version: str, refused: list[dict[str, Any]]) -> None:
    raw = flight.FlightClient(server.address)
    headers = [(wire.VERSION_HEADER.encode(), version.encode())] if version else []
    for send in (
        lambda options: list(raw.do_action(flight.Action("hello", b""), options)),
        lambda options: raw.do_get(flight.Ticket(b""), options).read_all(),
    ):
        with pytest.raises(flight.FlightServerError) as caught:
            send(flight.FlightCallOptions(headers=headers))
        form = wire.read_form(bytes(caught.value.extra_info))
        assert form.kind == "Incompatible"
        assert form.where["ours"] == wire.WIRE_VERSION
    raw.close()
    assert len(refused) == 2


def test_a_client_of_another_version_raises_incompatible(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.channel.WIRE_VERSION", 2)
    with pytest.raises(quire.Incompatible, match="version 2"):
        quire.connect(server.address, timeout=5)


def test_a_read_only_store_cannot_serve(path: Path) -> None:
    quire.open(path).close()
    with quire.open(path, "r") as reader, pytest.raises(quire.ReadOnly):
        reader.serve()
