"""What test_sharding.py asks: which ids reach which worker, from the strategy itself and inside `fit`.

    python sharding_case.py FOLDER [QUESTION of the strategy]

Each task writes FOLDER/JOB_N.json. A question is answered with the ids of each step on this worker.
"""

import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ends_at_once  # noqa: F401 (before it is used)
import tensorflow as tf

import mnist_setup
import multi_worker

keras = tf.keras
folder = pathlib.Path(sys.argv[1])
task = multi_worker.check_tf_config()["task"]
name = f"{task['type']}_{task['index']}"
HINT = tf.data.experimental.SHARD_HINT
EPOCHS = 2


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    return dataset.with_options(options)


# -- the strategy ------------------------------------------------------------------------------------------


def in_memory():
    return tf.data.Dataset.range(32)


def in_files(*lengths):
    """As many TFRecord files, with ids counted on. Each worker writes its own, so none waits for another."""
    names, first = [], 0
    for number, length in enumerate(lengths):
        names.append(str(folder / f"{name}_{len(lengths)}_{number}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for id_ in range(first, first + length):
                writer.write(str(id_).encode())
        first += length
    return tf.data.TFRecordDataset(names).map(lambda record: tf.strings.to_number(record, tf.int64))


def share_out(ids, policy):
    return strategy.experimental_distribute_dataset(with_policy(ids.batch(8), policy))


def by_hand(count, pipeline):
    def of_this_worker(context):
        ids = pipeline(tf.data.Dataset.range(count), context.num_input_pipelines, context.input_pipeline_id)
        return ids.batch(context.get_per_replica_batch_size(8))

    return strategy.distribute_datasets_from_function(of_this_worker)


def mnist():
    """One step of what main.py trains on; answered with the number of images."""
    part = next(iter(strategy.experimental_distribute_dataset(mnist_setup.mnist_dataset(8))))
    return [range(len(strategy.experimental_local_results(part)[0][1]))]


STRATEGY = {
    "mnist": mnist,
    "auto": lambda: share_out(in_memory(), "AUTO"),
    "data": lambda: share_out(in_memory(), "DATA"),
    "off": lambda: share_out(in_memory(), "OFF"),
    "hint": lambda: share_out(in_memory().shard(HINT, HINT), "HINT"),
    "file": lambda: share_out(in_memory(), "FILE"),
    "auto_of_files": lambda: share_out(in_files(8, 8, 8, 8), "AUTO"),
    "file_of_files": lambda: share_out(in_files(8, 8, 8, 8), "FILE"),
    "file_of_3_files": lambda: share_out(in_files(8, 8, 8), "FILE"),
    "data_of_1_file": lambda: share_out(in_files(32), "DATA"),
    "data_same_seed": lambda: share_out(in_memory().shuffle(32, seed=1), "DATA"),
    "data_own_seeds": lambda: share_out(in_memory().shuffle(32, seed=worker), "DATA"),
    "data_global_seed": lambda: keras.utils.set_random_seed(7) or share_out(in_memory().shuffle(32), "DATA"),
    "file_own_seeds": lambda: share_out(in_files(8, 8, 8, 8).shuffle(32, seed=worker), "FILE"),
    "shuffle_shard": lambda: by_hand(32, lambda ids, n, i: ids.shuffle(32, seed=i).shard(n, i)),
    "shard_shuffle": lambda: by_hand(32, lambda ids, n, i: ids.shard(n, i).shuffle(32, seed=i)),
    "repeat_shard": lambda: by_hand(15, lambda ids, n, i: ids.repeat(2).shard(n, i)),
    "shard_repeat": lambda: by_hand(15, lambda ids, n, i: ids.shard(n, i).repeat(2)),
}
ENDS_THE_JOB = {"auto_of_1_file": lambda: share_out(in_files(32), "AUTO")}


def ids_by_step(distributed):
    return [[int(id_) for id_ in strategy.experimental_local_results(ids)[0]] for ids in distributed]


def ask_strategy(questions):
    answers = {}
    for question in questions:
        print(f"question {question}", flush=True)
        try:
            distributed = (STRATEGY | ENDS_THE_JOB)[question]()
        except tf.errors.NotFoundError as error:  # on every worker, before they exchange anything
            answers[question] = str(error)
            continue
        answers[question] = [list(ids) for ids in distributed] if question == "mnist" else ids_by_step(distributed)
    return answers


# -- inside fit --------------------------------------------------------------------------------------------

TRAINED, TESTED = [], []


class Enough(Exception):
    pass


class Notes(keras.callbacks.Callback):
    """Notes after how many steps each epoch ends; ends an evaluation that has no end of its own."""

    def __init__(self):
        super().__init__()
        self.ends = [0]

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(len(TRAINED))

    def on_test_batch_end(self, batch, logs=None):
        if len(TESTED) == 20:
            raise Enough


class Witness(keras.Sequential):
    """A model whose data is (x, y, ids); it notes the ids that reach its steps on this worker."""

    def train_step(self, batch):
        x, y, ids = batch
        tf.numpy_function(lambda ids: TRAINED.append(ids.tolist()), [ids], [])
        return super().train_step((x, y))

    def test_step(self, batch):
        x, y, ids = batch
        tf.numpy_function(lambda ids: TESTED.append(ids.tolist()), [ids], [])
        return super().test_step((x, y))


def build():
    model = Witness([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return multi_worker.enable_multi_worker_fit(model)


def numbered(count, batch_size, policy="DATA"):
    ids = np.arange(count)
    x = (ids % 7).astype("float32")[:, None]
    return with_policy(tf.data.Dataset.from_tensor_slices((x, x**2, ids)).batch(batch_size), policy)


def part_by_hand(context):
    mine = numbered(32, 8).unbatch().shard(context.num_input_pipelines, context.input_pipeline_id)
    return mine.shuffle(32, seed=context.input_pipeline_id).batch(context.get_per_replica_batch_size(8))


def ask_fit(model, checkpoint):
    data, test, start = numbered(32, 8), numbered(100, 32), model.get_weights()
    questions = {
        "data": {"x": data},
        "off": {"x": numbered(32, 8, "OFF"), "epochs": 2},
        "half_batch": {"x": numbered(16, 4), "epochs": 2},
        "by_hand": {"x": strategy.distribute_datasets_from_function(part_by_hand), "steps_per_epoch": 4},
        "too_many_steps": {"x": data, "steps_per_epoch": 6, "epochs": 2},
        "too_few_steps": {"x": data, "steps_per_epoch": 3, "epochs": 3},
        "repeated": {"x": data.repeat(), "steps_per_epoch": 3, "epochs": 2},
        "one_left": {"x": numbered(25, 8)},
        "validation": {"x": data, "validation_data": test, "epochs": EPOCHS},
        "validation_steps": {"x": data, "validation_data": test, "validation_steps": 2, "epochs": 2},
        "repeated_validation": {"x": data, "validation_data": test.repeat(), "validation_steps": 4, "epochs": 2},
        "endless_validation": {"x": data, "validation_data": test.repeat()},
    }

    def save(epoch, logs):
        if question == "validation":
            checkpoint.save(multi_worker.write_filepath(folder / "checkpoints" / "epoch", strategy))

    answers = {}
    for question, arguments in questions.items():
        TRAINED.clear()
        TESTED.clear()
        model.set_weights(start)
        print(f"question fit {question}", flush=True)
        notes, saves = Notes(), keras.callbacks.LambdaCallback(on_epoch_end=save)
        try:
            history = model.fit(verbose=0, shuffle=False, callbacks=[notes, saves], **arguments).history
        except (Enough, ValueError):  # tf_keras refuses an endless evaluation
            history = None
        answers[question] = {
            "trained": TRAINED[:],
            "tested": TESTED[:],
            "steps": np.diff(notes.ends).tolist(),
            "history": history,
            "weights": [float(value) for weight in model.get_weights() for value in weight.ravel()],
        }
    return answers


def evaluate():
    """What the evaluator finds: {epoch: loss} of each checkpoint that was the newest when it looked."""
    model, losses = build(), {}
    checkpoint = tf.train.Checkpoint(model=model)
    for path in tf.train.checkpoints_iterator(str(folder / "checkpoints"), timeout=60):
        checkpoint.restore(path).expect_partial()
        epoch = int(path.rpartition("-")[2])
        losses[epoch] = model.evaluate(numbered(100, 32), verbose=0)
        if epoch == EPOCHS:
            break
    return losses


if task["type"] == "evaluator":
    result = evaluate()
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = multi_worker.worker_number(strategy)
    result = {"workers": multi_worker.number_of_workers(strategy)}
    result["strategy"] = ask_strategy(sys.argv[2:] or STRATEGY)
    with strategy.scope():
        model = build()
    result["fit"] = ask_fit(model, tf.train.Checkpoint(model=model))
(folder / f"{name}.json").write_text(json.dumps(result))
