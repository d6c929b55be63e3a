"""The rules of the notebooks. Each takes a Lesson and yields a complaint, in words, for every place that breaks it."""

import ast
import dataclasses
import functools
import pathlib
import re

import nbformat
from lessons import NAMES

LESSONS = [f"{name}.ipynb" for name in NAMES]
INTRODUCED_IN = {"mnist_setup.py": 1, "main.py": 2, "multi_worker.py": 2, "local_cluster.py": 2}
MAGICS = r"%%writefile [\w.]+|%%bash|%%bash --bg|%killbgscripts|%matplotlib inline"
TAGS = {"nbval-ignore-output", "raises-exception"}
LINES_IN_A_CELL, WORDS_IN_A_CELL, POLL_SECONDS = 25, 120, 0.2
STARTS_AND_WAITS = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}

RULES = []


def rule(function):
    RULES.append(function)
    return function


@dataclasses.dataclass
class Lesson:
    """One notebook: its path (its number and the files beside it count) and its cells."""

    path: pathlib.Path
    cells: list

    @classmethod
    def read(cls, path):
        return cls(path, nbformat.read(path, as_version=4).cells)

    @property
    def number(self):
        return int(self.path.name[:2])

    @property
    def code(self):
        return [cell for cell in self.cells if cell.cell_type == "code"]

    @property
    def text(self):
        return [cell for cell in self.cells if cell.cell_type == "markdown"]

    @property
    def own_code(self):
        """Code cells without the %%writefile cells, whose files have linters of their own."""
        return [cell for cell in self.code if not cell.source.startswith("%%writefile")]

    def section(self, title):
        """The cells from the heading `## title` (a regular expression) to the next of that level; [] without it."""
        heads = [(index, text) for index, cell in enumerate(self.cells) for _, text in headings(cell)]
        starts = [index for index, text in heads if re.fullmatch(title, text)]
        if len(starts) != 1:
            return []
        return self.cells[starts[0] : next((index for index, _ in heads if index > starts[0]), len(self.cells))]

    @property
    def opening(self):
        """The cells before the first `##`."""
        count = next((i for i, cell in enumerate(self.cells) if any(level == 2 for level, _ in headings(cell))), 0)
        return self.cells[:count]

    @property
    def things_to_learn(self):
        table = next((rows for rows in map(table_of, self.opening) if rows), [[]])
        learn = [cells for cells in zip(*table) if plain(cells[0]) == "you'll learn"]
        return re.split(r"\s*<br\s*/?>\s*", learn[0][1]) if learn and len(learn[0]) > 1 else []


def without_code(source):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^```.*?^```", "", source))


def headings(cell):
    if cell.cell_type != "markdown":
        return []
    found = re.findall(r"(?m)^(#{1,2}) (.+?)\s*$", re.sub(r"(?ms)^```.*?^```", "", cell.source))
    return [(len(marks), text) for marks, text in found]


def links(cell):
    """(is an image, words, target) of each link and image, in Markdown or as an <img>."""
    prose = without_code(cell.source)
    found = re.findall(r"(!?)\[([^\]]*)\]\(([^)\s]+)[^)]*\)", prose)
    for tag in re.findall(r"<img\b[^>]*>", prose):
        attributes = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        found.append(("!", attributes.get("alt", ""), attributes.get("src", "")))
    return [(bool(mark), words, target) for mark, words, target in found]


def table_of(cell):
    """Rows of the cell's first Markdown table, each a list of its cells."""
    rows = re.findall(r"(?m)^\|(.+)\|\s*$", cell.source)
    return [[part.strip() for part in row.split("|")] for row in rows if not re.fullmatch(r"[\s|:-]+", row)]


FOLDED = "metadata: jupyter.source_hidden"


def is_folded(cell):
    return cell.metadata.get("jupyter", {}).get("source_hidden") is True


def plain(text):
    return text.replace("’", "'").strip(" *").lower()


@functools.cache
def parsed(source):
    """The syntax tree of a code cell's Python; empty for a cell that is all magic."""
    if source.startswith("%%"):
        return ast.parse("")
    return ast.parse(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source))


