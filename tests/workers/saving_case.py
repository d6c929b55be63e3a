"""What test_saving.py runs on many workers: python saving_case.py FOLDER save|go_on|restore; answers as JSON in FOLDER."""

import json
import os
import pathlib
import signal
import sys
import time
import zipfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import ends_at_once  # noqa: F401 (before it is used)
import tensorflow as tf

import mnist_setup
import multi_worker

keras = tf.keras
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
PATIENCE = 5  # seconds; such a save takes a tenth of one
folder, part = pathlib.Path(sys.argv[1]), sys.argv[2]
strategy = tf.distribute.MultiWorkerMirroredStrategy()
me, chief = multi_worker.worker_number(strategy), multi_worker.is_chief(strategy)
answers = {}


class InputMean(keras.layers.Layer):
    """Passes its input on and keeps the last batch's mean, which is averaged over the workers when it is read."""

    def build(self, input_shape):
        if LEGACY:
            kinds = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.MEAN}
            self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False, **kinds)
        else:
            kinds = {"synchronization": "on_read", "aggregation": "mean"}
            self.seen = keras.Variable(0.0, trainable=False, name="seen", **kinds)
        self.built = True

    def call(self, inputs, training=False):
        if training:
            self.seen.assign(tf.reduce_mean(inputs))
        return inputs


def make_model(*first, synchronized=False):
    with strategy.scope():
        layers = [keras.layers.Flatten(), *first, keras.layers.Dense(24, "relu")]
        layers += [keras.layers.BatchNormalization(synchronized=synchronized), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((28, 28)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return multi_worker.enable_multi_worker_fit(model)


def train(model, epochs=2, steps=20, callbacks=()):
    data = mnist_setup.mnist_dataset(96, seed=5)
    return model.fit(data, epochs=epochs, steps_per_epoch=steps, callbacks=list(callbacks), verbose=0).history


def own_value(variable):
    """This worker's own value."""
    return strategy.experimental_local_results(variable if LEGACY else variable.value)[0].numpy()


def meet():
    """Returns when all workers are here: a sum needs a number from each."""
    ones = strategy.experimental_distribute_values_from_function(lambda context: tf.constant(1))
    strategy.reduce("SUM", ones, axis=None).numpy()


def error_of(path):
    try:
        multi_worker.save_model(plain, path, strategy)
    except OSError as error:
        return str(error)


def tree(name):
    meet()
    return sorted(path.relative_to(folder / name).as_posix() for path in (folder / name).rglob("*") if path.is_file())


def write_answers():
    (folder / f"{part}_{me}.json").write_text(json.dumps(answers))


def chief_alone(model, path):
    """The chief saves, the other waits: returns, there, whether the chief came back within PATIENCE seconds."""
    meet()
    done, end = path.with_suffix(".done"), time.monotonic() + PATIENCE
    if chief:
        model.save(path)
        done.touch()
        return None
    while not done.exists() and time.monotonic() < end:
        time.sleep(0.05)  # polling, up to a deadline
    return done.exists()


keras.utils.set_random_seed(7)
plain = make_model()
_, (images, _) = mnist_setup.load_mnist()

if part == "save":
    answers["chief"] = [chief, multi_worker.is_chief()]
    kept = keras.callbacks.ModelCheckpoint(
        multi_worker.write_filepath(folder / "kept" / "best.keras", strategy), monitor="loss", save_best_only=True
    )
    answers["history"] = train(plain, callbacks=[kept])
    answers["iterations"] = int(plain.optimizer.iterations.numpy())
    multi_worker.remove_temporary(folder / "kept" / "best.keras", strategy)
    np.save(folder / f"predictions_{me}.npy", plain(images[:100], training=False).numpy())
    multi_worker.save_model(plain, folder / "models" / "model.keras", strategy)
    answers["is there"] = (folder / "models" / "model.keras").exists()
    plain.export(multi_worker.write_filepath(folder / "exported" / "model", strategy))
    checkpoint = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer)
    where = multi_worker.write_filepath(folder / "checkpoints" / "run", strategy)
    manager = tf.train.CheckpointManager(checkpoint, where, max_to_keep=1)
    manager.save(), manager.save()
    meet()
    for path in (folder / "exported" / "model", folder / "checkpoints" / "run"):
        multi_worker.remove_temporary(path, strategy)
    answers["trees"] = {name: tree(name) for name in ("models", "kept", "exported", "checkpoints")}

    # What each worker keeps of its own, and what is saved of it.
    averaged, together = make_model(InputMean()), make_model(synchronized=True)
    for name, model in (("averaged", averaged), ("together", together)):
        train(model, epochs=1, steps=3)
        answers[f"{name}: moving mean"] = own_value(model.layers[-2].moving_mean).tolist()
        multi_worker.save_model(model, folder / "models" / f"{name}.keras", strategy)
    answers["seen"] = float(own_value(averaged.layers[1].seen))

    # Paths that cannot be written: for all, for worker 1 alone, for the chief alone.
    answers["faults"] = [error_of(folder / name / "m.keras") for name in ("blocked", "blocked_1", "blocked_0")]

    # A reader reads meanwhile.
    for number in range(20):
        with strategy.scope():
            plain.layers[-1].bias.assign(np.full(10, number, "float32"))
        multi_worker.save_model(plain, folder / "twenty" / "m.keras", strategy)
    answers["trees"]["twenty"] = tree("twenty")
    write_answers()

    # Killed in the middle of a save.
    whole = zipfile.ZipFile.open

    def kill_at_second_member(archive, name, mode="r", **options):
        if mode == "w" and archive.namelist():
            archive.fp.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(archive, name, mode, **options)

    meet()
    zipfile.ZipFile.open = kill_at_second_member
    multi_worker.save_model(plain, folder / "twenty" / "m.keras", strategy)

elif part == "go_on":
    multi_worker.save_model(plain, folder / "twenty" / "m.keras", strategy)
    answers["tree"] = tree("twenty")
    with strategy.scope():
        loaded = keras.models.load_model(folder / "models" / "model.keras")
        multi_worker.enable_multi_worker_fit(loaded)
    answers["iterations"] = [int(loaded.optimizer.iterations.numpy())]
    answers["history"] = train(loaded)
    answers["iterations"] += [int(loaded.optimizer.iterations.numpy())]
    answers["plain alone"] = None if LEGACY else chief_alone(plain, folder / "plain.keras")
    averaged = make_model(InputMean())
    train(averaged, epochs=1, steps=1)
    if chief:
        write_answers()
    answers["averaged alone"] = chief_alone(averaged, folder / "averaged.keras")
    write_answers()
    os.kill(os.getpid(), signal.SIGKILL)  # the chief would wait for ever

elif part == "restore":
    with strategy.scope():
        plain.optimizer.build(plain.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer)
    checkpoint.restore(tf.train.latest_checkpoint(folder / "checkpoints" / "run")).assert_consumed()
    np.save(folder / f"restored_{me}.npy", plain(images[:100], training=False).numpy())
    answers["iterations"] = [int(plain.optimizer.iterations.numpy())]
    answers["history"] = train(plain, epochs=1)
    answers["iterations"] += [int(plain.optimizer.iterations.numpy())]
    write_answers()
