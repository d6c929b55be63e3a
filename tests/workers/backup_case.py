"""What test_backup.py runs: a model with all kinds of state, which may be killed at a given step.

    python backup_case.py FOLDER [OPTIONS as JSON]

Options: kill_worker, kill_epoch, kill_batch (SIGKILL to this process after that step, once); freq; epochs;
position (create the data where the backup ends; else the callback passes over it); finite; units; steps_per_execution;
delete; second_fit.
"""

import json
import os
import pathlib
import signal
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf

import mnist_setup
import multi_worker

keras = tf.keras
folder = pathlib.Path(sys.argv[1])
options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
strategy = tf.distribute.MultiWorkerMirroredStrategy()
me = multi_worker.worker_number(strategy)
keras.utils.set_random_seed(11)


class KillOnce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        marker = folder / "killed"
        # "or later": Keras 3.10 gives the first step of an execution, 3.15 the last.
        due = epoch_now[0] == options["kill_epoch"] and batch >= options["kill_batch"]
        if due and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        epoch_now[0] = epoch


epoch_now = [0]
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(options.get("units", 24), "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    steps_per_execution = options.get("steps_per_execution", 1)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    multi_worker.enable_multi_worker_fit(model)
backup = multi_worker.BackupAndRestore(folder / "backup", options.get("freq", "epoch"), options.get("delete", True))
callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)]
callbacks += [KillOnce()] if options.get("kill_worker") == me else []
skip = backup.steps_done(strategy) if options.get("position") else 0
data = mnist_setup.mnist_dataset(96, seed=5, skip_batches=skip)
if options.get("finite"):  # the data starts anew in each epoch
    data = data.take(7)
_, (x_test, y_test) = mnist_setup.load_mnist()
policy = tf.data.Options()
policy.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
test = tf.data.Dataset.from_tensor_slices((x_test[:100], y_test[:100])).batch(96).with_options(policy)
arguments = {"validation_data": test, "steps_per_epoch": None if options.get("finite") else 7, "verbose": 2}
try:
    history = model.fit(data, epochs=options.get("epochs", 3), callbacks=[*callbacks, backup], **arguments)
except multi_worker.BackupError as error:
    sys.exit(f"BackupError: {error}")
result = {"epoch": history.epoch, **history.history}
if options.get("second_fit"):
    second = model.fit(data, epochs=1, callbacks=[backup], **arguments)
    result["second"] = second.epoch
(folder / f"history_{me}.json").write_text(json.dumps(result))
np.savez(folder / f"weights_{me}.npz", *[weight.numpy() for weight in model.trainable_variables])
