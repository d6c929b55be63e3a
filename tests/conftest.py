"""What every test promises when it ends: no process of its own is left."""

import contextlib
import ctypes
import sys

import psutil
import pytest

ENDING_SECONDS = 3  # a process that has been killed needs a moment to be gone

if sys.platform == "linux":
    # So that orphans stay among our descendants, as in notebooks/conftest.py (36: PR_SET_CHILD_SUBREAPER).
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def running():
    """This process's living descendants."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = running()
    yield
    psutil.wait_procs(running() - before, timeout=ENDING_SECONDS)
    left = []
    for process in running() - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(" ".join(process.cmdline())[:200])
            process.kill()
    assert not left, f"processes were left: {left}"
