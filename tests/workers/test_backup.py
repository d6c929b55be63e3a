"""A training that is broken off resumes exactly: history and variables of the undisturbed one, to the last bit.

The trainings stand in backup_case.py; one launch of two workers runs them all. Real kills: test_chaos.py.
"""

import pathlib
import pickle
import re
import shutil

import numpy as np
import pytest
from legacy import only_keras_3

from local_cluster import LocalCluster

SCRIPT = pathlib.Path(__file__).with_name("backup_case.py")
TEXT = SCRIPT.read_text()
RESUMES = re.findall(r'^    "(\w+)":\s+\(\[', TEXT, re.MULTILINE)
CASES = RESUMES + re.findall(r"^@case\ndef (\w+)", TEXT, re.MULTILINE)
# On many workers TensorFlow cannot have variables of bfloat16: it has no collective for them.
ONLY_ALONE = ["bfloat16", "without_a_strategy"]
ALONE = ONLY_ALONE + ["number_of_workers", "data_that_start_anew_each_epoch", "second_fit"]
ALONE += ["the_callback_passes_over_endless_data"]
FOR_TWO_REPLICAS = ["momentum", "adam_dropout_batch_normalization_validation_decay"]  # as two GPUs would be
OF_TWO = [case for case in CASES if case not in ONLY_ALONE]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # most of it for one launch, which holds about eighty trainings
    only_keras_3("for Keras 3; tf_keras has its own"),
]


def run(folder, workers, cases, env=None):
    """What each case returned on each worker: {case: [of worker 0, of worker 1, ...]}."""
    with LocalCluster(SCRIPT, workers, [folder, *cases], env=env) as cluster:
        cluster.wait(deadline=540)
        print(cluster.log(0))
    each = [pickle.loads((folder / f"worker_{number}.pickle").read_bytes()) for number in range(workers)]
    return {case: [results[case] for results in each] for case in cases}


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def of_two(folder_of_two):
    return run(folder_of_two, 2, OF_TWO)


def handed_over(folder_of_two, folder):
    """The half-done epoch that two workers left."""
    shutil.copytree(folder_of_two / "number_of_workers", folder / "number_of_workers")
    return folder


@pytest.fixture(scope="module")
def of_one(of_two, folder_of_two, tmp_path_factory):
    return run(handed_over(folder_of_two, tmp_path_factory.mktemp("one")), 1, ALONE)


def returned(results, case):
    """The case's results, one a worker; an error in the case is an error here."""
    for result in results[case]:
        assert not isinstance(result, str) or "Traceback" not in result, result
    return results[case]


def check_same(ours, theirs):
    assert ours[0] == theirs[0]
    for our_values, their_values in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(our_values, their_values)


@pytest.mark.parametrize("case", [case for case in OF_TWO if case in RESUMES])
def test_a_training_that_was_broken_off_resumes_exactly(of_two, case):
    for result in returned(of_two, case):
        check_same(result["resumed"], result["undisturbed"])
        assert not result["folder is left"]


@pytest.fixture(scope="module")
def of_two_replicas_each(tmp_path_factory):
    return run(tmp_path_factory.mktemp("replicas"), 2, FOR_TWO_REPLICAS, {"REPLICAS": "2"})


@pytest.mark.parametrize("case", FOR_TWO_REPLICAS)
def test_with_two_replicas_on_each_worker_it_resumes_exactly(of_two_replicas_each, case):
    for result in returned(of_two_replicas_each, case):
        check_same(result["resumed"], result["undisturbed"])


@pytest.mark.parametrize("case", [case for case in ALONE if case in RESUMES])
def test_a_training_alone_resumes_exactly(of_one, case):
    (result,) = returned(of_one, case)
    check_same(result["resumed"], result["undisturbed"])


def test_the_runs_differ_where_they_should(of_two):
    """So that equal means something: seeds decide, and stopping early does."""
    histories = {case: returned(of_two, case)[0]["undisturbed"][0] for case in OF_TWO if case in RESUMES}
    assert len({str(history) for history in histories.values()}) >= 8
    assert histories["stopped_early_and_killed_at_the_end"]["epoch"] == [0, 1]
    assert histories["initial_epoch"]["epoch"] == [2, 3, 4]
    assert set(histories["after_the_last_step_of_an_epoch"]) == {"epoch", "own_loss", "twice"}
    assert "val_loss" in histories["data_that_start_anew_each_epoch"]


