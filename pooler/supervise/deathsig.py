"""The belt to the link's braces: a child gets SIGTERM when its supervisor dies, however it dies.

The braces are end of file on the link, after which a child closes its sessions with proof. A child that
handles SIGTERM does the same on it; one too broken to handle anything is ended by its default action.
Source: prctl(2), PR_SET_PDEATHSIG. It follows the *thread* that forks: spawn from the main thread only.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: the child may not take locks


def end_with_parent(parent_pid: int) -> None:
    """Run in the child between fork and exec. Ends the child at once if the parent is already gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