def long_sleeps(tree):
    """Lines of a syntax tree that wait a fixed time: not in a loop, or for longer than a poll."""
    found, polls = [], {id(node) for loop in ast.walk(tree) if isinstance(loop, ast.While) for node in ast.walk(loop)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "sleep":
            seconds = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if id(node) not in polls or seconds is None or seconds > POLL_SECONDS:
                found.append(node.lineno)
    return sorted(found)


def nodes(lesson, kind):
    for cell in lesson.own_code:
        for node in ast.walk(parsed(cell.source)):
            if isinstance(node, kind):
                yield cell, node


# The order of a lesson


@rule
def title_and_what_you_will_have(lesson):
    title = lesson.cells[0]
    if not re.match(rf"# {lesson.number} · .+\n\n[A-Z]\w+ .+\.(\n|$)", title.source):
        yield f"cell {title.id}: should be `# {lesson.number} · …`, then one sentence: what you will have at the end"
    if sum(level == 1 for cell in lesson.cells for level, _ in headings(cell)) != 1:
        yield "it should have one heading of the first level"


@rule
def series_line(lesson):
    lines = [line for cell in lesson.opening for line in cell.source.splitlines()]
    line = next((line for line in lines if f"**{lesson.number} " in line), "")
    if len(re.findall(r"\*\*.+?\*\*", line)) != 1 or sum(f"{number} " in line for number in range(1, 8)) != 7:
        yield f"no line with all seven lessons, of which `**{lesson.number} …**` alone is bold"
    for name in LESSONS:
        if name != lesson.path.name and (lesson.path.parent / name).exists() and f"]({name})" not in line:
            yield f"its line of lessons has no link to {name}"


@rule
def how_to_run(lesson):
    lines = [line for cell in lesson.opening for line in cell.source.splitlines()]
    if not any("`make lab`" in line and "Colab" in line for line in lines):
        yield "no line before the first section that says how to run it, with `make lab` and with Colab"


@rule
def table_of_four(lesson):
    tables = [table_of(cell) for cell in lesson.opening]
    table = next((rows for rows in tables if rows), [[]])
    if [plain(head) for head in table[0]] != ["time", "you'll do", "you'll learn", "you'll need"] or len(table) != 2:
        yield "no table Time | You'll do | You'll learn | You'll need with one row before the first section"
    elif not 3 <= len(lesson.things_to_learn) <= 5 or not all(table[1]):
        yield f"{len(lesson.things_to_learn)} things to learn (set apart by <br>), not 3 to 5; or an empty field"


@rule
def diagram(lesson):
    images = [target for cell in lesson.opening for is_image, _, target in links(cell) if is_image]
    if len(images) != 1 or not images[0].endswith(".svg"):
        yield "no single SVG diagram before the first section"


@rule
def environment_before_tensorflow(lesson):
    code = "\n".join(cell.source for cell in lesson.own_code)
    for name in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG"):
        if "import tensorflow" in code and not 0 <= code.find(f'"{name}"') < code.find("import tensorflow"):
            yield f"{name} is not set before `import tensorflow`"


@rule
def all_numbers_in_one_cell(lesson):
    if [cell.id for cell in lesson.code].count("numbers") != 1:
        yield "no cell `numbers`"
    for cell, node in nodes(lesson, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name) and target.id.isupper()]
        if names and isinstance(node.value, ast.Constant) and cell.id != "numbers":
            yield f"cell {cell.id}: {names[0]} belongs to the cell `numbers`"


@rule
def sections_in_order(lesson):
    wanted = ["Try it", "In practice", "Recap", "Clean up"]
    found = [text for cell in lesson.cells for level, text in headings(cell) if level == 2 and text in wanted]
    if found != wanted:
        yield f"sections {found} should be {wanted}"


@rule
def what_changes_as_a_diff(lesson):
    if not any("```diff" in cell.source for cell in lesson.section("What (will change|changed)")):
        yield "no section `What changed` (in lesson 1 `What will change`) with a ```diff"


@rule
def exercises(lesson):
    section = {cell.id: cell for cell in lesson.section("Try it")}
    names = [name.removesuffix("-solution") for name in section if re.fullmatch(r"exercise-.+-solution", name)]
    if not 2 <= len(names) <= 3:
        yield f"{len(names)} exercises (cells `exercise-NAME-solution`) in `Try it`, not 2 or 3"
    for name in names:
        parts = [f"{name}-say", name, f"{name}-check", f"{name}-solution"]
        if [part for part in section if part in parts] != parts:
            yield f"{name}: should be the cells {', '.join(parts)}"
        elif "assert" not in section[f"{name}-check"].source:
            yield f"cell {name}-check: asserts nothing"
        elif not is_folded(section[f"{name}-solution"]):
            yield f"cell {name}-solution: is not folded ({FOLDED})"
        elif section[f"{name}-solution"].metadata["jupyter"].get("outputs_hidden") is not True:
            yield f"cell {name}-solution: shows its output, which is the answer (metadata: jupyter.outputs_hidden)"


