"""Each rule of sanitise.cfg: what it makes equal, and lines that it must leave alone."""

import pathlib
import re

import pytest
from nbval.plugin import get_sanitize_patterns

TEXT = (pathlib.Path(__file__).parent / "sanitise.cfg").read_text(encoding="utf-8")
RULES = get_sanitize_patterns(TEXT)

CHANGED = [
    ("Overwriting main.py", "Writing main.py"),
    ("Overwriting lessons.mplstyle\n", "Writing lessons.mplstyle\n"),
    ("first\nOverwriting main.py\nlast\n", "first\nWriting main.py\nlast\n"),
    ('"worker": ["127.0.0.1:43121", "127.0.0.1:8123"]', '"worker": ["127.0.0.1:PORT", "127.0.0.1:PORT"]'),
    ("Started server with target: grpc://127.0.0.1:39999", "Started server with target: grpc://127.0.0.1:PORT"),
    ("MNIST: mnist_sample.npz (from MNIST_NPZ), 4000 images", "MNIST: data/mnist_sample.npz, 4000 images"),
    ("70/70 - 14s - 193ms/step - accuracy: 0.1717 - loss: 2.2771", "70/70 - TIME - accuracy: 0.1717 - loss: 2.2771"),
    ("9/9 - 1s - 1s/step - loss: 2.2", "9/9 - TIME - loss: 2.2"),
]
UNCHANGED = [
    "Writing main.py",
    "Overwriting all of it",
    "it says Overwriting main.py",
    "loss 2.2839, accuracy 0.32, 127 steps, 70/70",
    "10.127.0.0.1:43121.5 and 127.0.0.10:43121 and localhost:43121",
    "127.0.0.1:80, 127.0.0.1:431219",
    "MNIST: mnist.npz (from MNIST_NPZ), 60000 images to train",
    "MNIST: data/mnist_sample.npz, 4000 images to train, 1000 to test",
    "a step takes 193ms/step, 70/70",
    "an epoch of 70/70 - 14s - 193ms/step - loss: 2.2",
    "all of MNIST: mnist_sample.npz (from MNIST_NPZ), 4000 images",
]


def sanitised(text, rules=RULES):
    for regex, replacement in rules:  # as nbval does
        text = re.sub(regex, replacement, text)
    return text


@pytest.mark.parametrize("before, after", CHANGED)
def test_a_rule_makes_this_line_stable(before, after):
    assert sanitised(before) == after == sanitised(after)


@pytest.mark.parametrize("line", UNCHANGED)
def test_no_rule_touches_this_line(line):
    assert sanitised(line) == line


def test_every_rule_is_needed_and_has_its_cause_above_it():
    with_cause = re.findall(r"\n\n[A-Z]\w+[^\n:]*: [^\n]+\nregex:", TEXT)
    assert len(with_cause) == len(RULES) == TEXT.count("regex:") == TEXT.count("replace:")
    for rule in RULES:
        others = [other for other in RULES if other != rule]
        assert any(sanitised(before, others) != after for before, after in CHANGED), rule
