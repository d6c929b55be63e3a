"""Train one Keras 3 model on many workers with `Model.fit`: copy this one file into your own project.

What Keras 3 needs under tf.distribute.MultiWorkerMirroredStrategy (MWMS), a judge for TF_CONFIG, who writes
what, and a backup that a killed job resumes from. Importing this file starts nothing in TensorFlow.
"""

import io
import json
import os
import re
import socket
import zipfile

import numpy as np
import tensorflow as tf


def enable_multi_worker_fit(model):
    """Makes `fit`, `evaluate` and `predict` of a Keras 3 model work on many workers. Returns the model.

    Call it in `strategy.scope()` beside `compile`. It sets three methods on this one instance and leaves its
    class alone, so what `model.save` writes is a plain Keras model. On one worker, with tf_keras, or with a
    Keras that no longer needs it, it does nothing. XLA (`jit_compile`) is not used on many workers.

    Raises:
        RuntimeError: a Keras that this mend does not fit: older than 3.10, or changed inside.
        ValueError (in `fit`, `evaluate`): the model or a metric was made outside the strategy's scope.
    """
    strategy = model.distribute_strategy
    if not _is_keras_3(model) or not _keras_fails_under(strategy):
        return model
    build = model._maybe_symbolic_build

    def first_replica(value):
        return strategy.experimental_local_results(value)[0]

    def build_from_own_batch(iterator=None, data_batch=None):
        # Fault one: to learn a batch's shape, Keras averages the first one over the workers, which fails.
        # This worker's own part of that batch has the same shape.
        if iterator is not None:
            *_, batches = next(iter(iterator))
            data_batch = tf.nest.map_structure(first_replica, next(batches))
        build(data_batch=data_batch)

    def make_function(step):
        for variable in [*model.variables, *model.metrics_variables]:
            if not strategy.extended.variable_created_in_scope(variable.value):
                raise ValueError(
                    f"the variable {variable.path} was created outside strategy.scope(), so each worker would keep its "
                    "own: build the model, its metrics and its optimizer inside the scope"
                )

        def step_with_mean_logs(batch):
            # Fault two: Keras averages each log, a scalar, along an axis that a scalar does not have.
            # Instead: all logs side by side, one all-reduce. Each worker's callbacks see the same values.
            logs = step(batch)
            values = tf.stack([tf.cast(value, tf.float32) for value in tf.nest.flatten(logs)])
            values = tf.distribute.get_replica_context().all_reduce("MEAN", values)
            return tf.nest.pack_sequence_as(logs, tf.unstack(values))

        def one_step(batches):
            batch = next(batches)
            # Nothing may run before the batch is there: at the end of the data, where `next` raises, the
            # optimizer would otherwise count a step that it never took.
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                logs = strategy.run(step_with_mean_logs, args=(batch,))
            return tf.nest.map_structure(first_replica, logs)

        graph_step = one_step if model.run_eagerly else tf.function(one_step, reduce_retracing=True)

        def one_execution(batches):
            # Fault three: an all-reduce cannot run in the graph loop in which Keras puts several steps.
            in_graph = isinstance(batches, (tf.data.Iterator, tf.distribute.DistributedIterator))
            for step_number in range(model.steps_per_execution):
                try:
                    logs = graph_step(batches) if in_graph else one_step(batches)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if step_number == 0:
                        raise
                    break
            return logs

        return one_execution

    def make_train_function(force=False):
        if force or model.train_function is None:
            model.train_function = make_function(model.train_step)

    def make_test_function(force=False):
        if force or model.test_function is None:
            model.test_function = make_function(model.test_step)

    model._maybe_symbolic_build = build_from_own_batch
    model.make_train_function, model.make_test_function = make_train_function, make_test_function
    model.train_function = model.test_function = None
    return model


def _is_keras_3(model):
    return not any(base.__module__.startswith("tf_keras") for base in type(model).__mro__)


