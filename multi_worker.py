"""Train one Keras 3 model on many workers with `Model.fit`: copy this one file into your own project.

What Keras 3 needs under tf.distribute.MultiWorkerMirroredStrategy (MWMS), a judge for TF_CONFIG, who writes
what, and a backup that a killed job resumes from. Importing this file starts nothing in TensorFlow.
"""

import contextlib
import io
import itertools
import json
import os
import re
import socket

import numpy as np
import tensorflow as tf


def enable_multi_worker_fit(model):
    """Makes `fit`, `evaluate` and `predict` of a Keras 3 model work on many workers. Returns the model.

    Call it in `strategy.scope()` beside `compile`. It sets three methods on this one instance and leaves its
    class alone, so what `model.save` writes is a plain Keras model. On one worker with one replica (one GPU, or the
    CPU), with tf_keras, or with a Keras that no longer needs it, it does nothing. Where it does something, XLA
    (`jit_compile`) is not used.

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
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or strategy.num_replicas_in_sync == 1:
        return False
    import keras

    advice = f"Keras {keras.__version__} is not one that multi_worker.py can mend: install keras>=3.10,<3.16."
    if tuple(int(part) for part in re.findall(r"\d+", keras.__version__)[:2]) < (3, 10):
        raise RuntimeError(advice)
    try:
        from keras.src.backend.tensorflow.trainer import reduce_per_replica

        keras.Model._maybe_symbolic_build, keras.Model.make_train_function  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"{advice} ({error})") from None
    if number_of_workers(strategy) == 1:  # Of the three faults, several replicas on one worker meet the third alone.
        return True
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
            host and port.isdecimal() and 0 < int(port) < 65536,
            f'address "{address}" has no port; write it as "host:port" with a port from 1 to 65535',
        )
        refuse_unless(addresses.count(address) == 1, f'address "{address}" stands twice; give each task its own')
    job, index = task.get("type"), task.get("index")
    refuse_unless(
        isinstance(job, str) and job in cluster,
        f'task type "{job}" is no job of the cluster; use one of {", ".join(cluster)}',
    )
    refuse_unless(type(index) is int, f"task index {json.dumps(index)} is not a whole number; count from 0")
    refuse_unless(
        0 <= index < len(cluster[job]),
        f'task index {index} is out of range: job "{job}" has {len(cluster[job])} task(s), counted from 0',
    )
    _check_address(*cluster[job][index].rsplit(":", 1), refuse_unless)
    return config


def _check_address(host, port, refuse_unless):
    """Refuses a port of this machine that is taken, and a `localhost` that means IPv6: peers would wait for an hour."""
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
    if strategy is None:  # TF_CONFIG is read, not judged: once the strategy is up, this task's port is taken
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    else:
        resolver = getattr(strategy, "cluster_resolver", None)
    if resolver is None:
        return {}, None, None
    return resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id


def write_filepath(filepath, strategy=None):
    """Where this worker writes: `filepath` for the chief, a temporary folder of its own for any other.

    Every worker must save, for reading some variables takes all workers; no two may write one path. The
    folder in which the returned path lies is made if it is not there.
    """
    folder, name = os.path.split(os.fspath(filepath).rstrip("/"))
    if not is_chief(strategy):
        folder = _temporary_folder(filepath, strategy)
    if folder:
        tf.io.gfile.makedirs(folder)
    return os.path.join(folder, name)


def remove_temporary(filepath, strategy=None):
    """Removes this worker's temporary folder beside `filepath`, with all that is in it. The chief has none."""
    if not is_chief(strategy) and tf.io.gfile.isdir(_temporary_folder(filepath, strategy)):
        tf.io.gfile.rmtree(_temporary_folder(filepath, strategy))


def _temporary_folder(filepath, strategy):
    _, job, index = _cluster_and_task(strategy)
    return os.path.join(os.path.dirname(os.fspath(filepath).rstrip("/")), f"workertemp_{job}_{index}")


