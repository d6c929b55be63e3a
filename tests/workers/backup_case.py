"""What test_backup.py runs: trainings that are broken off and go on, faults, a backup's file operations.

    [REPLICAS=2] python backup_case.py FOLDER CASE...

Writes FOLDER/worker_N.pickle: {case: what it returned}. A training is broken off by an exception on every
worker: what is left is what a kill leaves, the backup's folder. (Real kills: test_chaos.py.)
"""

import contextlib
import functools
import json
import pathlib
import pickle
import shutil
import sys
import time
import traceback
from unittest import mock

import numpy as np

# First: it puts the project on the path. (No operation runs in it.)
from cases import (
    BATCH,
    X_TEST,
    Y_TEST,
    OwnTrainStep,
    X,
    Y,
    by_data,
    crossentropy,
    dense,
    keras,
    take_replicas_from_environment,
    tf,
)

import mnist_setup
import multi_worker

folder = pathlib.Path(sys.argv[1])
take_replicas_from_environment()
strategy = tf.distribute.MultiWorkerMirroredStrategy()
me = multi_worker.worker_number(strategy)
CASES = {}
mnist_setup.load_mnist = functools.cache(mnist_setup.load_mnist)  # once, not in each of the many trainings


def case(function):
    CASES[function.__name__] = function
    return function


class BrokenOff(Exception):
    pass


class Full(keras.callbacks.Callback):
    """The disk is full from an epoch's begin on: a device that says so stands where the chief writes."""

    def __init__(self, directory, epoch):
        super().__init__()
        self.file, self.epoch = directory / "backup.npz.new", epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch and me == 0:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.symlink_to("/dev/full")


class AskToStop(keras.callbacks.Callback):
    """One worker is asked to stop, as by SIGTERM, in the second epoch."""

    def __init__(self, backup):
        super().__init__()
        self.backup = backup

    def on_train_batch_end(self, batch, logs=None):
        if me == 1 and len(self.model.history.epoch) == 1 and batch == 2:
            assert self.backup.stop()


class BreakOff(keras.callbacks.Callback):
    """Stands before BackupAndRestore: that one does not see the step, or the epoch's end, at which it breaks."""

    def __init__(self, epoch, step):
        super().__init__()
        self.due = epoch, step

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        # "or later": Keras 3.10 gives the first step of an execution, 3.15 the last.
        if self.due[1] not in ("end", "over") and self.epoch == self.due[0] and batch >= self.due[1]:
            raise BrokenOff

    def on_epoch_end(self, epoch, logs=None):
        if self.due == (epoch, "end"):
            raise BrokenOff

    def on_train_end(self, logs=None):
        if self.due[1] == "over":
            raise BrokenOff


def plain():
    return dense(), "sgd"


def momentum():
    return dense(), keras.optimizers.SGD(0.05, momentum=0.9)


def all_state():
    return dense(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)), "adam"


def own_train_step():
    model = OwnTrainStep()
    model(np.zeros((1, 28, 28), "float32"))
    return model, "adam"


def bfloat16():
    inner = keras.layers.Dense(8, dtype="bfloat16")
    return dense(inner, keras.layers.BatchNormalization(dtype="bfloat16")), keras.optimizers.SGD(0.05)


def train(
    directory, build=plain, break_at=None, freq="epoch", position=False, finite=False, decay=False, again=None,
    validate=False, patience=None, steps=7, epochs=3, seed=1, callbacks=(), steps_per_execution=1, delete=True,
    backup=None, **options,
):  # fmt: skip
    """One run, as after a fresh start. Returns history and this worker's variables; None if it was broken off."""
    keras.backend.clear_session(free_memory=False)  # no gc.collect(): it takes as long as an epoch
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model, optimizer = build()
        model.compile(optimizer, crossentropy(), metrics=["accuracy"], steps_per_execution=steps_per_execution)
        multi_worker.enable_multi_worker_fit(model)
    backup = backup or multi_worker.BackupAndRestore(directory, freq, delete)
    skip = backup.steps_done(strategy) if position else 0
    data = mnist_setup.mnist_dataset(BATCH, seed=5, skip_batches=skip).repeat()
    options = {"steps_per_epoch": None if finite else steps, "verbose": 0, "shuffle": False} | options
    if finite:  # the data start anew in each epoch; Keras knows their length, or not
        data = by_data(X[: steps * BATCH], Y[: steps * BATCH])
        data = data if finite == "known" else data.filter(lambda x, y: True)
    if decay:
        callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9), *callbacks]
    if patience:
        callbacks = [keras.callbacks.EarlyStopping(monitor="loss", min_delta=10, patience=patience), *callbacks]
    if break_at:
        callbacks = [*callbacks, BreakOff(*break_at)]
    if validate:
        options["validation_data"] = by_data(X_TEST[:100], Y_TEST[:100])
    try:
        history = model.fit(data, epochs=epochs, callbacks=[*callbacks, backup], **options)
    except BrokenOff:
        return None
    outcome = {"epoch": history.epoch, **history.history}
    if again:
        outcome["without the callback"] = model.fit(data, epochs=again, **options).epoch
        outcome["second"] = model.fit(data, epochs=again, callbacks=[*callbacks, backup], **options).epoch
    variables = [*model.variables, *model.optimizer.variables]
    values = [strategy.experimental_local_results(variable.value)[0].numpy() for variable in variables]
    return outcome, [value.astype("float64") for value in values]


