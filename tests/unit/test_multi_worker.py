"""multi_worker.py without any second process: the judge of TF_CONFIG, who is chief, where to write."""

import json
import socket

import pytest
import tensorflow as tf
from clusters_of import TWO, WITH_CHIEF, strategy_of

import multi_worker


def config(cluster=TWO, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


WRONG = {
    "empty": ("", "empty string"),
    "blank": ("  ", "empty string"),
    "not JSON": ("{'cluster': 1}", "not JSON"),
    "not an object": ("[1]", "must be an object"),
    "nothing in it": ("{}", 'no "cluster"'),
    "no cluster": ('{"task": {"type": "worker", "index": 0}}', 'no "cluster"'),
    "no task": (json.dumps({"cluster": TWO}), 'no "task"'),
    "unknown job in the cluster": (config({"master": ["a:1"]} | TWO), 'unknown job "master"'),
    "parameter servers": (config({"ps": ["a:1"]} | TWO), 'unknown job "ps"'),
    "unknown job of the task": (config(job="boss"), 'task type "boss"'),
    "job that the cluster lacks": (config(job="chief"), 'task type "chief"'),
    "type of the task a list": (config(job=["worker"]), 'is no job of the cluster'),
    "index out of range": (config(index=2), "index 2 is out of range"),
    "index below 0": (config(index=-1), "index -1 is out of range"),
    "index as text": (config(index="0"), "not a whole number"),
    "index true": (config(index=True), "not a whole number"),
    "index missing": (json.dumps({"cluster": TWO, "task": {"type": "worker"}}), "not a whole number"),
    "address without a port": (config({"worker": ["127.0.0.1", "b:2"]}), 'address "127.0.0.1" has no port'),
    "port 0": (config({"worker": ["127.0.0.1:0"]}), "has no port"),
    "port in other digits": (config({"worker": ["127.0.0.1:8²"]}), "has no port"),
    "port too high": (config({"worker": ["127.0.0.1:70000"]}), "from 1 to 65535"),
    "address not text": (config({"worker": [5]}), "has no port"),
    "the same address twice": (config({"worker": ["a:1", "a:1"]}), "stands twice"),
    "twice across jobs": (config({"chief": ["a:1"], "worker": ["a:1"]}), "stands twice"),
    "no worker at all": (config({"worker": []}), "no worker"),
    "an evaluator alone": (config({"evaluator": ["a:1"]}, "evaluator"), "no worker"),
    "two chiefs": (config({"chief": ["a:1", "b:1"]}, "chief"), "more than one chief"),
    "addresses not a list": (config({"worker": "a:1"}), "must be a list"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_tf_config_is_named_in_one_line(monkeypatch, fault):
    text, named = WRONG[fault]
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError) as error:
        multi_worker.check_tf_config()
    message = str(error.value)
    assert message.startswith("TF_CONFIG: ") and named in message and "\n" not in message


def test_a_right_tf_config_is_returned_and_none_is_none(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config())
    assert multi_worker.check_tf_config() == {"cluster": TWO, "task": {"type": "worker", "index": 0}}
    monkeypatch.delenv("TF_CONFIG")
    assert multi_worker.check_tf_config() is None


def test_a_busy_port_is_named(monkeypatch):
    with socket.create_server(("", 0)) as busy:
        port = busy.getsockname()[1]
        monkeypatch.setenv("TF_CONFIG", config({"worker": [f"127.0.0.1:{port}", "b:1"]}))
        with pytest.raises(ValueError, match=f"port {port} .*choose a free one"):
            multi_worker.check_tf_config()
        monkeypatch.setenv("TF_CONFIG", config({"worker": ["127.0.0.1:21111", f"127.0.0.1:{port}"]}))
        multi_worker.check_tf_config()  # another task's port is not ours to judge


def test_localhost_that_means_ipv6_is_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config({"worker": ["localhost:21111"]}))
    answer = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 21111, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: answer)
    with pytest.raises(ValueError, match='"localhost" is ::1 here.*write 127.0.0.1'):
        multi_worker.check_tf_config()


