"""What mnist_setup.py promises. The network is a server on 127.0.0.1; the cache is a temporary folder."""

import errno
import hashlib
import http.server
import importlib.util
import io
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
import tensorflow as tf

import mnist_setup

ROOT = pathlib.Path(mnist_setup.__file__).resolve().parent
DEADLINE = 60  # seconds, for anything that waits


def small_arrays(train=20, test=10):
    """A small MNIST in Keras's layout; image i has the value i everywhere and the label i modulo 10."""

    def images(count):
        return np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None], (count, 28, 28)).copy()

    def labels(count):
        return (np.arange(count) % 10).astype(np.uint8)

    arrays = images(train), labels(train), images(test), labels(test)
    return dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True))


def npz_bytes(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


WHOLE = npz_bytes(small_arrays())
TORN = WHOLE[: len(WHOLE) // 2]
ITS_SHA256 = hashlib.sha256(WHOLE).hexdigest()


def closed_port_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/mnist.npz"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty Keras cache, an empty temporary folder, no network; returns where the cached file would be."""
    for name in ("MNIST", "MNIST_NPZ"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # So that TMPDIR is looked at again.
    monkeypatch.setattr(mnist_setup, "MNIST_URL", closed_port_url())
    monkeypatch.setattr(mnist_setup, "MNIST_SHA256", ITS_SHA256)
    return tmp_path / "keras" / "datasets" / "mnist.npz"


@pytest.fixture
def temporary_copy(tmp_path):
    return tmp_path / "tmp" / ".keras" / "datasets" / "mnist.npz"


@pytest.fixture
def no_sample(monkeypatch):
    monkeypatch.setenv("MNIST", "full")


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """20 images to train, so that a pass is short and each image is known by its value."""
    path = tmp_path / "small.npz"
    path.write_bytes(WHOLE)
    monkeypatch.setenv("MNIST_NPZ", str(path))


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with `answer(handler, number of the request)`."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.requests, self.lock = answer, 0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/mnist.npz"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with self.server.lock:
            number, self.server.requests = self.server.requests, self.server.requests + 1
        self.server.answer(self, number)

    def begin(self, length, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def trickle(self, content):
        for start in range(0, len(content), 1000):
            self.wfile.write(content[start : start + 1000])
            self.wfile.flush()

    def log_message(self, *_):
        pass


def send_whole(handler, _):
    handler.begin(len(WHOLE))
    handler.trickle(WHOLE)


@pytest.fixture
def serve(monkeypatch):
    """serve(answer) starts a server and makes it the source of the download."""
    servers = []

    def start(answer=send_whole):
        server = Server(answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        monkeypatch.setattr(mnist_setup, "MNIST_URL", server.url)
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE)


def assert_small_mnist(loaded):
    (x_train, y_train), (x_test, y_test) = loaded
    expected = small_arrays()
    np.testing.assert_array_equal(np.rint(x_train * 255), expected["x_train"])
    np.testing.assert_array_equal(np.rint(x_test * 255), expected["x_test"])
    np.testing.assert_array_equal(y_train, expected["y_train"])
    np.testing.assert_array_equal(y_test, expected["y_test"])


# Which source


def test_the_bundled_sample_is_used_and_one_line_says_so(capsys):
    (x_train, y_train), (x_test, y_test) = mnist_setup.load_mnist()
    assert capsys.readouterr().out == "MNIST: data/mnist_sample.npz, 4000 images to train, 1000 to test\n"
    assert x_train.shape == (4000, 28, 28) and x_test.shape == (1000, 28, 28)
    assert y_train.shape == (4000,) and y_test.shape == (1000,)
    assert x_train.dtype == x_test.dtype == np.float32
    assert y_train.dtype == y_test.dtype == np.int64
    assert x_train.min() == x_test.min() == 0 and x_train.max() == x_test.max() == 1
    assert set(y_train) == set(y_test) == set(range(10))


def module_copied_to(folder):
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "mnist_setup.py", folder)
    spec = importlib.util.spec_from_file_location("copied_mnist_setup", folder / "mnist_setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MNIST_URL, module.MNIST_SHA256 = mnist_setup.MNIST_URL, mnist_setup.MNIST_SHA256
    return module


def test_the_sample_is_found_one_folder_up_from_any_working_folder(tmp_path, monkeypatch, capsys):
    module = module_copied_to(tmp_path / "clone" / "notebooks")
    (tmp_path / "clone" / "data").mkdir()
    (tmp_path / "clone" / "data" / "mnist_sample.npz").write_bytes(WHOLE)
    monkeypatch.chdir(tmp_path / "tmp")
    assert_small_mnist(module.load_mnist())
    assert capsys.readouterr().out == "MNIST: data/mnist_sample.npz, 20 images to train, 10 to test\n"


def test_a_torn_sample_is_an_error_in_words(tmp_path):
    module = module_copied_to(tmp_path / "clone")
    (tmp_path / "clone" / "data").mkdir()
    (tmp_path / "clone" / "data" / "mnist_sample.npz").write_bytes(TORN)
    with pytest.raises(ValueError, match="mnist_sample.npz is torn"):
        module.load_mnist()


def test_without_a_sample_the_keras_cache_is_used(tmp_path, cache, capsys):
    module = module_copied_to(tmp_path / "alone")
    cache.parent.mkdir(parents=True)
    cache.write_bytes(WHOLE)
    assert_small_mnist(module.load_mnist())
    assert capsys.readouterr().out == (
        "MNIST: mnist.npz from the Keras cache, 20 images to train, 10 to test\n"
    )


def test_mnist_full_skips_the_sample(no_sample, cache):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(WHOLE)
    assert_small_mnist(mnist_setup.load_mnist())


def test_the_keras_cache_is_in_the_home_folder_unless_keras_home_is_set(no_sample, tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cached = tmp_path / "home" / ".keras" / "datasets" / "mnist.npz"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(WHOLE)
    assert_small_mnist(mnist_setup.load_mnist())


def test_mnist_set_to_anything_but_full_is_an_error(monkeypatch):
    monkeypatch.setenv("MNIST", "ful")
    with pytest.raises(ValueError, match="MNIST='ful'.*MNIST=full"):
        mnist_setup.load_mnist()


# MNIST_NPZ


def test_mnist_npz_comes_before_every_other_source(small_mnist, no_sample, cache, capsys):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(npz_bytes(small_arrays(train=11)))
    assert_small_mnist(mnist_setup.load_mnist())
    assert capsys.readouterr().out == "MNIST: small.npz (from MNIST_NPZ), 20 images to train, 10 to test\n"


@pytest.mark.parametrize("value", ["", "no/such/file.npz", "."])
def test_mnist_npz_that_names_no_file_is_an_error_in_words(value, monkeypatch, capsys):
    monkeypatch.setenv("MNIST_NPZ", value)
    with pytest.raises(FileNotFoundError, match="MNIST_NPZ=.*is not a file"):
        mnist_setup.load_mnist()
    assert capsys.readouterr().out == ""


def bytes_with_one_bit_flipped():
    middle = len(WHOLE) // 3  # Inside the pixels, where only the archive's checksum can tell.
    return WHOLE[:middle] + bytes([WHOLE[middle] ^ 1]) + WHOLE[middle + 1 :]


def npy_bytes():
    file = io.BytesIO()
    np.save(file, small_arrays()["x_train"])
    return file.getvalue()


def object_bytes():
    return npz_bytes({**small_arrays(), "y_test": np.array([{}] * 10, dtype=object)})


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>Sign in to the network</html>", TORN, WHOLE[:-1], bytes_with_one_bit_flipped(), npy_bytes(),
     object_bytes(), npz_bytes({"x_train": small_arrays()["x_train"]})],
    ids=["empty", "a_web_page", "half", "a_byte_short", "bit_flipped", "npy", "objects", "keys_missing"],
)  # fmt: skip
def test_mnist_npz_that_is_torn_or_foreign_is_an_error_in_words(content, tmp_path, monkeypatch, capsys):
    path = tmp_path / "given.npz"
    path.write_bytes(content)
    monkeypatch.setenv("MNIST_NPZ", str(path))
    with pytest.raises(ValueError, match=r"given\.npz is torn, or no \.npz file like Keras's"):
        mnist_setup.load_mnist()
    assert capsys.readouterr().out == ""


SMALL = small_arrays()


@pytest.mark.parametrize(
    "change",
    [
        {"x_train": SMALL["x_train"] / 255},
        {"x_train": SMALL["x_train"][..., None]},
        {"x_train": SMALL["x_train"].reshape(-1, 784)},
        {"x_test": SMALL["x_test"][:-1]},
        {"y_train": SMALL["y_train"].astype(np.float32)},
        {"y_train": SMALL["y_train"][:, None]},
        {"y_test": SMALL["y_test"] + 1},
        {"x_test": SMALL["x_test"][:0], "y_test": SMALL["y_test"][:0]},
    ],
    ids=["floats", "channels", "flat", "an_image_short", "float_labels", "label_column", "label_10", "none"],
)
def test_mnist_npz_of_another_layout_is_an_error_in_words(change, tmp_path, monkeypatch, capsys):
    path = tmp_path / "given.npz"
    path.write_bytes(npz_bytes({**SMALL, **change}))
    monkeypatch.setenv("MNIST_NPZ", str(path))
    with pytest.raises(ValueError, match=r"given\.npz must hold"):
        mnist_setup.load_mnist()
    assert capsys.readouterr().out == ""


# The download


def test_a_download_is_kept_in_the_keras_cache_and_used_next_time(no_sample, serve, cache, capsys):
    server = serve()
    assert_small_mnist(mnist_setup.load_mnist())
    assert_small_mnist(mnist_setup.load_mnist())
    assert capsys.readouterr().out == (
        "MNIST: mnist.npz downloaded to the Keras cache, 20 images to train, 10 to test\n"
        "MNIST: mnist.npz from the Keras cache, 20 images to train, 10 to test\n"
    )
    assert server.requests == 1
    assert os.listdir(cache.parent) == ["mnist.npz"] and cache.read_bytes() == WHOLE


def test_a_download_may_be_read_by_everyone_whom_the_umask_lets(no_sample, serve, cache):
    serve()
    old = os.umask(0o022)
    try:
        mnist_setup.load_mnist()
    finally:
        os.umask(old)
    assert cache.stat().st_mode & 0o777 == 0o644


CHILD = """
import sys, types
sys.modules["tensorflow"] = types.ModuleType("tensorflow")  # An empty one: load_mnist needs NumPy alone.
import mnist_setup
mnist_setup.MNIST_URL, mnist_setup.MNIST_SHA256 = sys.argv[1:]
(x_train, y_train), _ = mnist_setup.load_mnist()
assert len(x_train) == len(y_train) == 20 and x_train.max() > 0
"""


def test_two_processes_on_an_empty_cache_both_end_well(no_sample, serve, cache):
    # The second starts when the first has half of the file, and is itself half-way when the first ends.
    first_is_half_way, second_is_half_way, first_has_ended = (threading.Event() for _ in range(3))
    half = len(WHOLE) // 2

    def answer(handler, number):
        reached = [first_is_half_way, second_is_half_way][number]
        go_on = [second_is_half_way, first_has_ended][number]
        handler.begin(len(WHOLE))
        handler.trickle(WHOLE[:half])
        reached.set()
        assert go_on.wait(DEADLINE)
        handler.trickle(WHOLE[half:])

    server = serve(answer)
    children = []

    def start():
        command = [sys.executable, "-c", CHILD, server.url, ITS_SHA256]
        children.append(subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=subprocess.STDOUT, text=True))
        return children[-1]

    said = "MNIST: mnist.npz downloaded to the Keras cache, 20 images to train, 10 to test\n"
    try:
        first = start()
        assert first_is_half_way.wait(DEADLINE)
        second = start()
        assert (first.communicate(timeout=DEADLINE)[0], first.returncode) == (said, 0)
        assert second.poll() is None, "the second was to be still at it"
        assert cache.read_bytes() == WHOLE
        first_has_ended.set()
        assert (second.communicate(timeout=DEADLINE)[0], second.returncode) == (said, 0)
    finally:
        for child in children:
            child.kill()
            child.wait(DEADLINE)
            child.stdout.close()
    assert server.requests == 2
    assert os.listdir(cache.parent) == ["mnist.npz"] and cache.read_bytes() == WHOLE


def test_every_download_is_written_to_a_name_of_its_own_beside_the_cached_file(
    no_sample, serve, cache, monkeypatch
):
    serve()
    written, write_bytes = [], pathlib.Path.write_bytes
    monkeypatch.setattr(
        pathlib.Path, "write_bytes", lambda path, content: written.append(path) or write_bytes(path, content)
    )
    for _ in range(2):
        mnist_setup.load_mnist()
        cache.unlink()
    assert len({*written, cache}) == 3, "two downloads, two names, neither of them the final one"
    assert {path.parent for path in written} == {cache.parent}, "a rename is one step within one folder only"


def fail_halfway(monkeypatch, error_number, only_in):
    """Makes every file written below `only_in` break off after half of its bytes."""
    write_bytes = pathlib.Path.write_bytes

    def broken(path, content):
        if only_in in path.parents:
            write_bytes(path, content[: len(content) // 2])
            raise OSError(error_number, os.strerror(error_number))
        return write_bytes(path, content)

    monkeypatch.setattr(pathlib.Path, "write_bytes", broken)


def test_the_cache_never_shows_half_a_file(no_sample, serve, cache, temporary_copy, monkeypatch, capsys):
    serve()
    fail_halfway(monkeypatch, errno.ENOSPC, only_in=cache.parent)
    assert_small_mnist(mnist_setup.load_mnist())
    assert os.listdir(cache.parent) == []
    assert temporary_copy.read_bytes() == WHOLE
    assert capsys.readouterr().out == (
        "MNIST: the Keras cache cannot be written (No space left on device)\n"
        "MNIST: mnist.npz downloaded to a temporary folder, 20 images to train, 10 to test\n"
    )


@pytest.mark.parametrize("torn", [TORN, b"", bytes_with_one_bit_flipped()], ids=["half", "empty", "a_bit"])
def test_a_torn_cache_file_is_said_and_downloaded_anew(torn, no_sample, serve, cache, capsys):
    serve()
    cache.parent.mkdir(parents=True)
    cache.write_bytes(torn)
    assert_small_mnist(mnist_setup.load_mnist())
    assert capsys.readouterr().out == (
        "MNIST: mnist.npz in the Keras cache is torn (wrong SHA-256) and is not used\n"
        "MNIST: mnist.npz downloaded to the Keras cache, 20 images to train, 10 to test\n"
    )
    assert os.listdir(cache.parent) == ["mnist.npz"] and cache.read_bytes() == WHOLE


def test_a_torn_cache_file_is_not_used_without_network_either(no_sample, cache):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(TORN)
    with pytest.raises(OSError, match="could not be downloaded"):
        mnist_setup.load_mnist()


def a_file_in_place_of(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")  # Stops root too, whom a read-only folder would not.


def test_a_cache_that_cannot_be_written_makes_way_for_a_temporary_folder(
    no_sample, serve, cache, temporary_copy, capsys
):
    server = serve()
    a_file_in_place_of(cache.parent)
    assert_small_mnist(mnist_setup.load_mnist())
    assert_small_mnist(mnist_setup.load_mnist())
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("MNIST: the Keras cache cannot be written (")
    assert second == "MNIST: mnist.npz downloaded to a temporary folder, 20 images to train, 10 to test"
    assert third == "MNIST: mnist.npz from a temporary folder, 20 images to train, 10 to test"
    assert server.requests == 1
    assert os.listdir(temporary_copy.parent) == ["mnist.npz"] and temporary_copy.read_bytes() == WHOLE


def test_a_read_only_cache_that_exists_makes_way_for_a_temporary_folder(
    no_sample, serve, cache, temporary_copy, monkeypatch, capsys
):
    serve()
    cache.parent.mkdir(parents=True)
    cache.write_bytes(TORN)
    write_bytes = pathlib.Path.write_bytes

    def read_only(path, content):
        if path.parent == cache.parent:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return write_bytes(path, content)

    monkeypatch.setattr(pathlib.Path, "write_bytes", read_only)
    assert_small_mnist(mnist_setup.load_mnist())
    assert capsys.readouterr().out.splitlines()[1:] == [
        "MNIST: the Keras cache cannot be written (Read-only file system)",
        "MNIST: mnist.npz downloaded to a temporary folder, 20 images to train, 10 to test",
    ]
    assert temporary_copy.read_bytes() == WHOLE


def test_nothing_to_write_to_does_not_stop_the_lesson(no_sample, serve, cache, temporary_copy, capsys):
    serve()
    a_file_in_place_of(cache.parent)
    a_file_in_place_of(temporary_copy.parent)
    assert_small_mnist(mnist_setup.load_mnist())
    assert capsys.readouterr().out.splitlines()[-1] == (
        "MNIST: mnist.npz downloaded, kept nowhere, 20 images to train, 10 to test"
    )


def test_no_network_is_an_error_that_names_the_cure(no_sample, cache, temporary_copy, capsys):
    with pytest.raises(OSError, match=r"could not be downloaded from http.*Without network, set .*MNIST_NPZ"):
        mnist_setup.load_mnist()
    assert capsys.readouterr().out == ""
    assert not cache.parent.exists() and not temporary_copy.parent.exists()


def send_404(handler, _):
    handler.begin(0, status=404)


def send_a_web_page(handler, _):
    handler.begin(5)
    handler.trickle(b"login")


def send_half(handler, _):
    handler.begin(len(WHOLE))
    handler.trickle(TORN)


@pytest.mark.parametrize("answer", [send_404, send_a_web_page, send_half])
def test_a_download_that_goes_wrong_is_an_error_in_words_and_is_not_kept(answer, no_sample, serve, cache):
    serve(answer)
    with pytest.raises(OSError, match="could not be downloaded.*MNIST_NPZ"):
        mnist_setup.load_mnist()
    assert not cache.exists()


def test_the_download_is_the_file_that_keras_knows():
    source = pathlib.Path(importlib.util.find_spec("keras").origin).parent / "src" / "datasets" / "mnist.py"
    keras_says = source.read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location("untouched_mnist_setup", ROOT / "mnist_setup.py")
    untouched = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(untouched)
    folder, _, name = untouched.MNIST_URL.rpartition("/")
    assert folder + "/" in keras_says and name in keras_says and untouched.MNIST_SHA256 in keras_says


# The dataset


def batches(count, *args, **kwargs):
    """The first batches, as pairs of lists: which images (by their value), and their labels."""
    drawn = mnist_setup.mnist_dataset(*args, **kwargs).take(count).as_numpy_iterator()
    return [(np.rint(x[:, 0, 0] * 255).astype(int).tolist(), y.tolist()) for x, y in drawn]


def test_batches_have_the_promised_shapes_and_types():
    dataset = mnist_setup.mnist_dataset(128)
    assert dataset.element_spec == (
        tf.TensorSpec((128, 28, 28), tf.float32),
        tf.TensorSpec((128,), tf.int64),
    )
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    x, y = next(dataset.as_numpy_iterator())
    assert x.shape == (128, 28, 28) and y.shape == (128,)
    assert 0 <= x.min() < x.max() <= 1 and set(y) <= set(range(10))


def test_images_and_labels_stay_together():
    (x_train, y_train), _ = mnist_setup.load_mnist()
    label_of = {image.tobytes(): label for image, label in zip(x_train, y_train, strict=True)}
    for x, y in mnist_setup.mnist_dataset(500).take(8).as_numpy_iterator():
        assert [label_of[image.tobytes()] for image in x] == y.tolist()


def test_every_pass_holds_every_image_once_though_batches_run_across_passes(small_mnist):
    drawn = [image for images, _ in batches(15, 8) for image in images]  # 120 images: 6 passes over 20.
    passes = [drawn[start : start + 20] for start in range(0, 120, 20)]
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert len({tuple(one) for one in passes}) == 6, "each pass has an order of its own"
    assert passes[0] != sorted(passes[0])


def test_every_batch_is_full_even_one_larger_than_the_data(small_mnist):
    assert [len(images) for images, _ in batches(5, 33)] == [33] * 5


def test_the_same_seed_gives_the_same_batches_and_another_seed_others(small_mnist):
    assert batches(5, 8, seed=7) == batches(5, 8, seed=7)
    assert batches(5, 8) == batches(5, 8, seed=0)
    assert len({str(batches(1, 20, seed=seed)) for seed in (0, 1, 2, 2**40)}) == 4


def test_the_batches_do_not_depend_on_the_global_seed(small_mnist):
    before = batches(5, 8)
    tf.random.set_seed(123)
    assert batches(5, 8) == before


@pytest.mark.parametrize("batch_size", [1, 8, 20, 33])
@pytest.mark.parametrize("skip_batches", [1, 2, 3, 5, 19, 20, 101])
def test_skip_batches_equals_skip(skip_batches, batch_size, small_mnist):
    every = batches(skip_batches + 4, batch_size, seed=3)
    assert batches(4, batch_size, seed=3, skip_batches=skip_batches) == every[skip_batches:]


@pytest.mark.timeout(60)  # it takes 0.1 s; Dataset.skip would take minutes
def test_skipping_a_million_batches_takes_no_longer_than_skipping_none():
    next(mnist_setup.mnist_dataset(128, skip_batches=1_000_000).as_numpy_iterator())


def test_workers_share_each_batch_out_as_data_and_not_as_files(small_mnist):
    policy = mnist_setup.mnist_dataset(8).options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.DATA


def test_nothing_is_tuned_for_whose_end_a_training_would_wait(small_mnist):
    assert mnist_setup.mnist_dataset(8).options().autotune.enabled is False


@pytest.mark.parametrize(("batch_size", "skip_batches"), [(0, 0), (-1, 0), (8, -1)])
def test_impossible_sizes_are_an_error_in_words(batch_size, skip_batches):
    with pytest.raises(ValueError, match=f"batch_size={batch_size} must be .*skip_batches={skip_batches} "):
        mnist_setup.mnist_dataset(batch_size, skip_batches=skip_batches)


# The model


def test_the_model_is_the_lessons_network():
    model = mnist_setup.build_and_compile_cnn_model()
    names = ["Reshape", "Conv2D", "Flatten", "Dense", "Dense"]
    assert [type(layer).__name__ for layer in model.layers] == names
    reshape, convolution, _, hidden, logits = model.layers
    assert model.input_shape == (None, 28, 28) and model.output_shape == (None, 10)
    assert reshape.target_shape == (28, 28, 1)
    assert (convolution.filters, convolution.kernel_size) == (32, (3, 3))
    assert (hidden.units, logits.units) == (128, 10)
    activations = [layer.activation.__name__ for layer in (convolution, hidden, logits)]
    assert activations == ["relu", "relu", "linear"]
    assert model.count_params() == 2_770_634


def test_the_model_is_compiled_as_the_lesson_says():
    model = mnist_setup.build_and_compile_cnn_model()
    assert type(model.loss) is tf.keras.losses.SparseCategoricalCrossentropy
    assert model.loss.get_config()["from_logits"] is True
    assert type(model.optimizer) is tf.keras.optimizers.SGD
    assert float(model.optimizer.learning_rate) == pytest.approx(0.001)
    assert model.optimizer.momentum == 0
    logs = model.evaluate(np.zeros((2, 28, 28), "float32"), np.zeros(2, "int64"), verbose=0, return_dict=True)
    assert set(logs) == {"loss", "accuracy"}
    other = mnist_setup.build_and_compile_cnn_model(learning_rate=0.05)
    assert float(other.optimizer.learning_rate) == pytest.approx(0.05)


def test_importing_and_loading_start_nothing_in_tensorflow():
    code = (
        "import mnist_setup, multi_worker, main\n"
        "from tensorflow.python.eager import context\n"
        "assert not context.context()._initialized, 'the import started TensorFlow'\n"
        "mnist_setup.load_mnist()\n"
        "assert not context.context()._initialized, 'load_mnist started TensorFlow'\n"
        "import tensorflow as tf\n"
        "tf.constant(1)\n"
        "assert context.context()._initialized, 'this test can no longer tell'\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, timeout=DEADLINE, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


class TensorFlowWithTfKeras:
    """TensorFlow as TF_USE_LEGACY_KERAS=1 makes it: tf.keras is tf_keras."""

    def __init__(self, tf_keras):
        self.keras = tf_keras

    def __getattr__(self, name):
        return getattr(tf, name)


def test_the_model_and_data_work_with_tf_keras_too(small_mnist, monkeypatch):
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is the second lane, and may be absent")
    monkeypatch.setattr(mnist_setup, "tf", TensorFlowWithTfKeras(tf_keras))
    model = mnist_setup.build_and_compile_cnn_model()
    history = model.fit(mnist_setup.mnist_dataset(8), steps_per_epoch=2, verbose=0)
    assert isinstance(model, tf_keras.Sequential) and set(history.history) == {"loss", "accuracy"}
    assert model.count_params() == 2_770_634
