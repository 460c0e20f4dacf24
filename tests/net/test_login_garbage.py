"""What cannot begin a connection."""

from __future__ import annotations

import pytest

from pooler.net.handshake import HandshakeFailed
from pooler.wire import messages
from tests.net.test_login import DOOR, client_at


@pytest.mark.parametrize("data", [
    messages.TERMINATE, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 8, b"\0\1\0\0\0\3\0\0"])
async def test_who_does_not_begin_with_a_packet_is_told_nothing(data: bytes) -> None:
    """R26. A driver may say Terminate first when it is ended before it has begun."""
    async with client_at(DOOR) as (peer, verdict):
        await peer.send(data)
        await verdict.failed(HandshakeFailed)
