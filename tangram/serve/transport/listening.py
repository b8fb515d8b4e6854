"""Sockets on which a server listens: opened before the model is loaded, then given to uvicorn."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from tangram.errors import ConfigError

_BACKLOG = 2048
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Listener:
    """Open sockets, one for each address of a host.

    A client that connects waits until a server accepts it.
    """

    sockets: tuple[socket.socket, ...]

    @classmethod
    def at(cls, host: str, port: int) -> Listener:
        """Listen at `host`:`port`; port 0 is any free port.

        Raises `ConfigError` if the port is taken or not allowed, or `host` is no address of this
        machine.
        """
        if not host.strip():
            raise ConfigError(f"host is {host!r}: take 127.0.0.1, or 0.0.0.0 for all interfaces")
        if not 0 <= port <= 65535:
            raise ConfigError(f"port is {port}, it must lie in [0, 65535]")
        try:
            found = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            raise _explain_refusal(host, port, error) from error
        opened: list[socket.socket] = []
        failure: OSError | None = None
        for family, _, _, _, address in found:
            try:
                opened.append(socket.create_server(address, family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    cls(tuple(opened)).close()
                    raise _explain_refusal(host, port, error) from error
                failure = error  # localhost may have an IPv6 address where there is no IPv6
        if not opened:
            raise _explain_refusal(host, port, failure or OSError()) from failure
        return cls(tuple(opened))

    def close(self) -> None:
        """Close the sockets."""
        for opened in self.sockets:
            opened.close()

    @property
    def is_open_to_all(self) -> bool:
        """Whether it listens on all of the machine's interfaces."""
        return any(opened.getsockname()[0] in _ANYWHERE for opened in self.sockets)

    @property
    def url(self) -> str:
        """The address for a client on this machine."""
        host, port = self.sockets[0].getsockname()[:2]
        host = _ANYWHERE.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain_refusal(host: str, port: int, error: Exception) -> ConfigError:
    """The error for an address that cannot be used."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return ConfigError(
            f"port is {port}, another program listens at {host}:{port}: end it or choose another "
            "port"
        )
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"port is {port}, this user may not listen there: choose one from 1024")
    return ConfigError(
        f"host is {host!r}, it is no address of this machine: take 127.0.0.1, or 0.0.0.0 for all"
    )
