"""The script that every worker runs, unchanged on a laptop, Slurm, Kubernetes or Ray; TF_CONFIG tells them apart."""

import argparse
import json
import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported: its C++ notes drown the epochs

import tensorflow as tf

import mnist_setup
import multi_worker


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=positive, default=3, metavar="N")
    parser.add_argument("--steps-per-epoch", type=positive, default=70, metavar="N")
    parser.add_argument("--per-worker-batch-size", type=positive, default=64, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=0.001, metavar="X")
    parser.add_argument("--seed", type=int, default=42, metavar="N")
    parser.add_argument("--backup-dir", metavar="DIR", help="back up here each epoch, and resume from it")
    parser.add_argument("--model-path", metavar="FILE.keras", help="save the trained model here")
    parser.add_argument("--history", metavar="FILE.json", help="write loss and accuracy of each epoch here")
    options = parser.parse_args(arguments)
    if options.model_path and not options.model_path.endswith(".keras"):
        parser.error(f"--model-path {options.model_path}: the file's name must end with .keras")
    return options


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def train(options):
    """Trains on as many workers as TF_CONFIG names; returns Keras's History."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else runs in TensorFlow
    # Once the strategy is up, TensorFlow ignores SIGTERM. A backup is whole at any moment: end at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    workers, chief = multi_worker.number_of_workers(strategy), multi_worker.is_chief(strategy)
    role = " (chief)" if chief else ""
    alone = ", alone: TF_CONFIG is not set" if "TF_CONFIG" not in os.environ else ""
    print(f"worker {multi_worker.worker_number(strategy) + 1} of {workers}{role}{alone}", flush=True)

    tf.keras.utils.set_random_seed(options.seed)
    callbacks, steps_done = [], 0
    if options.backup_dir:
        callbacks = [multi_worker.BackupAndRestore(options.backup_dir)]
        steps_done = callbacks[0].steps_done(strategy)
    global_batch_size = options.per_worker_batch_size * workers
    try:
        dataset = mnist_setup.mnist_dataset(global_batch_size, seed=options.seed, skip_batches=steps_done)
    except (OSError, ValueError) as error:
        sys.exit(f"main.py: {error}")
    with strategy.scope():
        model = mnist_setup.build_and_compile_cnn_model(options.learning_rate)
        multi_worker.enable_multi_worker_fit(model)
    history = model.fit(
        dataset,
        epochs=options.epochs,
        steps_per_epoch=options.steps_per_epoch,
        callbacks=callbacks,
        shuffle=False,  # mnist_dataset has shuffled; without this Keras warns
        verbose=2,
    )
    if options.model_path:
        multi_worker.save_model(model, options.model_path, strategy)
    if options.history and chief:
        with open(options.history, "w") as file:
            json.dump({"epoch": history.epoch, **history.history}, file)
    return history


def main():
    sys.stdout.reconfigure(line_buffering=True)
    options = parse_arguments()
    try:
        config = multi_worker.check_tf_config()
        if config and config["task"]["type"] == "evaluator":
            raise ValueError("TF_CONFIG: main.py trains, an evaluator does not; start a script that evaluates")
    except ValueError as error:
        print(f"main.py: {error}", file=sys.stderr)
        return 2
    try:
        train(options)
    except multi_worker.BackupError as error:
        print(f"main.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
