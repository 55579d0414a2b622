"""Signed tokens and their permissions: the claims of libSQL's server; look-alikes are refused."""

from __future__ import annotations

import base64
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from quire.core.errors import AccessDenied, InvalidConfig, InvalidInput, InvalidName, Unauthenticated
from quire.service.grants import Access, Grant
from quire.service.signed_tokens import Verifier, create_token, ensure_signing_key, read_public_keys, verifier
from quire.testing import ManualClock

PEM, DER = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def keys(key: Ed25519PrivateKey, clock: ManualClock) -> Verifier:
    return Verifier((Ed25519PrivateKey.generate().public_key(), key.public_key()), clock)


def signed(key: Any, claims: dict[str, Any], algorithm: str = "EdDSA") -> str:
    return jwt.encode(claims, key, algorithm=algorithm)


# ── claims ────────────────────────────────────────────────────────────────────────────────────────────────────────────
CLAIMS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {"shop": "rw", "other": "rw"}),
    ({"a": "ro"}, {"shop": "ro", "other": "ro"}),
    ({"a": "rw"}, {"shop": "rw", "other": "rw"}),
    ({"id": "shop"}, {"shop": "rw", "other": ""}),
    ({"id": "shop", "a": "ro"}, {"shop": "ro", "other": ""}),
    ({"p": {}}, {"shop": "", "other": ""}),
    ({"p": {"rw": {"ns": ["shop"]}}}, {"shop": "rw", "other": ""}),
    ({"p": {"ro": {"ns": ["shop"]}, "rw": {"ns": ["other"]}}}, {"shop": "ro", "other": "rw"}),
    ({"p": {"ro": {"ns": ["shop"]}, "rw": {"ns": ["shop"]}}}, {"shop": "rw", "other": ""}),
    ({"p": {"roa": {"ns": ["shop"]}, "rwa": {"ns": ["other"]}}}, {"shop": "ro", "other": "rw"}),
    ({"p": {"ro": {"ns": ["shop"], "tags": ["x"]}}, "a": "rw", "id": "other"}, {"shop": "ro", "other": ""}),
    ({"sub": "somebody", "org": 7, "id": "shop"}, {"shop": "rw", "other": ""}),
]


@pytest.mark.parametrize(("claims", "allowed"), CLAIMS, ids=lambda value: json.dumps(value))
def test_claims_have_the_meaning_of_libsqls_server(
    keys: Verifier, key: Ed25519PrivateKey, claims: dict[str, Any], allowed: dict[str, str]
) -> None:
    grant = keys.grant(signed(key, claims))
    for database, access in allowed.items():
        assert (grant.may(database), grant.may(database, write=True)) == (access != "", access == "rw"), database
    assert not grant.is_admin
    with pytest.raises(AccessDenied, match="admin token"):
        grant.check_admin()


@pytest.mark.parametrize(
    "claims",
    [{"a": "admin"}, {"a": 7}, {"a": ["rw"]}, {"id": 7}, {"id": ["shop"]}, {"p": "rw"}, {"p": {"rw": ["shop"]}},
     {"p": {"rw": {"ns": "shop"}}}, {"p": {"rw": {"ns": [1]}}}, {"exp": "soon"}, {"exp": 1e999},
     {"exp": -1e999}, {"nbf": 1e999}, {"exp": None, "p": []}],
    ids=json.dumps,
)  # fmt: skip
def test_unreadable_claims_allow_nothing(keys: Verifier, key: Ed25519PrivateKey, claims: dict[str, Any]) -> None:
    """Hazard: they are treated like a token without claims, which allows everything."""
    header = base64.urlsafe_b64encode(b'{"alg":"EdDSA","typ":"JWT"}').rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=")  # `jwt.encode` refuses some of them
    signature = base64.urlsafe_b64encode(key.sign(header + b"." + body)).rstrip(b"=")
    with pytest.raises(Unauthenticated):
        keys.grant(b".".join((header, body, signature)).decode())


def test_a_token_expires_also_for_open_connections(keys: Verifier, key: Ed25519PrivateKey, clock: ManualClock) -> None:
    now = clock.now_ms() // 1000
    token = signed(key, {"id": "shop", "exp": now + 60})
    grant = keys.grant(token)
    grant.check("shop", write=True)
    clock.advance(61)
    assert not grant.may("shop")
    with pytest.raises(Unauthenticated, match="expired"):
        grant.check("shop")
    with pytest.raises(Unauthenticated, match="expired"):
        keys.grant(token)
    with pytest.raises(Unauthenticated, match="not valid yet"):
        keys.grant(signed(key, {"nbf": now + 3600}))