def _keras_fails_under(strategy):
    """Tries Keras's own averaging of a scalar log: True where it fails, before anything is sent."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or number_of_workers(strategy) == 1:
        return False
    import keras

    advice = f"Keras {keras.__version__} is not one that multi_worker.py can mend: install keras>=3.10,<3.16."
    if tuple(int(part) for part in re.findall(r"\d+", keras.__version__)[:2]) < (3, 10):
        raise RuntimeError(advice)
    try:
        from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, reduce_per_replica

        TensorFlowTrainer._maybe_symbolic_build, TensorFlowTrainer.make_train_function  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"{advice} ({error})") from None
    try:
        reduce_per_replica(tf.constant(0.0), strategy, reduction="mean")
    except ValueError:
        return True
    return False


def check_tf_config():
    """Reads TF_CONFIG and judges it before TensorFlow can hang on it.

    Returns:
        None if TF_CONFIG is not set, else the dict: {"cluster": {job: [host:port, ...]}, "task": {"type", "index"}}.
    Raises:
        ValueError: one line that names the fault and the cure.
    """
    text = os.environ.get("TF_CONFIG")
    if text is None:
        return None

    def refuse_unless(right, message):
        if not right:
            raise ValueError(f"TF_CONFIG: {message}")

    refuse_unless(text.strip(), "is an empty string; unset it to train alone, or give a cluster and a task")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"TF_CONFIG: is not JSON ({error}); write it with json.dumps") from None
    example = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
    refuse_unless(isinstance(config, dict), f"must be an object like {example}")
    cluster, task = config.get("cluster"), config.get("task")
    refuse_unless(isinstance(cluster, dict) and cluster, f'names no "cluster"; it must look like {example}')
    refuse_unless(isinstance(task, dict), f'names no "task" for this worker; it must look like {example}')
    addresses = []
    for job, members in cluster.items():
        refuse_unless(
            job in ("chief", "worker", "evaluator"),
            f'unknown job "{job}" in the cluster; MultiWorkerMirroredStrategy knows chief, worker and evaluator',
        )
        refuse_unless(isinstance(members, list), f'job "{job}" must be a list of "host:port" addresses')
        addresses += members
    refuse_unless(
        cluster.get("worker") or cluster.get("chief"), 'the cluster has no worker; list their addresses under "worker"'
    )
    refuse_unless(len(cluster.get("chief", [])) <= 1, "the cluster has more than one chief; leave one")
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        refuse_unless(
            host and port.isdigit() and 0 < int(port) < 65536,
            f'address "{address}" has no port; write it as "host:port" with a port from 1 to 65535',
        )
        refuse_unless(addresses.count(address) == 1, f'address "{address}" stands twice; give each task its own')
    job, index = task.get("type"), task.get("index")
    refuse_unless(job in cluster, f'task type "{job}" is no job of the cluster; use one of {", ".join(cluster)}')
    refuse_unless(type(index) is int, f"task index {json.dumps(index)} is not a whole number; count from 0")
    refuse_unless(
        0 <= index < len(cluster[job]),
        f'task index {index} is out of range: job "{job}" has {len(cluster[job])} task(s), counted from 0',
    )
    _check_address(*cluster[job][index].rsplit(":", 1), refuse_unless)
    return config


def _check_address(host, port, refuse_unless):
    """Refuses a port of this machine that is taken, and a `localhost` that means IPv6: peers would wait for ever."""
    if host == "localhost":
        first = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
        refuse_unless(":" not in first, f'"localhost" is {first} here, where TensorFlow does not listen; write 127.0.0.1')
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            refuse_unless(False, f"port {port} of this task cannot be used ({error.strerror}); choose a free one")


def number_of_workers(strategy):
    """The number of processes that train together: chief and workers, or 1 without TF_CONFIG."""
    cluster = _cluster_and_task(strategy)[0]
    return max(1, len(cluster.get("chief", [])) + len(cluster.get("worker", [])))


def worker_number(strategy):
    """This process's place among them, counted from 0, the chief first."""
    cluster, job, index = _cluster_and_task(strategy)
    return (index or 0) + (len(cluster.get("chief", [])) if job == "worker" else 0)


def is_chief(strategy=None):
    """Whether this process is the chief, the one that writes what all others may read.

    The chief is task 0 of the job `chief` if there is one, else worker 0; without TF_CONFIG, this process.

    Args:
        strategy: the strategy that the job trains with; without one, TF_CONFIG is read.
    """
    cluster, job, index = _cluster_and_task(strategy)
    return not job or job == "chief" or (job == "worker" and index == 0 and not cluster.get("chief"))


def _cluster_and_task(strategy):
    if strategy is None:
        config = check_tf_config() or {"cluster": {}, "task": {}}
        return config["cluster"], config["task"].get("type"), config["task"].get("index")
    resolver = getattr(strategy, "cluster_resolver", None)
    if resolver is None:
        return {}, None, None
    return resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id


