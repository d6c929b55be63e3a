"""Saving and loading with two workers: no race, nothing left behind, plain Keras files, across worker counts."""

import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest
from legacy import LEGACY, only_keras_3
from saved_results import arrays_in

from local_cluster import LocalCluster, WorkerFailed

SCRIPT = pathlib.Path(__file__).with_name("saving_case.py")
for_keras_3 = only_keras_3("in tf_keras, moving statistics are averaged on reading")
pytestmark = pytest.mark.slow

# Run in a folder without this project's files: what was saved must be plain.
FRESH = """
import importlib.util, json, sys
import numpy as np
import tensorflow as tf
assert importlib.util.find_spec("multi_worker") is None
x = np.load("images.npy"); y = np.load("labels.npy")
model = tf.keras.models.load_model("models/model.keras")
np.save("loaded.npy", model.predict(x[:100], verbose=0))
exported = tf.saved_model.load("exported/model")
np.save("served.npy", exported.serve(x[:100]).numpy())
np.save("kept.npy", tf.keras.models.load_model("kept/best.keras").predict(x[:100], verbose=0))
iterations = [int(model.optimizer.iterations.numpy())]
losses = model.fit(x, y, batch_size=96, epochs=2, steps_per_epoch=20, verbose=0).history["loss"]
iterations += [int(model.optimizer.iterations.numpy())]
checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
checkpoint.restore(tf.train.latest_checkpoint("checkpoints/run")).assert_consumed()
np.save("restored.npy", model.predict(x[:100], verbose=0))
iterations += [int(model.optimizer.iterations.numpy())]
statistics = [v.numpy().tolist() for v in tf.keras.models.load_model("models/together.keras").non_trainable_variables[:1]]
json.dump({"iterations": iterations, "losses": losses, "together": statistics[0]}, open("fresh.json", "w"))
"""


def answers(folder, part, workers=2):
    return [json.loads((folder / f"{part}_{number}.json").read_text()) for number in range(workers)]


class Reader(threading.Thread):
    """Opens a model again and again while workers save it: which versions it saw, and what was not whole."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.versions, self.torn, self.over = path, set(), [], threading.Event()

    def run(self):
        while not self.over.wait(0.001):
            if self.path.exists() or self.versions:  # once there, it must not go away
                try:
                    content = self.path.read_bytes()
                    bad = zipfile.ZipFile(io.BytesIO(content)).testzip()
                    self.versions.add(hashlib.sha256(content).hexdigest())
                except (OSError, zipfile.BadZipFile) as error:
                    bad = repr(error)
                self.torn += [bad] if bad else []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two workers save in every way, and both are killed in the middle of the last save."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "blocked").write_text("a file where a folder should be")
    for name in ("blocked_1", "blocked_0/m.keras"):
        (folder / name).mkdir(parents=True)
    (folder / "blocked_1" / "workertemp_worker_1").write_text("a file where worker 1's folder should be")
    reader = Reader(folder / "twenty" / "m.keras")
    reader.start()
    try:
        with LocalCluster(SCRIPT, 2, [folder, "save"]) as cluster:
            with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
                cluster.wait(deadline=120)
            assert set(cluster.status().values()) == {"killed by SIGKILL"}, cluster.log(0) + cluster.log(1)
    finally:
        reader.over.set()
        reader.join()
    left = sorted(path.relative_to(folder / "twenty").as_posix() for path in (folder / "twenty").rglob("*.keras"))
    return folder, answers(folder, "save"), reader, left


@pytest.fixture(scope="module")
def gone_on(saved):
    """The next run in the same folder; at its end the chief saves alone, which it cannot."""
    with LocalCluster(SCRIPT, 2, [saved[0], "go_on"]) as cluster:
        with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
            cluster.wait(deadline=120)
        assert (saved[0] / "go_on_1.json").exists(), cluster.log(0) + cluster.log(1)
    return answers(saved[0], "go_on")


@pytest.fixture(scope="module")
def fresh(saved):
    """What a process finds that has the saved files and none of this project's."""
    import mnist_setup

    (x, y), (x_test, _) = mnist_setup.load_mnist()
    np.save(saved[0] / "images.npy", np.concatenate([x_test[:100], x]))
    np.save(saved[0] / "labels.npy", np.concatenate([np.zeros(100, "int64"), y]))
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TF_CONFIG")}
    subprocess.run([sys.executable, "-c", FRESH], cwd=saved[0], env=variables, check=True, timeout=120)
    return json.loads((saved[0] / "fresh.json").read_text())


@pytest.fixture(scope="module")
def by_three(saved):
    with LocalCluster(SCRIPT, 3, [saved[0], "restore"]) as cluster:
        cluster.wait(deadline=120)
    return answers(saved[0], "restore", workers=3)


def distance(folder, first, second):
    return np.abs(np.load(folder / first) - np.load(folder / second)).max()


def test_each_worker_knows_whether_it_is_chief_with_and_without_a_strategy(saved):
    assert [worker["chief"] for worker in saved[1]] == [[True, True], [False, False]]


