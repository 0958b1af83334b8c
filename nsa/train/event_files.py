"""TensorBoard's event files of a run that goes on from a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path


def keep_up_to(step: int, folder: Path) -> None:
    """Rewrite the event files in ``folder`` without the events of later steps.

    A new file that asks for it (`purge_step`) is not enough: one of TensorBoard 2.21's readers
    heeds it, and its server is none of them. A record that a kill has torn is left out, too.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    for path in sorted(folder.glob("events.out.tfevents.*")):
        records = list(RawEventFileLoader(str(path)).Load())
        kept = [one for one in records if Event.FromString(one).step <= step]
        if len(kept) == len(records):
            continue
        rewritten = path.with_name(f".{path.name.replace('tfevents', 'rewritten')}")
        with rewritten.open("wb") as file:
            writer = RecordWriter(file)
            for record in kept:
                writer.write(record)
            file.flush()
            os.fsync(file.fileno())
        rewritten.replace(path)
