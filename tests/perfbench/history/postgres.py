"""A PostgreSQL server for tests: Debian's binaries, on loopback, in a folder that goes with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEBIAN = Path("/usr/lib/postgresql")
START_S = 60
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
        self._settings = ["-p", str(port), "-c", "listen_addresses=127.0.0.1"]
        self._settings += ["-c", "unix_socket_directories=", *settings.split()]

    def start(self) -> None:
        """It ends with this process, however this one ends."""
        command = self._as_user("--pdeathsig", "QUIT")
        command += [str(self._programs / "postgres"), "-D", str(self.data), *self._settings]
        log = self._folder / "log"
        with open(log, "a", encoding="utf-8") as out:
            self._process = subprocess.Popen(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        end = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise NoServer(f"postgres does not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, mode: str = "immediate") -> None:
        self._process.send_signal({"immediate": signal.SIGQUIT, "fast": signal.SIGINT}[mode])
        self._process.wait(START_S)

    def _answers(self) -> bool:
        """`postmaster.pid` says so in its last line."""
        try:
            return (self.data / "postmaster.pid").read_text().split()[-1] == "ready"
        except (OSError, IndexError):
            return False

    def _as_user(self, *options: str) -> list[str]:
        user = ("--reuid", USER, "--regid", USER, "--init-groups") if os.getuid() == 0 else ()
        return ["setpriv", *user, *options]

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = [*self._as_user("--no-new-privs"), self._programs / program, "-D", self.data]
        command += arguments
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
