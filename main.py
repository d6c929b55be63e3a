"""The script that every worker runs, unchanged on a laptop, Slurm, Kubernetes or Ray; TF_CONFIG tells them apart."""

import argparse
import json
import os
import signal
import sys
import threading
import time

# Before TensorFlow is imported: its C++ notes drown the epochs; and it would catch SIGTERM, and go on. So all threads
# inherit that SIGTERM is kept from them, and one waits for it: `end_at_sigterm`.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

import tensorflow as tf

import mnist_setup
import multi_worker

# A worker that hangs lets the others wait for ever. Without progress for so long, `Progress` ends them.
# Longer than what a healthy worker does alone: loading data, compiling, the chief's writing of a backup.
PEER_SECONDS = 300
STOP_SECONDS = 15  # from SIGTERM to the end; Slurm and Kubernetes send SIGKILL after 30


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=positive, default=3, metavar="N")
    parser.add_argument("--steps-per-epoch", type=positive, default=70, metavar="N")
    parser.add_argument("--per-worker-batch-size", type=positive, default=64, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=0.001, metavar="X")
    parser.add_argument("--seed", type=int, default=42, metavar="N")
    parser.add_argument(
        "--communication", choices=["AUTO", "RING", "NCCL"], default="AUTO", help="who carries gradients; GPUs: NCCL"
    )
    parser.add_argument(
        "--backup-dir", metavar="DIR", help="back up here each epoch and at SIGTERM, and resume from it"
    )
    parser.add_argument("--model-path", metavar="FILE.keras", help="save the trained model here")
    parser.add_argument("--history", metavar="FILE.json", help="write loss and accuracy of each epoch here")
    options = parser.parse_args(arguments)
    if options.model_path and not options.model_path.endswith(".keras"):
        parser.error(f"--model-path {options.model_path}: the file's name must end with .keras")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed {options.seed}: must be from 0 to {2**32 - 1}")
    return options


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def train(options):
    """Trains on as many workers as TF_CONFIG names; returns Keras's History."""
    backup = None
    if options.backup_dir:  # deleted at the end, when the results are written
        backup = multi_worker.BackupAndRestore(options.backup_dir, delete_checkpoint=False, save_before_preemption=True)
    threading.Thread(target=end_at_sigterm, args=[backup], daemon=True).start()
    communication = tf.distribute.experimental.CommunicationOptions(implementation=options.communication)
    # Before anything else runs in TensorFlow:
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    workers, chief = multi_worker.number_of_workers(strategy), multi_worker.is_chief(strategy)
    role = " (chief)" if chief else ""
    alone = ", alone: TF_CONFIG is not set" if "TF_CONFIG" not in os.environ else ""
    print(f"worker {multi_worker.worker_number(strategy) + 1} of {workers}{role}{alone}", flush=True)

    with Progress() as progress:
        tf.keras.utils.set_random_seed(options.seed)
        steps_done = backup.steps_done(strategy) if backup else 0
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
            callbacks=[progress, *([backup] if backup else [])],
            shuffle=False,  # mnist_dataset has shuffled; without this Keras warns
            verbose=2,
        )
        try:
            if options.model_path:
                multi_worker.save_model(model, options.model_path, strategy)
            if options.history and chief:
                os.makedirs(os.path.dirname(options.history) or ".", exist_ok=True)
                with open(options.history, "w") as file:
                    json.dump({"epoch": history.epoch, **history.history}, file)
        except OSError as error:
            sys.exit(f"main.py: the results cannot be written: {error}")
        if backup:
            backup.delete(strategy)
        return history


class Progress(tf.keras.callbacks.Callback):
    """Inside `with`: ends this process with exit code 1 if nothing is heard of `fit` for PEER_SECONDS.

    CommunicationOptions has a time-out too, for debugging: with it TensorFlow starts a thread for each collective
    operation, which stays until its time is over. Here that would be thousands.
    """

    def note(self, *arguments, **options):
        self.last = time.monotonic()

    on_train_batch_end = on_test_batch_end = on_epoch_end = on_train_end = note

    def __enter__(self):
        self.note()
        self.done = threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.done.set()

    def watch(self):
        while not self.done.wait(1):
            if time.monotonic() > self.last + PEER_SECONDS:
                words = f"no progress for {PEER_SECONDS} s: a worker hangs, here or elsewhere; start all of them again"
                print(f"main.py: {words}", file=sys.stderr, flush=True)
                os._exit(1)


def end_at_sigterm(backup):
    """Ends this process with exit code 143 after SIGTERM; if it trains, all workers back up first if they can in time.

    While TensorFlow waits for the peers to start, it lets no Python run: SIGTERM takes effect when they are there.
    """
    signal.sigwait({signal.SIGTERM})
    if backup and backup.stop():
        time.sleep(STOP_SECONDS)  # `main` ends the process sooner, unless it waits for a peer or in a long validation
    os._exit(128 + signal.SIGTERM)


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
    except multi_worker.TrainingStopped as stopped:
        print(f"main.py: {stopped}; the same command goes on from there", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGTERM)  # at once: TensorFlow's own end may take half a minute
    return 0


if __name__ == "__main__":
    sys.exit(main())