def write_filepath(filepath, strategy=None):
    """Where this worker writes: `filepath` for the chief, a temporary folder of its own for any other.

    Every worker must save, for reading some variables takes all workers; no two may write one path.
    """
    filepath = os.fspath(filepath)
    if is_chief(strategy):
        return filepath
    _, job, index = _cluster_and_task(strategy)
    folder = os.path.join(os.path.dirname(filepath), f"workertemp_{job}_{index}")
    tf.io.gfile.makedirs(folder)
    return os.path.join(folder, os.path.basename(filepath))


def remove_temporary(filepath, strategy=None):
    """Removes what `write_filepath(filepath)` made for a worker that is not the chief."""
    if not is_chief(strategy):
        tf.io.gfile.rmtree(os.path.dirname(write_filepath(filepath, strategy)))


def save_model(model, filepath, strategy=None):
    """Saves a model with every worker taking part; the chief's file replaces `filepath` in one move."""
    new_file = write_filepath(re.sub(r"(\.keras)?$", ".new.keras", os.fspath(filepath), count=1), strategy)
    tf.io.gfile.makedirs(os.path.dirname(new_file) or ".")
    model.save(new_file)
    if is_chief(strategy):
        tf.io.gfile.rename(new_file, filepath, overwrite=True)
    else:
        remove_temporary(os.path.join(os.path.dirname(filepath), os.path.basename(new_file)), strategy)


class BackupError(RuntimeError):
    """A backup cannot be written or read; one line that says why and what to do."""


