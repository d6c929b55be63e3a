"""The data and the model of these lessons: MNIST digits and a small convolutional network.

Three names to use: `load_mnist`, `mnist_dataset`, `build_and_compile_cnn_model`.
Importing this file starts nothing in TensorFlow, and `load_mnist` needs NumPy alone: both may come before
the strategy is made. The other two run TensorFlow operations, so they come after it.
"""

import hashlib
import http.client
import io
import os
import pathlib
import tempfile
import urllib.request
import uuid

import numpy as np
import tensorflow as tf

# The file that keras.datasets.mnist.load_data() downloads, and its SHA-256 (keras/src/datasets/mnist.py).
# The tests point these two at a server of their own.
MNIST_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
MNIST_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"


def load_mnist():
    """Returns MNIST as NumPy arrays, `(x_train, y_train), (x_test, y_test)`, and prints which source it used.

    x_train, x_test: images, float32 in [0, 1], 0 is the background, shape (n, 28, 28).
    y_train, y_test: the digits 0-9 that they show, int64, shape (n,).

    The first of these sources that applies: the file named by the environment variable MNIST_NPZ; the sample
    in `data/`, beside this file or one folder up (5,000 images; MNIST=full skips it); the Keras cache; the
    Keras download (70,000 images, 11 MB).

    Raises OSError if MNIST_NPZ names no file, or if a download is needed and fails; ValueError if a file is
    torn or of another layout than Keras's mnist.npz, or if MNIST is set to anything but "full".
    """
    named, wanted = os.environ.get("MNIST_NPZ"), os.environ.get("MNIST", "")
    if wanted not in ("", "full"):
        raise ValueError(f"MNIST={wanted!r} has no meaning here: set MNIST=full, or unset it.")
    here = pathlib.Path(__file__).resolve().parent
    samples = [folder / "data" / "mnist_sample.npz" for folder in (here, here.parent)]
    sample = next((path for path in samples if path.is_file()), None)

    if named is not None:  # Set, even if to nothing: someone chose, so no other source will do.
        if not os.path.isfile(named):
            raise FileNotFoundError(f"MNIST_NPZ={named!r} is not a file: correct it, or unset it.")
        source, (train, test) = f"{os.path.basename(named)} (from MNIST_NPZ)", _read_npz(named, named)
    elif sample and not wanted:
        source, (train, test) = "data/mnist_sample.npz", _read_npz(sample, sample)
    else:
        source, content = _keras_file()
        train, test = _read_npz(io.BytesIO(content), source)
    print(f"MNIST: {source}, {len(train[0])} images to train, {len(test[0])} to test", flush=True)
    return train, test


def mnist_dataset(batch_size, seed=0, skip_batches=0):
    """Returns the training images as an endless, shuffled `tf.data.Dataset` of batches `(x, y)`.

    x: float32 in [0, 1], shape (batch_size, 28, 28). y: int64 digits 0-9, shape (batch_size,).

    batch_size: the GLOBAL batch: the images in one step of all workers together. Every batch is full.
    seed: the same seed gives the same batches; each pass over the images has an order of its own.
    skip_batches: where to start. Equal to `mnist_dataset(batch_size, seed).skip(skip_batches)`, but nothing
    that is skipped is read: a training that resumes after 10,000 steps starts at once.

    Make the strategy first. Raises ValueError if batch_size < 1 or skip_batches < 0, and what `load_mnist`
    raises.
    """
    if batch_size < 1 or skip_batches < 0:
        raise ValueError(f"batch_size={batch_size} must be 1 or more, skip_batches={skip_batches} 0 or more.")
    (x_train, y_train), _ = load_mnist()
    with tf.device("CPU"):  # Where the pipeline runs: on a GPU the images would take up room for nothing.
        images, labels = tf.constant(x_train), tf.constant(y_train)

    def order_of(pass_number):  # Follows from the seed and the pass alone, so any pass can come first.
        return tf.random.experimental.stateless_shuffle(tf.range(len(y_train)), tf.stack([seed, pass_number]))

    def look_up(indices):
        return tf.gather(images, indices), tf.gather(labels, indices)

    first_pass, images_to_skip = divmod(skip_batches * batch_size, len(y_train))
    indices = tf.data.Dataset.counter(first_pass).map(order_of).unbatch().skip(images_to_skip)
    dataset = indices.batch(batch_size, drop_remainder=True).map(look_up)
    # DATA: with many workers, each makes every global batch and keeps its own part of it. TensorFlow's
    # default, AUTO, does the same for data in memory; data in files it would share out by file.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    # There is nothing to tune, and the end of a tuned pipeline, so of `fit`, may wait until its tuner wakes up again:
    # that one sleeps for 10, 20, 40 ms and so on, up to a minute, and can miss the call to stop.
    options.autotune.enabled = False
    return dataset.with_options(options)