def test_only_our_keys_and_only_eddsa_are_accepted(keys: Verifier, key: Ed25519PrivateKey) -> None:
    public = key.public_key().public_bytes(PEM, DER)
    token = signed(key, {"id": "shop"})
    head, body, signature = token.split(".")
    unsigned = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    other = base64.urlsafe_b64encode(b'{"id":"other"}').rstrip(b"=").decode()
    forged = [
        signed(Ed25519PrivateKey.generate(), {"id": "shop"}),
        signed("a secret that is long enough for the library", {"id": "shop"}, "HS256"),
        signed(ec.generate_private_key(ec.SECP256R1()), {"id": "shop"}, "ES256"),
        f"{unsigned}.{body}.",
        f"{unsigned}.{body}.{signature}",
        f"{head}.{other}.{signature}",
        f"{head}.{body}.{signature[:-4]}AAAA",
        f"{head}.{body}.",
        "..", "a.b.c", "", "x" * 20_000, f"{head}.{body}.{signature}.more", "é.é.é",
    ]  # fmt: skip
    for text in forged:
        with pytest.raises(Unauthenticated, match="the token is wrong"):
            keys.grant(text)
    # the public key must not work as an HMAC secret
    mac_head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=").decode()
    mac = base64.urlsafe_b64encode(hmac.digest(public, f"{mac_head}.{body}".encode(), "sha256")).rstrip(b"=")
    with pytest.raises(Unauthenticated):
        keys.grant(f"{mac_head}.{body}.{mac.decode()}")
    assert keys.grant(token).may("shop")


# ── keys and creation ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_token_is_created_for_databases_and_a_lifetime(tmp_path: Path, clock: ManualClock) -> None:
    root = str(tmp_path)
    token = create_token(root, ["shop"], read_only=True, ttl_seconds=3600, clock=clock)
    assert stat.S_IMODE(os.stat(tmp_path / "jwt.key").st_mode) == 0o600
    keys = verifier(root, (), clock)
    grant = keys.grant(token)
    assert (grant.may("shop"), grant.may("shop", write=True), grant.may("other")) == (True, False, False)
    assert grant.expires_ms == (clock.now_ms() // 1000 + 3600) * 1000
    several = keys.grant(create_token(root, ["a", "b"], clock=clock))
    assert (several.may("a", write=True), several.may("b", write=True), several.may("c")) == (True, True, False)
    everything = keys.grant(create_token(root, [], read_only=True, clock=clock))
    assert (everything.everywhere, everything.expires_ms) == (Access.READ, None)
    assert os.listdir(tmp_path) == ["jwt.key"]
    for ttl in (0, -1, 1e12):
        with pytest.raises(InvalidInput):
            create_token(root, ["shop"], ttl_seconds=ttl)
    with pytest.raises(InvalidName):
        create_token(root, ["../shop"])


def test_an_invalid_key_or_one_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jwt.key"
    ensure_signing_key(str(path))
    os.chmod(path, 0o644)
    with pytest.raises(InvalidConfig, match="other users can read"):
        ensure_signing_key(str(path))
    path.write_text("not a key")
    os.chmod(path, 0o600)
    with pytest.raises(InvalidConfig, match="not an Ed25519 key"):
        ensure_signing_key(str(path))


def test_public_keys_are_read_as_pem_and_as_base64(tmp_path: Path, clock: ManualClock) -> None:
    issuers = [Ed25519PrivateKey.generate() for _ in range(3)]
    pem, raw = tmp_path / "two.pem", tmp_path / "raw"
    pem.write_bytes(b"".join(issuer.public_key().public_bytes(PEM, DER) for issuer in issuers[:2]))
    plain = issuers[2].public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    raw.write_bytes(base64.urlsafe_b64encode(plain).rstrip(b"=") + b"\n")
    keys = verifier(str(tmp_path), (str(pem), str(raw)), clock)
    for issuer in issuers:
        assert keys.grant(signed(issuer, {"id": "shop"})).may("shop")
    elliptic = ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(PEM, DER)
    for contents in (b"", b"nothing", elliptic, pem.read_bytes() + elliptic, b"AAAA"):
        raw.write_bytes(contents)
        with pytest.raises(InvalidConfig, match="public keys"):
            read_public_keys(str(raw))
    with pytest.raises(InvalidConfig, match="does not exist"):
        read_public_keys(str(tmp_path / "none"))


# ── grants ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_refusal_states_whether_another_token_would_help() -> None:
    with pytest.raises(Unauthenticated, match="needs a token"):
        Grant.NOTHING.check("shop")
    loopback = Grant(holder="loopback", everywhere=Access.READ, is_anonymous=True)
    loopback.check("shop")
    loopback.check_read_all()
    with pytest.raises(Unauthenticated):
        loopback.check("shop", write=True)
    with pytest.raises(AccessDenied, match="may not be written"):
        Grant.READ.check("shop", write=True)
    single = Grant(holder="jwt", databases={"shop": Access.WRITE})
    with pytest.raises(AccessDenied, match="whole store"):
        single.check_read_all()
    Grant.ADMIN.check("shop", write=True)
    Grant.ADMIN.check_admin()


def test_a_grant_does_not_reveal_whether_a_database_exists() -> None:
    single = Grant(holder="jwt", databases={"shop": Access.READ})
    refusals = []
    for name in ("exists", "does-not"):
        with pytest.raises(AccessDenied) as refused:
            single.check(name)
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]
