"""multi_worker.py without any second process: the judge of TF_CONFIG, who is chief, where to write."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf

import multi_worker

TWO = {"worker": ["127.0.0.1:21111", "127.0.0.1:21112"]}


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
    "index out of range": (config(index=2), "index 2 is out of range"),
    "index below 0": (config(index=-1), "index -1 is out of range"),
    "index as text": (config(index="0"), "not a whole number"),
    "index true": (config(index=True), "not a whole number"),
    "index missing": (json.dumps({"cluster": TWO, "task": {"type": "worker"}}), "not a whole number"),
    "address without a port": (config({"worker": ["127.0.0.1", "b:2"]}), 'address "127.0.0.1" has no port'),
    "port 0": (config({"worker": ["127.0.0.1:0"]}), "has no port"),
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
    (TWO, "worker", 0, True, 0, 2),
    (TWO, "worker", 1, False, 1, 2),
    ({"chief": ["a:1"], "worker": ["a:2", "a:3"]}, "chief", 0, True, 0, 3),
    ({"chief": ["a:1"], "worker": ["a:2", "a:3"]}, "worker", 0, False, 1, 3),
    ({"chief": ["a:1"], "worker": ["a:2", "a:3"]}, "worker", 1, False, 2, 3),
    ({"worker": ["a:2"], "evaluator": ["a:3"]}, "evaluator", 0, False, 0, 1),
]


def strategy_of(cluster, job, index):
    spec = tf.train.ClusterSpec(cluster)
    return SimpleNamespace(
        cluster_resolver=SimpleNamespace(cluster_spec=lambda: spec, task_type=job, task_id=index),
    )


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


def test_the_chief_writes_to_the_path_and_others_to_folders_of_their_own(tmp_path):
    path = tmp_path / "models" / "m.keras"
    assert multi_worker.write_filepath(path, strategy_of(TWO, "worker", 0)) == os.fspath(path)
    other = multi_worker.write_filepath(path, strategy_of(TWO, "worker", 1))
    assert other == os.fspath(tmp_path / "models" / "workertemp_worker_1" / "m.keras")
    assert os.path.isdir(os.path.dirname(other))
    multi_worker.remove_temporary(path, strategy_of(TWO, "worker", 0))
    multi_worker.remove_temporary(path, strategy_of(TWO, "worker", 1))
    assert os.listdir(tmp_path / "models") == []


def test_a_bare_file_name_is_written_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert multi_worker.write_filepath("m.keras", strategy_of(TWO, "worker", 0)) == "m.keras"
    other = multi_worker.write_filepath("m.keras", strategy_of(TWO, "worker", 1))
    assert other == os.path.join("workertemp_worker_1", "m.keras")


def test_remote_paths_are_written_through_tensorflow():
    other = multi_worker.write_filepath("ram://bucket/m.keras", strategy_of(TWO, "worker", 1))
    assert other == "ram://bucket/workertemp_worker_1/m.keras"
    with tf.io.gfile.GFile(other, "w") as file:
        file.write("a model")
    assert tf.io.gfile.exists(other)
    multi_worker.remove_temporary("ram://bucket/m.keras", strategy_of(TWO, "worker", 1))
    assert not tf.io.gfile.exists(other)


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

    def reduce(self, operation, value, axis):
        assert axis == 0
        raise ValueError("a scalar has no axis 0")


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


def test_backup_arguments_are_judged():
    for wrong in (0, -1, 2.5, "batch"):
        with pytest.raises(ValueError, match="save_freq"):
            multi_worker.BackupAndRestore("folder", save_freq=wrong)
    with pytest.raises(ValueError, match="backup_dir is empty"):
        multi_worker.BackupAndRestore("")


def test_importing_the_modules_starts_nothing_in_tensorflow():
    code = "import mnist_setup, multi_worker, main\nfrom tensorflow.python.eager import context\n"
    code += "assert context._context is None or not context._context._initialized"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
