"""Every notebook keeps the rules of lesson_rules.py, and every rule refuses a lesson that breaks it."""

import pathlib

import nbformat
import pytest
from lesson_rules import RULES, Lesson

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
FOLDED = {"jupyter": {"source_hidden": True}}
SOLUTION = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}

# A small lesson that keeps all rules: (id, source) or (id, source, metadata). Code is what has a letter C before it.
GOOD = [
    ("title", """# 2 · Two

You have two workers at the end.

[1 One](01_single_worker.ipynb) · **2 Two** · 3 Three · 4 Four · 5 Five · 6 Six · 7 Seven

*Run it*: in a clone, `make lab`; or in Colab."""),
    ("overview", """| Time | You'll do | You’ll learn | You'll need |
|---|---|---|---|
| 9 minutes | this | 1. one<br>2. two<br>3. three | that |"""),
    ("diagram", "![Two workers that share one batch.](images/two.svg)"),
    ("setup", "## Setup"),
    ("C environment", 'import os\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "-1"\nos.environ.pop("TF_CONFIG", None)'),
    ("C imports", "import subprocess\nimport time\n\nimport matplotlib.pyplot as plt\nimport tensorflow as tf"),
    ("C numbers", "STEPS = 70\nDEADLINE = 60  # seconds"),
    ("C write-mnist-setup", "%%writefile mnist_setup.py\nimport time\n\ntime.sleep(9)\nassert True", FOLDED),
    ("C start", "%%bash --bg\nexec python main.py &> job_0.log"),
    ("C wait", "end = time.monotonic() + DEADLINE\nwhile time.monotonic() < end:\n    time.sleep(0.1)"),
    ("C run", 'subprocess.run(["true"], check=True, timeout=DEADLINE)'),
    ("C plot", 'plt.plot([1])\nplt.title("It falls")\nplt.xlabel("step")\nplt.ylabel("loss")\nplt.show()\nprint(1)'),
    ("what-changes", "## What changed\n\n```diff\n+just_one = '/bin/line'\n```"),
    ("try-it", "## Try it"),
    ("exercise-one-say", "**1** Say `simply`."), ("C exercise-one", "x = None"),
    ("C exercise-one-check", 'assert x is None, "No."'), ("C exercise-one-solution", "x = 1", SOLUTION),
    ("exercise-two-say", "**2**"), ("C exercise-two", "y = None"),
    ("C exercise-two-check", 'assert y is None, "No."'), ("C exercise-two-solution", "y = 1", SOLUTION),
    ("in-practice", "## In practice\n\nMore."),
    ("recap", "## Recap\n\n- one\n- two\n- three"),
    ("clean-up", "## Clean up"),
    ("C stop", "%killbgscripts"),
    ("C check-clean", 'assert "TF_CONFIG" not in os.environ, "TF_CONFIG is set."'),
    ("next", "Previous: [1 · One](01_single_worker.ipynb) · Next: 3 · Three"),
]  # fmt: skip

