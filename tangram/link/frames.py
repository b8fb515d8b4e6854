"""Messages on a pair of connected sockets: each is its length, four bytes, and so many bytes."""

from __future__ import annotations

import asyncio
import struct

_LENGTH = struct.Struct("!I")


def frame(message: bytes) -> bytes:
    """`message` as it is sent."""
    return _LENGTH.pack(len(message)) + message


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None once the other process has closed its end, or has ended."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
