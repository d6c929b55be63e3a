"""Which worker trains and evaluates on what: the claims of lesson 3 that a new TensorFlow or Keras could break."""

import json
import pathlib

import numpy as np
import pytest
from legacy import LEGACY

from local_cluster import LocalCluster, WorkerFailed

SCRIPT = pathlib.Path(__file__).with_name("sharding_case.py")
ALL = list(range(32))
DEADLINE = 150  # seconds


@pytest.fixture(scope="module")
def cluster_and_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    # An earlier test may have imported a module that hushes TensorFlow; these look for its warnings.
    with LocalCluster(SCRIPT, {"worker": 2, "evaluator": 1}, [folder], env={"TF_CPP_MIN_LOG_LEVEL": "0"}) as cluster:
        cluster.wait(DEADLINE)
    return cluster, folder


@pytest.fixture(scope="module")
def results(cluster_and_folder):
    return [json.loads((cluster_and_folder[1] / f"worker_{number}.json").read_text()) for number in range(2)]


@pytest.fixture(scope="module")
def steps_of(results):
    """steps_of(question): the ids of each step, of worker 0 and of worker 1, as the strategy shares them out."""
    return lambda question: [result["strategy"][question] for result in results]


@pytest.fixture(scope="module")
def fits_of(results):
    return lambda question: [result["fit"][question] for result in results]


def flat(steps):
    return sum(steps, [])


def check_each_id_once(workers, ids=ALL):
    assert sorted(flat(workers[0]) + flat(workers[1])) == ids


def check_some_twice_and_some_never(workers, ids=ALL):
    both = set(flat(workers[0])) & set(flat(workers[1]))
    assert both and len(set(ids) - set(flat(workers[0])) - set(flat(workers[1]))) == len(both)


# -- policies ----------------------------------------------------------------------------------------------


def test_data_cuts_each_global_batch_in_two(steps_of):
    firsts = range(0, 32, 8)
    assert steps_of("data") == [
        [list(range(first, first + 4)) for first in firsts],
        [list(range(first + 4, first + 8)) for first in firsts],
    ]


def test_auto_is_data_without_files_and_file_with_them(steps_of):
    assert steps_of("auto") == steps_of("data")
    assert steps_of("auto_of_files") == steps_of("file_of_files")


def test_file_gives_each_worker_whole_files(steps_of):
    workers = steps_of("file_of_files")
    assert [flat(steps) for steps in workers] == [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]


def test_off_gives_every_worker_every_id_in_half_batches(steps_of):
    quarters = [list(range(first, first + 4)) for first in range(0, 32, 4)]
    assert steps_of("off") == [quarters, quarters]


def test_hint_shards_where_the_hint_stands(steps_of):
    assert [flat(steps) for steps in steps_of("hint")] == [ALL[0::2], ALL[1::2]]


def test_file_refuses_data_without_files_on_every_worker(steps_of):
    for answer in steps_of("file"):
        assert "Found an unshardable source dataset" in answer


def test_a_worker_with_fewer_files_goes_on_with_empty_batches(steps_of):
    assert [[len(ids) for ids in steps] for steps in steps_of("file_of_3_files")] == [[4, 4, 4, 4], [4, 4, 0, 0]]


def test_data_shares_out_a_single_file(steps_of):
    check_each_id_once(steps_of("data_of_1_file"))


def test_auto_with_one_file_for_two_workers_ends_the_job_and_says_why(tmp_path):
    with LocalCluster(SCRIPT, 2, [tmp_path, "auto_of_1_file"]) as cluster:
        with pytest.raises(WorkerFailed, match="^worker 0 failed"):
            cluster.wait(DEADLINE)
        assert "Could not apply FILE based sharding: the dataset only has 1 file(s)" in cluster.log(0)


# -- seeds and the shard point -----------------------------------------------------------------------------


def test_under_data_one_seed_for_all_keeps_the_parts_apart(steps_of):
    for question in ["data_same_seed", "data_global_seed"]:
        check_each_id_once(steps_of(question))
        assert steps_of(question) != steps_of("data")


def test_under_data_seeds_that_differ_give_some_ids_twice_and_others_never(steps_of):
    check_some_twice_and_some_never(steps_of("data_own_seeds"))


def test_under_file_seeds_may_differ(steps_of):
    check_each_id_once(steps_of("file_own_seeds"))