CHIEF_TABLE = [  # cluster, job, index, chief?, place, workers
    ({}, None, None, True, 0, 1),
    ({"worker": ["a:1"]}, "worker", 0, True, 0, 1),
    (TWO, "worker", 0, True, 0, 2),
    (TWO, "worker", 1, False, 1, 2),
    (WITH_CHIEF, "chief", 0, True, 0, 3),
    (WITH_CHIEF, "worker", 0, False, 1, 3),
    (WITH_CHIEF, "worker", 1, False, 2, 3),
    ({"worker": ["a:2"], "evaluator": ["a:3"]}, "evaluator", 0, False, 0, 1),
]


@pytest.mark.parametrize("cluster, job, index, chief, place, workers", CHIEF_TABLE)
def test_who_is_chief_with_a_strategy(cluster, job, index, chief, place, workers):
    strategy = strategy_of(cluster, job, index)
    assert multi_worker.is_chief(strategy) is chief
    assert multi_worker.number_of_workers(strategy) == workers
    if job != "evaluator":
        assert multi_worker.worker_number(strategy) == place


@pytest.mark.parametrize("cluster, job, index, chief, place, workers", CHIEF_TABLE)
def test_who_is_chief_by_tf_config_alone(monkeypatch, cluster, job, index, chief, place, workers):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if job:
        monkeypatch.setenv("TF_CONFIG", config(cluster, job, index))
    assert multi_worker.is_chief() is chief


def test_a_strategy_of_one_process_is_chief():
    assert multi_worker.is_chief(tf.distribute.get_strategy()) is True
    assert multi_worker.number_of_workers(tf.distribute.get_strategy()) == 1


def test_on_one_worker_nothing_is_changed():
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    before = dict(vars(model))
    assert multi_worker.enable_multi_worker_fit(model) is model
    assert dict(vars(model)).keys() == before.keys()


class ManyWorkers(tf.distribute.MultiWorkerMirroredStrategy):
    """The strategy's type without its server: enough to be asked what it is."""

    def __init__(self):
        pass

    cluster_resolver = strategy_of(TWO, "worker", 0).cluster_resolver
    num_replicas_in_sync = 2


def test_an_older_keras_is_refused_in_words(monkeypatch):
    import keras

    monkeypatch.setattr(keras, "__version__", "3.9.2")
    with pytest.raises(RuntimeError, match=r"Keras 3\.9\.2 .*install keras>=3\.10"):
        multi_worker._keras_fails_under(ManyWorkers())


def test_a_keras_changed_inside_is_refused_in_words(monkeypatch):
    import keras

    trainer = next(base for base in keras.Model.__mro__ if "_maybe_symbolic_build" in vars(base))
    monkeypatch.delattr(trainer, "_maybe_symbolic_build")
    with pytest.raises(RuntimeError, match="_maybe_symbolic_build"):
        multi_worker._keras_fails_under(ManyWorkers())


def test_a_keras_that_no_longer_fails_is_left_alone(monkeypatch):
    from keras.src.backend.tensorflow import trainer

    monkeypatch.setattr(trainer, "reduce_per_replica", lambda values, strategy, reduction: values)
    assert multi_worker._keras_fails_under(ManyWorkers()) is False


def test_asking_to_stop_where_nobody_looks_is_refused():
    with pytest.raises(RuntimeError, match="needs BackupAndRestore.*save_before_preemption=True"):
        multi_worker.BackupAndRestore("folder").stop()


def test_backup_arguments_are_judged():
    for wrong in (0, -1, 2.5, "batch"):
        with pytest.raises(ValueError, match="save_freq"):
            multi_worker.BackupAndRestore("folder", save_freq=wrong)
    with pytest.raises(ValueError, match="backup_dir is empty"):
        multi_worker.BackupAndRestore("")