class BackupAndRestore(tf.keras.callbacks.Callback):
    """Keras's callback of this name, made safe and exact for many workers; put it last in `callbacks`.

    The chief writes one file, `backup_dir/backup.npz`, which always holds a whole backup: it is written under
    another name and then renamed. It holds the model, the optimizer, the metrics, the epoch, the step and
    the history, so a run that was killed and started again ends as if nothing had happened.

    Args:
        backup_dir: a folder of its own on a file system that outlives the job.
        save_freq: "epoch", or the number of steps from one backup to the next.
        delete_checkpoint: whether the chief deletes the backup at the successful end of `fit`.
    Raises (in `fit`, on every worker):
        BackupError: the backup cannot be written, is damaged, or belongs to another model or to no one we know.

    The data goes on where it stopped. Either create an endless dataset at that place, with
    `mnist_dataset(..., skip_batches=backup.steps_done(strategy))`, or leave it to the callback, which then
    reads and drops the batches that were used up (in the half-done epoch, if the data starts anew each epoch).
    What other callbacks remember (EarlyStopping's patience, say) is not in the backup.
    """

    LAYOUT = 1

    def __init__(self, backup_dir, save_freq="epoch", delete_checkpoint=True):
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(f'save_freq must be "epoch" or a positive number of steps, not {save_freq!r}')
        self.backup_dir, self.save_freq, self.delete_checkpoint = os.fspath(backup_dir), save_freq, delete_checkpoint
        self.filepath = os.path.join(self.backup_dir, "backup.npz")
        self._data_is_positioned = False

    def steps_done(self, strategy=None):
        """The number of steps (batches) that the backup already holds; 0 if there is none.

        Call it on every worker, before `fit`, to create an endless dataset that starts there.
        """
        state = self._read(strategy or tf.distribute.get_strategy())
        self._data_is_positioned = True
        return state["meta"]["steps_done"] if state else 0

    # -- what Keras calls ------------------------------------------------------------------------------

    def on_train_begin(self, logs=None):
        if not _is_keras_3(self.model):
            raise BackupError("this BackupAndRestore is for Keras 3; with tf_keras use tf.keras.callbacks.BackupAndRestore")
        self.strategy = self.model.distribute_strategy
        self.history, self.history_is_shown, self.batch, self.steps_in_epochs = {"epoch": []}, False, 0, 0
        state = self._read(self.strategy)
        if state is None:
            return
        self._restore(state)
        meta = state["meta"]
        self.history, self.batch = meta["history"], meta["batch"]
        self.steps_in_epochs = meta["steps_done"] - meta["batch"]
        self.model._initial_epoch = meta["epoch"]
        self._pass_over_steps(state)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self._show_history()

    def on_train_batch_begin(self, batch, logs=None):
        self.first_batch = batch

    def on_train_batch_end(self, batch, logs=None):
        # With steps_per_execution > 1, `batch` is the first step of the execution in Keras 3.10, the last in 3.15.
        end = self.first_batch + self.model.steps_per_execution
        if end <= self.batch:
            return  # passed over
        done, self.batch = self.batch, end
        if self.save_freq != "epoch" and done // self.save_freq < self.batch // self.save_freq:
            self._write(self.epoch, self.batch)

    def on_epoch_end(self, epoch, logs=None):
        self.history["epoch"].append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(float(value))
        self.steps_in_epochs, self.batch = self.steps_in_epochs + self.batch, 0
        self._write(epoch + 1, 0)

    def on_train_end(self, logs=None):
        self._show_history()
        self.model._initial_epoch, self._data_is_positioned = 0, False
        if self.delete_checkpoint and is_chief(self.strategy) and tf.io.gfile.exists(self.filepath):
            tf.io.gfile.remove(self.filepath)
            if not tf.io.gfile.listdir(self.backup_dir):
                tf.io.gfile.rmtree(self.backup_dir)

    def _show_history(self):
        """Puts the epochs before the resume into what `fit` returns."""
        if not self.history_is_shown and self.model.history is not None:
            past = {name: list(values) for name, values in self.history.items()}
            self.model.history.epoch, self.model.history.history = past.pop("epoch"), past
            self.history_is_shown = True

    def _pass_over_steps(self, state):
        """Wraps the train function: the steps that the backup holds are not run again."""
        train, (batch, steps_done) = self.model.train_function, (self.batch, state["meta"]["steps_done"])
        calls = iter(range(0, batch, self.model.steps_per_execution))
        data_is_positioned, metric_logs = self._data_is_positioned, {}

        def train_function(batches):
            nonlocal data_is_positioned
            if not data_is_positioned:
                endless = getattr(batches, "_cardinality", None) == tf.data.INFINITE_CARDINALITY
                for _ in range(steps_done if endless else batch):
                    next(batches)
                data_is_positioned = True
            if next(calls, None) is None:
                return train(batches)
            if not metric_logs:
                self._restore(state)  # once more: `fit` and other callbacks have touched metrics, learning rate
                metric_logs.update(self.model.get_metrics_result())
            return metric_logs

        self.model.train_function = train_function

    # -- the state: what to keep, and where it goes ----------------------------------------------------

    def _variables(self):
        """All variables of the run, and for each whether every replica has its own value of it.

        It has so for metrics and for what layers keep aside: in Keras 3 the moving statistics of
        BatchNormalization are those of each worker's own batches, also when the model is saved.
        """
        model = self.model
        own = {id(variable) for variable in [*model.non_trainable_variables, *model.metrics_variables]}
        each_once = {id(variable): variable for variable in [*model.variables, *model.optimizer.variables]}
        each_once |= {id(variable): variable for variable in model.metrics_variables}
        return list(each_once.values()), [number in own for number in each_once]

    def _write(self, epoch, batch):
        variables, differ = self._variables()
        arrays = {
            str(number): _read_rows(variable, self.strategy) if differ[number] else variable.numpy()
            for number, variable in enumerate(variables)
        }
        meta = {
            "layout": self.LAYOUT,
            "epoch": epoch,
            "batch": batch,
            "steps_done": self.steps_in_epochs + batch,
            "history": self.history,
            "variables": [[variable.path, list(variable.shape)] for variable in variables],
        }
        fault = ""
        if is_chief(self.strategy):
            try:
                tf.io.gfile.makedirs(self.backup_dir)
                with tf.io.gfile.GFile(self.filepath + ".new", "wb") as file:
                    buffer = io.BytesIO()
                    np.savez(buffer, meta=np.array(json.dumps(meta)), **arrays)
                    file.write(buffer.getvalue())
                tf.io.gfile.rename(self.filepath + ".new", self.filepath, overwrite=True)
            except (tf.errors.OpError, OSError) as error:
                fault = f"cannot write the backup {self.filepath}: {error}; free space or choose another folder"
        self._raise_everywhere(fault, self.strategy)

    def _raise_everywhere(self, fault, strategy):
        fault = _from_chief(fault.encode(), strategy).decode()
        if fault:
            raise BackupError(fault)

    def _read(self, strategy):
        """What the chief's backup holds, on every worker alike; None if there is none."""
        content, fault = b"", ""
        if is_chief(strategy):
            try:
                if tf.io.gfile.exists(self.filepath):
                    with tf.io.gfile.GFile(self.filepath, "rb") as file:
                        content = file.read()
                    fault = "" if content else "is an empty file"
                elif tf.io.gfile.exists(self.backup_dir):
                    others = set(tf.io.gfile.listdir(self.backup_dir)) - {"backup.npz.new"}
                    fault = f"is missing where there are other files ({min(others)}, …)" if others else ""
            except (tf.errors.OpError, OSError) as error:
                fault = f"cannot be read ({error})"
        advice = "to start anew, remove it or choose another backup folder"
        self._raise_everywhere(f"the backup {self.filepath} {fault}; {advice}" if fault else "", strategy)
        content = _from_chief(content, strategy)
        if not content:
            return None
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                state = dict(file)
            state["meta"] = json.loads(str(state["meta"]))
            layout = state["meta"]["layout"]
        except (ValueError, KeyError, EOFError, TypeError, OSError, zipfile.BadZipFile) as error:
            raise BackupError(f"the backup {self.filepath} is damaged or not ours ({error}); {advice}") from None
        if layout != self.LAYOUT:
            raise BackupError(f"the backup {self.filepath} has layout {layout}, this code reads {self.LAYOUT}; {advice}")
        return state

    def _restore(self, state):
        (variables, differ), saved = self._variables(), state["meta"]["variables"]
        for number in range(max(len(variables), len(saved))):
            ours = [variables[number].path, list(variables[number].shape)] if number < len(variables) else None
            theirs = saved[number] if number < len(saved) else None
            if ours is None or theirs is None or ours[1] != theirs[1]:
                raise BackupError(
                    f"the backup {self.filepath} is of another model: variable {number} is {theirs} there and "
                    f"{ours} here; use the model that it was made with, or choose another backup folder"
                )
        with self.strategy.scope():
            for number, variable in enumerate(variables):
                value = state[str(number)]
                _assign_rows(variable, value, self.strategy) if differ[number] else variable.assign(value)


