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


# Files whose tests share nothing. In the others a launch of workers serves many tests.
EACH_TEST_ALONE = {"test_notebooks.py", "test_local_cluster.py"}


def pytest_collection_modifyitems(items):
    """Where tests run two at once (make test): those that share a launch stay together, and the long ones begin."""
    for item in items:
        if item.path.name not in EACH_TEST_ALONE:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.fixture(autouse=True)
def no_process_is_left(request):
    before = set(children_of(os.getpid()))
    yield
    left = set(children_of(os.getpid())) - before
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left: {left}"