def test_a_kill_at_any_file_operation_leaves_a_backup_to_resume_from(of_two):
    for number, (undisturbed, resumed, moments) in enumerate(returned(of_two, "file_operations")):
        for outcome in resumed.values():
            check_same(outcome, undisturbed)
        if number == 0:
            operations = ["makedirs", "rename", "remove", "rmtree"]
            expected = {f"{when} {what}" for when in ("before", "after") for what in operations} | {"in write"}
            assert set(moments) == expected
        else:
            assert not moments, "the chief alone touches files"
        assert len(resumed) == 12, sorted(resumed)  # as many different states are there


def check_resumed_by_another_number(of_two, outcomes):
    """The numbers of two workers, but for the order in which they are added."""
    expected = returned(of_two, "number_of_workers")[0]
    for outcome in outcomes:
        assert outcome[0]["epoch"] == [0, 1, 2]
        np.testing.assert_allclose(outcome[0]["loss"], expected[0]["loss"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(outcome[0]["accuracy"], expected[0]["accuracy"], rtol=0, atol=1e-5)
        for ours, theirs in zip(outcome[1], expected[1], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_one_worker_takes_over_from_two(of_two, of_one):
    check_resumed_by_another_number(of_two, returned(of_one, "number_of_workers"))


def test_three_workers_take_over_from_two(of_two, folder_of_two, tmp_path):
    of_three = run(handed_over(folder_of_two, tmp_path), 3, ["number_of_workers"])
    check_resumed_by_another_number(of_two, returned(of_three, "number_of_workers"))


def test_the_backup_of_a_finished_run_trains_no_more_but_for_further_epochs(of_two):
    for (first, same_again, longer), is_kept, undisturbed in returned(of_two, "finished"):
        assert is_kept
        check_same(same_again, first)
        check_same(longer, undisturbed)


def test_nothing_is_deleted_before_all_workers_are_there(of_two):
    assert returned(of_two, "deletion") == [(None, False), (True, False)]


def test_a_second_fit_runs_all_its_epochs(of_two, of_one):
    for first, resumed in returned(of_two, "second_fit") + returned(of_one, "second_fit"):
        assert first["second"] == resumed["second"] == [0, 1]
        assert first["without the callback"] == resumed["without the callback"] == [0, 1]
        assert first["epoch"] == [0] and resumed["epoch"] == [0, 1]


def test_early_stopping_counts_its_patience_anew(of_two):
    for undisturbed, resumed in returned(of_two, "early_stopping_counts_anew"):
        assert undisturbed["epoch"] == [0, 1] and resumed["epoch"] == [0, 1, 2]
        assert resumed["loss"][:2] == undisturbed["loss"]


def test_when_one_worker_is_asked_to_stop_all_stop_after_the_same_step_with_a_backup(of_two):
    results = returned(of_two, "stop")
    assert len({message for _, message, _, _ in results}) == 1
    for asked_too_soon, message, resumed, undisturbed in results:
        assert asked_too_soon is False
        assert message.startswith("TrainingStopped: stopped after step 4 of epoch 2; backed up in ")
        check_same(resumed, undisturbed)


def test_a_disk_that_becomes_full_costs_nothing_but_the_time(of_two):
    results = returned(of_two, "full_disk_in_the_second_epoch")
    for error, resumed, undisturbed in results:
        assert error == results[0][0] and "cannot be written" in error and "No space left on device" in error
        check_same(resumed, undisturbed)


FAULTS = {
    "other_compression": "is damaged or not ours (That compression method is not supported)",
    "other_header": "is damaged or not ours (",
    "torn": "is damaged or not ours (",
    "empty": "is an empty file; to start anew, remove it or choose another",
    "foreign": "is damaged or not ours (",
    "older_layout": "has layout 1, this code reads 2; to start anew, remove it",
    "keras_own": "is missing where there are other files (latest.weights.h5, …)",
    "other_layer": "/kernel (32, 10) where this model has ",
    "other_optimizer": "/iteration () where this model has ",
    "other_steps_per_execution": "was made with another steps_per_execution",
    "a_file": "cannot be read (",
    "below_a_file": "cannot be written (",
    "not_writable": "the backup /proc/backup/backup.npz cannot be written (",
    "full": "No space left on device); free space or choose another backup folder",
    "data_that_cannot_resume": "make them endless with repeat()",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_all_workers_the_same_words(of_two, fault):
    first, second = [result[fault] for result in returned(of_two, "faults")]
    assert isinstance(first, str) and first == second and first.startswith("BackupError: ")
    assert FAULTS[fault] in first and "\n" not in first


def test_a_model_outside_any_strategy_is_refused_in_words(of_one):
    (error,) = returned(of_one, "without_a_strategy")
    assert error.startswith("BackupError: BackupAndRestore needs a model that was built in a strategy's scope;")
