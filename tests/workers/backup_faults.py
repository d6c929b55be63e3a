"""What test_backup.py runs on two workers: damaged backups, one folder each under FOLDER; prints each error."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf

import mnist_setup
import multi_worker

strategy = tf.distribute.MultiWorkerMirroredStrategy()
data = mnist_setup.mnist_dataset(96)
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    with strategy.scope():
        layers = [tf.keras.layers.Flatten(), tf.keras.layers.Dense(10, name="out")]
        model = tf.keras.Sequential([tf.keras.Input((28, 28)), *layers])
        model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        multi_worker.enable_multi_worker_fit(model)
    try:
        model.fit(data, steps_per_epoch=1, verbose=0, callbacks=[multi_worker.BackupAndRestore(folder)])
        print(f"{folder.name}: no error", flush=True)
    except multi_worker.BackupError as error:
        print(f"{folder.name}: {error}", flush=True)
