"""A PostgreSQL server for tests: Debian's binaries, on loopback, in a folder that goes with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEBIAN = Path("/usr/lib/postgresql")
USER = "postgres"  # the server refuses to run as root; Debian's package makes this user


class NoServer(Exception):
    """Why there is none, and what to install."""


def binaries() -> Path:
    """The folder of the newest version."""
    found = [path.parent for path in DEBIAN.glob("*/bin/postgres")]
    if not found:
        raise NoServer(f"no {DEBIAN}/*/bin/postgres; apt-get install postgresql")
    return max(found, key=lambda path: float(path.parent.name))


def _run(*command: str | Path, folder: Path) -> None:
    as_user = ("runuser", "-u", USER, "--") if os.getuid() == 0 else ()
    # The server keeps what it inherits: a pipe would never end.
    with open(folder.with_suffix(".out"), "a+", encoding="utf-8") as out:
        done = subprocess.run([*as_user, *command], cwd="/", stdout=out, stderr=out, check=False)
        if done.returncode:
            out.seek(0)
            raise NoServer(f"{command[0]} left with {done.returncode}: {out.read()[-2000:]}")


@contextmanager
def running() -> Iterator[str]:
    """The address of a server without its database: postgresql://postgres@127.0.0.1:PORT/."""
    programs = binaries()
    folder = Path(tempfile.mkdtemp(prefix="perfbench-postgres-"))
    data = folder / "data"
    try:
        if os.getuid() == 0:
            shutil.chown(folder, USER)
        options = ("-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        _run(programs / "initdb", "-D", data, *options, folder=folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories=''"
        settings += " -c fsync=off -c max_connections=50"
        start = ("-D", data, "-w", "-l", folder / "log", "-o", settings, "start")
        _run(programs / "pg_ctl", *start, folder=folder)
        try:
            yield f"postgresql://{USER}@127.0.0.1:{port}/"
        finally:
            _run(programs / "pg_ctl", "-D", data, "-m", "immediate", "stop", folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".out").unlink(missing_ok=True)
