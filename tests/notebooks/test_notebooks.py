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
MINUTES_FOR_ALL = MINUTES_FOR_A_NOTEBOOK * (len(NAMES) + 1)
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
        pairs = [answer if isinstance(answer, tuple) else (answer, "") for answer in answers]
        return [cell, *(nbformat.v4.new_code_cell(CELL.format(answer=one, words=words)) for one, words in pairs)]

    def run(self):
        sample = ROOT / "data" / "mnist_sample.npz"
        environment = {"MNIST_NPZ": str(sample), "MNIST": None, "TMPDIR": str(self.temporary)}
        environment |= NO_NETWORK | {"TF_CPP_MIN_LOG_LEVEL": None}
        return run_nbval(self.folder, *self.options, seconds=MINUTES_FOR_A_NOTEBOOK * 60, environment=environment)

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


@pytest.fixture(scope="module")
def class_of_two(request, tmp_path_factory):
    """The lessons that these tests ask for, gone through by two learners at a time on this host.

    Returns for each lesson its pairs (learner, run). Lesson 2 has two of them, who begin together; the second shows
    only that there may be two: with few steps and no wrong answers.
    """
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    learners = []
    if TWO_WORKERS in asked:
        learners += [Learner(tmp_path_factory.mktemp("second"), TWO_WORKERS, steps=5)]
    for name in sorted(asked.intersection(NAMES), key=lambda name: name != TWO_WORKERS):
        folder = tmp_path_factory.mktemp(name)
        learners += [Learner(folder, name, twice=name in RUN_TWICE, wrong_answers=True)]
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        runs = list(pool.map(Learner.run, learners))
    return {name: [pair for pair in zip(learners, runs) if pair[0].name == name] for name in asked}


@pytest.mark.slow
@pytest.mark.timeout(MINUTES_FOR_ALL * 60)
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_alone_in_an_empty_folder_it_gives_its_outputs_and_leaves_nothing(class_of_two, name):
    learner, run = class_of_two[name][-1]
    learner.assert_all_is_well(run)


@pytest.mark.slow
@pytest.mark.timeout(MINUTES_FOR_ALL * 60)
@pytest.mark.parametrize("name", [TWO_WORKERS])
def test_two_learners_on_one_host_run_it_at_once(class_of_two, name):
    one, other = class_of_two[name]
    for learner, run in (one, other):
        learner.assert_all_is_well(run)


@pytest.mark.slow
def test_as_a_user_types_it_in_a_clone_git_sees_no_change():
    def git_status():
        return subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT, text=True, timeout=30)

    before = git_status()
    run = run_nbval(f"notebooks/{FIRST}.ipynb", cwd=ROOT, environment={"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert run.ended_well and run.failed(FIRST) == [], run.output
    assert git_status() == before
