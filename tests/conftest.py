"""What every test promises when it ends: no process of its own is left."""

import os
import pathlib
import signal

import pytest


def children_of(pid):
    """The pids of a process's children, of its children's children, and so on (Linux)."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if after_name[0] != "Z":
            parents[int(stat.parent.name)] = int(after_name[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


@pytest.fixture(autouse=True)
def no_process_is_left(request):
    before = set(children_of(os.getpid()))
    yield
    left = set(children_of(os.getpid())) - before
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left: {left}"
