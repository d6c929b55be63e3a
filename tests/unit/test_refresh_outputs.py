"""What tools/refresh_outputs.py promises: outputs fit to commit, and nothing left running."""

import base64
import os

import nbformat
import pytest
import refresh_outputs as tool
from descendants import running

new_output = nbformat.v4.new_output
HOME = "/" + "home/someone/x"
START = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], "
START += "start_new_session=True)\nNone"


def refresh(folder, *arguments):
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # ipykernel, seeing it, drops what child processes print
    return tool.main(list(arguments), folder)


def cell(source, output=None, count=1, name="a-cell", **metadata):
    made = nbformat.v4.new_code_cell(source, execution_count=count, metadata=metadata)
    made.id, made.outputs = name, [output] if output else []
    return made


def save(folder, *cells, name="01_one"):
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 1"), *cells]), path)
    return path


def printed(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def picture(size):
    png = base64.b64encode(b"x" * size).decode()
    return new_output("display_data", data={"text/plain": "<Figure>", "image/png": png})


def complaints(*cells):
    """What --check says of a notebook with these cells that is otherwise as the tool writes it."""
    notebook = nbformat.v4.new_notebook(cells=list(cells), metadata=tool.METADATA)
    return list(tool.complaints_about(notebook, nbformat.writes(notebook) + "\n"))


def test_a_notebook_is_executed_in_its_folder_and_saved_ready_to_commit(tmp_path, capsys):
    (tmp_path / "value.txt").write_text("42")
    path = save(
        tmp_path,
        cell("import sys\nprint(open('value.txt').read())\nprint('n', file=sys.stderr)", printed("old\n"), 7, "read"),
        cell("import subprocess\nx = 1\ndone = subprocess.run(['echo', 'child'])", None, None, "child", reason="why"),
        cell("x + 1", None, 9, "sum", tags=["kept"], execution={"t": "2026"}, collapsed=True),
        cell("1 / 0", None, 9, "divide", tags=["raises-exception"]),
    )
    assert refresh(tmp_path, "01_one") == 0, capsys.readouterr().err
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata == tool.METADATA and path.read_text(encoding="utf-8").endswith("}\n")
    read, child, total, divide = notebook.cells[1:]
    assert [each.id for each in notebook.cells[1:]] == ["read", "child", "sum", "divide"]
    assert [each.execution_count for each in notebook.cells[1:]] == [1, 2, 3, 4]
    assert [output.text for output in read.outputs] == ["42\n"] and child.outputs[0].text == "child\n"
    assert total.outputs[0].data["text/plain"] == "2" and total.outputs[0].execution_count == 3
    assert divide.outputs[0].ename == "ZeroDivisionError" and "\x1b" not in str(divide.outputs)
    assert total.metadata == {"tags": ["kept"]} and child.metadata == {"reason": "why"} and read.metadata == {}
    saved = path.read_bytes()
    assert refresh(tmp_path, "--check") == 0
    assert refresh(tmp_path, str(path)) == 0 and path.read_bytes() == saved


@pytest.mark.parametrize("source, words", [("1 / 0", "ZeroDivisionError"), ("%nosuchmagic", "nosuchmagic")])
def test_a_notebook_whose_cell_fails_is_not_saved(tmp_path, capsys, source, words):
    path = save(tmp_path, cell("print(1)", printed("old\n"), 1, "good"), cell(source, None, 2, "bad"))
    before = path.read_bytes()
    assert refresh(tmp_path) == 1
    said = capsys.readouterr().err
    assert said.startswith("refresh_outputs: 01_one.ipynb, cell bad: ") and words in said and "\x1b" not in said
    assert path.read_bytes() == before


@pytest.mark.parametrize("last", ["print(1)", "1 / 0", "import threading\nthreading.Event().wait()"])
def test_nothing_that_a_notebook_started_runs_afterwards(tmp_path, monkeypatch, last):
    monkeypatch.setattr(tool, "CELL_SECONDS", 5)
    before = running()
    save(tmp_path, cell(START, None, 1), cell(last, None, 2, "last"))
    assert refresh(tmp_path) == (last != "print(1)")
    assert running() <= before


def test_good_outputs_are_fit():
    line = printed("x" * 120 + "\n")
    assert complaints(cell("1", line, 1, "a"), cell("2", picture(60_000), 2, "b"), cell("3", None, 3, "c")) == []
    ratio = printed("loss/accuracy 2.1/0.4 of data/mnist_sample.npz, tests/work/x, https://example.org/home/x\n" * 40)
    assert complaints(cell("1", ratio)) == []
    error = new_output("error", ename="OSError", evalue="x", traceback=["OSError: x"])
    assert complaints(cell("1", error, tags=["raises-exception"])) == []


@pytest.mark.parametrize(
    "made, words",
    [
        (cell("1", count=None), "execution count is None, not 1"),
        (cell("1", count=2), "execution count is 2, not 1"),
        (cell("1", printed("x", "stderr")), "stderr is saved"),
        (cell("1", new_output("error", ename="OSError", evalue="", traceback=[])), "OSError is saved"),
        (cell("1", printed("x" * 121)), "a line of 121 characters"),
        (cell("1", printed("x\n" * 41)), "41 lines"),
        (cell("1", printed(f"File {HOME}.py")), "a path of this machine"),
        (cell("1", printed("in '/tmp/ipykernel_1/2.py'")), "a path of this machine"),
        (cell("1", printed("lib/python3.11/site-packages/keras/x.py")), "a path of this machine"),
        (cell("1", printed(r"C:\Users\x")), "a path of this machine"),
        (cell("1", new_output("display_data", data={"text/html": f"<a href='{HOME}'>"})), "a path of this machine"),
        (cell("1", printed("\x1b[31mred\x1b[0m")), "colour codes"),
        (cell("1", picture(60_001)), "60,001 bytes"),
        (cell("1", execution={"x": "2026"}), "not as this tool writes it"),
    ],
)
def test_unfit_outputs_are_named(made, words):
    assert any(words in complaint for complaint in complaints(made)), complaints(made)


def test_check_names_notebook_and_cell_and_executes_nothing(tmp_path, capsys):
    path = save(tmp_path, cell("raise SystemExit", None, None, "never"))
    before = path.read_bytes()
    assert refresh(tmp_path, "--check") == 1
    assert "01_one.ipynb, cell never: its execution count is None, not 1" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_file_with_other_metadata_is_refused(tmp_path):
    path = save(tmp_path, cell("1"))
    assert refresh(tmp_path, "--check") == 1  # no kernelspec
    path.write_text(tool.tidied(nbformat.read(path, as_version=4)), encoding="utf-8")
    assert refresh(tmp_path, "--check") == 0
    path.write_text(path.read_text(encoding="utf-8").rstrip("\n"), encoding="utf-8")
    assert refresh(tmp_path, "--check") == 1


def test_an_unknown_notebook_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        refresh(tmp_path, "09_none")
    assert end.value.code == 2 and "09_none.ipynb" in capsys.readouterr().err
