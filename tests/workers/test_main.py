"""main.py as a user starts it: alone, in a cluster, with a wrong TF_CONFIG, told to stop, with a peer that hangs."""

import importlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from legacy import only_keras_3
from saved_results import results_in, weights_in

from local_cluster import LocalCluster, WorkerFailed

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAIN = ROOT / "main.py"
QUICK = ["--epochs", "3", "--steps-per-epoch", "10", "--learning-rate", "0.01"]
for_keras_3 = only_keras_3("this BackupAndRestore is for Keras 3; tf_keras has its own")


def run_alone(*arguments, **environment):
    variables = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return subprocess.run(
        [sys.executable, MAIN, *arguments], env=variables | {"CUDA_VISIBLE_DEVICES": "-1"} | environment,
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip


def run_cluster(*arguments, workers=2):
    with LocalCluster(MAIN, workers, [*QUICK, *arguments]) as cluster:
        cluster.wait(deadline=90)
        return [cluster.log(number) for number in range(len(cluster.tasks))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Two workers at 64: logs, history, the model's path."""
    folder = tmp_path_factory.mktemp("undisturbed")
    logs = run_cluster(*results_in(folder))
    return logs, json.loads((folder / "history.json").read_text()), folder / "model.keras"


@pytest.mark.slow
def test_two_workers_at_64_give_history_and_weights_of_one_at_128(undisturbed, tmp_path):
    _, history, model_path = undisturbed
    alone = run_alone(
        *QUICK, "--per-worker-batch-size", "128", "--history", tmp_path / "h.json", "--model-path", tmp_path / "m.keras"
    )
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("worker 1 of 1 (chief), alone: TF_CONFIG is not set\n")
    history_alone = json.loads((tmp_path / "h.json").read_text())
    assert history.keys() == history_alone.keys() and history["epoch"] == [0, 1, 2]
    for name, values in history_alone.items():
        np.testing.assert_allclose(history[name], values, rtol=0, atol=1e-5, err_msg=name)
    for ours, theirs in zip(weights_in(model_path), weights_in(tmp_path / "m.keras"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert history["loss"][-1] < history["loss"][0]


def test_each_worker_says_first_who_it_is_and_then_one_line_an_epoch(undisturbed):
    logs, history, _ = undisturbed
    for number, log in enumerate(logs):
        first = next(line for line in log.splitlines() if line.startswith("worker"))
        assert first == f"worker {number + 1} of 2" + (" (chief)" if number == 0 else "")
    epochs = [re.findall(r"accuracy: \S+ - loss: \S+|loss: \S+ - accuracy: \S+", log) for log in logs]
    assert len(epochs[0]) == 3 and epochs[0] == epochs[1]


def test_no_temporary_folder_is_left_beside_the_model(undisturbed):
    names = sorted(path.name for path in undisturbed[2].parent.iterdir())
    assert [name for name in names if "temp" in name or "new" in name] == []
    assert not any("Traceback" in log for log in undisturbed[0])


@pytest.mark.slow
def test_make_train_trains_and_verifies_what_it_trained(tmp_path):
    for path in [*ROOT.glob("*.py"), ROOT / "Makefile"]:
        shutil.copy(path, tmp_path)
    for name in ("data", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    command = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 170}
    made = subprocess.run(["make", "train", f"ENV_PYTHON={sys.executable}"], **command)
    assert made.returncode == 0 and made.stdout.count("\nverified: ") == 3, made.stdout + made.stderr
    assert len(re.findall(r"^70/70 - .*loss: ", made.stdout, re.MULTILINE)) == 3, "one line an epoch"
    (tmp_path / "trained" / "history.json").write_text('{"loss": [1.0, 2.0, 3.0]}')
    verified = subprocess.run([sys.executable, "tools/verify_training.py", "trained"], **command)
    assert verified.returncode == 1 and verified.stdout.endswith("NOT SO: the loss fell from 1.0000 to 3.0000\n")


@pytest.mark.slow
def test_a_chief_job_beside_workers_gives_the_same_numbers(undisturbed, tmp_path):
    """And NCCL, asked for where there is no GPU, is RING."""
    arguments = ["--communication", "NCCL", "--history", tmp_path / "made" / "h.json"]
    logs = run_cluster(*arguments, workers={"chief": 1, "worker": 1})
    assert "worker 1 of 2 (chief)" in logs[0] and "worker 2 of 2\n" in logs[1]
    assert json.loads((tmp_path / "made" / "h.json").read_text()) == undisturbed[1]


@pytest.mark.parametrize(
    "tf_config, named",
    [
        ("", "empty string"),
        ("{}", "cluster"),
        ('{"cluster": {"worker": ["127.0.0.1:BUSY"]}, "task": {"type": "worker", "index": 0}}', "port BUSY"),
        ('{"cluster": {"worker": ["a:1"], "evaluator": ["127.0.0.1:2"]}, "task": {"type": "evaluator", "index": 0}}',
         "evaluator"),
    ],
)  # fmt: skip
def test_a_wrong_tf_config_gives_one_line_and_exit_2(tf_config, named):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        result = run_alone(TF_CONFIG=tf_config.replace("BUSY", port), TF_CPP_MIN_LOG_LEVEL="3")
    assert result.returncode == 2
    assert named.replace("BUSY", port) in result.stderr
    ours = [line for line in result.stderr.splitlines() if line.startswith("main.py:")]
    assert len(ours) == 1 and result.stdout == ""


def test_data_that_cannot_be_read_ends_in_one_line(tmp_path):
    result = run_alone(MNIST_NPZ=str(tmp_path / "absent.npz"), TF_CPP_MIN_LOG_LEVEL="3")
    ours = [line for line in result.stderr.splitlines() if line.startswith("main.py:")]
    assert result.returncode == 1 and len(ours) == 1 and "absent.npz" in ours[0], result.stderr
    assert "Traceback" not in result.stderr


def test_results_that_cannot_be_written_end_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    for argument, name in (("--history", "h.json"), ("--model-path", "m.keras")):
        result = run_alone("--epochs", "1", "--steps-per-epoch", "1", argument, str(tmp_path / "file" / name))
        ours = [line for line in result.stderr.splitlines() if line.startswith("main.py:")]
        assert result.returncode == 1 and len(ours) == 1 and str(tmp_path / "file") in ours[0], result.stderr
        assert "Traceback" not in result.stderr


def test_a_wrong_argument_is_named(capsys):
    main = importlib.import_module("main")
    for arguments in (["--epochs", "0"], ["--steps-per-epoch", "x"], ["--model-path", "model.h5"], ["--seed", "-1"]):
        with pytest.raises(SystemExit) as end:
            main.parse_arguments(arguments)
        assert end.value.code == 2 and arguments[0] in capsys.readouterr().err


@pytest.mark.slow
@for_keras_3
def test_sigterm_ends_all_workers_with_a_backup_from_which_the_same_command_goes_on(undisturbed, tmp_path):
    """To one worker, as when a pod is removed; what a scheduler does to all of them is the same and more."""
    arguments = [*QUICK, "--backup-dir", tmp_path / "backup", "--history", tmp_path / "h.json"]
    with LocalCluster(MAIN, 2, arguments) as cluster:
        until(lambda: "Epoch 1/3" in cluster.log(1), cluster)
        cluster.processes[1].terminate()
        for number, process in enumerate(cluster.processes):
            assert process.wait(timeout=60) == 143, cluster.log(number)
            # The question whether to stop is put after each epoch of ten steps.
            stopped = re.search(
                r"^main.py: stopped after .* epoch (1|2); backed up in .*", cluster.log(number), re.MULTILINE
            )
            assert stopped, cluster.log(number)
    assert (tmp_path / "backup" / "backup.npz").exists() and not (tmp_path / "h.json").exists()
    with LocalCluster(MAIN, 2, arguments) as cluster:
        cluster.wait(deadline=60)
        assert "goes on from the backup in" in cluster.log(0) and "Epoch 3/3" in cluster.log(0)
        assert "Epoch 1/3" not in cluster.log(0) or "step 11" in cluster.log(0)
    assert json.loads((tmp_path / "h.json").read_text()) == undisturbed[1]
    assert not (tmp_path / "backup").exists()


def until(condition, cluster):
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end and "running" in cluster.status().values(), cluster.log(0)
        time.sleep(0.02)


LATE = """
import os, pathlib, runpy, sys, time
main, go = sys.argv.pop(1), pathlib.Path(sys.argv.pop(1))
end = time.monotonic() + 90
while '"index": 1' in os.environ["TF_CONFIG"] and not go.exists():
    assert time.monotonic() < end
    time.sleep(0.05)
sys.path.insert(0, os.path.dirname(main))
runpy.run_path(main, run_name="__main__")
"""


@pytest.mark.slow
def test_sigterm_while_a_worker_waits_for_its_peers_ends_it_when_they_come(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    with LocalCluster(script, 2, [MAIN, tmp_path / "go", *QUICK], env={"TF_CPP_MIN_LOG_LEVEL": "0"}) as cluster:
        until(lambda: "Started server with target" in cluster.log(0), cluster)
        cluster.processes[0].terminate()
        (tmp_path / "go").touch()
        assert cluster.processes[0].wait(timeout=60) == 143, cluster.log(0)
        assert "Epoch" not in cluster.log(0)


HANGS = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import psutil
import main
main.PEER_SECONDS = 10
class Hangs(main.Progress):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        print("threads:", psutil.Process().num_threads(), flush=True)
        if epoch == 1 and '"index": 1' in os.environ["TF_CONFIG"]:  # alive, and never comes to the next step
            signal.pause()
main.Progress = Hangs
sys.exit(main.main())
"""
STEPS_OF_AN_EPOCH = 40


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """What LocalCluster and the chief say of a training whose second worker hangs after two epochs."""
    script = tmp_path_factory.mktemp("hung") / "hangs.py"
    script.write_text(HANGS)
    with LocalCluster(script, 2, [ROOT, *QUICK, "--steps-per-epoch", STEPS_OF_AN_EPOCH]) as cluster:
        with pytest.raises(WorkerFailed) as failure:
            cluster.wait(deadline=90)
    return str(failure.value), cluster.log(0)


@pytest.mark.slow
def test_workers_one_of_whom_hangs_end_with_one_line(hung):
    failure, log = hung
    assert re.match("worker [01] failed: exit code 1;", failure), failure
    assert re.findall("^main.py: .*", log, re.MULTILINE) == [
        "main.py: no progress for 10 s: a worker hangs, here or elsewhere; start all of them again"
    ]
    assert log.count(" - loss: ") == 2 and "Traceback" not in log


def test_the_watch_over_peers_costs_no_thread_a_step(hung):
    after_one, after_two = map(int, re.findall(r"threads: (\d+)", hung[1]))
    assert after_two - after_one < STEPS_OF_AN_EPOCH / 2
