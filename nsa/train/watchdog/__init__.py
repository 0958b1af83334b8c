"""The watchdog, out of band: a process that shares nothing with the trainer but files.

`supervise` runs and judges a trainer, `watch` looks at one from another shell. The trainer itself
calls `read_halt` and obeys it.
"""

from __future__ import annotations

from nsa.train.watchdog.child import die_with_parent
from nsa.train.watchdog.halt import Halt, begin_alone, heartbeat_path, read_halt, write_halt
from nsa.train.watchdog.outside import watch
from nsa.train.watchdog.supervisor import supervise

__all__ = [
    "Halt",
    "begin_alone",
    "die_with_parent",
    "heartbeat_path",
    "read_halt",
    "supervise",
    "watch",
    "write_halt",
]
