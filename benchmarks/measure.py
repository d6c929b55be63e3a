"""What every worker of a benchmark runs: it times the steps of each case, round after round.

    python measure.py PLAN.json

PLAN.json: {"cases": {name: case}, "rounds": n, "steps": n, "warm_up": n, "communication": {}, "results": FILE.json}. A
case names a `road` (who makes the steps, see ROADS), a `model` (see MODELS), a `batch` (images a step and worker), and
may set steps_per_execution, precision and data. The cases of a round follow one another, so that whatever else the
machine does meets them all. At the end the chief writes FILE.json:
{"milliseconds": {name: [median of a step's time, one a round]}, "loopback_bytes": {name: [of all workers, a step]},
"start_up": {what: seconds}}: how long the chief took to come so far, for the first case alone.
"""

import json
import os
import pathlib
import sys
import time

STARTED = time.time()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

import mnist_setup
import multi_worker

MODELS = {  # what stands between the image, 28 x 28 x 1, and the logits
    "small": lambda layers: [layers.Flatten(), layers.Dense(32, "relu")],
    "cnn": lambda layers: [layers.Conv2D(32, 3, activation="relu"), layers.Flatten(), layers.Dense(128, "relu")],
    "large": lambda layers: [layers.Flatten(), layers.Dense(2048, "relu"), layers.Dense(2048, "relu")],
    "conv": lambda layers: [
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(32, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
    ],
}


def compiled(keras, case):
    """The case's model, compiled as in the lessons. `keras` is Keras 3 or tf_keras."""
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(case.get("precision", "float32"))
    image = [keras.Input((28, 28)), keras.layers.Reshape((28, 28, 1))]
    model = keras.Sequential([*image, *MODELS[case["model"]](keras.layers), keras.layers.Dense(10, dtype="float32")])
    model.compile(
        optimizer=keras.optimizers.SGD(0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=case.get("steps_per_execution", 1),
    )
    return model


def fit(strategy, case, data, keras=tf.keras):
    """`Model.fit` of Keras 3 with multi_worker.py's mend."""
    with strategy.scope():
        model = compiled(keras, case)
        multi_worker.enable_multi_worker_fit(model)
    shuffled = {"shuffle": False} if keras is tf.keras else {}
    steps_a_call = case.get("steps_per_execution", 1)

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_train_batch_end(self, batch, logs=None):
            self.ends.append(time.perf_counter())

    def run(steps):
        clock = Clock()
        model.fit(data, steps_per_epoch=steps * steps_a_call, callbacks=[clock], verbose=0, **shuffled)
        return np.diff(clock.ends) / steps_a_call

    return run


def fit_tf_keras(strategy, case, data):
    """`Model.fit` of Keras 2."""
    import tf_keras

    return fit(strategy, case, data, tf_keras)


def loop(strategy, case, data):
    """A loop written by hand around `strategy.run`; of logs only the loss. The floor of what `fit` can reach."""
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model = compiled(tf.keras, case)
    batches = iter(strategy.experimental_distribute_dataset(data))

    def on_each_replica(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def step(batches):
        return strategy.reduce("SUM", strategy.run(on_each_replica, args=next(batches)), axis=None)

    return lambda steps: seconds_of_each(lambda: step(batches), steps)


def all_reduce(strategy, case, data):
    """The exchange alone: float32 numbers, as many as the model has weights and cut up like them; or `model` many."""
    model = case["model"]
    shapes = [[model]] if isinstance(model, int) else [v.shape for v in compiled(tf.keras, case).trainable_variables]
    gradients = [tf.Variable(tf.ones(shape)) for shape in shapes]

    def exchange():
        totals = tf.distribute.get_replica_context().all_reduce("SUM", [tf.identity(value) for value in gradients])
        return tf.add_n([tf.reshape(total, [-1])[0] for total in totals])

    step = tf.function(lambda: strategy.run(exchange))
    return lambda steps: seconds_of_each(step, steps)


def seconds_of_each(step, steps):
    ends = [time.perf_counter()]
    for _ in range(steps):
        step()
        ends.append(time.perf_counter())
    return np.diff(ends)


def png_dataset(batch_size, how):
    """Batches of images that must be decoded first, as images on disk must. `how` may add parallel, cache, prefetch."""
    (images, labels), _ = mnist_setup.load_mnist()
    images, labels = images[: 2 * batch_size], labels[: 2 * batch_size]  # so that a cache is full after two steps
    pngs = [tf.io.encode_png(image[..., None]).numpy() for image in (255 * images).astype("uint8")]

    def decode(png, label):
        return tf.squeeze(tf.cast(tf.io.decode_png(png, channels=1), tf.float32) / 255, -1), label

    data = tf.data.Dataset.from_tensor_slices((pngs, labels))
    data = data.map(decode, num_parallel_calls=tf.data.AUTOTUNE if "parallel" in how else None)
    data = (data.cache() if "cache" in how else data).repeat().batch(batch_size, drop_remainder=True)
    data = data.map(lambda x, y: (tf.ensure_shape(x, [batch_size, 28, 28]), y))
    return data.prefetch(tf.data.AUTOTUNE) if "prefetch" in how else data


def loopback_bytes():
    """Bytes that this machine has sent to itself so far, by anyone; 0 where the system does not say."""
    counters = pathlib.Path("/proc/net/dev")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return next((int(line.split()[9]) for line in lines if line.split()[0] == "lo:"), 0)


def parts_of(moments):
    """{what: seconds from the moment before}, from {what: when it was done}."""
    times = [float(os.environ.get("LAUNCHED", STARTED)), *moments.values()]
    return {what: round(after - before, 2) for what, before, after in zip(moments, times, times[1:])}


ROADS = {"fit": fit, "tf_keras": fit_tf_keras, "loop": loop, "all_reduce": all_reduce}


def main(plan):
    moments = {"Python": STARTED, "imports": time.time()}
    options = tf.distribute.experimental.CommunicationOptions(**plan.get("communication", {}))
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    moments["connecting"] = time.time()
    run, milliseconds, sent = {}, {}, {}
    for name, case in plan["cases"].items():
        global_batch = case["batch"] * multi_worker.number_of_workers(strategy)
        data = png_dataset(global_batch, case["data"]) if "data" in case else mnist_setup.mnist_dataset(global_batch)
        run[name] = ROADS[case["road"]](strategy, case, data)
        moments.setdefault("data and model", time.time())
        run[name](plan["warm_up"])
        moments.setdefault("first steps", time.time())
        milliseconds[name], sent[name] = [], []
    for _ in range(plan["rounds"]):
        for name, case in plan["cases"].items():
            steps = max(3, plan["steps"] * 64 // max(64, case["batch"]))  # fewer of the long ones
            before = loopback_bytes()
            seconds = run[name](steps)
            sent[name].append((loopback_bytes() - before) // steps // case.get("steps_per_execution", 1))
            milliseconds[name].append(round(1000 * float(np.median(seconds[1:])), 2))
    if multi_worker.is_chief(strategy):  # In one move: who sees the file sees all of it.
        part = pathlib.Path(plan["results"] + ".part")
        part.write_text(json.dumps({"milliseconds": milliseconds, "loopback_bytes": sent, "start_up": parts_of(moments)}))
        part.replace(plan["results"])


if __name__ == "__main__":
    with open(sys.argv[1]) as plan_file:
        main(json.load(plan_file))
