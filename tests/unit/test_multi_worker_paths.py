"""Where each worker writes, and save_model, without any second process."""

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from clusters_of import TWO, WITH_CHIEF, strategy_of

import multi_worker

CHIEF, OTHER = strategy_of(TWO, "worker", 0), strategy_of(TWO, "worker", 1)
BESIDE_A_CHIEF = strategy_of(WITH_CHIEF, "worker", 0)


def tree(folder):
    return sorted(path.relative_to(folder).as_posix() for path in pathlib.Path(folder).rglob("*"))


def test_without_a_strategy_paths_follow_tf_config(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO, "task": {"type": "worker", "index": 1}}))
    assert multi_worker.write_filepath(tmp_path / "m.keras") == f"{tmp_path}/workertemp_worker_1/m.keras"
    multi_worker.remove_temporary(tmp_path / "m.keras")
    assert tree(tmp_path) == []


def test_no_two_workers_write_one_path(tmp_path):
    tasks = [("chief", 0), ("worker", 0), ("worker", 1)]
    paths = [multi_worker.write_filepath(tmp_path / "m", strategy_of(WITH_CHIEF, *task)) for task in tasks]
    assert paths[0] == f"{tmp_path}/m" and len(set(paths)) == 3
    assert tree(tmp_path) == ["workertemp_worker_0", "workertemp_worker_1"]


@pytest.mark.parametrize("strategy", [CHIEF, OTHER], ids=["chief", "other"])
def test_a_missing_folder_is_made(tmp_path, strategy):
    path = multi_worker.write_filepath(tmp_path / "a" / "b" / "m.keras", strategy)
    assert os.path.isdir(os.path.dirname(path))


@pytest.mark.parametrize("given", ["m.keras", "./m.keras", "models/m.keras", "models/m/"])
def test_relative_paths_stay_relative(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    folder, name = os.path.split(given.rstrip("/"))
    assert multi_worker.write_filepath(given, CHIEF) == os.path.join(folder, name)
    other = multi_worker.write_filepath(given, OTHER)
    assert other == os.path.join(folder, "workertemp_worker_1", name)
    assert os.path.isdir(os.path.dirname(other))
    multi_worker.remove_temporary(given, OTHER)
    assert tree(tmp_path) == ([folder] if folder not in ("", ".") else [])


def test_remote_paths_go_through_tensorflow():
    chief = multi_worker.write_filepath("ram://bucket/a/m.keras", CHIEF)
    other = multi_worker.write_filepath("ram://bucket/a/m.keras", OTHER)
    assert (chief, other) == ("ram://bucket/a/m.keras", "ram://bucket/a/workertemp_worker_1/m.keras")
    for path in (chief, other):
        with tf.io.gfile.GFile(path, "w") as file:
            file.write("a model")
    multi_worker.remove_temporary("ram://bucket/a/m.keras", CHIEF)
    multi_worker.remove_temporary("ram://bucket/a/m.keras", OTHER)
    assert tf.io.gfile.exists(chief) and not tf.io.gfile.exists(other)


def test_a_file_system_that_tensorflow_lacks_is_an_error_in_words():
    with pytest.raises(tf.errors.UnimplementedError, match="memory.*not implemented"):
        multi_worker.write_filepath("memory://bucket/m.keras", OTHER)


def test_removing_takes_this_workers_folder_and_no_other(tmp_path):
    path = tmp_path / "m.keras"
    for strategy in (CHIEF, OTHER, BESIDE_A_CHIEF):
        pathlib.Path(multi_worker.write_filepath(path, strategy)).touch()
    multi_worker.remove_temporary(path, CHIEF)
    multi_worker.remove_temporary(path, OTHER)
    multi_worker.remove_temporary(path, OTHER)  # a second time: nothing to do
    assert tree(tmp_path) == ["m.keras", "workertemp_worker_0", "workertemp_worker_0/m.keras"]


# -- save_model ------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    model.compile("adam", "mse")
    return model


@pytest.fixture
def as_many(monkeypatch):
    """save_model for one worker of many: `others` are the faults that the others report, prepare and save."""

    def report(others=((0, 0), (0, 0))):
        reports = iter(others)
        monkeypatch.setattr(multi_worker, "_sum_over_workers", lambda failed, strategy: failed + next(reports))

    report()
    return report


def test_the_chief_leaves_one_file_and_the_other_none(model, as_many, tmp_path):
    path = tmp_path / "models" / "m.keras"
    multi_worker.save_model(model, path, CHIEF)
    assert tree(path.parent) == ["m.keras"]
    as_many()
    multi_worker.save_model(model, path, OTHER)
    assert tree(path.parent) == ["m.keras"]
    loaded = tf.keras.models.load_model(path)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_alone_it_needs_no_strategy(model, tmp_path, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    multi_worker.save_model(model, "m.keras")
    assert tree(tmp_path) == ["m.keras"]


def test_a_remote_model_is_saved_whole(model, as_many):
    multi_worker.save_model(model, "ram://models/m.keras", CHIEF)
    assert tf.io.gfile.listdir("ram://models") == ["m.keras"]
    loaded = tf.keras.models.load_model("ram://models/m.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_another_ending_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"m\.h5: .*must end with \.keras"):
        multi_worker.save_model(model, tmp_path / "m.h5", CHIEF)
    assert tree(tmp_path) == []


@pytest.mark.parametrize("strategy", [CHIEF, OTHER], ids=["chief", "other"])
def test_a_path_that_cannot_be_written_is_named(model, as_many, tmp_path, strategy):
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(OSError, match=r"cannot save the model .*models/m\.keras: .*[Nn]ot a directory"):
        multi_worker.save_model(model, tmp_path / "models" / "m.keras", strategy)
    assert tree(tmp_path) == ["models"]


def test_a_folder_in_the_models_place_is_named_and_left(model, as_many, tmp_path):
    (tmp_path / "m.keras").mkdir()
    with pytest.raises(OSError, match="cannot save the model .*directory"):
        multi_worker.save_model(model, tmp_path / "m.keras", CHIEF)
    assert tree(tmp_path) == ["m.keras"]


@pytest.mark.parametrize("others", [((0, 1),), ((0, 0), (0, 1))], ids=["before the save", "in the save"])
def test_another_workers_fault_ends_this_workers_save_too(model, as_many, tmp_path, others):
    as_many(others)
    with pytest.raises(OSError, match=r"m\.keras not saved: worker 1 cannot write"):
        multi_worker.save_model(model, tmp_path / "m.keras", CHIEF)
    assert tree(tmp_path) == ([] if len(others) == 1 else ["m.keras"])


def test_a_failed_save_leaves_the_old_model(model, as_many, tmp_path, monkeypatch):
    multi_worker.save_model(model, tmp_path / "m.keras", CHIEF)
    before = (tmp_path / "m.keras").read_bytes()

    def disk_full(path):
        pathlib.Path(path).write_bytes(b"half a mod")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save", disk_full)
    as_many()
    with pytest.raises(OSError, match="No space left on device"):
        multi_worker.save_model(model, tmp_path / "m.keras", CHIEF)
    assert (tmp_path / "m.keras").read_bytes() == before and tree(tmp_path) == ["m.keras"]
