"""Signed tokens (JWT, EdDSA): rights to single databases, for a limited time (W5).

The claims are those of libSQL's servers and clients:
  exp   expiry in seconds since 1970; a token without it never expires
  a     `rw` (the default) or `ro`
  id    the one database that `a` applies to; without `id` and `p`, every database
  p     {"ro": {"ns": [names]}, "rw": {"ns": [names]}}: several databases; `a` and `id` are then ignored. `roa` and `rwa`
        are the same, and also allow ATTACH of these databases, for reading

Rules
  1. A token is accepted if one of the keys verifies it, with EdDSA and no other algorithm, whatever its header names.
  2. Malformed claims grant nothing: they are never treated as missing.
  3. The store's own key (`jwt.key`) is in a file that only its owner may read; other keys are public, from `service.jwt_keys`.
  4. No signed token grants administration of the store: only the admin token does.

Threads: any; pure functions over files and text. Raises `InvalidConfig` for keys, `Unauthenticated` for tokens.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any

import jwt
import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from quire.core.clock import Clock, SystemClock
from quire.core.decoding import described
from quire.core.errors import InvalidConfig, InvalidInput, Unauthenticated
from quire.durable import names
from quire.durable.files import translated
from quire.service.grants import Access, Grant
from quire.service.tokens import TOKEN_BYTES_MAX, Tokens, ensure_token, make_private, read_private

ALGORITHM = "EdDSA"
KEY_BYTES_MAX = 16 * 1024
TTL_SECONDS_MAX = 10 * 365 * 86_400


class TokenScope(msgspec.Struct, frozen=True):
    """Databases, by name."""

    ns: tuple[str, ...] = ()


class Scopes(msgspec.Struct, frozen=True):
    """The claim `p`."""

    ro: TokenScope = TokenScope()
    rw: TokenScope = TokenScope()
    roa: TokenScope = TokenScope()
    rwa: TokenScope = TokenScope()


class Claims(msgspec.Struct, frozen=True):
    """The claims that are read; others are ignored."""

    exp: float | None = None
    nbf: float | None = None
    a: str | None = None
    id: str | None = None
    p: Scopes | None = None


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies signed tokens with the keys of a server."""

    keys: tuple[Ed25519PublicKey, ...]
    clock: Clock

    def grant(self, token: str) -> Grant:
        """Return what a signed token allows (rules 1 and 2)."""
        if len(token) > TOKEN_BYTES_MAX:
            raise _wrong()
        for key in self.keys:
            try:
                # The times are compared below, with the store's clock.
                options: Any = {"verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_aud": False}
                payload = jwt.decode(token, key, algorithms=[ALGORITHM], options=options)
            except (jwt.InvalidTokenError, ValueError, RecursionError):
                continue  # signed by another key, or by none of these
            return self._read(payload)
        raise _wrong()

    def _read(self, payload: dict[str, Any]) -> Grant:
        try:
            claims = msgspec.convert(payload, described(Claims))
        except msgspec.ValidationError:
            raise _wrong() from None
        if not all(isfinite(moment) for moment in (claims.exp, claims.nbf) if moment is not None):
            raise _wrong()
        now_ms = self.clock.now_ms()
        if claims.nbf is not None and now_ms < claims.nbf * 1000:
            raise Unauthenticated("the token is not valid yet", hint="check that the clocks of both machines agree")
        everywhere, databases = _rights(claims)
        attachable = (*claims.p.roa.ns, *claims.p.rwa.ns) if claims.p is not None else ()
        expires_ms = None if claims.exp is None else int(claims.exp * 1000)
        grant = Grant(
            holder="jwt",
            everywhere=everywhere,
            databases=MappingProxyType(databases),
            attachable=frozenset(attachable),
            expires_ms=expires_ms,
            clock=self.clock,
        )
        if grant.is_expired:
            raise Unauthenticated("the token has expired", hint="create a new one with `quire token create`")
        return grant


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """Every token that a server accepts: the store's two tokens, and signed ones."""

    own: Tokens
    signed: Verifier

    def grant(self, token: str) -> Grant:
        """Return what a token allows."""
        if (grant := self.own.grant(token)) is not None:
            return grant
        if token.count(".") == 2:
            return self.signed.grant(token)
        raise Unauthenticated(
            "the token is wrong",
            hint="use the token in the store's admin.token, or create one with `quire token create`",
        )


