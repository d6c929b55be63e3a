"""What test_equivalence.py compares: each case trains a model; run alone, or by each worker of a cluster.

    [REPLICAS=2] python cases.py FOLDER [CASE ...]

Writes FOLDER/worker_N.npz: history, weights and so on of each case, as "case/what".
"""

import os
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import ends_at_once  # noqa: F401 (before it is used)
import tensorflow as tf

import mnist_setup
import multi_worker

BATCH = 96  # the global batch: 96 on one, 48 on two, 32 on three workers
keras = tf.keras
(X, Y), (X_TEST, Y_TEST) = mnist_setup.load_mnist()
X, Y, X_TEST, Y_TEST = X[:960], Y[:960], X_TEST[:251], Y_TEST[:251]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append([float(logs[name]) for name in sorted(logs)])


def by_data(*parts, batch=BATCH):
    """The parts as a dataset of batches, each of which is cut into one part per worker."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch).with_options(options)


def dense(*layers, activation="relu", regularizer=None, last=10):
    return keras.Sequential(
        [
            keras.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation, kernel_regularizer=regularizer),
            *layers,
            keras.layers.Dense(last),
        ]
    )


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model, optimizer, **options):
    options = {"loss": crossentropy(), "metrics": ["accuracy"]} | options
    model.compile(optimizer=optimizer, **options)
    return multi_worker.enable_multi_worker_fit(model)


def fitted(model, *data, **options):
    logs = BatchLogs()
    options = {"epochs": 2, "verbose": 0, "shuffle": False} | options
    options["callbacks"] = [logs, *options.get("callbacks", [])]
    history = model.fit(*data, **options)
    result = {f"history_{name}": np.array(values) for name, values in history.history.items()}
    result["batch_logs"] = np.array(logs.rows)
    weights = model.trainable_variables
    result |= {f"weight_{number}": weight.numpy() for number, weight in enumerate(weights)}
    result["steps_counted"] = model.optimizer.iterations.numpy()
    return result


@case
def cnn_sgd(strategy):
    with strategy.scope():
        model = mnist_setup.build_and_compile_cnn_model()
        multi_worker.enable_multi_worker_fit(model)
    return fitted(model, mnist_setup.mnist_dataset(BATCH, seed=3), steps_per_epoch=5)


@case
def momentum(strategy):
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.05, momentum=0.9))
    return fitted(model, by_data(X, Y))


@case
def adam_with_l2_evaluate_predict(strategy):
    with strategy.scope():
        model = compiled(dense(regularizer=keras.regularizers.L2(0.01)), keras.optimizers.Adam(0.01))
    result = fitted(model, by_data(X, Y), validation_data=by_data(X_TEST, Y_TEST))
    result["evaluate"] = np.array(model.evaluate(by_data(X_TEST, Y_TEST), verbose=0))
    result["predict"] = model.predict(by_data(X_TEST, Y_TEST), verbose=0)
    result["predict_10"] = model.predict(by_data(X_TEST[:10], Y_TEST[:10], batch=4), verbose=0)
    return result


@case
def validation_steps_of_repeated_data(strategy):
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.Adam(0.01))
    return fitted(model, by_data(X, Y), validation_data=by_data(X_TEST, Y_TEST).repeat(), validation_steps=2)


@case
def steps_per_execution_with_a_remainder(strategy):
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.Adam(0.01), steps_per_execution=4)
    return fitted(model, by_data(X, Y), validation_data=by_data(X_TEST, Y_TEST))  # 10 batches: 4, 4, 2


@case
def steps_per_execution_of_endless_data(strategy):
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.Adam(0.01), steps_per_execution=3)
    return fitted(model, by_data(X, Y).repeat(), steps_per_epoch=6)


@case
def data_of_unknown_length(strategy):
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.Adam(0.01))
    data = by_data(X, Y)
    # One process has the known length: where it is not known, Keras counts one optimizer step too many per epoch.
    return fitted(model, data.filter(lambda x, y: True) if multi_worker.number_of_workers(strategy) > 1 else data)


@case
def last_batch_uneven(strategy):
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.Adam(0.01))
    return fitted(model, by_data(X[:229], Y[:229]))  # 96, 96, 37


@case
def sample_weights(strategy):
    weights = np.linspace(0, 2, len(Y), dtype="float32")
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.05), weighted_metrics=["accuracy", crossentropy_metric()])
    return fitted(model, by_data(X, Y, weights))


def crossentropy_metric():
    return keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="ce")


@case
def several_metrics(strategy):
    with strategy.scope():
        metrics = ["accuracy", crossentropy_metric(), keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")]
        model = compiled(dense(), keras.optimizers.SGD(0.05), metrics=metrics)
    return fitted(model, by_data(X, Y))


@case
def functional_with_dicts(strategy):
    with strategy.scope():
        image, row = keras.Input((28, 28), name="image"), keras.Input((28,), name="row")
        hidden = keras.layers.Concatenate()([keras.layers.Flatten()(image), row])
        hidden = keras.layers.Dense(16, "relu")(hidden)
        digit, odd = keras.layers.Dense(10, name="digit")(hidden), keras.layers.Dense(1, name="odd")(hidden)
        model = keras.Model({"image": image, "row": row}, {"digit": digit, "odd": odd})
        losses = {"digit": crossentropy(), "odd": keras.losses.BinaryCrossentropy(from_logits=True)}
        metrics = {"digit": ["accuracy"], "odd": [keras.metrics.BinaryAccuracy(threshold=0.0)]}
        compiled(model, keras.optimizers.SGD(0.05), loss=losses, loss_weights={"digit": 1.0, "odd": 0.5}, metrics=metrics)
    inputs, outputs = {"image": X, "row": X[:, 14]}, {"digit": Y, "odd": (Y % 2).astype("float32")[:, None]}
    result = fitted(model, by_data(inputs, outputs))
    predictions = model.predict(by_data({"image": X_TEST, "row": X_TEST[:, 14]}), verbose=0)
    return result | {f"predict_{name}": values for name, values in predictions.items()}


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.hidden = keras.layers.Flatten(), keras.layers.Dense(32, "relu")
        self.out = keras.layers.Dense(10)

    def call(self, x):
        return self.out(self.hidden(self.flatten(x)))


@case
def subclassed(strategy):
    with strategy.scope():
        model = compiled(Subclassed(), keras.optimizers.SGD(0.05))
    return fitted(model, by_data(X, Y))


class OwnTrainStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            )
            share = loss / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(share, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own_loss": loss, "twice": 2 * loss}


@case
def own_train_step(strategy):
    with strategy.scope():
        model = compiled(OwnTrainStep(), keras.optimizers.SGD(0.05))
    return fitted(model, by_data(X, Y))


@case
def batch_normalization_synchronized(strategy):
    with strategy.scope():
        model = compiled(dense(keras.layers.BatchNormalization(synchronized=True)), keras.optimizers.SGD(0.05))
    return fitted(model, by_data(X, Y))


@case
def batch_normalization(strategy):
    with strategy.scope():
        model = compiled(dense(keras.layers.BatchNormalization()), keras.optimizers.SGD(0.05))
    return fitted(model, by_data(X, Y), validation_data=by_data(X_TEST, Y_TEST))


@case
def dropout(strategy):
    with strategy.scope():
        model = compiled(dense(keras.layers.Dropout(0.5)), keras.optimizers.SGD(0.05))
    return fitted(model, by_data(X, Y), validation_data=by_data(X_TEST, Y_TEST))


@case
def eager(strategy):
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.05), run_eagerly=True)
    return fitted(model, by_data(X[:192], Y[:192]))


@case
def train_on_batch(strategy):
    """Each worker gives its own part of the batch by hand."""
    workers, number = multi_worker.number_of_workers(strategy), multi_worker.worker_number(strategy)
    part = BATCH // workers
    with strategy.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.05))
    for start in range(0, 3 * BATCH, BATCH):
        rows = slice(start + number * part, start + (number + 1) * part)
        logs = model.train_on_batch(X[rows], Y[rows], return_dict=True)
    result = {f"log_{name}": np.array(value) for name, value in logs.items()}
    return result | {f"weight_{number}": np.array(weight) for number, weight in enumerate(model.get_weights())}


@case
def nan_on_one_worker(strategy):
    broken = X.copy()
    broken[3 * BATCH] = np.nan  # the fourth batch, in the part of worker 0
    with strategy.scope():  # no ReLU: on a processor with AVX-512 oneDNN's makes 0 of NaN
        model = compiled(dense(activation=None), keras.optimizers.SGD(0.05))
    result = fitted(model, by_data(broken, Y), callbacks=[keras.callbacks.TerminateOnNaN()])
    return {"batches_seen": np.array(len(result["batch_logs"]))}


def take_replicas_from_environment():
    """REPLICAS=2 gives each worker two, as two GPUs would. MWMS takes one CPU only, so it is told otherwise."""
    if "REPLICAS" not in os.environ:
        return
    number = int(os.environ["REPLICAS"])
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    def devices(extended, resolver, worker_device):
        return tuple(f"{worker_device}/device:CPU:{replica}" for replica in range(number)), "CPU"

    cpus = [tf.config.LogicalDeviceConfiguration()] * number
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
    CollectiveAllReduceExtended._initialize_local_devices = devices


def main(folder, *names):
    take_replicas_from_environment()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    everything = {}
    for name in names or CASES:
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        print(f"case {name}", flush=True)
        everything |= {f"{name}/{what}": value for what, value in CASES[name](strategy).items()}
    np.savez(pathlib.Path(folder) / f"worker_{multi_worker.worker_number(strategy)}.npz", **everything)


if __name__ == "__main__":
    main(*sys.argv[1:])
