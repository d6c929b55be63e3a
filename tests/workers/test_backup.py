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


FAULTS = {
    "torn": "is damaged or not ours",
    "empty": "is an empty file",
    "foreign": "is damaged or not ours",
    "older_layout": "has layout 0",
    "keras_own": "is missing where there are other files (latest.weights.h5",
    "other_model": "is of another model: variable 0 is ['sequential/dense/kernel', [784, 24]] there and ",
    "a_file": "cannot be read (",
}


@pytest.fixture(scope="module")
def errors(kept_backup, tmp_path_factory):
    """What each of two workers says of each fault: one run for all of them."""
    folder = tmp_path_factory.mktemp("faults")
    for fault in FAULTS:
        if fault == "a_file":
            (folder / fault).write_text("a file in the folder's place")
            continue
        shutil.copytree(kept_backup, folder / fault)
        file = folder / fault / "backup.npz"
        if fault == "torn":
            file.write_bytes(file.read_bytes()[:5000])
        elif fault == "empty":
            file.write_bytes(b"")
        elif fault == "foreign":
            np.savez(file, something=np.zeros(3))
        elif fault == "older_layout":
            np.savez(file, meta=np.array(json.dumps({"layout": 0})))
        elif fault == "keras_own":
            file.rename(file.with_name("latest.weights.h5"))
    with LocalCluster(SCRIPT.with_name("backup_faults.py"), 2, [folder]) as cluster:
        cluster.wait(deadline=90)
        logs = [cluster.log(0).splitlines(), cluster.log(1).splitlines()]
    return {fault: [line for log in logs for line in log if line.startswith(f"{fault}: ")] for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_backup_gives_all_workers_the_same_words(errors, fault):
    first, second = errors[fault]
    assert first == second and "choose another" in first
    assert FAULTS[fault].replace("sequential/", "") in first.replace("sequential/", "")  # older Keras: shorter paths
