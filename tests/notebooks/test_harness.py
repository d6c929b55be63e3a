"""Notebooks with one fault each must fail, at the cell that shows it, in time; one without fault must pass."""

import pathlib
import sys

import nbformat
import pytest
from nbval_run import notebook_of, run_nbval

ROOT = pathlib.Path(__file__).resolve().parents[2]
CELL_SECONDS = 10
WAIT_FOR_EVER = "import signal\nwhile True:\n    signal.pause()\n"
START = f"import subprocess\nchild = subprocess.Popen([{sys.executable!r}, '-c', {WAIT_FOR_EVER!r}]"
SEE_LOG = """
import pathlib, time
DEADLINE = 2
end, log = time.monotonic() + DEADLINE, pathlib.Path("job_0.log")
while not (log.exists() and "Epoch 1" in log.read_text()):
    assert time.monotonic() < end, f"worker 0 did not start within {DEADLINE} s: {log.read_text()}"
"""
CLUSTER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from local_cluster import LocalCluster
"""
LAST = ("last", "print('end')", "end\n")

# The notebook; the cells that fail; what nbval says at the first of them.
FAULTS = {
    "wrong_number": (
        [("sum", "print(1 + 1)", "2\n"), ("product", "print(2 * 3)", "7\n"), LAST],
        [1], ["[product]", "Cell outputs differ"],
    ),
    "unknown_magic": (
        [("line", "%nosuchmagic", None), ("cell", "%%nosuchmagic\nx", None), LAST],
        [0, 1], ["[line]", "UsageError", "nosuchmagic"],
    ),
    "failing_background": (
        [("background", "%%bash --bg\nexec nosuchprogram &> job_0.log", None), ("see-log", SEE_LOG, None),
         ("remove-log", "log.unlink()", None), LAST],
        [1], ["[see-log]", "worker 0 did not start within 2 s", "nosuchprogram: not found"],
    ),
    "orphan": ([("start", START + ")", None), LAST], [1], ["[last]", "left running: process", "import signal"]),
    "orphan_in_its_own_session_after_a_failure": (
        [("start", START + ", start_new_session=True)", None), ("fail", "1 / 0", None), LAST],
        [1, 2], ["[fail]", "ZeroDivisionError"],
    ),
    "orphan_of_a_shell": (
        [("start", f"%%bash --bg\n{sys.executable} -c '{WAIT_FOR_EVER}' &> /dev/null\necho", None),
         ("kill", "%killbgscripts", "All background processes were killed.\n"), LAST],
        [2], ["[last]", "left running: process", "import signal"],
    ),
    "port_and_files": (
        [("listen", "import socket\nserver = socket.create_server(('127.0.0.1', 0))", None),
         ("write", "open('job_0.log', 'w').close()\nsize = open('kept.txt', 'w').write('x')", None), LAST],
        [2], ["[last]", "listening port: ", "file: job_0.log", "file: kept.txt"],
    ),
    "worker_that_never_starts": (
        [("import", CLUSTER, None),
         ("script", f"%%writefile never.py\n{WAIT_FOR_EVER}", "Writing never.py\n"),
         ("train", "with LocalCluster('never.py') as cluster:\n    cluster.wait(deadline=2)", None), LAST],
        [2], ["[train]", "worker 0, worker 1 still running at the deadline of 2 s", "it wrote nothing"],
    ),
    "cell_that_hangs": (
        [("first", "print(1)", "1\n"), ("hang", "import threading\nthreading.Event().wait()", None), LAST],
        [1, 2], ["[hang]", f"Timeout of {CELL_SECONDS} seconds exceeded"],
    ),
}  # fmt: skip

NO_FAULT = [
    ("write", "%%writefile own.py\nanswer = 42", "Writing own.py\n"),
    ("again", "%%writefile own.py\nanswer = 42", "Writing own.py\n"),
    ("read", "import own\nprint(own.answer)", "42\n"),
    ("child", "import subprocess\ndone = subprocess.run(['echo', 'a child'])", "a child\n"),
    ("noise", "import sys\nprint('a warning', file=sys.stderr)", None),
    ("background", "%%bash --bg\nexec cat /dev/zero &> /dev/null", None),
    ("kill", "%killbgscripts", "All background processes were killed.\n"),
    ("start", START + ")", None),
    ("stop", "child.kill()\nprint(child.wait())", "-9\n"),
    LAST,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of nbval over all of them: each has a kernel of its own."""
    folder = tmp_path_factory.mktemp("faults") / "notebooks"
    folder.mkdir()
    for name, cells in {"no_fault": NO_FAULT, **{name: fault[0] for name, fault in FAULTS.items()}}.items():
        (folder / name).mkdir()
        (folder / name / "kept.txt").touch()
        nbformat.write(notebook_of(*cells), folder / name / f"{name}.ipynb")
    return run_nbval(folder, f"--nbval-cell-timeout={CELL_SECONDS}")


def test_nbval_that_does_not_end_is_ended_and_its_output_kept(tmp_path):
    (tmp_path / "notebooks").mkdir()
    cells = ("start", START + ", start_new_session=True)", None), ("hang", "child.wait()", None)
    nbformat.write(notebook_of(*cells), tmp_path / "notebooks" / "hang.ipynb")
    run = run_nbval(tmp_path / "notebooks", seconds=30)  # ten times what a kernel needs to start
    assert not run.ended_well and run.results == {("hang", 0): "PASSED"} and "ended after 30 s" in run.output


@pytest.mark.timeout(170)
def test_a_notebook_without_fault_passes(run):
    assert run.failed("no_fault") == [], run.output


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_at_its_cell_and_says_what_it_is(name, run):
    _, cells, words = FAULTS[name]
    assert not run.ended_well
    assert run.failed(name) == cells, run.output
    for word in words:
        assert word in run.report(name, cells[0]), run.report(name, cells[0])