def save_model(model, filepath, strategy=None):
    """Saves a model as FILE.keras with every worker taking part; leaves nothing else behind.

    The chief writes under another name, then renames: whoever opens `filepath` finds the old model or the new
    one, whole. When this returns, on any worker, the new one is there.

    Raises:
        ValueError: the name does not end with .keras.
        OSError (on every worker, so that none waits for another): some worker cannot write.
    """
    filepath, together = os.fspath(filepath), strategy or model.distribute_strategy
    if not filepath.endswith(".keras"):
        raise ValueError(f"{filepath}: the file's name must end with .keras")
    unfinished = filepath[: -len(".keras")] + ".new.keras"

    def prepare():
        # Before the first variable is read, as from there on workers wait for each other.
        with tf.io.gfile.GFile(write_filepath(unfinished, strategy), "wb") as file:
            file.write(b"")

    def save():
        model.save(write_filepath(unfinished, strategy))
        if is_chief(strategy):
            tf.io.gfile.rename(unfinished, filepath, overwrite=True)

    try:
        for step in (prepare, save):
            fault, failed = None, np.zeros(number_of_workers(together), "int64")
            try:
                step()
            except (tf.errors.OpError, OSError) as error:
                fault, failed[worker_number(together)] = error, 1
            failed = _sum_over_workers(failed, together)
            if fault:
                raise OSError(f"cannot save the model {filepath}: {getattr(fault, 'message', fault)}") from fault
            if failed.any():
                raise OSError(f"model {filepath} not saved: worker {failed.argmax()} cannot write, its error says why")
    finally:
        remove_temporary(unfinished, strategy)
        if is_chief(strategy) and tf.io.gfile.exists(unfinished):
            tf.io.gfile.remove(unfinished)


class BackupError(RuntimeError):
    """A backup cannot be written, read or used; one line that says why and what to do."""


class TrainingStopped(Exception):
    """`BackupAndRestore.stop` was called: every worker has left `fit` after the same step, which is backed up."""


