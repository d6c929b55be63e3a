"""A killed job resumes exactly: history and weights are those of the run that nobody killed, to the last bit."""

import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from local_cluster import LocalCluster, WorkerFailed

SCRIPT = pathlib.Path(__file__).with_name("backup_case.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TF_USE_LEGACY_KERAS") == "1", reason="for Keras 3; tf_keras has its own"),
]


def run(folder, workers=2, **options):
    with LocalCluster(SCRIPT, workers, [folder, json.dumps(options)]) as cluster:
        cluster.wait(deadline=90)


def fails(folder, workers=2, **options):
    with pytest.raises(WorkerFailed) as failure:
        run(folder, workers, **options)
    return str(failure.value)


def outcome(folder, worker=0):
    with np.load(folder / f"weights_{worker}.npz") as arrays:
        weights = [arrays[name] for name in arrays.files]
    return json.loads((folder / f"history_{worker}.json").read_text()), weights


def check_same(folder, expected):
    for worker in (0, 1):
        history, weights = outcome(folder, worker)
        assert history == expected[0]
        for ours, theirs in zip(weights, expected[1], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder)
    return outcome(folder)


KILLS = {
    "half an epoch is done again": {"kill_worker": 1, "kill_epoch": 1, "kill_batch": 3, "position": True},
    "the chief dies, the callback skips the data": {"kill_worker": 0, "kill_epoch": 2, "kill_batch": 0},
    "in the middle of an epoch": {"kill_worker": 1, "kill_epoch": 1, "kill_batch": 4, "freq": 3, "position": True},
    "in the middle, the callback skips the data": {"kill_worker": 0, "kill_epoch": 2, "kill_batch": 5, "freq": 2},
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_run_killed_by_sigkill_resumes_exactly(undisturbed, tmp_path, kill):
    assert "killed by SIGKILL" in fails(tmp_path, **KILLS[kill])
    run(tmp_path, **KILLS[kill])
    check_same(tmp_path, undisturbed)
    assert not (tmp_path / "backup").exists()


def test_data_that_starts_anew_each_epoch_resumes_exactly(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    run(tmp_path / "a", finite=True)
    fails(tmp_path / "b", finite=True, freq=2, kill_worker=1, kill_epoch=1, kill_batch=4)
    run(tmp_path / "b", finite=True, freq=2)
    check_same(tmp_path / "b", outcome(tmp_path / "a"))


def test_steps_per_execution_resumes_exactly(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    run(tmp_path / "a", steps_per_execution=2)
    fails(tmp_path / "b", steps_per_execution=2, freq=2, kill_worker=0, kill_epoch=1, kill_batch=5)
    run(tmp_path / "b", steps_per_execution=2, freq=2)
    check_same(tmp_path / "b", outcome(tmp_path / "a"))


@pytest.fixture(scope="module")
def kept_backup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    run(folder, delete=False, epochs=2)
    return folder / "backup"


def test_a_backup_of_a_finished_run_trains_no_more_and_gives_its_history(kept_backup, tmp_path, undisturbed):
    shutil.copytree(kept_backup, tmp_path / "backup")
    run(tmp_path, epochs=2)
    assert outcome(tmp_path)[0]["loss"] == undisturbed[0]["loss"][:2]


def test_a_second_fit_runs_all_its_epochs(tmp_path):
    run(tmp_path, workers=1, epochs=2, second_fit=True)
    assert outcome(tmp_path)[0]["second"] == [0]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_backup_of_two_workers_is_resumed_by_another_number(kept_backup, tmp_path, workers):
    shutil.copytree(kept_backup, tmp_path / "backup")
    run(tmp_path, workers=workers, epochs=3)
    assert outcome(tmp_path)[0]["epoch"] == [0, 1, 2]


def damage(kind, backup):
    file = backup / "backup.npz"
    if kind == "torn":
        file.write_bytes(file.read_bytes()[:5000])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "foreign":
        np.savez(file, something=np.zeros(3))
    elif kind == "of Keras's own callback":
        file.rename(backup / "latest.weights.h5")


@pytest.mark.parametrize("kind", ["torn", "empty", "foreign", "of Keras's own callback"])
def test_a_damaged_backup_is_an_error_in_words_on_all_workers(kept_backup, tmp_path, kind):
    shutil.copytree(kept_backup, tmp_path / "backup")
    damage(kind, tmp_path / "backup")
    message = fails(tmp_path)
    assert message.count("BackupError: the backup") == 2 and "choose another backup folder" in message
    assert "Traceback" not in message


def test_a_backup_of_another_model_names_the_variable(kept_backup, tmp_path):
    shutil.copytree(kept_backup, tmp_path / "backup")
    message = fails(tmp_path, units=25)
    assert "is of another model" in message and "dense/kernel" in message and "[784, 24]" in message


def test_a_folder_that_cannot_be_written_ends_all_workers_with_the_same_words(tmp_path):
    (tmp_path / "backup").write_text("a file in the folder's place")
    message = fails(tmp_path)
    assert message.count("BackupError:") == 2 and "Traceback" not in message
