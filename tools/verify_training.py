"""Checks what `make train` left in a folder, says what holds, and exits 1 if anything does not.

    python tools/verify_training.py FOLDER

The folder holds worker_0.log and worker_1.log, history.json and model.keras.
"""

import json
import os
import pathlib
import re
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main(folder):
    # What Keras prints at the end of an epoch: "70/70 - 3s - 49ms/step - accuracy: 0.5 - loss: 2.2"; tf_keras: loss first.
    at_the_end = r"accuracy: [\d.]+ - loss: [\d.]+|loss: [\d.]+ - accuracy: [\d.]+"
    epoch_lines = [re.findall(at_the_end, log.read_text()) for log in sorted(folder.glob("worker_*.log"))]
    losses = json.loads((folder / "history.json").read_text())["loss"]
    agree = len(epoch_lines) >= 2 and len(epoch_lines[0]) == len(losses) and all(e == epoch_lines[0] for e in epoch_lines)
    report(agree, f"all {len(epoch_lines)} workers report the same loss and accuracy in each epoch")
    report(losses[-1] < losses[0], f"the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")

    import tensorflow as tf

    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
    import mnist_setup

    _, (x_test, y_test) = mnist_setup.load_mnist()
    model = tf.keras.models.load_model(folder / "model.keras")
    right = (model.predict(x_test, verbose=0).argmax(axis=1) == y_test).mean()
    report(right > 0.2, f"{folder / 'model.keras'} reloads, and names {right:.0%} of the test digits (10% is chance)")


def report(holds, what):
    print(("verified: " if holds else "NOT SO: ") + what)
    if not holds:
        sys.exit(1)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