@rule
def recap_answers_what_you_learn(lesson):
    bullets = re.findall(r"(?m)^[-*] ", "\n".join(cell.source for cell in lesson.section("Recap")))
    if len(bullets) != len(lesson.things_to_learn):
        yield f"{len(bullets)} bullets in `Recap` for {len(lesson.things_to_learn)} things to learn"


@rule
def clean_up_asserts(lesson):
    section = [cell for cell in lesson.section("Clean up") if cell.cell_type == "code"]
    if not section or section[-1] is not lesson.code[-1] or "assert" not in section[-1].source:
        yield "the last code cell should be in `Clean up` and assert that nothing is left"


@rule
def previous_and_next(lesson):
    last = lesson.cells[-1]
    for word, place in (("Previous", lesson.number - 2), ("Next", lesson.number)):
        if not 0 <= place < len(LESSONS):
            continue
        exists = (lesson.path.parent / LESSONS[place]).exists()
        linked = re.search(rf"{word}: \[[^\]]+\]\({re.escape(LESSONS[place])}\)", last.source)
        if last.cell_type != "markdown" or f"{word}: " not in last.source or (exists and not linked):
            yield f"cell {last.id}: the last cell should say `{word}: `, with a link to {LESSONS[place]} if that exists"


# Cells


@rule
def readable_unique_ids(lesson):
    ids = [cell.get("id", "") for cell in lesson.cells]
    for name in ids:
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or re.fullmatch(r"[0-9a-f]{6,}|.{0,2}|.{41,}", name):
            yield f"cell {name!r}: its id should be words in small letters with hyphens"
        if ids.count(name) > 1:
            yield f"cell {name!r}: two cells have this id"


@rule
def short_cells(lesson):
    for cell in lesson.own_code:
        if not 0 < len(cell.source.splitlines()) <= LINES_IN_A_CELL:
            yield f"cell {cell.id}: {len(cell.source.splitlines())} lines, not 1 to {LINES_IN_A_CELL}"


@rule
def few_words(lesson):
    for cell in lesson.text:
        words = len(re.findall(r"\S*\w\S*", re.sub(r"(?m)^\|.*$", "", without_code(cell.source))))
        if words > WORDS_IN_A_CELL and cell not in lesson.section("In practice") + lesson.section("Recap"):
            yield f"cell {cell.id}: {words} words, more than {WORDS_IN_A_CELL}"


@rule
def known_magics(lesson):
    for cell in lesson.code:
        lines = cell.source.splitlines()
        if cell.source.startswith("%%"):
            lines = lines[:1]
        for line in lines:
            if re.match(r"\s*[%!]|\s*[\w., ]+= *[%!]\w", line) and not re.fullmatch(MAGICS, line.strip()):
                yield f"cell {cell.id}: {line.strip()!r} is not one of the magics that are allowed"
            if re.search(r"\?\s*$|^\s*\?\w|get_ipython", line.split("#")[0]):
                yield f"cell {cell.id}: {line.strip()!r} is for IPython alone"


@rule
def background_with_exec(lesson):
    for cell in lesson.code:
        if cell.source.startswith("%%bash --bg"):
            if lesson.number != 2:
                yield f"cell {cell.id}: `%%bash --bg` is for lesson 2; use LocalCluster"
            if not re.match(r"exec .*>", cell.source.strip().splitlines()[-1]):
                yield f"cell {cell.id}: should end with `exec …`, its output in a file: else %killbgscripts misses it"


@rule
def no_sleep(lesson):
    for cell in lesson.own_code:
        if long_sleeps(parsed(cell.source)):
            yield f"cell {cell.id}: sleeps; poll in a `while` with a deadline, {POLL_SECONDS} s at most each time"
    for cell in lesson.code:
        if cell.source.startswith("%%bash") and re.search(r"\bsleep\b", cell.source):
            yield f"cell {cell.id}: sleeps in bash"


@rule
def waits_have_named_deadlines(lesson):
    for cell, node in nodes(lesson, ast.Call):
        given = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "deadline")]
        if any(isinstance(value, ast.Constant) for value in given):
            yield f"cell {cell.id}: line {node.lineno} has a number for its deadline; name it in the cell `numbers`"
        name = ast.unparse(node.func)
        may_wait = name in STARTS_AND_WAITS or name.endswith((".wait", ".communicate"))
        if may_wait and not given and not (name.endswith(".wait") and node.args):
            yield f"cell {cell.id}: {name}() in line {node.lineno} has no deadline"


