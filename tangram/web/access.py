"""Who may see the web page's data: holders of a key, or clients of this machine.

A request's data go to the key that sent it. Without keys a browser is no proof of a local user: a
foreign page may name this machine in DNS (rebinding), so the `Host` of a request must be ours.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from fastapi import Request

from tangram.serve.observability.record import record_in
from tangram.serve.options import Visibility
from tangram.serve.transport.api_errors import ApiError

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)
_ANYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class Access:
    """Decides who sees what on a server that listens at `host`.

    AUTO shows everything to holders of a key, and on a server without keys (`locked` is false) to
    clients of this machine. LOCAL shows it to clients of this machine alone, OPEN to every client.
    """

    visibility: Visibility
    host: str
    locked: bool = False

    def check(self, request: Request) -> bytes | None:
        """The digest of the client's key, None on a server without keys.

        Raises `ApiError` 403 for a client that may see nothing.
        """
        if not self.locked:
            self._check_names(request)
        local_alone = self.visibility is Visibility.local or (
            self.visibility is Visibility.auto and not self.locked
        )
        if local_alone and not (request.client and _is_loopback(request.client.host)):
            raise ApiError(
                403,
                "without an API key this page is for clients of this machine: start the server "
                "with --api-key, or with --page open",
                code="not_local",
            )
        return record_in(request.scope).key_digest

    def _check_names(self, request: Request) -> None:
        """Raise `ApiError` 403 if the request names another host."""
        host = request.headers.getlist("host")
        found = _HOST.fullmatch(host[0]) if len(host) == 1 else None
        if found is None or not self._is_ours(found["name"].strip("[]").lower(), request):
            raise ApiError(
                403,
                "the Host header names another machine: open the page by the address at which "
                "the server listens, or start the server with --api-key",
                code="wrong_host",
            )
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host[0].lower():
            raise ApiError(403, "another site's page asks: open this server's page", code="origin")

    def _is_ours(self, name: str, request: Request) -> bool:
        if name == "localhost" or name.endswith(".localhost") or _is_loopback(name):
            return True
        server = request.scope.get("server")
        names = {self.host.lower(), "" if server is None else str(server[0]).lower()}
        if self.host in _ANYWHERE:
            names.add(socket.gethostname().lower())
        return name in names - set(_ANYWHERE)


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
