"""Every notebook of these lessons, executed: its outputs must be the committed ones, and nothing may be left."""

import concurrent.futures
import copy
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest
from lessons import NAMES
from nbval_run import run_nbval
from wrong_answers import CELL, WRONG_ANSWERS

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST, TWO_WORKERS = NAMES[:2]
MINUTES_FOR_A_NOTEBOOK = 7
RUN_TWICE = {FIRST}  # in one kernel; the cheapest
NO_NETWORK = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9") | {
    "no_proxy": None, "NO_PROXY": None,
}  # fmt: skip


class Learner:
    """A person with one notebook in an empty folder, without a network and without this repository around it."""

    def __init__(self, folder, name, twice=False, wrong_answers=False, steps=None):
        """twice: all cells again in the same kernel. wrong_answers: behind each exercise's solution some are tried.
        steps: an epoch has so few, and outputs are not compared."""
        self.folder, self.temporary, self.name = folder / "empty", folder / "temporary", name
        self.folder.mkdir(parents=True)
        self.temporary.mkdir()
        notebook = ROOT / "notebooks" / f"{name}.ipynb"
        content = nbformat.read(notebook, as_version=4)
        if twice:
            again = copy.deepcopy(content.cells)
            for cell in again:
                cell.id += "-second-run"
            content.cells += again
        self.options = ["--nbval-lax"] if steps else []
        if wrong_answers:
            content.cells = [cell for given in content.cells for cell in self.with_wrong_answers(given)]
        for cell in content.cells:
            if steps and cell.id == "numbers":
                assert cell.source.count("STEPS_PER_EPOCH = 20") == 1, "the lesson has another number of steps now"
                cell.source = cell.source.replace("STEPS_PER_EPOCH = 20", f"STEPS_PER_EPOCH = {steps}")
        self.code_cells = sum(cell.cell_type == "code" for cell in content.cells)
        nbformat.write(content, self.folder / notebook.name)
        sources = "\n".join(cell.source for cell in content.cells)
        self.writes = {notebook.name, *re.findall(r"^%%writefile (\S+)$", sources, re.MULTILINE)}

    def with_wrong_answers(self, cell):
        """The cell; if it solves an exercise, then also those that try wrong answers."""
        exercise = re.fullmatch(r"exercise-(.+)-solution(-second-run)?", cell.id)
        if not exercise:
            return [cell]
        answers = WRONG_ANSWERS[self.name][exercise[1]]
        return [cell, *(nbformat.v4.new_code_cell(CELL.format(answer=answer)) for answer in answers)]

    def run(self, seconds=MINUTES_FOR_A_NOTEBOOK * 60, **environment):
        sample = ROOT / "data" / "mnist_sample.npz"
        data = {"MNIST_NPZ": str(sample), "MNIST": None}
        environment = NO_NETWORK | data | {"TMPDIR": str(self.temporary)} | environment
        return run_nbval(self.folder, *self.options, seconds=seconds, environment=environment)

    def assert_all_is_well(self, run):
        assert run.ended_well and run.failed(self.name) == [] and len(run.results) == self.code_cells, run.output
        assert {path.name for path in self.folder.iterdir()} - {"__pycache__"} <= self.writes, "files were left"
        # TensorFlow removes these of its own at exit; nbval ends its kernels without one.
        left = [path for path in self.temporary.iterdir() if not path.name.startswith("__autograph_generated_file")]
        assert left == [], "temporary files were left"


def test_the_lessons_are_there_by_their_names():
    assert [notebook.stem for notebook in NOTEBOOKS] == NAMES


def test_every_exercise_has_a_wrong_answer():
    for notebook in NOTEBOOKS:
        ids = [cell.id for cell in nbformat.read(notebook, as_version=4).cells]
        solved = [name[len("exercise-") : -len("-solution")] for name in ids if re.match("exercise-.*-solution$", name)]
        assert sorted(solved) == sorted(WRONG_ANSWERS[notebook.stem]) and len(solved) >= 2, notebook.name
        assert all(WRONG_ANSWERS[notebook.stem].values()), notebook.name


def test_every_notebook_is_collected_with_all_its_code_cells():
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval", "--collect-only", "-q", "notebooks/"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert listing.returncode == 0, listing.stdout + listing.stderr
    for notebook in NOTEBOOKS:
        cells = nbformat.read(notebook, as_version=4).cells
        collected = len(re.findall(rf"{notebook.stem}\W+ipynb::Cell \d+", listing.stdout))
        assert collected == sum(cell.cell_type == "code" for cell in cells) > 0, notebook.name


@pytest.mark.slow
@pytest.mark.timeout(MINUTES_FOR_A_NOTEBOOK * 60 + 10)
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_alone_in_an_empty_folder_it_gives_its_outputs_and_leaves_nothing(name, tmp_path):
    learner = Learner(tmp_path, name, twice=name in RUN_TWICE, wrong_answers=True)
    learner.assert_all_is_well(learner.run(TF_CPP_MIN_LOG_LEVEL=None))


@pytest.mark.slow
@pytest.mark.timeout(MINUTES_FOR_A_NOTEBOOK * 60 + 10)
def test_two_learners_on_one_host_run_02_at_once(tmp_path):
    learners = [Learner(tmp_path / who, TWO_WORKERS, steps=5) for who in ("one", "other")]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = list(pool.map(Learner.run, learners))
    for learner, run in zip(learners, runs):
        learner.assert_all_is_well(run)


@pytest.mark.slow
def test_as_a_user_types_it_in_a_clone_git_sees_no_change():
    def git_status():
        return subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT, text=True, timeout=30)

    before = git_status()
    run = run_nbval(f"notebooks/{FIRST}.ipynb", cwd=ROOT, environment={"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert run.ended_well and run.failed(FIRST) == [], run.output
    assert git_status() == before
