"""Threads that take descriptors which clients pass (`kvfuse/usrbio/daemon/passing`)."""

from __future__ import annotations

import errno
import os
import socket
from typing import NoReturn

import pytest
import trio

from kvfuse.usrbio.daemon.descriptor_receiver import USER_THREADS_MAX, open_receivers


async def test_a_user_has_its_turns_again_when_the_daemon_has_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn that began while there was none was lost: after four no connection of the user could end."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "there is none left")

    client, stream = trio.socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with client, stream:
        async with open_receivers() as receivers:
            receiver = receivers.make_receiver("user", stream)
            with monkeypatch.context() as patch:
                patch.setattr(socket, "socketpair", refuse)
                for _ in range(USER_THREADS_MAX):
                    with pytest.raises(OSError, match="none left"):
                        await receiver.inspect(os.fstat)
            with open(os.devnull) as file:
                await client.sendmsg(
                    [b"m"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, file.fileno().to_bytes(4, "little"))]
                )
                assert (await receiver.inspect(os.fstat)).st_rdev == os.fstat(file.fileno()).st_rdev
