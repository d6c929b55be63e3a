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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own, which reads these marks
def pytest_collection_modifyitems(config, items):
    """What `make test` does not tear apart: a file, for its fixtures are launches; but each notebook goes by itself."""
    for item in items if config.pluginmanager.hasplugin("xdist") else []:
        lesson = item.callspec.params.get("name") if "test_alone_in_an_empty_folder" in item.name else None
        alone = lesson or (item.name if "test_two_learners" in item.name else None)
        item.add_marker(pytest.mark.xdist_group(alone or item.path.stem))


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
