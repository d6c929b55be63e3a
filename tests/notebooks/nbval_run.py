"""Runs nbval on notebooks in a temporary folder, under the rules that stand in notebooks/."""

import os
import pathlib
import re
import subprocess
import sys

import nbformat
import psutil
from descendants import end

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Run:
    """What one run of nbval gave: `ended_well`, its whole `output`, and each cell's result by notebook and number."""

    def __init__(self, returncode, output):
        self.ended_well, self.output = returncode == 0, output
        lines = re.findall(r"(\w+)::ipynb::Cell (\d+) (PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)", output)
        self.results = {(name, int(number)): result for name, number, result in lines}

    def failed(self, name):
        """Numbers of a notebook's cells that did not pass; -1 if none of it ran."""
        cells = {number: result for (notebook, number), result in self.results.items() if notebook == name}
        return [number for number, result in cells.items() if result != "PASSED"] if cells else [-1]

    def report(self, name, number):
        """nbval's words about one cell that failed."""
        parts = re.split(r"\n_+ (?:\S*/)?(\w+)\.ipynb::Cell (\d+) _+\n", self.output)
        return dict(zip(zip(parts[1::3], map(int, parts[2::3])), parts[3::3])).get((name, number), "(no word)")


def run_nbval(folder, *options, cwd=None, seconds=170, environment=()):
    """Runs nbval on the notebooks in `folder` by the rules of notebooks/conftest.py; returns a Run.

    environment: changes to this process's; None removes a variable.
    """
    folder = pathlib.Path(folder)
    conftest = folder.parent / "conftest.py"
    if cwd is None and not conftest.exists():
        conftest.symlink_to(ROOT / "notebooks" / "conftest.py")  # beside the folder: that one stays empty
        options = (f"--confcutdir={folder.parent}", *options)
    command = [sys.executable, "-u", "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "--nbval"]
    changes = {"PYTEST_ADDOPTS": None, "PYTEST_CURRENT_TEST": None, "TF_CONFIG": None, "PYTHONPATH": None}
    merged = os.environ | changes | dict(environment)
    process = subprocess.Popen(
        [*command, *options, str(folder)], cwd=cwd or folder,
        env={name: value for name, value in merged.items() if value is not None}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        end([*psutil.Process(process.pid).children(recursive=True), process])
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        output += f"\nnbval was ended after {seconds} s"
    return Run(process.returncode, output)


def notebook_of(*cells):
    """A notebook of code cells (id, source, output); output None: nothing is printed."""
    made = []
    for number, (name, source, output) in enumerate(cells, start=1):
        outputs = [] if output is None else [nbformat.v4.new_output("stream", name="stdout", text=output)]
        cell = nbformat.v4.new_code_cell(source, execution_count=number, outputs=outputs)
        cell.id = name
        made.append(cell)
    return nbformat.v4.new_notebook(cells=made)
