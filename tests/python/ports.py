"""Ports of this machine for servers that tests start."""

import socket
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count=1):
    """The first of some ports in a row. Meanwhile the kernel gives them to no other socket, neither to
    one that binds port 0 nor to one that connects; a server that sets SO_REUSEADDR may bind them."""
    with ExitStack() as held:
        while True:
            with ExitStack() as tried:
                sockets = [tried.enter_context(socket.socket()) for _ in range(count)]
                port = 0
                try:
                    for i, one in enumerate(sockets):
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        one.bind(("127.0.0.1", port + i))
                        port = port or one.getsockname()[1]
                except (OSError, OverflowError):
                    continue
                held.push(tried.pop_all())
                break
        yield port
