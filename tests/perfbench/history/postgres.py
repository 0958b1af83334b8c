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


class Server:
    """``address``: without a database's name, postgresql://postgres@127.0.0.1:PORT/."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.data = folder / "data"
        self._folder, self._programs = folder, binaries()
        options = ("-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self._run("initdb", *options)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"postgresql://{USER}@127.0.0.1:{port}/"
        self._settings = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories=''"
        self._settings += f" {settings}"

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-l", self._folder / "log", "-o", self._settings, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def _run(self, program: str, *arguments: str | Path) -> None:
        as_user = ("runuser", "-u", USER, "--") if os.getuid() == 0 else ()
        command = [*as_user, self._programs / program, "-D", self.data, *arguments]
        # The server keeps what it inherits: a pipe would never end.
        with open(self._folder / "out", "a+", encoding="utf-8") as out:
            done = subprocess.run(command, cwd="/", stdout=out, stderr=out, check=False)
            if done.returncode:
                out.seek(0)
                raise NoServer(f"{program} left with {done.returncode}: {out.read()[-2000:]}")


@contextmanager
def running(settings: str = "") -> Iterator[Server]:
    """A server that is gone afterwards, with its data. ``settings``: options of `postgres`."""
    folder = Path(tempfile.mkdtemp(prefix="perfbench-postgres-"))
    try:
        if os.getuid() == 0:
            shutil.chown(folder, USER)
        server = Server(folder, settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