@functools.cache
def undisturbed(**options):
    """The run that nobody breaks off: one for all cases that train alike."""
    return train(folder / "undisturbed", **options)


def broken_off_and_resumed(directory, *points, **options):
    """Another seed after each break: nothing but the backup may decide."""
    for seed, point in enumerate(points, start=1):
        assert train(directory, break_at=point, seed=seed, **options) is None
    return train(directory, seed=99, **options)


def error_of(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except (multi_worker.BackupError, multi_worker.TrainingStopped) as error:
        return f"{type(error).__name__}: {error}"


# Where the run is broken off (epoch, step), and how it trains.
RESUMES = {
    "each_epoch": ([(1, 3)], {"position": True}),
    "momentum": ([(1, 4)], {"build": momentum, "freq": 3, "position": True}),
    "the_callback_passes_over_endless_data": ([(1, 1), (2, 5)], {"freq": 2}),
    "adam_dropout_batch_normalization_validation_decay":
        ([(1, 4), (2, 1)], {"build": all_state, "freq": 3, "position": True, "validate": True, "decay": True}),
    "after_the_last_step_of_an_epoch": ([(1, "end")], {"build": own_train_step, "freq": 7, "position": True}),
    "initial_epoch": ([(2, 4), (3, 4)], {"freq": 2, "initial_epoch": 2, "epochs": 5}),
    "data_that_start_anew_each_epoch": ([(1, 4), (2, 0)], {"freq": 2, "finite": "known", "validate": True}),
    "data_of_unknown_length": ([(1, 4)], {"freq": 2, "finite": "unknown"}),
    "steps_per_execution": ([(1, 5)], {"freq": 2, "steps_per_execution": 2, "decay": True}),
    "bfloat16": ([(1, 3)], {"build": bfloat16, "freq": 2}),
    "stopped_early_and_killed_at_the_end": ([(0, "over")], {"patience": 1, "epochs": 5}),
}  # fmt: skip


def resume(name):
    points, options = RESUMES[name]
    expected = undisturbed(**{key: value for key, value in options.items() if key not in ("freq", "position")})
    directory = folder / name / f"of_worker_{me}"  # no shared folder: the chief's counts, and no other is looked at
    if me > 0:
        directory.mkdir(parents=True)
        (directory / "backup.npz").write_bytes(b"torn")
    resumed = broken_off_and_resumed(directory, *points, **options)
    return {"undisturbed": expected, "resumed": resumed, "folder is left": directory.exists() and me == 0}


CASES |= {name: functools.partial(resume, name) for name in RESUMES}


@case
def number_of_workers():
    """A half-done epoch that this number of workers leaves to another, or takes over from another."""
    directory, options = folder / "number_of_workers", {"build": momentum, "freq": 2}
    if directory.exists():
        return train(directory, **options)
    assert train(directory, break_at=(1, 4), **options) is None
    return undisturbed(build=momentum)


@case
def finished():
    """The backup of a run that has ended, found by the same run, and by one of more epochs."""
    directory = folder / "finished"
    runs = [train(directory, epochs=epochs, delete=False) for epochs in (2, 2, 3)]
    return runs, directory.exists(), undisturbed()


@case
def deletion():
    """Worker 1 comes late to the deletion. Returns whether the backup was there all that time, and whether after it."""
    backup = multi_worker.BackupAndRestore(folder / "deletion", delete_checkpoint=False)
    train(folder / "deletion", backup=backup)
    file, end = folder / "deletion" / "backup.npz", time.monotonic() + 2
    while me == 1 and file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    before = file.exists() if me == 1 else None
    backup.delete(strategy)
    return before, file.exists()


@case
def second_fit():
    directory = folder / "second_fit"
    return train(directory, epochs=1, again=2)[0], broken_off_and_resumed(directory, (1, 3), epochs=2, again=2)[0]


@case
def early_stopping_counts_anew():
    directory, options = folder / "early_stopping", {"patience": 1, "epochs": 5}
    return train(directory, **options)[0], broken_off_and_resumed(directory, (1, 3), **options)[0]


@case
def stop():
    multi_worker.BackupAndRestore.STEPS_BETWEEN_QUESTIONS = 2
    backup = multi_worker.BackupAndRestore(folder / "stop", save_before_preemption=True)
    asked_too_soon = backup.stop()
    backup = multi_worker.BackupAndRestore(folder / "stop", save_before_preemption=True)
    message = error_of(train, None, backup=backup, callbacks=[AskToStop(backup)])
    return asked_too_soon, message, train(folder / "stop"), undisturbed()


@case
def full_disk_in_the_second_epoch():
    directory = folder / "full"
    error = error_of(train, directory, callbacks=[Full(directory, 1)])
    if me == 0:
        (directory / "backup.npz.new").unlink()
    return error, train(directory), undisturbed()


def compressed_as_nobody_can_read(content):
    method = content.index(b"PK\x01\x02") + 10  # in the zip file's directory
    return content[:method] + b"\x63\0" + content[method + 2 :]


FAULTY_BACKUPS = {
    "other_compression": lambda file: file.write_bytes(compressed_as_nobody_can_read(file.read_bytes())),
    "torn": lambda file: file.write_bytes(file.read_bytes()[:5000]),
    "other_header": lambda file: file.write_bytes(file.read_bytes().replace(b"{'descr'", b"{(descr'")),
    "empty": lambda file: file.write_bytes(b""),
    "foreign": lambda file: np.savez(file, something=np.zeros(3)),
    "older_layout": lambda file: np.savez(file, meta=np.array(json.dumps({"layout": 1}))),
    "keras_own": lambda file: file.rename(file.with_name("latest.weights.h5")),
    "other_layer": None,
    "other_optimizer": None,
    "other_steps_per_execution": None,
}
FAULTY_RUNS = {
    "other_layer": {"build": lambda: (dense(last=11), keras.optimizers.SGD(0.05, momentum=0.9))},
    "other_optimizer": {"build": lambda: (dense(), "rmsprop")},
    "other_steps_per_execution": {"steps_per_execution": 2},
}


@case
def faults():
    """What each worker says of each fault."""
    kept = folder / "kept"
    train(kept, momentum, break_at=(0, 1), freq=1)
    errors = {}
    for fault, spoil in FAULTY_BACKUPS.items():
        directory = folder / fault
        if me == 0:  # no other looks
            shutil.copytree(kept, directory)
            if spoil:
                spoil(directory / "backup.npz")
        errors[fault] = error_of(train, directory, **{"build": momentum} | FAULTY_RUNS.get(fault, {}))
    if me == 0:
        (folder / "a_file").write_text("a file in the folder's place")
    errors["a_file"] = error_of(train, folder / "a_file")
    errors["below_a_file"] = error_of(train, folder / "a_file" / "backup")
    errors["not_writable"] = error_of(train, "/proc/backup")  # refused to root, too
    errors["full"] = error_of(train, folder / "full_at_once", callbacks=[Full(folder / "full_at_once", 0)])
    errors["data_that_cannot_resume"] = error_of(train, folder / "data", finite="known", steps=9, steps_per_epoch=3)
    return errors


class Snapshots:
    """Copies the folder around every file operation in it: what a kill at that moment leaves on the disk."""

    def __init__(self, directory, into):
        self.directory, self.into, self.moments, self.last = directory, into, [], 0

    def take(self, moment):
        state = None
        if self.directory.exists():
            state = {file.name: file.read_bytes() for file in self.directory.iterdir()}
        self.moments.append(moment)
        if state != self.last:
            copy = self.into / f"{len(self.moments):02} {moment}"
            copy.mkdir(parents=True)
            if state is not None:
                shutil.copytree(self.directory, copy / "backup")
        self.last = state

    @contextlib.contextmanager
    def taken(self):
        gfile, take = tf.io.gfile, self.take

        class WatchedFile(gfile.GFile):
            def write(self, content):
                for part in (b"", content[: len(content) // 2], content[len(content) // 2 :]):
                    super().write(part)
                    self.flush()
                    take("in write")

        def watched(name, function):
            def call(*arguments, **options):
                take(f"before {name}")
                function(*arguments, **options)
                take(f"after {name}")

            return call

        with contextlib.ExitStack() as patches:
            for name in ("makedirs", "rename", "remove", "rmtree"):
                patches.enter_context(mock.patch.object(gfile, name, watched(name, getattr(gfile, name))))
            patches.enter_context(mock.patch.object(gfile, "GFile", WatchedFile))
            yield


@case
def file_operations():
    """All workers go on from each state that a kill at a file operation of two backups, or of the deletion, leaves."""
    options = {"build": momentum, "epochs": 2, "steps": 3}
    snapshots = Snapshots(folder / "operations", folder / ("snapshots" if me == 0 else f"snapshots_of_{me}"))
    with snapshots.taken():
        train(folder / "operations", **options)
    states = sorted((folder / "snapshots").iterdir())
    resumed = {}
    for state in states:
        seed = 99 if (state / "backup" / "backup.npz").exists() else 1  # without a backup, the seed decides
        resumed[state.name] = train(state / "backup", seed=seed, **options)
    return undisturbed(**options), resumed, snapshots.moments


@case
def without_a_strategy():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backup = multi_worker.BackupAndRestore(folder / "without_a_strategy")
    return error_of(model.fit, np.zeros((4, 2)), np.zeros((4, 1)), callbacks=[backup], verbose=0)


def main(names):
    results = {}
    for name in names:
        begin = time.monotonic()
        try:
            results[name] = CASES[name]()
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"worker_{me}.pickle").write_bytes(pickle.dumps(results))
        print(f"case {name}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
