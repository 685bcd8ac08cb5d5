"""Keys, tokens and certificates for tests, and managers that have them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from kvcore import Security
from tests.helpers import Duo, manager, memory

TOKEN = "a-token-of-these-tests"


@dataclass(frozen=True)
class Pair:
    """A pair of curve keys."""

    public: str
    secret: str

    @classmethod
    def fresh(cls) -> Pair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def with_peers(self, *peers: Pair, **more: Any) -> Security:
        """Settings of an instance that has this pair and lets these in."""
        return Security(curve_secret=self.secret, curve_peers=tuple(peer.public for peer in peers), **more)  # type: ignore[arg-type]


@contextmanager
def secured(prefill: Security, decode: Security, **settings: Any) -> Iterator[Duo]:
    """A prefill and a decode manager with these."""
    source, target = memory(32, seed=7), memory(32)
    with (
        manager("prefill", source, security=prefill, **settings) as one,
        manager("decode", target, security=decode, **settings) as other,
    ):
        yield Duo(one, other, source, target)


def certificate(folder: Path, name: str = "own", host: str = "IP:127.0.0.1") -> tuple[str, str]:
    """A certificate for a host, signed by itself, and its key, as files."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    made += ["-subj", f"/CN={name}", "-addext", f"subjectAltName={host}", "-addext", "keyUsage=digitalSignature,keyCertSign"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=60)
    return str(cert), str(key)
