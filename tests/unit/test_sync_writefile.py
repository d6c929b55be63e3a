"""What tools/sync_writefile.py promises: a cell `%%writefile NAME` and the file NAME have the same bytes."""

import pathlib

import nbformat
import pytest
import sync_writefile as tool
from IPython.core.inputtransformer2 import TransformerManager

ROOT = pathlib.Path(__file__).resolve().parents[2]

FILES = {
    "main.py": '"""It says \\n and %s and {x}."""\n\nprint("ä → b")\n',
    "ends_empty.py": "x = 1\n\n\n",
    "one_line.py": "x = 1\n",
    "empty_line.py": "\n",
}


@pytest.fixture
def project(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "notebooks" / "lessons.mplstyle").write_text("figure.dpi: 80\n")
    return tmp_path


def write_notebook(project, *sources, name="01_one"):
    cells = [nbformat.v4.new_markdown_cell("%%writefile main.py\nprose")]
    for number, source in enumerate(sources):
        cells.append(nbformat.v4.new_code_cell(source, execution_count=number + 1))
        cells[-1].id = f"cell-{number}"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), project / "notebooks" / f"{name}.ipynb")


def read_cells(project, name="01_one"):
    return nbformat.read(project / "notebooks" / f"{name}.ipynb", as_version=4).cells


def what_ipython_writes(source):
    """The name and the text that IPython hands to %%writefile."""
    handed = {}

    class Shell:
        def run_cell_magic(self, magic, line, body):
            handed.update(magic=magic, line=line, body=body)

    exec(TransformerManager().transform_cell(source), {"get_ipython": Shell})
    assert handed["magic"] == "writefile"
    return handed["line"], handed["body"]


@pytest.mark.parametrize("name", FILES)
def test_the_cell_writes_the_bytes_of_its_file(project, name):
    write_notebook(project, f"%%writefile {name}\nold", f"%%writefile {name}")
    assert tool.main(["--write"], project) == 0
    for cell in read_cells(project)[1:]:
        assert what_ipython_writes(cell.source) == (name, FILES[name])
    assert tool.main(["--check"], project) == 0


@pytest.mark.parametrize("name", [path.name for path in ROOT.glob("*.py")])
def test_the_cell_writes_the_bytes_of_this_projects_module(name):
    assert what_ipython_writes(tool.source_of(ROOT / name)) == (name, (ROOT / name).read_text(encoding="utf-8"))


def test_check_names_notebook_and_cell_and_writes_nothing(project, capsys):
    write_notebook(project, "x = 1", "%%writefile main.py\nold")
    before = (project / "notebooks" / "01_one.ipynb").read_bytes()
    assert tool.main(["--check"], project) == 1
    said = capsys.readouterr()
    assert said.err == (
        "sync_writefile: 01_one.ipynb, cell cell-1: not the bytes of main.py; run tools/sync_writefile.py --write\n"
    )
    assert said.out == "" and (project / "notebooks" / "01_one.ipynb").read_bytes() == before


@pytest.mark.parametrize("change", [lambda s: s + "\n", lambda s: s.replace("→", "->"), lambda s: s[:-1]])
def test_one_changed_byte_is_seen(project, change):
    write_notebook(project, change(tool.source_of(project / "main.py")))
    assert tool.main(["--check"], project) == 1


def test_all_notebooks_are_looked_at(project, capsys):
    write_notebook(project, "%%writefile main.py\nold")
    write_notebook(project, "%%writefile main.py\nold", name="07_last")
    assert tool.main(["--check"], project) == 1
    said = capsys.readouterr().err
    assert "01_one.ipynb" in said and "07_last.ipynb" in said


def test_write_changes_these_sources_and_nothing_else(project):
    write_notebook(project, "print(1)", "%%writefile main.py\nold", "%%writefile mine.py\nmine")
    before = read_cells(project)
    assert tool.main(["--write"], project) == 0
    after = read_cells(project)
    assert after[2].pop("source") == tool.source_of(project / "main.py") and before[2].pop("source")
    assert after == before


def test_the_plots_style_is_in_notebooks_and_no_other_file_there_counts(project):
    (project / "notebooks" / "mine.py").write_text("x = 1\n")
    write_notebook(project, "%%writefile lessons.mplstyle\nold", "%%writefile mine.py\nx = 2")
    assert tool.main(["--write"], project) == 0
    sources = [cell.source for cell in read_cells(project)[1:]]
    assert sources == ["%%writefile lessons.mplstyle\nfigure.dpi: 80", "%%writefile mine.py\nx = 2"]


def test_the_files_of_the_benchmarks_are_canonical_too(project):
    (project / "benchmarks" / "results").mkdir(parents=True)
    (project / "benchmarks" / "measure.py").write_text("x = 1\n")
    (project / "benchmarks" / "results" / "performance.json").write_text("{}\n")
    write_notebook(project, "%%writefile measure.py\nold", "%%writefile performance.json\nold")
    assert tool.main(["--check"], project) == 1
    assert tool.main(["--write"], project) == 0
    sources = [cell.source for cell in read_cells(project)[1:]]
    assert sources == ["%%writefile measure.py\nx = 1", "%%writefile performance.json\n{}"]


@pytest.mark.parametrize("content", [b"x = 1", b"x = 1\r\n"])
def test_a_file_that_no_cell_can_write_is_named(project, content, capsys):
    (project / "main.py").write_bytes(content)
    write_notebook(project, "%%writefile main.py\nx = 1")
    assert tool.main(["--write"], project) == 1
    assert capsys.readouterr().err.startswith("sync_writefile: 01_one.ipynb: main.py: its last line must end")
