"""The central proof: many workers give the numbers of one. What is compared stands in cases.py."""

import pathlib

import numpy as np
import pytest
from legacy import LEGACY, only_keras_3

from local_cluster import LocalCluster

SCRIPT = pathlib.Path(__file__).with_name("cases.py")
FOR_THREE = ["cnn_sgd", "adam_with_l2_evaluate_predict", "several_metrics", "functional_with_dicts", "nan_on_one_worker"]
FOR_TWO_REPLICAS = ["cnn_sgd", "adam_with_l2_evaluate_predict", "steps_per_execution_with_a_remainder", "several_metrics"]
FOR_TWO_REPLICAS += ["functional_with_dicts", "own_train_step"]
# Not the numbers of one process, by nature: a worker drops units and normalizes within its own part of the batch,
# and the mean of the workers' means is not the mean where their parts differ in size.
BY_NATURE_DIFFERENT = ["batch_normalization", "dropout", "last_batch_uneven"]
# Inside an epoch a weighted metric shows the mean of the workers' weighted means; at its end, the true one.
BATCH_LOGS_DIFFER = ["sample_weights"]
CASES = [line.split("(")[0][4:] for line in SCRIPT.read_text().split("@case\n")[1:]]
if LEGACY:  # what tf_keras itself does not do, or does otherwise, on many workers
    BATCH_LOGS_DIFFER = CASES
    NOT_IN_TF_KERAS = ["eager", "train_on_batch", "nan_on_one_worker", "own_train_step", "batch_normalization"]
    NOT_IN_TF_KERAS += ["data_of_unknown_length"]
    CASES = [case for case in CASES if case not in NOT_IN_TF_KERAS]
    FOR_THREE = [case for case in FOR_THREE if case in CASES]
    FOR_TWO_REPLICAS = [case for case in FOR_TWO_REPLICAS if case in CASES]


def outcomes(workers, folder, names, env=None):
    with LocalCluster(SCRIPT, workers, [folder, *names], env=env) as cluster:
        cluster.wait(deadline=170)
    return [dict(np.load(folder / f"worker_{number}.npz")) for number in range(workers)]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    return outcomes(1, tmp_path_factory.mktemp("one"), CASES)[0]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return outcomes(2, tmp_path_factory.mktemp("two"), CASES)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    return outcomes(3, tmp_path_factory.mktemp("three"), FOR_THREE)


def check_all_workers_the_same(workers, case):
    keys = [key for key in workers[0] if key.startswith(f"{case}/")]
    assert keys
    for key in keys:
        for other in workers[1:]:
            np.testing.assert_array_equal(other[key], workers[0][key], err_msg=key)


def check_same_as_one(one, many, case):
    keys = [key for key in one if key.startswith(f"{case}/")]
    assert keys
    for key in keys:
        if not (case in BATCH_LOGS_DIFFER and key.endswith("batch_logs")):
            np.testing.assert_allclose(many[key], one[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_workers_report_the_same_to_the_last_bit(of_two, case):
    check_all_workers_the_same(of_two, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in BY_NATURE_DIFFERENT])
def test_two_workers_give_the_numbers_of_one(of_one, of_two, case):
    check_same_as_one(of_one, of_two[0], case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOR_THREE)
def test_three_workers_give_the_numbers_of_one(of_one, of_three, case):
    check_all_workers_the_same(of_three, case)
    check_same_as_one(of_one, of_three[0], case)


@pytest.fixture(scope="module", params=[1, 2], ids=["one_worker", "two_workers"])
def of_two_replicas_each(request, tmp_path_factory):
    return outcomes(request.param, tmp_path_factory.mktemp("replicas"), FOR_TWO_REPLICAS, {"REPLICAS": "2"})


@pytest.mark.slow
@pytest.mark.parametrize("case", FOR_TWO_REPLICAS)
def test_two_replicas_on_each_worker_give_the_numbers_of_one(of_one, of_two_replicas_each, case):
    check_all_workers_the_same(of_two_replicas_each, case)
    check_same_as_one(of_one, of_two_replicas_each[0], case)


@pytest.mark.slow
@only_keras_3("not among tf_keras's cases")
def test_a_nan_on_one_worker_stops_all_at_the_same_batch(of_one, of_two):
    seen = [int(outcome["nan_on_one_worker/batches_seen"]) for outcome in (of_one, *of_two)]
    assert seen == [4, 4, 4]


@pytest.mark.slow
@only_keras_3("tf_keras shows sums over workers inside an epoch")
def test_logs_inside_an_epoch_are_means_over_workers_not_sums(of_one, of_two):
    np.testing.assert_allclose(of_two[0]["cnn_sgd/batch_logs"], of_one["cnn_sgd/batch_logs"], atol=1e-5)


@pytest.mark.slow
def test_the_optimizer_counts_each_step_once(of_two):
    for case, steps in {"adam_with_l2_evaluate_predict": 20, "steps_per_execution_with_a_remainder": 20}.items():
        assert of_two[0][f"{case}/steps_counted"] == steps