def build_and_compile_cnn_model(learning_rate=0.001):
    """Returns the lessons' network, compiled: images (n, 28, 28) in, logits (n, 10) out, 2.8 million weights.

    Call it inside `strategy.scope()`. `tf.keras` is Keras 3, or tf_keras where TF_USE_LEGACY_KERAS=1 is set.
    """
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(28, 28)),
            tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=learning_rate),
        metrics=["accuracy"],
    )
    return model


def _read_npz(file, name):
    """Returns `(x_train, y_train), (x_test, y_test)` as `load_mnist` promises; `name` is for errors."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            pairs = (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])
    except Exception as error:  # NumPy, zipfile and zlib each have their own exceptions for a torn file.
        raise ValueError(f"{name} is torn, or no .npz file like Keras's mnist.npz ({error}).") from error
    for x, y in pairs:
        if x.dtype != np.uint8 or y.dtype.kind not in "iu" or x.shape != (y.size, 28, 28) or y.ndim != 1:
            found = f"{x.dtype} {x.shape} with {y.dtype} {y.shape}"
            raise ValueError(f"{name} must hold uint8 images (n, 28, 28), integer labels (n,): got {found}.")
        if y.size == 0 or y.min() < 0 or y.max() > 9:
            raise ValueError(f"{name} must hold images, with labels from 0 to 9.")
    return tuple((x.astype(np.float32) / 255, y.astype(np.int64)) for x, y in pairs)


def _keras_file():
    """Returns where Keras's mnist.npz came from, in words, and its bytes. Keeps a download for next time."""
    keras_home = os.path.expanduser(os.environ.get("KERAS_HOME") or "~/.keras")
    spare_home = os.path.join(tempfile.gettempdir(), ".keras")  # Keras, too, turns to it if need be.
    places = {
        "the Keras cache": pathlib.Path(keras_home, "datasets", "mnist.npz"),
        "a temporary folder": pathlib.Path(spare_home, "datasets", "mnist.npz"),
    }
    for place, path in places.items():
        try:
            content = path.read_bytes()
        except OSError:  # Not there, or not ours to read.
            continue
        if hashlib.sha256(content).hexdigest() == MNIST_SHA256:
            return f"mnist.npz from {place}", content
        print(f"MNIST: mnist.npz in {place} is torn (wrong SHA-256) and is not used", flush=True)

    try:
        # The 30 seconds are for a line that has gone silent, not for the whole download.
        with urllib.request.urlopen(MNIST_URL, timeout=30) as response:
            content = response.read()
        if hashlib.sha256(content).hexdigest() != MNIST_SHA256:
            raise OSError("what arrived has the wrong SHA-256")
    except (OSError, http.client.HTTPException) as error:
        cure = "Without network, set the environment variable MNIST_NPZ to the path of a copy of mnist.npz."
        raise OSError(f"MNIST could not be downloaded from {MNIST_URL} ({error}). {cure}") from error

    for place, path in places.items():
        # Workers may get here at the same time. Each writes to a name of its own, and the renaming is one
        # step: whoever looks for mnist.npz finds a whole file or none.
        part = path.with_name(f"mnist.npz.{uuid.uuid4().hex}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_bytes(content)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            return f"mnist.npz downloaded to {place}", content
        except OSError as error:
            print(f"MNIST: {place} cannot be written ({error.strerror})", flush=True)
    return "mnist.npz downloaded, kept nowhere", content