def test_all_workers_save_and_one_tree_is_left(saved):
    trees = saved[1][0]["trees"]
    assert trees["models"] == ["model.keras"] and trees["kept"] == ["best.keras"]
    values = [f"model/variables/variables.{name}" for name in ("data-00000-of-00001", "index")]
    assert trees["exported"][-3:] == ["model/saved_model.pb", *values]
    assert not [path for tree in trees.values() for path in tree if "workertemp" in path or ".new." in path]


def test_when_save_model_returns_the_model_is_there_for_all(saved):
    assert [worker["is there"] for worker in saved[1]] == [True, True]


def test_one_checkpoint_is_kept(saved):
    names = saved[1][0]["trees"]["checkpoints"]
    assert names == ["run/checkpoint", "run/ckpt-2.data-00000-of-00001", "run/ckpt-2.index"]


def test_twenty_saves_leave_one_model_and_a_reader_finds_each_whole(saved):
    _, (chief, _), reader, _ = saved
    assert chief["trees"]["twenty"] == ["m.keras"]
    assert reader.torn == []
    assert len(reader.versions) >= 3, "the reader must have read while the workers saved"


def test_workers_killed_in_their_save_leave_the_last_good_model(saved, gone_on):
    folder, _, _, left = saved
    assert left == ["m.keras", "m.new.keras", "workertemp_worker_1/m.new.keras"], "the kill came in the middle"
    assert [worker["tree"] for worker in gone_on] == [["m.keras"]] * 2, "the next run starts clean"


def test_a_path_that_cannot_be_written_is_an_error_on_all_and_nobody_waits(saved):
    by_path = list(zip(*[worker["faults"] for worker in saved[1]]))
    (chief, other), (chief_1, other_1), (chief_0, other_0) = by_path
    assert "cannot save the model" in chief and "cannot save the model" in other
    assert "not saved: worker 1 cannot write" in chief_1 and "cannot save the model" in other_1
    assert "cannot save the model" in chief_0 and "not saved: worker 0 cannot write" in other_0
    assert "irectory" in chief and "irectory" in other_1 and "irectory" in chief_0


def test_a_saved_model_is_plain_keras_with_the_same_predictions(saved, fresh):
    assert distance(saved[0], "loaded.npy", "predictions_0.npy") < 1e-6
    assert distance(saved[0], "served.npy", "predictions_0.npy") < 1e-6
    assert distance(saved[0], "kept.npy", "predictions_0.npy") < 1e-6  # the last epoch was the best


def test_a_saved_model_trains_on_alone(saved, fresh):
    assert saved[1][0]["iterations"] == 40 and fresh["iterations"][:2] == [40, 80]
    assert fresh["losses"][-1] < saved[1][0]["history"]["loss"][-1]


def test_a_saved_model_trains_on_on_two_workers(saved, gone_on):
    assert [worker["iterations"] for worker in gone_on] == [[40, 80], [40, 80]]
    assert gone_on[0]["history"] == gone_on[1]["history"]
    assert gone_on[0]["history"]["loss"][-1] < saved[1][0]["history"]["loss"][-1]


def test_a_checkpoint_of_two_workers_is_restored_by_one(saved, fresh):
    assert fresh["iterations"][2] == 40
    assert distance(saved[0], "restored.npy", "predictions_0.npy") < 1e-6


def test_a_checkpoint_of_two_workers_is_restored_by_three(saved, by_three):
    assert [worker["iterations"] for worker in by_three] == [[40, 60]] * 3
    assert by_three[0]["history"] == by_three[2]["history"]
    for worker in range(3):
        assert distance(saved[0], f"restored_{worker}.npy", "predictions_0.npy") < 1e-6


@for_keras_3
def test_of_each_workers_own_moving_statistics_the_chiefs_are_saved(saved):
    chief, other = (np.array(worker["averaged: moving mean"], "float32") for worker in saved[1])
    assert not np.array_equal(chief, other)
    arrays = arrays_in(saved[0] / "models" / "averaged.keras")
    np.testing.assert_array_equal(arrays["layers/batch_normalization/vars/2"], chief)


@for_keras_3
def test_synchronized_moving_statistics_are_one_for_all(saved, fresh):
    chief, other = (worker["together: moving mean"] for worker in saved[1])
    assert chief == other and np.allclose(fresh["together"], chief, atol=1e-7)


def test_a_variable_averaged_on_reading_is_saved_as_the_mean_of_all_workers(saved):
    values = [worker["seen"] for worker in saved[1]]
    assert values[0] != values[1]
    arrays = arrays_in(saved[0] / "models" / "averaged.keras")
    scalars = [float(value) for name, value in arrays.items() if "input_mean" in name and value.shape == ()]
    assert len(scalars) == 1 and abs(scalars[0] - np.mean(values)) < 1e-6


def test_whether_a_chief_can_save_alone_depends_on_the_model(gone_on):
    if not LEGACY:
        assert gone_on[1]["plain alone"] is True
    assert gone_on[1]["averaged alone"] is False