class BackupAndRestore(tf.keras.callbacks.Callback):
    """Keras's callback of this name, made safe and exact for many workers; put it last in `callbacks`.

    The chief writes one file, `backup_dir/backup.npz`, which always holds a whole backup: it is written under
    another name and then renamed. It holds the model, the optimizer, the metrics, the epoch, the step and
    the history, so a run that was killed and started again ends as if nothing had happened.

    Args:
        backup_dir: a folder of its own on a file system that outlives the job. The chief alone looks into it.
        save_freq: "epoch"; or an integer: every so many steps of an epoch, and at its end.
        delete_checkpoint: whether the chief deletes the backup at the successful end of `fit`.
        save_before_preemption: whether `stop` may be called: every 10 steps the workers ask each other.
    Raises (in `fit`, on every worker):
        BackupError: the backup cannot be written, is damaged, or belongs to another model or to no one we know.
        TrainingStopped: after `stop`.

    The data goes on where it stopped. Either create an endless dataset at that place, with
    `mnist_dataset(..., skip_batches=backup.steps_done(strategy))`, or leave it to the callback, which then
    reads and drops the batches that were used up (in the half-done epoch, if the data starts anew each epoch).

    Not covered: what other callbacks remember (EarlyStopping counts its patience anew) and that they see the
    first steps of a half-done epoch again; the order of data that is shuffled anew in each epoch (`repeat()` it
    instead); random numbers that no layer keeps the seed of; a second `fit` in the same script (give it
    another folder, and both `delete_checkpoint=False`); a changed learning rate (the backup's is used).
    """

    LAYOUT = 2
    STEPS_BETWEEN_QUESTIONS = 10  # Each costs an all-reduce of one number, a few milliseconds.

    def __init__(self, backup_dir, save_freq="epoch", delete_checkpoint=True, save_before_preemption=False):
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(f'save_freq must be "epoch" or a positive number of steps, not {save_freq!r}')
        if not os.fspath(backup_dir):
            raise ValueError("backup_dir is empty; name a folder")
        self.backup_dir, self.save_freq, self.delete_checkpoint = os.fspath(backup_dir), save_freq, delete_checkpoint
        self.filepath, self.save_before_preemption = os.path.join(self.backup_dir, "backup.npz"), save_before_preemption
        self._data_is_positioned = self._is_training = self._stop_asked = False

    def steps_done(self, strategy=None):
        """The number of steps (batches) that the backup already holds; 0 if there is none.

        Call it on every worker, before `fit`, to create an endless dataset that starts there.
        """
        state = self._read(strategy or tf.distribute.get_strategy())
        self._data_is_positioned = True
        return state["meta"]["steps_done"] if state else 0

    def stop(self):
        """Asks all workers to back up and leave `fit` soon. Any worker, any thread. Returns whether `fit` runs here.

        Raises:
            RuntimeError: without save_before_preemption=True no worker asks whether to stop.
        """
        if not self.save_before_preemption:
            raise RuntimeError("stop() needs BackupAndRestore(…, save_before_preemption=True)")
        self._stop_asked = True
        return self._is_training

    def delete(self, strategy=None):
        """Deletes the backup, on the chief; call it on every worker. It begins when all of them are here."""
        strategy = strategy or tf.distribute.get_strategy()
        _sum_over_workers(np.zeros(1, "int64"), strategy)

        def remove_files():
            for file in (self.filepath, self.filepath + ".new"):
                if tf.io.gfile.exists(file):
                    tf.io.gfile.remove(file)
            if tf.io.gfile.exists(self.backup_dir) and not tf.io.gfile.listdir(self.backup_dir):
                tf.io.gfile.rmtree(self.backup_dir)

        self._on_chief(remove_files, "cannot be deleted", "delete it before the next run", strategy)

    # -- what Keras calls ------------------------------------------------------------------------------

    def on_train_begin(self, logs=None):
        if not _is_keras_3(self.model):
            raise BackupError("this callback is for Keras 3; with tf_keras use tf.keras.callbacks.BackupAndRestore")
        self.strategy = self.model.distribute_strategy
        with self.strategy.scope():
            if not tf.distribute.has_strategy():
                raise BackupError(
                    "BackupAndRestore needs a model that was built in a strategy's scope; to train alone, use "
                    "MultiWorkerMirroredStrategy() without TF_CONFIG, or Keras's own callback"
                )
        self.model._initial_epoch, self._stop_asked = 0, False  # a `fit` before this one may have been broken off
        state = self._read(self.strategy)
        meta = {"epoch": 0, "batch": 0, "steps_done": 0, "history": {"epoch": []}, "is_over": False, "logs": {}}
        if state:
            meta = state["meta"]
            if meta["batch"] % self.model.steps_per_execution:
                raise BackupError(f"the backup {self.filepath} was made with another steps_per_execution; use that one")
            self._restore(state)
            self.model._initial_epoch = self.params["epochs"] if meta["is_over"] else meta["epoch"]
            is_over = self.model._initial_epoch >= self.params["epochs"]
            place = "nothing is left to train" if is_over else f"epoch {meta['epoch'] + 1}, step {meta['batch'] + 1}"
            print(f"goes on from the backup in {self.backup_dir}: {place}", flush=True)
        self.history, self.history_is_shown, self.batch = meta["history"], False, meta["batch"]
        self.steps_in_epochs, self.state = meta["steps_done"] - meta["batch"], state if meta["batch"] else None
        self._pass_over_steps(meta)
        self._is_training = True

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self._show_history()

    def on_train_batch_begin(self, batch, logs=None):
        self.first_batch = batch

    def on_train_batch_end(self, batch, logs=None):
        # With steps_per_execution > 1, `batch` is the first step of the execution in Keras 3.10, the last in 3.15.
        done, end = self.batch, self.first_batch + self.model.steps_per_execution
        if end <= done:  # passed over
            if end == done:
                self._restore(self.state)  # once more: `fit` and other callbacks have touched metrics, learning rate
            return
        self.batch = end
        stop = done // self.STEPS_BETWEEN_QUESTIONS < end // self.STEPS_BETWEEN_QUESTIONS and self._any_worker_stops()
        if stop or (self.save_freq != "epoch" and done // self.save_freq < end // self.save_freq):
            self._write(self.epoch, end, logs)
        if stop:
            raise TrainingStopped(f"stopped after step {end} of epoch {self.epoch + 1}; backed up in {self.backup_dir}")

    def on_epoch_end(self, epoch, logs=None):
        self.history["epoch"].append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(_plain(value))
        self.steps_in_epochs, self.batch = self.steps_in_epochs + self.batch, 0
        self._write(epoch + 1, 0)
        if self._any_worker_stops():
            raise TrainingStopped(f"stopped after epoch {epoch + 1}; backed up in {self.backup_dir}")

    def on_train_end(self, logs=None):
        self._show_history()
        self.model._initial_epoch, self._data_is_positioned, self._is_training = 0, False, False
        if self.delete_checkpoint:
            self.delete(self.strategy)

    def _show_history(self):
        """Puts the epochs before the resume into what `fit` returns."""
        if not self.history_is_shown and self.model.history is not None:
            past = {name: list(values) for name, values in self.history.items()}
            self.model.history.epoch, self.model.history.history = past.pop("epoch"), past
            self.history_is_shown = True

    def _pass_over_steps(self, meta):
        """Wraps the train function until the steps that the backup holds, and their data, are passed over."""
        train = getattr(self.model.train_function, "wrapped_for_resume", self.model.train_function)

        def train_function(batches):
            if not self._data_is_positioned:
                self._drop_batches(batches, meta)
                self._data_is_positioned = True
            if self.first_batch < self.batch:
                return dict(meta["logs"])
            self.model.train_function = train
            return train(batches)

        train_function.wrapped_for_resume = train
        self.model.train_function = train_function

    def _drop_batches(self, batches, meta):
        """Reads the batches that the backup's steps have used."""
        length, steps = getattr(batches, "_cardinality", None), self.params["steps"]  # No public way to know it.
        if length == tf.data.INFINITE_CARDINALITY:
            used = meta["steps_done"]
        elif length is not None and steps in (None, length):  # Keras starts such data anew in each epoch.
            used = meta["batch"]
        else:
            raise BackupError(
                f"these data could not go on where they stop (batches: {length}, steps in an epoch: {steps}); "
                "make them endless with repeat(), or give no steps_per_epoch"
            )
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            for _ in range(used):
                next(batches)

    def _any_worker_stops(self):
        if not self.save_before_preemption:
            return False
        return _sum_over_workers(np.array([self._stop_asked], "int64"), self.strategy)[0] > 0

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

    def _write(self, epoch, batch, logs=None):
        variables, differ = self._variables()
        arrays = {
            str(number): _read_rows(variable, self.strategy) if differ[number] else _exact(variable.numpy())
            for number, variable in enumerate(variables)
        }
        meta = {
            "layout": self.LAYOUT,
            "epoch": epoch,
            "batch": batch,
            "steps_done": self.steps_in_epochs + batch,
            "history": self.history,
            "is_over": batch == 0 and bool(self.model.stop_training),
            "logs": {name: _plain(value) for name, value in (logs or {}).items()},
            "variables": [[variable.path, list(variable.shape)] for variable in variables],
        }

        def write_file():
            buffer = io.BytesIO()
            np.savez(buffer, meta=np.array(json.dumps(meta)), **arrays)
            tf.io.gfile.makedirs(self.backup_dir)
            with tf.io.gfile.GFile(self.filepath + ".new", "wb") as file:
                file.write(buffer.getvalue())
            tf.io.gfile.rename(self.filepath + ".new", self.filepath, overwrite=True)

        self._on_chief(write_file, "cannot be written", "free space or choose another backup folder", self.strategy)

    def _on_chief(self, action, fault, advice, strategy):
        """Runs `action` on the chief; its bytes, or the same error, come to every worker."""
        answer = b""
        if is_chief(strategy):
            try:
                answer = b"+" + (action() or b"")
            except (tf.errors.OpError, OSError, BackupError) as error:
                reason = " ".join(str(error).split()) if isinstance(error, BackupError) else f"{fault} ({error})"
                answer = f"-the backup {self.filepath} {reason}; {advice}".encode()
        answer = _from_chief(answer, strategy)
        if answer[:1] == b"-":
            raise BackupError(answer[1:].decode())
        return answer[1:]

    def _read(self, strategy):
        """What the chief's backup holds, on every worker alike; None if there is none."""
        advice = "to start anew, remove it or choose another backup folder"

        def read_file():
            if tf.io.gfile.exists(self.filepath):
                with tf.io.gfile.GFile(self.filepath, "rb") as file:
                    content = file.read()
                if not content:
                    raise BackupError("is an empty file")
                return content
            if tf.io.gfile.exists(self.backup_dir):
                others = set(tf.io.gfile.listdir(self.backup_dir)) - {"backup.npz.new"}
                if others:
                    raise BackupError(f"is missing where there are other files ({min(others)}, …)")

        content = self._on_chief(read_file, "cannot be read", advice, strategy)
        if not content:
            return None
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                state = dict(file)
            state["meta"] = json.loads(str(state["meta"]))
            layout = state["meta"]["layout"]
        except Exception as error:  # of one flipped bit, zipfile, NumPy and json make errors of ten kinds
            raise BackupError(f"the backup {self.filepath} is damaged or not ours ({error}); {advice}") from None
        if layout != self.LAYOUT:
            raise BackupError(f"the backup {self.filepath} has layout {layout}, this code reads {self.LAYOUT}; {advice}")
        return state

    def _restore(self, state):
        variables, differ = self._variables()
        ours = [[variable.path, list(variable.shape)] for variable in variables]
        for here, there in itertools.zip_longest(ours, state["meta"]["variables"], fillvalue=["no variable", []]):
            # Without its numbers: Keras counts up the names of a model that is built again in the same process.
            if (re.sub(r"_\d+", "", here[0]), here[1]) != (re.sub(r"_\d+", "", there[0]), there[1]):
                raise BackupError(
                    f"the backup {self.filepath} is of another model: it has {there[0]} {tuple(there[1])} where this model "
                    f"has {here[0]} {tuple(here[1])}; use the model that it was made with, or choose another backup folder"
                )
        with self.strategy.scope():
            for number, variable in enumerate(variables):
                value = state[str(number)]
                _assign_rows(variable, value, self.strategy) if differ[number] else variable.assign(value)


# -- values that differ from replica to replica ----------------------------------------------------------


def _plain(value):
    """A log as JSON can hold it, to the last bit."""
    return np.asarray(value).tolist()


def _exact(array):
    """The array in a type that .npz files and collectives know, with the same values: bfloat16 is of neither."""
    return array.astype("float32") if array.dtype.kind == "V" else array


def _read_rows(variable, strategy):
    """Every replica's value of a variable, shape (replicas, *shape), the same on every worker."""
    values = [_exact(value.numpy()) for value in strategy.experimental_local_results(variable.value)]
    first_row = worker_number(strategy) * len(values)
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
