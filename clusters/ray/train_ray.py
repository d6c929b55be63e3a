"""Trains with main.py's own `train` as the function of Ray Train's TensorflowTrainer, with Keras 3.

    python clusters/ray/train_ray.py --workers 2 --epochs 10 --backup-dir /shared/digits/backup

From the project's folder, which is at the same place on every node of the Ray cluster. Options that are not for this
script go to main.py. Needs `pip install "ray[train]"`. Ray itself sets TF_CONFIG, and restarts the workers.
"""

import argparse
import os
import pathlib
import sys

PROJECT = pathlib.Path(__file__).resolve().parents[2]


def train_on_this_worker(config):
    # Ray has set this to 1, for Keras 2. TensorFlow reads it when tf.keras is first used: by the next import.
    os.environ["TF_USE_LEGACY_KERAS"] = "0"
    import main

    main.train(main.parse_arguments(config["arguments"]))


def start():
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    parser = argparse.ArgumentParser(description="Train main.py's model on Ray workers. Other options: main.py's.")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--max-failures", type=int, default=3, metavar="N", help="restarts of all workers (default 3)")
    parser.add_argument("--storage-path", default=PROJECT / "ray_results", metavar="DIR", help="where Ray keeps its notes")
    asked, arguments = parser.parse_known_args()
    sys.path.insert(0, str(PROJECT))
    import main

    options = main.parse_arguments(arguments)  # a wrong option ends here
    for name in ("backup_dir", "model_path", "history"):  # a worker's current folder is one of Ray's
        if getattr(options, name):
            arguments += [f"--{name.replace('_', '-')}", os.path.abspath(getattr(options, name))]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(PROJECT)}})
    trainer = TensorflowTrainer(
        train_on_this_worker,
        train_loop_config={"arguments": arguments},
        scaling_config=ScalingConfig(num_workers=asked.workers, use_gpu=asked.use_gpu),
        run_config=RunConfig(
            storage_path=str(asked.storage_path), failure_config=FailureConfig(max_failures=asked.max_failures)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    start()
