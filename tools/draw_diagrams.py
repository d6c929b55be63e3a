"""Draws the lessons' diagrams, notebooks/images/*.svg: one scene that grows from lesson to lesson.

python tools/draw_diagrams.py          writes them
python tools/draw_diagrams.py --check  exits 1 if a file is not what this script draws
"""

import pathlib
import sys

IMAGES = pathlib.Path(__file__).resolve().parent.parent / "notebooks" / "images"
# Okabe and Ito's colours, as in the plots: told apart by colour-blind readers.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"


class Drawing:
    """Shapes on a light card, which reads the same in a light and in a dark notebook."""

    def __init__(self, title, width=760, height=300):
        self.title, self.width, self.height, self.parts = title, width, height, []

    def text(self, x, y, words, size=14, color="#222222", anchor="middle", bold=False):
        weight = ' font-weight="bold"' if bold else ""
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>{words}</text>'
        )

    def box(self, x, y, width, height, words="", color=GREY, fill="white", size=14, bold=False, dashed=False):
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{color}" '
            f'stroke-width="1.6"{dash}/>'
        )
        lines = words.split("\n")
        for number, line in enumerate(lines):
            middle = y + height / 2 + 5 + (number - (len(lines) - 1) / 2) * (size + 3)
            self.text(x + width / 2, middle, line, size, bold=bold)

    def arrow(self, x1, y1, x2, y2, color=GREY, both=False):
        start = f' marker-start="url(#tip{color[1:]})"' if both else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="2" '
            f'marker-end="url(#tip{color[1:]})"{start}/>'
        )

    def svg(self):
        tips = "".join(
            f'<marker id="tip{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{color}"/></marker>'
            for color in (BLUE, ORANGE, GREEN, RED, GREY)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="DejaVu Sans, Verdana, sans-serif">\n'
            f"<title>{self.title}</title>\n<defs>{tips}</defs>\n"
            f'<rect x="1" y="1" width="{self.width - 2}" height="{self.height - 2}" rx="10" fill="#FAFAFA" stroke="#CCCCCC"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def worker(drawing, x, title, batch, color, y=40, width=300):
    """One worker: its batch, its copy of the model, its gradients."""
    drawing.box(x, y, width, 170, color=color, fill="#F2F7FA" if color == BLUE else "#FDF6E8")
    drawing.text(x + 14, y + 24, title, 15, color="#222222", anchor="start", bold=True)
    for number, words in enumerate((batch, "copy of\nthe model", "gradients")):
        left = x + 14 + number * 96
        drawing.box(left, y + 60, 80, 64, words, color, size=13)
        if number:
            drawing.arrow(left - 15, y + 92, left - 1, y + 92, color)


def two_workers(title, titles=("worker 0 · chief", "worker 1"), batches=("its 64\nimages", "its 64\nimages"), height=300):
    drawing = Drawing(title, height=height)
    worker(drawing, 40, titles[0], batches[0], BLUE)
    worker(drawing, 420, titles[1], batches[1], ORANGE)
    return drawing


def all_reduce(drawing, words="all-reduce: both get the mean gradients, in every step"):
    for x in (286, 666):
        drawing.arrow(x, 166, x, 236, GREEN, both=True)
    drawing.box(60, 238, 640, 34, words, GREEN, fill="#EAF6F1")


def one_worker():
    drawing = Drawing("One worker: a batch goes through the model, the gradients change it, 210 times", height=240)
    worker(drawing, 230, "one worker", "a batch of\n64 images", BLUE)
    drawing.box(60, 100, 110, 64, "4,000 images\nshuffled", GREY)
    drawing.arrow(172, 132, 242, 132)
    drawing.parts.append(
        f'<path d="M476 166 V190 H380 V168" fill="none" stroke="{GREEN}" stroke-width="2" '
        f'marker-end="url(#tip{GREEN[1:]})"/>'
    )
    drawing.text(428, 206, "update, in every step", 13, GREEN)
    drawing.box(590, 100, 120, 64, "a model that\nreads digits", GREY)
    drawing.arrow(532, 132, 588, 132)
    return drawing


def two_in_step():
    drawing = two_workers("Two workers: each has a copy of the model and half the batch; an all-reduce joins the gradients")
    drawing.text(326, 64, "task: worker 0", 12, GREY, anchor="end")
    drawing.text(706, 64, "task: worker 1", 12, GREY, anchor="end")
    drawing.text(380, 26, "TF_CONFIG: one cluster, known to both; one task, each its own", 13, GREY)
    all_reduce(drawing)
    return drawing


def shared_batch():
    drawing = Drawing("A global batch of eight ids is cut in two: ids 0 to 3 for worker 0, ids 4 to 7 for worker 1", height=376)
    drawing.box(40, 30, 680, 64, fill="#F4F4F4", dashed=True)
    drawing.text(380, 58, "one global batch,", 13, GREY)
    drawing.text(380, 76, "ids 0 to 7", 13, GREY)
    for x, title, first, color in ((40, "worker 0 · chief", 0, BLUE), (420, "worker 1", 4, ORANGE)):
        for number in range(4):
            drawing.box(x + 66 + 44 * number, 44, 36, 36, str(first + number), color, bold=True)
        worker(drawing, x, title, "ids\n" + " ".join(str(first + number) for number in range(4)), color, y=124)
        drawing.arrow(x + 150, 82, x + 150, 122, color)
        drawing.arrow(x + 246, 250, x + 246, 316, GREEN, both=True)
    drawing.box(60, 318, 640, 34, "all-reduce: both get the mean gradients of all eight", GREEN, fill="#EAF6F1")
    return drawing


def saving():
    drawing = two_workers("Two workers save: both read the variables, the chief's file stays, the other's is removed")
    drawing.arrow(342, 190, 418, 190, GREEN, both=True)
    drawing.text(380, 180, "read", 12, GREEN)
    drawing.text(380, 206, "together", 12, GREEN)
    drawing.arrow(120, 212, 120, 242, BLUE)
    drawing.box(40, 244, 160, 34, "model.new.keras", BLUE, size=13, dashed=True)
    drawing.arrow(202, 261, 258, 261, BLUE)
    drawing.text(230, 252, "rename", 12, BLUE)
    drawing.box(260, 244, 120, 34, "model.keras", BLUE, size=13, bold=True)
    drawing.arrow(570, 212, 570, 242, ORANGE)
    drawing.box(420, 244, 300, 34, "workertemp_worker_1/model.new.keras", ORANGE, size=13, dashed=True)
    drawing.text(710, 236, "removed afterwards", 12, GREY, anchor="end")
    return drawing


def killed_and_resumed():
    drawing = two_workers(
        "Two workers with a backup: worker 1 is killed; after a restart both go on from the chief's one file", height=356
    )
    all_reduce(drawing, "all-reduce: without worker 1 it fails, so all must be started again")
    for x1, y1, x2, y2 in ((424, 44, 716, 206), (716, 44, 424, 206)):
        drawing.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{RED}" stroke-width="3"/>')
    drawing.text(570, 26, "kill -9", 14, RED, bold=True)
    drawing.box(40, 300, 300, 34, "backup.npz: all that the run needs", BLUE)
    drawing.arrow(50, 212, 50, 298, BLUE, both=True)
    drawing.text(420, 322, "written by the chief in one move; on a restart", 13, GREY, anchor="start")
    drawing.text(420, 340, "its bytes go to every worker", 13, GREY, anchor="start")
    return drawing


def a_step_of_time():
    drawing = two_workers("Two workers: in each step both compute, then 11 MB of gradients go each way", height=366)
    all_reduce(drawing, "all-reduce: each sends 4 bytes a weight × 2 (n − 1) / n: here 11 MB, in every step")
    for y, label, parts in (
        (290, "two workers", ((150, "compute", BLUE), (50, "latency", ORANGE), (170, "bytes / bandwidth", GREEN))),
        (326, "one, all images", ((300, "compute", BLUE),)),
    ):
        drawing.text(150, y + 18, label, 13, GREY, anchor="end")
        left = 160
        for width, words, color in parts:
            drawing.box(left, y, width, 26, words, color, size=11)
            left += width
    drawing.arrow(560, 339, 714, 339)
    drawing.text(637, 330, "time of a step", 12, GREY)
    return drawing


def many_machines():
    drawing = two_workers(
        "Two machines: an engine starts main.py on each and tells it by TF_CONFIG who it is",
        titles=("host1: worker 0 · chief", "host2: worker 1"), batches=("its share", "its share"), height=396,
    )  # fmt: skip
    drawing.parts = [f'<g transform="translate(0 62)">\n{chr(10).join(drawing.parts)}\n</g>']
    drawing.box(40, 16, 680, 40, "an engine: Slurm, Kubernetes, Ray: starts main.py on every host, all again if one fails", GREY)
    for x, words in ((190, "TF_CONFIG: task 0"), (570, "TF_CONFIG: task 1")):
        drawing.arrow(x, 58, x, 100)
        drawing.text(x + 10, 84, words, 12, GREY, anchor="start")
    for x in (286, 666):
        drawing.arrow(x, 228, x, 292, GREEN, both=True)
    drawing.box(60, 294, 640, 34, "the network: all-reduce in every step", GREEN, fill="#EAF6F1")
    drawing.box(60, 346, 640, 34, "one file system: code, data, backups, the model", BLUE)
    return drawing


DIAGRAMS = {
    "01_one_worker": one_worker,
    "02_two_workers": two_in_step,
    "03_sharding": shared_batch,
    "04_saving": saving,
    "05_backup_and_restore": killed_and_resumed,
    "06_performance": a_step_of_time,
    "07_many_machines": many_machines,
}


def main():
    stale = []
    for name, draw in DIAGRAMS.items():
        path, svg = IMAGES / f"{name}.svg", draw().svg()
        if "--check" in sys.argv[1:]:
            if not path.is_file() or path.read_text(encoding="utf-8") != svg:
                stale.append(path.name)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(svg, encoding="utf-8")
    if stale:
        sys.exit(f"not what tools/draw_diagrams.py draws: {', '.join(stale)}; run it again")


if __name__ == "__main__":
    main()
