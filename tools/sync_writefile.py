"""Keeps each cell `%%writefile NAME` the same as the file NAME that the tests and linters read.

    python tools/sync_writefile.py --check     # exit 1, in words, if a cell differs from its file
    python tools/sync_writefile.py --write     # put the files into the cells

The file is NAME beside README.md, or where FOLDERS says. A cell that writes any other file is left alone.
"""

import argparse
import pathlib
import re
import sys

import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = {  # the others are beside README.md
    "lessons.mplstyle": "notebooks",
    "with_tf_config.py": "clusters",
    "hosts.py": "clusters",
    "bench.py": "benchmarks",
    "measure.py": "benchmarks",
    "performance.json": "benchmarks/results",
}
FIRST_LINE = re.compile(r"%%writefile +(\S+)\s*")


class SyncError(Exception):
    """A cell or a file that cannot be, or is not, in step; the message names it."""


def canonical_file(root, name):
    """Returns the path of the file that the cell must equal, or None if the lesson alone has it."""
    path = root / FOLDERS.get(name, "") / name
    return path if path.is_file() else None


def source_of(path):
    """Returns the source of the cell that writes this file's bytes.

    %%writefile ends the file with one newline more than the cell has, unless the cell ends with one itself.
    Raises SyncError if no cell can write them.
    """
    text = path.read_bytes().decode("utf-8")
    if not text.endswith("\n") or "\r" in text:
        raise SyncError(f"{path.name}: its last line must end with a newline, and no line with CR LF")
    source = f"%%writefile {path.name}\n{text}"
    return source if source.endswith("\n\n") else source[:-1]


def differing_cells(root, notebook):
    """Yields (cell, source that it should have)."""
    for cell in notebook.cells:
        named = FIRST_LINE.fullmatch(cell.source.split("\n", 1)[0]) if cell.cell_type == "code" else None
        path = canonical_file(root, named[1]) if named else None
        if path and cell.source != source_of(path):
            yield cell, source_of(path)


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(description="Keeps %%writefile cells the same as their files.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="write nothing; exit 1 if a cell differs from its file")
    what.add_argument("--write", action="store_true", help="put the files into the cells")
    options = parser.parse_args(arguments)
    complaints, written, notebooks = [], 0, sorted((root / "notebooks").glob("*.ipynb"))
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        try:
            differing = list(differing_cells(root, notebook))
        except SyncError as error:
            complaints.append(f"{path.name}: {error}")
            continue
        for cell, source in differing:
            name = source.split()[1]
            if options.check:
                todo = f"not the bytes of {name}; run tools/sync_writefile.py --write"
                complaints.append(f"{path.name}, cell {cell.id}: {todo}")
            cell.source = source
        if differing and options.write:
            nbformat.write(notebook, path)
            written += len(differing)
    for complaint in complaints:
        print(f"sync_writefile: {complaint}", file=sys.stderr)
    if not complaints:
        done = "all %%writefile cells are their files" if options.check else f"{written} cells rewritten"
        print(f"{len(notebooks)} notebooks: {done}")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
