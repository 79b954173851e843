"""Runs a command, and ends all processes that it has started once it ends, or once who asked for it does.

A program of its own, on nothing but the standard library. Its standard input is a pipe from who asked: the end of that
is seen even after SIGKILL. The command gets SIGTERM then, and SIGKILL later. Processes in sessions of their own, as
torchrun's are, become children of this one."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_S = 5  # in which a command may end what it has elsewhere: a container, ranks on other hosts
_SET_CHILD_SUBREAPER = 36  # of prctl, which Linux alone has; elsewhere only the group of the command is ended


def _end_after_input(process: "subprocess.Popen[bytes]") -> None:
    sys.stdin.read()
    _end_group(process, signal.SIGTERM)
    time.sleep(GRACE_S)
    _end_group(process, signal.SIGKILL)


def _end_group(process: "subprocess.Popen[bytes]", how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, how)


def _children() -> set[int]:
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def main() -> None:
    """Exits as the command does."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_after_input, args=(process,), daemon=True).start()
    status = process.wait()
    _end_group(process, signal.SIGKILL)
    ended = set[int]()
    while left := _children() - ended:  # the children of those that end come next
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        ended |= left
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
