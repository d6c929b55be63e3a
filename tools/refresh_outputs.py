"""Executes notebooks from the top in a fresh kernel and saves the outputs that the tests compare with.

    python tools/refresh_outputs.py                    # all
    python tools/refresh_outputs.py 02_two_workers     # one; a path will do as well
    python tools/refresh_outputs.py --check            # executes nothing; exit 1 if what is saved is not fit to commit

A notebook whose cell fails is not saved. What nbval does not compare and what differs from run to run is left out:
stderr, times, other metadata.
"""

import argparse
import base64
import os
import pathlib
import re
import sys

import nbformat
import psutil
from descendants import adopt_orphans, end, running
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
CELL_SECONDS, ENDING_SECONDS = 320, 5
PNG_BYTES, LINE_LENGTH, LINES = 60_000, 120, 40  # at most, for each picture, line and output

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT_CELL_METADATA = {"alt", "jupyter", "tags", "reason"}  # alt: what nbconvert writes beside a picture
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])/(?:home|Users|root|work|tmp|private|var|mnt|opt|usr|content|builds)/[^\s/]"
    r"|(?:site|dist)-packages|\b[A-Z]:\\\w"
)


class RefreshError(Exception):
    """A notebook that was not executed to its end; the message names notebook and cell."""


def execute(path):
    """Returns the notebook with new outputs. Its folder is the kernel's. Nothing that it started runs afterwards."""
    notebook, now = nbformat.read(path, as_version=4), {}
    client = NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", record_timing=False, coalesce_streams=True,
        shutdown_kernel="immediate", resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=lambda cell, cell_index: now.update(cell=cell.id),
    )  # fmt: skip
    before = running()
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        words = ANSI_COLOUR.sub("", str(error)).strip()
        raise RefreshError(f"{path.name}, cell {now.get('cell')}: {words}") from error
    finally:
        started = running() - before
        end(started)
        psutil.wait_procs(started, timeout=ENDING_SECONDS)
    return notebook


def tidied(notebook):
    """Returns the notebook as a text file: only what a reader sees and what does not change from run to run."""
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in KEPT_CELL_METADATA & set(cell.metadata)})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if output.output_type == "error":
                    output.traceback = [ANSI_COLOUR.sub("", line) for line in output.traceback]
    return nbformat.writes(notebook) + "\n"


def complaints_about(notebook, text):
    """Yields in words why these outputs (and `text`, the file that holds them) are not fit to commit."""
    number = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        number += 1
        if cell.execution_count != number:
            yield f"cell {cell.id}: its execution count is {cell.execution_count}, not {number}"
        for output in cell.outputs:
            for words in about_output(output, cell.metadata.get("tags", [])):
                yield f"cell {cell.id}: {words}"
    if text != tidied(notebook):
        yield "the file is not as this tool writes it"


def about_output(output, tags):
    data = output.get("data", {})
    if output.get("name") == "stderr":
        yield "stderr is saved"
    if output.output_type == "error" and "raises-exception" not in tags:
        yield f"{output.ename} is saved, without the tag raises-exception"
    for name, picture in data.items():
        size = len(base64.b64decode(picture)) if name.startswith("image/") and name != "image/svg+xml" else 0
        if size > PNG_BYTES:
            yield f"a picture of {size:,} bytes, more than {PNG_BYTES:,}"
    plain = output.get("text", "") + data.get("text/plain", "") + "\n".join(output.get("traceback", []))
    everything = plain + "".join(part for name, part in data.items() if name.startswith("text/") or "svg" in name)
    if found := MACHINE_PATH.search(everything):
        yield f"a path of this machine: {everything[found.start() : found.end() + 40].splitlines()[0]!r}"
    if ANSI_COLOUR.search(everything):
        yield "colour codes"
    lines = plain.splitlines()
    if len(lines) > LINES:
        yield f"{len(lines)} lines, more than {LINES}"
    if longest := max((line for line in lines if len(line) > LINE_LENGTH), key=len, default=None):
        yield f"a line of {len(longest)} characters, more than {LINE_LENGTH}: {longest[:40]!r}…"


def main(arguments=None, folder=NOTEBOOKS):
    parser = argparse.ArgumentParser(description="Executes notebooks and saves their outputs.")
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="name or path (default: all)")
    parser.add_argument("--check", action="store_true", help="execute nothing; exit 1 if what is saved is not fit")
    options = parser.parse_args(arguments)
    asked = [folder / f"{pathlib.Path(name).stem}.ipynb" for name in options.notebooks]
    paths = asked or sorted(folder.glob("*.ipynb"))
    if absent := [path.name for path in paths if not path.is_file()]:
        parser.error(f"no such notebook: {', '.join(absent)}")
    if not options.check:
        adopt_orphans()  # to be ended
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # "python3" is this environment, whatever the user's settings say
    complaints = []
    for path in paths:
        try:
            if not options.check:
                path.write_text(tidied(execute(path)), encoding="utf-8")
            text = path.read_text(encoding="utf-8")
            found = complaints_about(nbformat.reads(text, as_version=4), text)
            complaints += [f"{path.name}, {words}" for words in found]
        except RefreshError as error:
            complaints.append(str(error))
    for complaint in complaints:
        print(f"refresh_outputs: {complaint}", file=sys.stderr)
    if not complaints:
        print(f"{len(paths)} notebooks: {'outputs are fit to commit' if options.check else 'executed and saved'}")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