def test_shuffling_by_own_seeds_is_right_only_after_the_shard_point(steps_of):
    check_each_id_once(steps_of("shard_shuffle"))
    check_some_twice_and_some_never(steps_of("shuffle_shard"))


def test_repeat_before_the_shard_point_lets_ids_change_workers(steps_of):
    assert [set(flat(steps)) for steps in steps_of("repeat_shard")] == [set(range(15)), set(range(15))]
    assert [set(flat(steps)) for steps in steps_of("shard_repeat")] == [set(range(0, 15, 2)), set(range(1, 15, 2))]


# -- inside fit --------------------------------------------------------------------------------------------


def test_a_step_of_fit_gets_this_workers_share_of_the_global_batch(fits_of, steps_of):
    assert [fit["trained"] for fit in fits_of("data")] == steps_of("data")


def test_fit_under_off_trains_like_one_worker_with_half_the_batch(fits_of):
    off, half_batch = fits_of("off"), fits_of("half_batch")
    assert off[0]["trained"] == off[1]["trained"]
    assert set(flat(off[0]["trained"])) == set(range(16))  # the other half is never used
    np.testing.assert_allclose(off[0]["weights"], half_batch[0]["weights"], atol=1e-5)


def test_fit_takes_what_distribute_datasets_from_function_returns(fits_of):
    assert [sorted(flat(fit["trained"])) for fit in fits_of("by_hand")] == [ALL[0::2], ALL[1::2]]


def test_both_workers_end_each_epoch_after_the_same_step(fits_of):
    expected = {"too_many_steps": [4, 4], "too_few_steps": [3, 1, 3], "repeated": [3, 3]}
    if LEGACY:  # ends the whole training where the data end within an epoch
        expected |= {"too_many_steps": [4], "too_few_steps": [3, 1]}
    for question, steps in expected.items():
        assert [fit["steps"] for fit in fits_of(question)] == [steps, steps], question


def test_one_id_left_over_leaves_the_other_worker_an_empty_batch_and_no_nan(fits_of):
    fits = fits_of("one_left")
    assert [fit["trained"][-1] for fit in fits] == [[24], []]
    assert np.isfinite(fits[0]["weights"]).all() and fits[0]["weights"] == fits[1]["weights"]


# -- evaluation --------------------------------------------------------------------------------------------


def test_validation_counts_each_example_once_and_reports_one_number(fits_of):
    fits = fits_of("validation")
    per_epoch = [fit["tested"][:4] for fit in fits]  # 100 = 32 + 32 + 32 + 4
    check_each_id_once(per_epoch, list(range(100)))
    assert [fit["tested"][4:] for fit in fits] == per_epoch
    assert fits[0]["history"] == fits[1]["history"]


def test_validation_steps_uses_the_same_first_batches_in_every_epoch(fits_of):
    for question, steps, ids in [("validation_steps", 2, 64), ("repeated_validation", 4, 100)]:
        fits = fits_of(question)
        check_each_id_once([fit["tested"][:steps] for fit in fits], list(range(ids)))
        for fit in fits:
            assert fit["tested"][steps:] == fit["tested"][:steps], question


def test_a_repeated_validation_without_steps_has_no_end(fits_of):
    for fit in fits_of("endless_validation"):
        assert fit["history"] is None
        assert len(fit["tested"]) == (0 if LEGACY else 20)  # 5 passes, then the callback ended it; tf_keras refuses


def test_an_evaluator_beside_the_workers_finds_the_numbers_of_fit(results, fits_of, cluster_and_folder):
    assert [result["workers"] for result in results] == [2, 2]
    losses = json.loads((cluster_and_folder[1] / "evaluator_0.json").read_text())
    expected = fits_of("validation")[0]["history"]["val_loss"]
    assert str(len(expected)) in losses
    for epoch, loss in losses.items():
        np.testing.assert_allclose(loss, expected[int(epoch) - 1], rtol=1e-5)


# -- warnings ----------------------------------------------------------------------------------------------


def test_the_lessons_data_is_shared_out_without_a_warning(cluster_and_folder, steps_of):
    assert [len(steps[0]) for steps in steps_of("mnist")] == [4, 4]
    for number in range(2):
        notes = cluster_and_folder[0].log(number).split("question ")
        of_question = {note.split("\n")[0]: note for note in notes[1:]}
        assert "shard" in of_question["file"]  # what TensorFlow writes where it cannot share out files
        assert "shard" not in of_question["mnist"]