# -- values that differ from replica to replica ----------------------------------------------------------


def _read_rows(variable, strategy):
    """Every replica's value of a variable, shape (replicas, *shape), the same on every worker."""
    own_values = strategy.experimental_local_results(variable.value)
    first_row = worker_number(strategy) * len(own_values)
    values = [value.numpy() for value in own_values]
    # Collectives take no unsigned integers, which seeds are; int64 holds them.
    dtype = values[0].dtype if values[0].dtype.kind == "f" else "int64"
    rows = np.zeros([strategy.num_replicas_in_sync, *variable.shape], dtype)
    rows[first_row : first_row + len(values)] = values
    return _sum_over_workers(rows, strategy)


def _assign_rows(variable, rows, strategy):
    """Gives each replica its row. If there are more or fewer replicas now, sums stay sums and means means."""
    own_values = strategy.experimental_local_results(variable.value)
    if len(rows) != strategy.num_replicas_in_sync:
        if variable.aggregation == "sum":  # Keras's own word, known on one worker too
            merged = [rows.sum(axis=0)] + [0 * rows[0]] * (strategy.num_replicas_in_sync - 1)
        else:
            merged = [rows.mean(axis=0) if rows.dtype.kind == "f" else rows[0]] * strategy.num_replicas_in_sync
        rows = np.stack(merged)
    first_row = worker_number(strategy) * len(own_values)
    for row, value in enumerate(own_values, start=first_row):
        value.assign(rows[row].astype(value.dtype.as_numpy_dtype))


def _sum_over_workers(array, strategy):
    """The sum of every worker's array, on every worker; exact where at most one of them is not zero."""
    if number_of_workers(strategy) == 1:
        return array

    def on_one_replica_a_worker(context):
        is_first = context.replica_id_in_sync_group % len(strategy.extended.worker_devices) == 0
        return tf.constant(array if is_first else np.zeros_like(array))

    values = strategy.experimental_distribute_values_from_function(on_one_replica_a_worker)
    return strategy.reduce("SUM", values, axis=None).numpy()


def _from_chief(content, strategy):
    """The chief's bytes, on every worker."""
    chief = is_chief(strategy)
    size = int(_sum_over_workers(np.array([len(content) if chief else 0], "int64"), strategy)[0])
    array = np.zeros(-(-size // 4), "int32")
    if chief:
        array.view("uint8")[:size] = np.frombuffer(content, "uint8")
    return _sum_over_workers(array, strategy).tobytes()[:size] if size else b""
