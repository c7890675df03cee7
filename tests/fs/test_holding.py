"""The daemon's side of its holder, against a holder's end of a socket."""

from __future__ import annotations

import socket

from kvfuse.fs import holder_child
from kvfuse.fs.holding import Holding


def test_what_was_taken_is_named_until_it_is_dropped_or_replaced() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        for name in (b"ring/a", b"ring/b", b"ring/c", b"tier/0"):
            theirs.send(bytes([holder_child.KEPT]) + name + b"\0content")
        theirs.send(bytes([holder_child.START]))
        holding = Holding(ours.detach())
        assert holding.wait()
        taken = holding.take("ring/a")
        assert taken is not None
        assert taken.content == b"content"
        assert holding.take("ring/a") is None
        assert holding.names("ring/") == ["ring/a", "ring/b", "ring/c"]
        holding.drop("ring/a")
        holding.keep("ring/b")
        assert holding.names("ring/") == ["ring/c"]
        holding._socket.close()