def _rights(claims: Claims) -> tuple[Access, dict[str, Access]]:
    """Return the access to (every database, single databases)."""
    if claims.p is not None:
        readable = dict.fromkeys((*claims.p.ro.ns, *claims.p.roa.ns), Access.READ)
        return Access.NONE, readable | dict.fromkeys((*claims.p.rw.ns, *claims.p.rwa.ns), Access.WRITE)
    access = {"rw": Access.WRITE, "ro": Access.READ, None: Access.WRITE}.get(claims.a)
    if access is None:
        raise _wrong()
    return (access, {}) if claims.id is None else (Access.NONE, {claims.id: access})


def _wrong() -> Unauthenticated:
    return Unauthenticated("the token is wrong", hint="create a new one with `quire token create`")


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def verifier(root: str, key_files: Sequence[str], clock: Clock) -> Verifier:
    """Return a verifier with the store's own key, created if it does not exist, and the public keys of the settings."""
    own = ensure_signing_key(os.path.join(root, names.SIGNING_KEY)).public_key()
    return Verifier((own, *(key for path in key_files for key in read_public_keys(path))), clock)


def accepted_tokens(
    root: str, key_files: Sequence[str], clock: Clock, *, admin_file: str = "", read_file: str = ""
) -> AcceptedTokens:
    """Return the tokens that a store's server accepts. Files default to the store's own, which are created if missing."""
    own = Tokens(
        admin=ensure_token(admin_file or os.path.join(root, names.ADMIN_TOKEN)),
        read=ensure_token(read_file or os.path.join(root, names.READ_TOKEN)),
    )
    return AcceptedTokens(own, verifier(root, key_files, clock))


def ensure_signing_key(path: str) -> Ed25519PrivateKey:
    """Return the private key in a file, which is created with a new key if it does not exist (rule 3)."""
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    text = pem if make_private(path, pem) else read_private(path, KEY_BYTES_MAX)
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidConfig("this is not an Ed25519 key (PEM)", hint="remove the file: a new one is created", path=path)
    return key


def read_public_keys(path: str) -> list[Ed25519PublicKey]:
    """Return the public keys in a file: concatenated PEM, or the 32 bytes of one key in base64, as for sqld."""
    try:
        with translated(path, "reading a public key"), open(path, "rb") as file:
            text = file.read(KEY_BYTES_MAX).strip()
    except FileNotFoundError:
        raise InvalidConfig("the key file does not exist", hint="see service.jwt_keys", path=path) from None
    end = b"-----END PUBLIC KEY-----"
    blocks = [block + end for block in text.split(end)[:-1]] if end in text else []
    try:
        keys = [serialization.load_pem_public_key(block.strip()) for block in blocks] or [_raw_key(text)]
    except (ValueError, UnsupportedAlgorithm):
        keys = []
    ours = [key for key in keys if isinstance(key, Ed25519PublicKey)]
    if not ours or len(ours) < len(keys):
        hint = "create one with `openssl pkey -in jwt.key -pubout`"
        raise InvalidConfig("this is not a file of Ed25519 public keys", hint=hint, path=path)
    return ours


def _raw_key(text: bytes) -> Ed25519PublicKey:
    try:
        raw = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
    return Ed25519PublicKey.from_public_bytes(raw)


# ── creating tokens ───────────────────────────────────────────────────────────────────────────────────────────────────
def create_token(
    store_root: str,
    databases: Iterable[str],
    *,
    read_only: bool = False,
    attach: Iterable[str] = (),
    ttl_seconds: float | None = None,
    clock: Clock | None = None,
) -> str:
    """Create a token for some databases, or for all if none is given, signed with the store's own key; without `ttl_seconds` it
    never expires. SQL on these databases may `attach` the others, for reading. The server is not involved."""
    if ttl_seconds is not None and not 0 < ttl_seconds <= TTL_SECONDS_MAX:
        raise InvalidInput(
            "a token must be valid for more than 0 seconds and at most ten years", ttl_seconds=ttl_seconds
        )
    wanted = [names.check_name("database", name) for name in databases]
    attached = [names.check_name("database", name) for name in attach]
    if attached and not wanted:
        raise InvalidInput(
            "a token for attached databases must also name a database to attach them to", hint="name them with --db"
        )
    access = "ro" if read_only else "rw"
    now = (clock or SystemClock()).now_ms() / 1000
    claims: dict[str, Any] = {"iat": int(now)}
    if ttl_seconds is not None:
        claims["exp"] = int(now + ttl_seconds)
    if attached:
        claims["p"] = {access: {"ns": wanted}, "roa": {"ns": attached}}
    elif len(wanted) > 1:
        claims["p"] = {access: {"ns": wanted}}
    else:
        claims |= {"a": access} | ({"id": wanted[0]} if wanted else {})
    key = ensure_signing_key(os.path.join(store_root, names.SIGNING_KEY))
    return jwt.encode(claims, key, algorithm=ALGORITHM)
