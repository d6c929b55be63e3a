"""main.py's `train` on a real Ray cluster of one node: same numbers, resumed exactly. Run by `make test-ray`."""

import contextlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from saved_results import TRAINING, assert_same_results, local_results, results_in

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Ray's many processes: in namespaces of their own they reach nothing but each other, and end together.
ALONE = "unshare --map-root-user --net --pid --fork --kill-child --mount-proc".split()


def what_is_missing():
    try:  # not by import: this folder, too, is called ray
        importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return "ray is not installed (make test-ray installs it, in an environment of its own)"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare or ip not found (on Linux, in the packages util-linux and iproute2)"
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, timeout=30)
    return f"namespaces are not allowed here ({tried.stderr.strip()})" if tried.returncode else ""


missing = what_is_missing()
pytestmark = [pytest.mark.skipif(bool(missing), reason=f"NOT RUN, no Ray: {missing}"), pytest.mark.timeout(400)]


class Ray:
    """train_ray.py in a Ray cluster of its own, which is gone at the end."""

    def __init__(self, folder, *arguments):
        self.folder, self.log_file = folder, folder / "ray.log"
        self.ray_folder = tempfile.mkdtemp(prefix="ray_")  # a short path: Ray puts sockets there
        command = ["sh", "-c", 'ip link set dev lo up; exec "$@"', "sh", sys.executable, ROOT / "clusters/ray/train_ray.py"]
        command += ["--storage-path", folder / "results", *arguments, *results_in(folder)]
        environment = os.environ | {"RAY_TMPDIR": self.ray_folder, "CUDA_VISIBLE_DEVICES": "-1", "RAY_DEDUP_LOGS": "0"}
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                [*ALONE, *map(str, command)], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def log(self):
        return self.log_file.read_text(errors="replace")

    def wait(self, seconds):
        code = self.process.wait(seconds)
        assert code == 0, self.log()[-3000:]

    def close(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.ray_folder, ignore_errors=True)


@pytest.fixture
def run(tmp_path):
    started = []

    def run(*arguments):
        started.append(Ray(tmp_path, *arguments))
        return started[-1]

    yield run
    for ray in started:
        ray.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return local_results(tmp_path_factory.mktemp("undisturbed"))


def a_train_worker(ray):
    """The process of one of the training's workers."""
    for process in psutil.Process(ray.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::RayTrainWorker" in " ".join(process.cmdline()):
                return process
    raise LookupError("no worker of Ray Train runs")


def test_two_ray_workers_give_the_numbers_of_two_local_ones(run, undisturbed, tmp_path):
    ray = run("--workers", "2", *TRAINING)
    ray.wait(240)
    assert "worker 1 of 2 (chief)" in ray.log() and "worker 2 of 2" in ray.log()
    assert_same_results(tmp_path, undisturbed)


def test_a_killed_worker_restarts_all_which_resume_exactly(run, undisturbed, tmp_path):
    ray = run("--workers", "2", "--max-failures", "1", *TRAINING, "--backup-dir", tmp_path / "backup")
    end = time.monotonic() + 180
    while not (tmp_path / "backup" / "backup.npz").exists() or "Epoch 3/" not in ray.log():
        assert time.monotonic() < end and ray.process.poll() is None, ray.log()[-3000:]
        time.sleep(0.05)
    a_train_worker(ray).kill()
    ray.wait(180)
    # Two processes in turn were the chief; the second began with the epoch that was interrupted.
    chiefs = dict.fromkeys(re.findall(r"pid=(\d+)\)\S* worker 1 of 2 \(chief\)", ray.log()))
    epochs = [re.search(rf"pid={pid}\)\S* Epoch (\d+)/", ray.log())[1] for pid in chiefs]
    assert epochs == ["1", "3"]
    assert_same_results(tmp_path, undisturbed)


def test_a_wrong_option_ends_in_one_line(run):
    ray = run("--workers", "2", "--epochs", "none")
    assert ray.process.wait(120) == 2
    assert "none is not a whole number above 0" in ray.log() and "Traceback" not in ray.log()
