"""What every test and every module of tests promises when it ends: no process of its own is left."""

import contextlib

import psutil
import pytest
from descendants import adopt_orphans, end, running

ENDING_SECONDS = 3  # a process that has been killed needs a moment to be gone

adopt_orphans()


@contextlib.contextmanager
def nothing_left():
    before = running()
    yield
    psutil.wait_procs(running() - before, timeout=ENDING_SECONDS)
    left, words = running() - before, []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            words.append(" ".join(process.cmdline())[:200])
    end(left)
    assert not words, f"processes were left: {words}"


@pytest.fixture(autouse=True)
def no_process_is_left():
    with nothing_left():
        yield


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left_by_what_several_tests_share():
    with nothing_left():
        yield