# For each rule the changes that it must refuse: the cell, what stands there, what is put there instead.
# The cell None: what stands there is a whole cell's id, which is removed.
BROKEN = {
    "title_and_what_you_will_have": [
        ("title", "# 2 ·", "# 3 ·"), ("title", "You have two workers at the end.\n\n", ""),
        ("setup", "## Setup", "# Setup"),
    ],
    "series_line": [
        ("title", "[1 One](01_single_worker.ipynb)", "1 One"), ("title", "**2 Two**", "2 Two"),
        ("title", "3 Three", "**3 Three**"), ("title", " · 7 Seven", ""),
    ],
    "how_to_run": [("title", "Colab", "Jupyter")],
    "table_of_four": [
        ("overview", "Time", "Duration"), ("overview", "<br>3. three", ""), ("overview", "| this |", "| |"),
        ("overview", "3. three", "3.<br>4.<br>5.<br>6."),
    ],
    "diagram": [("diagram", "two.svg", "two.png"), (None, "diagram", None)],
    "environment_before_tensorflow": [
        ("environment", '"CUDA_VISIBLE_DEVICES"', '"X"'), ("environment", "import os", "import os\nimport tensorflow"),
    ],
    "all_numbers_in_one_cell": [("wait", "end = ", "SECONDS = 3\nend = "), (None, "numbers", None)],
    "sections_in_order": [("recap", "## Recap", "## Summary"), ("try-it", "## Try it", "## In practice")],
    "what_changes_as_a_diff": [("what-changes", "```diff", "```"), ("what-changes", "## What changed", "## Changes")],
    "exercises": [
        (None, "exercise-two-check", None), (None, "exercise-two-solution", None),
        ("exercise-one-check", "assert", "print"), ("exercise-one-solution", None, {"jupyter": {}}), ("exercise-one-solution", None, FOLDED),
    ],
    "recap_answers_what_you_learn": [("recap", "- three", ""), ("overview", "3. three", "3. three<br>4. four")],
    "clean_up_asserts": [("check-clean", "assert", "print"), (None, "check-clean", None)],
    "previous_and_next": [
        ("next", "[1 · One](01_single_worker.ipynb)", "1 · One"), ("next", " · Next: 3 · Three", ""),
        (None, "next", None),
    ],
    "readable_unique_ids": [
        ("run", "run", "0a1b2c3d"), ("run", "run", "wait"), ("run", "run", "Run_It"), ("run", "run", "deadbeef"),
    ],
    "short_cells": [("run", "subprocess", "\n" * 25 + "subprocess"), ("run", ..., "")],
    "few_words": [("setup", "## Setup", "## Setup\n\n" + "word " * 120)],
    "known_magics": [
        ("stop", "%killbgscripts", "%pip install x"), ("stop", "%killbgscripts", "!ls"),
        ("run", "subprocess", "x = !ls\nsubprocess"),
        ("start", "%%bash --bg", "%%sh"), ("start", "%%bash --bg", "%%bash --bg --out x"),
        ("run", ..., "print?"), ("run", ..., "get_ipython().system('ls')"),
        ("write-mnist-setup", "%%writefile ", "%%writefile -a "),
    ],
    "background_with_exec": [
        ("start", "exec ", ""), ("start", " &> job_0.log", ""), ("start", "job_0.log", "job_0.log\necho"),
        ("title", 3, None),
    ],
    "no_sleep": [
        ("wait", "sleep(0.1)", "sleep(10)"), ("wait", "    time.sleep", "    pass\ntime.sleep"),
        ("start", "exec", "sleep 1\nexec"),
    ],
    "waits_have_named_deadlines": [
        ("run", "timeout=DEADLINE", "timeout=9"), ("run", ", timeout=DEADLINE", ""), ("run", ..., "child.wait()"),
        ("run", ..., "cluster.wait(deadline=30)"), ("run", ..., "child.communicate()"),
    ],
    "no_fixed_port": [("run", '"true"', '"127.0.0.1:2222"'), ("start", "main.py", "main.py localhost:80")],
    "no_absolute_path": [
        ("run", '"true"', '"/bin/true"'), ("start", "job_0", "/tmp/job_0"), ("run", '"true"', r'"C:\\x"'),
    ],
    "no_comment_markers": [("run", "subprocess", "# NBVAL_SKIP\nsubprocess")],
    "known_tags_with_reasons": [
        ("run", None, {"tags": ["nbval-ignore-output"]}),
        ("run", None, {"tags": ["nbval-skip"], "reason": "one two three"}),
        ("run", None, {"tags": ["raises-exception"], "reason": "because"}),
        [(name, None, {"tags": ["nbval-ignore-output"], "reason": "times differ always"}) for name in ("run", "wait")],
    ],
    "output_does_not_hang_on_a_semicolon": [("run", "DEADLINE)", "DEADLINE);")],
    "asserts_teach": [("check-clean", ', "TF_CONFIG is set."', "")],
    "plots_say_what_they_show": [
        ("plot", 'plt.title("It falls")', ""), ("plot", 'plt.ylabel("loss")', ""), ("plot", "print(1)", ""),
    ],
    "modules_are_folded_in_later_lessons": [("write-mnist-setup", None, {})],
    "no_belittling_words": [("in-practice", "More.", "Just run it."), ("recap", "one", "obviously one")],
    "nothing_left_to_write": [("in-practice", "More.", "TO WRITE: more."), ("run", "subprocess", "# TODO\nsubprocess")],
    "images_have_words": [
        ("diagram", "Two workers that share one batch.", ""), ("diagram", "![Two", '<img src="x.svg"> ![Two'),
    ],
    "links_lead_somewhere": [
        ("next", "3 · Three", "[3 · Three](03_sharding.ipynb)"), ("diagram", "two.svg", "three.svg"),
    ],
}  # fmt: skip


@pytest.fixture
def lesson(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("images/two.svg", "01_single_worker.ipynb", "02_two_workers.ipynb"):
        (tmp_path / name).touch()
    cells = []
    for name, source, *metadata in GOOD:
        new_cell = nbformat.v4.new_code_cell if name.startswith("C ") else nbformat.v4.new_markdown_cell
        cell = new_cell(source, metadata=dict(*metadata))
        cell.id = name.removeprefix("C ")
        cells.append(cell)
    return Lesson(tmp_path / "02_two_workers.ipynb", cells)


def break_lesson(lesson, name, old, new):
    cell = next(cell for cell in lesson.cells if cell.id == (name or old))
    if name is None:
        lesson.cells.remove(cell)
    elif old is None:
        cell.metadata = nbformat.from_dict(new)
    elif isinstance(old, int):
        lesson.path = lesson.path.with_name(f"0{old}_x.ipynb")
    elif old is ...:
        cell.source = new
    elif name == old:
        cell.id = new
    else:
        assert old in cell.source, "this change changes nothing"
        cell.source = cell.source.replace(old, new)


def complaints(rule, lesson):
    return list(rule(lesson))


def test_a_plot_without_words_is_refused(lesson):
    cell = next(cell for cell in lesson.cells if cell.id == "run")
    cell.outputs = [nbformat.v4.new_output("display_data", data={"image/png": "", "text/plain": "<Figure>"})]
    rule = next(rule for rule in RULES if rule.__name__ == "images_have_words")
    assert complaints(rule, lesson) == ["cell run: no alt in its metadata that says what its picture shows"]
    cell.metadata["alt"] = "Two curves that fall together."
    assert complaints(rule, lesson) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_lesson_keeps_this_rule(path, rule):
    found = complaints(rule, Lesson.read(path))
    assert not found, f"{path.name}: " + "; ".join(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_lesson_passes(rule, lesson):
    assert complaints(rule, lesson) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_lesson_that_breaks_the_rule_is_refused(rule, lesson):
    good = nbformat.from_dict({"cells": lesson.cells}).cells
    path = lesson.path
    for changes in BROKEN[rule.__name__]:
        lesson.cells, lesson.path = nbformat.from_dict({"cells": good}).cells, path
        for change in changes if isinstance(changes, list) else [changes]:
            break_lesson(lesson, *change)
        assert complaints(rule, lesson), f"not refused: {changes}"
