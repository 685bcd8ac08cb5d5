"""The command ``kvcore explain``: what happened to a room, asked at an instance's admin port."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Annotated

import typer

from kvcore.addresses import parse
from kvcore.cli_options import Timeout
from kvcore.errors import cause, one_line
from kvcore.sides import ToolError

MOST_BYTES = 4 * 1024 * 1024


def explain(
    room: Annotated[int, typer.Argument(metavar="ROOM", help="The room's number.")],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="The admin port of an instance that has or had the room.")],
    attempt: Annotated[int, typer.Option(help="The room's attempt.")] = 0,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="Where its security.token is.")] = None,
    tls_ca: Annotated[str | None, typer.Option(metavar="FILE", help="Certificates to trust, if it speaks TLS.")] = None,
    timeout: Timeout = 10.0,
) -> None:
    """Show what happened to a room: there, and at the instances on the other side, which that one asks."""
    from kvcore.access import Guard
    from kvcore.config import Security
    from kvcore.room import room_id

    name, where = room_id(room, attempt), parse(address, "--address")
    guard = Guard.of(Security(token_file=token_file, tls_ca=tls_ca))
    scheme = "http" if guard.asking is None else "https"
    request = urllib.request.Request(f"{scheme}://{where}/rooms/{name.number}?attempt={name.attempt}")
    if guard.token:
        request.add_unredirected_header("Authorization", f"Bearer {guard.token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=guard.asking), _NoRedirect())
    try:
        with opener.open(request, timeout=timeout) as answer:
            text = answer.read(MOST_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            told = one_line(error.read(MOST_BYTES).decode(errors="replace"))
        if error.code == 401:
            raise ToolError(f"{where} wants its security.token; give it with --token-file") from error
        raise ToolError(f"{where} answered {error.code}: {told}; pass an instance's admin port, as set by Config.admin") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or cause(reason)
        tls = "if it speaks TLS, give --tls-ca" if guard.asking is None else "if it does not speak TLS, leave out --tls-ca"
        first = "see whether it runs" if isinstance(reason, ConnectionRefusedError) else tls
        raise ToolError(f"{where} gave no answer ({why}); {first}; else pass an instance's admin port, as set by Config.admin") from error
    for line in text.splitlines():
        typer.echo(("  " if line.startswith(" ") else "") + one_line(line))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Nobody is followed elsewhere, least of all with a token."""

    def redirect_request(self, *_: object) -> None:
        return None