@rule
def no_fixed_port(lesson):
    for cell in lesson.own_code:
        if found := re.search(r"(?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\]):\d+", cell.source):
            yield f"cell {cell.id}: the fixed port {found[0]}; take a free one"


@rule
def no_absolute_path(lesson):
    for cell in lesson.own_code:
        if found := re.search(r"(?<![\w.:/])(?:/(?!dev/null\b)[A-Za-z]\w*/\w*|[A-Z]:\\)", cell.source):
            yield f"cell {cell.id}: the absolute path {found[0]}…"


@rule
def no_comment_markers(lesson):
    for cell in lesson.code:
        if re.search(r"(?i)#\s*(NBVAL_|PYTEST_VALIDATE)", cell.source):
            yield f"cell {cell.id}: has a comment for nbval; use a tag, comments land in written files"


@rule
def known_tags_with_reasons(lesson):
    ignored = 0
    for cell in lesson.code:
        tags = set(cell.metadata.get("tags", []))
        if tags - TAGS:
            yield f"cell {cell.id}: unknown tags {sorted(tags - TAGS)}"
        if tags & TAGS and len(cell.metadata.get("reason", "").split()) < 3:
            yield f"cell {cell.id}: no reason for its tag (metadata: reason)"
        ignored += "nbval-ignore-output" in tags
    if 10 * ignored >= len(lesson.code):
        yield f"{ignored} of {len(lesson.code)} cells ignored by nbval; fewer than 1 in 10 may be"


@rule
def output_does_not_hang_on_a_semicolon(lesson):
    for cell in lesson.own_code:
        if cell.source.rstrip().endswith(";"):
            yield f"cell {cell.id}: Jupyter hides output after `;`, nbval does not; give the value a name instead"


@rule
def asserts_teach(lesson):
    for cell, node in nodes(lesson, ast.Assert):
        if node.msg is None:
            yield f"cell {cell.id}: line {node.lineno} asserts without a message"


@rule
def plots_say_what_they_show(lesson):
    code = lesson.own_code
    helpers = {node.name: ast.unparse(node) for _, node in nodes(lesson, ast.FunctionDef)}
    for cell, following in zip(code, [*code[1:], None]):
        if ".show()" not in cell.source and not any("image/png" in output.get("data", {}) for output in cell.outputs):
            continue
        source = "\n".join([cell.source, *(text for name, text in helpers.items() if f"{name}(" in cell.source)])
        if not re.search(r"\btitle|set_title", source):
            yield f"cell {cell.id}: its plot has no title"
        names = [re.search(pattern, source) for pattern in (r"xlabel", r"ylabel|yticklabels")]
        if not all(names) and 'axis("off")' not in source and "xticks=[]" not in source:
            yield f"cell {cell.id}: its plot has no axis labels"
        if "print(" not in cell.source + (following.source if following else ""):
            yield f"cell {cell.id}: its plot has no text twin printed below it"


@rule
def modules_are_folded_in_later_lessons(lesson):
    for cell in lesson.code:
        written = re.match(r"%%writefile (\S+)", cell.source)
        if written and INTRODUCED_IN.get(written[1], lesson.number) < lesson.number:
            if not is_folded(cell):
                yield f"cell {cell.id}: {written[1]} was shown in an earlier lesson; fold it ({FOLDED})"


# Prose


@rule
def no_belittling_words(lesson):
    for cell in lesson.text:
        if found := re.search(r"(?i)\b(just|simply|obviously|of course|trivial(ly)?)\b", without_code(cell.source)):
            yield f"cell {cell.id}: {found[0]!r}"


@rule
def nothing_left_to_write(lesson):
    for cell in lesson.cells:
        if found := re.search(r"TO WRITE|TODO|FIXME|XXX", cell.source):
            yield f"cell {cell.id}: {found[0]!r}"


@rule
def images_have_words(lesson):
    for cell in lesson.text:
        for is_image, words, target in links(cell):
            if is_image and len(words.split()) < 4:
                yield f"cell {cell.id}: no alt text that says what {target} shows"
    for cell in lesson.code:
        shows = any(name.startswith("image/") for output in cell.outputs for name in output.get("data", {}))
        if shows and len(cell.metadata.get("alt", "").split()) < 4:
            yield f"cell {cell.id}: no alt in its metadata that says what its picture shows"


@rule
def links_lead_somewhere(lesson):
    for cell in lesson.text:
        for _, _, target in links(cell):
            file = lesson.path.parent / target.partition("#")[0]
            if not re.match(r"https?://|#|mailto:", target) and not file.exists():
                yield f"cell {cell.id}: {target} does not exist"
