"""What runs of main.py have written, read and compared by the tests of every launcher."""

import io
import json
import pathlib
import subprocess
import sys
import zipfile

import numpy as np

from local_cluster import LocalCluster

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What the tests of engines train; `local_results` says what must come of it.
TRAINING = ["--epochs", "4", "--steps-per-epoch", "30", "--learning-rate", "0.01"]


def local_results(folder):
    """History and weights of TRAINING on two workers of LocalCluster, undisturbed."""
    with LocalCluster(ROOT / "main.py", 2, [*TRAINING, *results_in(folder)]) as local:
        local.wait(deadline=180)
    return read_results(folder)


def results_in(folder):
    """The arguments that make main.py write its results in this folder."""
    return ["--history", folder / "history.json", "--model-path", folder / "model.keras"]


def read_results(folder):
    """The history and the weights in this folder."""
    return json.loads((folder / "history.json").read_text()), weights_in(folder / "model.keras")


def assert_same_results(folder, expected):
    """The results in this folder are, to the last bit, those that `read_results` gave before."""
    (history, weights), (expected_history, expected_weights) = read_results(folder), expected
    assert history == expected_history
    for ours, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def weights_in(model_path):
    """The weights of a saved model, loaded as a plain Keras model by a process that has none of this project's files."""
    code = "import sys, numpy, tensorflow as tf; m = tf.keras.models.load_model(sys.argv[1]); "
    code += "numpy.savez(sys.argv[2], *m.get_weights())"
    arrays_path = model_path.with_suffix(".npz")
    command = [sys.executable, "-c", code, model_path, arrays_path]
    subprocess.run(command, cwd=model_path.parent, check=True, capture_output=True, timeout=60)
    with np.load(arrays_path) as arrays:
        return [arrays[name] for name in arrays.files]


def arrays_in(model_path):
    """All variables in a .keras file of Keras 3, the optimizer's too, by their paths in it; nothing is loaded."""
    import h5py

    arrays = {}
    with zipfile.ZipFile(model_path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
        file.visititems(lambda name, item: arrays.update({name: item[()]}) if hasattr(item, "shape") else None)
    return arrays
