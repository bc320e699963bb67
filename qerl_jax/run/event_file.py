"""TensorBoard's event file of a run, written by the thread that logs.

tensorboardX's SummaryWriter writes in a thread of its own, which a full disk ends; the queue to it
then fills up, and the next row waits forever.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from qerl_jax.system.safe_files import check_tree

_FLUSH_SECONDS = 10.0  # Flushing is also an fsync.


class EventFile:
    """Writes scalars for TensorBoard into a folder, which is made if missing.

    TensorBoard hides what earlier files say from `purge_step` on; None hides nothing.
    """

    def __init__(self, folder: Path, *, purge_step: int | None):
        from tensorboardX import RecordWriter

        # pyrefly: ignore[missing-module-attribute]  The module is generated.
        from tensorboardX.proto.event_pb2 import SessionLog

        check_tree(folder)
        folder.mkdir(exist_ok=True)
        # With host and second alone, as TensorBoard names it, a quick restart would overwrite it.
        name = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{name}"))
        self._flushed = 0.0
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Appends scalars by tag.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
        """
        # pyrefly: ignore[missing-module-attribute]  The module is generated.
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=step, summary=Summary(value=values))
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._records.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes what is left; raises what `write` raises."""
        self._records.close()

    def _write(self, **fields) -> None:
        # pyrefly: ignore[missing-module-attribute]  The module is generated.
        from tensorboardX.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
