"""Makes `pytest --nbval notebooks/` strict without further options, from any folder.

nbval compares the output of each cell. Here it also learns to see a magic that does not exist, and what a notebook
leaves behind after its last cell: processes, listening ports, files.
"""

import os
import pathlib
import re
import sys

import psutil
import pytest
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from descendants import adopt_orphans, end, running

SANITISER = ROOT / "tests" / "notebooks" / "sanitise.cfg"
CELL_SECONDS, NBVAL_CELL_SECONDS = 320, 2000  # ours: two launches and their own deadlines; nbval's default
ENDING_SECONDS = 3  # a process that has been killed needs a moment to be gone
BEFORE = pytest.StashKey()

adopt_orphans()  # whatever a notebook starts stays among our descendants


def pytest_collectstart(collector):
    if not isinstance(collector, IPyNbFile):
        return
    option = collector.config.option
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(SANITISER)
    if option.nbval_cell_timeout == NBVAL_CELL_SECONDS:
        option.nbval_cell_timeout = CELL_SECONDS
    # The environment that runs pytest is the one to test, not one that "python3" names in the user's settings.
    option.nbval_current_env = option.nbval_kernel_name is None
    collector.skip_compare += ("stderr",)  # notes and warnings, other ones on each machine
    start_kernel = collector.setup

    def start_kernel_as_jupyter_does():
        # ipykernel, if it sees this variable, does not pass on what child processes print.
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        start_kernel()

    collector.setup = start_kernel_as_jupyter_does


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not isinstance(item, IPyNbCell):
        return (yield)
    notebook = item.parent
    if BEFORE not in notebook.stash:  # its kernel is up, none of its cells has run
        notebook.stash[BEFORE] = running(), listening_ports(notebook), files(notebook)
    is_last = item is [other for other in item.session.items if other.parent is notebook][-1]
    try:
        yield
        streams = [output.text for output in item.test_outputs if output.get("name") == "stderr"]
        complaints = re.findall("^UsageError: .*", "\n".join(streams), re.MULTILINE)  # IPython: an unknown magic
    except NbCellError as error:
        error.args = (f"[{item.cell.get('id')}] {error}",)
        raise
    finally:
        left = left_behind(notebook) if is_last else []
    if complaints or left:
        raise NbCellError(item.cell_num, f"[{item.cell.get('id')}] {'; '.join(complaints + left)}", item.cell.source)


def left_behind(notebook):
    """Returns in words what the notebook has left; its processes are ended."""
    processes_before, ports_before, files_before = notebook.stash[BEFORE]
    found = {process: name_of(process) for process in running() - processes_before}
    psutil.wait_procs(found, timeout=ENDING_SECONDS)
    left = running() & found.keys()
    end(left)
    complaints = [f"left running: {found[process]}" for process in left]
    complaints += [f"left a listening port: {port}" for port in listening_ports(notebook) - ports_before]
    files_after = files(notebook)
    changed = [path for path in files_after.keys() | files_before if files_after.get(path) != files_before.get(path)]
    return complaints + [f"left, changed or removed a file: {path.name}" for path in sorted(changed)]


def name_of(process):
    try:
        return f"process {process.pid}, {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return f"process {process.pid}"


def listening_ports(notebook):
    provisioner = notebook.kernel.km.provisioner
    try:
        connections = psutil.Process(provisioner.pid).net_connections("inet") if provisioner else []
    except psutil.Error:  # the kernel is gone
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def files(notebook):
    """Contents of the files in the notebook's folder, but those that its own %%writefile cells name."""
    folder = notebook.path.parent
    sources = "\n".join(cell.source for cell in notebook.nb.cells if cell.cell_type == "code")
    its_own = {folder / name for name in re.findall(r"^%%writefile (\S+)$", sources, re.MULTILINE)}
    passed_over = {"__pycache__", ".ipynb_checkpoints", ".pytest_cache"}
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".ipynb" and path not in its_own and not passed_over & set(path.parts)
    }


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Ends what a notebook has left that never came to its last cell (pytest -x, Ctrl-C)."""
    notebooks = {item.parent for item in getattr(session, "items", []) if isinstance(item, IPyNbCell)}
    started = [notebook.stash[BEFORE][0] for notebook in notebooks if BEFORE in notebook.stash]
    if started:
        end(running() - set.intersection(*started))
