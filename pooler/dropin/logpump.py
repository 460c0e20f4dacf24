"""Where the log of all processes goes: a file that may be rotated under us, the first stderr, syslog.

The children inherit a pipe as their output, so that a SIGHUP here is enough to have the file opened anew.
"""

from __future__ import annotations

import os
import sys
import syslog
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pooler.dropin.pidfile import CannotStart


@dataclass(frozen=True, slots=True)
class LogTargets:
    """`file` None: no file. `facility` empty: no syslog."""

    file: Path | None
    to_stderr: bool
    facility: str = ""
    ident: str = ""


class LogPump:
    """Stands between our output and its targets from `start` to `close`."""

    def __init__(self, targets: LogTargets) -> None:
        self._targets = targets
        self._reopen = threading.Event()
        self._file: BinaryIO | None = None
        self._thread: threading.Thread | None = None
        self._stdout = self._stderr = -1

    def start(self) -> None:
        """Take stdout and stderr over. Raises CannotStart if the file cannot be opened."""
        self._file = self._open()
        if self._targets.facility:
            name = f"LOG_{self._targets.facility.upper()}"
            syslog.openlog(self._targets.ident, syslog.LOG_PID, getattr(syslog, name, syslog.LOG_DAEMON))
        reading, writing = os.pipe2(os.O_CLOEXEC)
        sys.stdout.flush()
        self._stdout, self._stderr = os.dup(1), os.dup(2)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        self._thread = threading.Thread(target=self._pump, args=(reading,), name="log", daemon=True)
        self._thread.start()

    def retarget(self, targets: LogTargets) -> None:
        """From the next line on; the file is opened anew, though its name may be the same."""
        self._targets = targets
        self._reopen.set()

    def close(self) -> None:
        """Give stderr back once all has been written."""
        if self._thread is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._stdout, 1)
        os.dup2(self._stderr, 2)  # the last writing end: the pump sees the end of its pipe
        self._thread.join(timeout=2.0)
        os.close(self._stdout)
        os.close(self._stderr)

    def _open(self) -> BinaryIO | None:
        if self._targets.file is None:
            return None
        try:
            return open(self._targets.file, "ab", buffering=0)
        except OSError as fault:
            raise CannotStart(f"could not open logfile '{self._targets.file}': {fault.strerror}") from None

    def _pump(self, reading: int) -> None:
        while data := os.read(reading, 65_536):
            if self._reopen.is_set():
                self._reopen.clear()
                with suppress(CannotStart):  # the old one goes on
                    self._file, old = self._open(), self._file
                    if old is not None:
                        old.close()
            self._write(data)
        os.close(reading)
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk: the rest of the log has another place, the fleet goes on
            if self._file is not None:
                self._file.write(data)
        if self._targets.to_stderr:
            with suppress(OSError):
                os.write(self._stderr, data)
        if self._targets.facility:
            for line in data.decode(errors="replace").splitlines():
                syslog.syslog(line)
