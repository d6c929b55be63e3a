"""What holds for the files as a whole: README, Makefile, and what no tracked file may contain."""

import ast
import pathlib
import re
import subprocess

import pytest
from lesson_rules import long_sleeps

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Folders in which people's, CI's and build machines' files are; and hosts and options that choose a package index.
MACHINE_PATH = re.compile(r"(?<![\w.:/$}~*+-])/(?:home|Users|root|work|builds|farm)/\w")
PACKAGE_INDEX = re.compile(
    r"(?i)\bpypi\.[a-z]|pythonhosted|artifactory|\bnexus\.|index-url[= ]\s*\S*//|trusted-host[= ]"
)


def tracked_files():
    """Texts of the files that git tracks, or will once they are added."""
    listing = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, text=True, timeout=30
    )
    texts = {}
    for name in filter(None, listing.split("\0")):
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # a data file; one that is removed but not yet committed
            pass
    return texts


def unknown_make_targets(text, makefile):
    """Targets that the code in this text names and the Makefile does not have."""
    targets = set(re.findall(r"(?m)^([\w-]+)\s*:(?!=)", makefile))
    code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"(?m)^    (.+)$", text)
    return {name for line in code for name in re.findall(r"\bmake ([a-z][\w-]*)", line)} - targets


def unlinked_notebooks(readme, names):
    rows = "\n".join(line for line in readme.splitlines() if line.startswith("|"))
    return [name for name in names if f"](notebooks/{name})" not in rows]


def dead_links(text, folder):
    targets = re.findall(r"\]\((?!https?://|#)([^)\s#]+)", re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", text))
    return [target for target in targets if not (folder / target).exists()]


def test_only_make_targets_that_exist_are_named():
    pages = {name: text for name, text in tracked_files().items() if name.endswith(".md")}
    assert "make train" in pages["README.md"] and "make test" in pages["README.md"] and len(pages) > 3
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    unknown = {name: unknown_make_targets(text, makefile) for name, text in pages.items()}
    assert not any(unknown.values()), unknown


def test_readme_has_every_lesson_in_its_table():
    names = [path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    assert unlinked_notebooks((ROOT / "README.md").read_text(encoding="utf-8"), names) == []


def test_links_between_files_lead_somewhere():
    pages = {name: text for name, text in tracked_files().items() if name.endswith(".md")}
    assert "README.md" in pages
    dead = {name: dead_links(text, (ROOT / name).parent) for name, text in pages.items()}
    assert not any(dead.values()), dead


def test_no_file_names_a_machine_or_a_package_index():
    texts = tracked_files()
    assert {"README.md", "Makefile", "main.py"} <= texts.keys()
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts.items()
        if pathlib.Path(name) != pathlib.Path(__file__).relative_to(ROOT)
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line) or PACKAGE_INDEX.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_test_sleeps_instead_of_waiting_for_something(path):
    assert long_sleeps(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_these_rules_refuse_what_they_are_for():
    assert unknown_make_targets("Run `make tea`, or\n\n    make train  # this\n", "train: x\nX := 1\n") == {"tea"}
    assert unlinked_notebooks("[1](notebooks/1.ipynb)\n| [2](notebooks/2.ipynb) |", ["1.ipynb", "2.ipynb"]) == [
        "1.ipynb"
    ]
    assert dead_links("[a](b.md) `[c](d.md)` [e](https://f) [g](#h) [i](test_repository.py)", ROOT / "tests/lint") == [
        "b.md"
    ]
    for bad in ("in /home/me/x", '"/work/x"', "(/root/x)", "/Users/me"):
        assert MACHINE_PATH.search(bad), bad
    for good in ("tests/work/x", "../home/x", "$HOME/work/x", "https://example.org/home/x", "/path/to/mnist.npz"):
        assert not MACHINE_PATH.search(good), good
    for bad in (
        "https://pypi.org/simple",
        "pip install --index-url https://x",
        "--extra-index-url=file:///x",
        "trusted-host x",
    ):
        assert PACKAGE_INDEX.search(bad), bad
    assert not PACKAGE_INDEX.search("a package index for the first run")
    polls_and_sleeps = "import time\nwhile True:\n    time.sleep(0.1)\n    time.sleep(5)\ntime.sleep(0.1)"
    assert long_sleeps(ast.parse(polls_and_sleeps)) == [4, 5]
