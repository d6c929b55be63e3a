"""main.py on a real Slurm: same numbers, requeued and resumed exactly, ended by scancel. Run by `make test-slurm`."""

import json
import os
import pathlib
import re
import signal
import sys

import pytest
from saved_results import TRAINING, assert_same_results, local_results, results_in
from slurm_cluster import SlurmCluster, what_is_missing

ROOT = pathlib.Path(__file__).resolve().parents[2]
WITH_TF_CONFIG = [sys.executable, ROOT / "clusters" / "with_tf_config.py"]
NODES = ["n2", "n10", "n11"]  # as words, n10 would come before n2
SUBMITTED = re.compile(r"Submitted batch job (\d+)")
missing = what_is_missing()
pytestmark = [pytest.mark.skipif(bool(missing), reason=f"NOT RUN, no Slurm: {missing}"), pytest.mark.timeout(400)]


@pytest.fixture
def cluster(tmp_path):
    with SlurmCluster(tmp_path, NODES, seconds=390) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same training by LocalCluster: its history, and its model's weights."""
    return local_results(tmp_path_factory.mktemp("undisturbed"))


def submit(cluster, *options, arguments=TRAINING, variables=None):
    """Submits train.sbatch as a user does, from the project's folder. Returns the job's number."""
    folder = cluster.folder
    environment = {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "-1",
        "BACKUPS": f"{folder}/backups",
        "MAX_RESTARTS": "1",
        **(variables or {}),
    }
    options = ["--job-name=run", "--cpus-per-task=1", f"--output={folder}/%x.out", *options]
    script = ROOT / "clusters" / "slurm" / "train.sbatch"
    command = ["sbatch", *options, script, *arguments, *results_in(folder)]
    return SUBMITTED.search(cluster.slurm(*command, cwd=ROOT, environment=environment))[1]


def log_of(cluster):
    path = cluster.folder / "run.out"
    return path.read_text(errors="replace") if path.exists() else ""


def wait_for_epoch(cluster, job, epoch):
    """Returns when the job trains in this epoch, counted from 1; the backup then holds all before it."""
    backup = cluster.folder / "backups" / "run" / "backup.npz"

    def reached():
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), log_of(cluster)
        return f"Epoch {epoch}/" in log_of(cluster) and backup.exists()

    cluster.until(reached, 120)


def wait_for_end(cluster, job, state, seconds=240):
    """Returns what Slurm knows of the job when it has ended."""
    active = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
    cluster.until(lambda: cluster.job(job)["JobState"] not in active, seconds)
    ended = cluster.job(job)
    assert ended["JobState"] == state, log_of(cluster)
    return ended


def pid_of_worker(cluster, number):
    """The process of a worker, as this machine numbers it."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        of_this_cluster = f"SLURM_CONF={cluster.folder}/slurm.conf".encode() in environment
        if of_this_cluster and b"\0main.py\0" in command and b"TF_CONFIG=" in environment:
            if f"SLURM_PROCID={number}\0".encode() in environment:
                return int(process.name)
    raise LookupError(f"worker {number} does not run")


def assert_resumed(cluster, before_epoch):
    """The log shows two starts; the second begins at the epoch that was interrupted, no earlier and no later."""
    starts = re.split(r"^worker 1 of 2 \(chief\)$", log_of(cluster), flags=re.MULTILINE)[1:]
    assert len(starts) == 2, log_of(cluster)
    epochs = [re.findall(r"^Epoch (\d+)/", start, flags=re.MULTILINE) for start in starts]
    assert epochs[0][0] == "1" and epochs[1][0] == str(before_epoch), epochs


def test_tasks_get_their_place_from_what_srun_really_sets(cluster):
    print_it = [*WITH_TF_CONFIG, "--port-base", "7000", "sh", "-c", "echo $TF_CONFIG"]
    lines = cluster.slurm("srun", "-N3", "-n5", *print_it).splitlines()
    configs = sorted((json.loads(line) for line in lines if line), key=lambda config: config["task"]["index"])
    assert [config["task"] for config in configs] == [{"type": "worker", "index": index} for index in range(5)]
    workers = ["n2:7000", "n2:7001", "n2:7002", "n10:7000", "n11:7000"]  # Slurm wrote "3,1(x2)"
    assert all(config["cluster"] == {"worker": workers} for config in configs)

    cyclic = cluster.slurm("srun", "-N2", "-n4", "--kill-on-bad-exit=1", "-m", "cyclic", *print_it, check=False)
    assert "with_tf_config.py: the tasks are not laid out in blocks" in cyclic and "exit code 2" in cyclic

    # In the batch script itself, without srun.
    script = ["sbatch", "--wait", "--output=batch.out", f"--wrap={' '.join(map(str, WITH_TF_CONFIG))} true"]
    cluster.slurm(*script, check=False, cwd=cluster.folder)
    refusal = (cluster.folder / "batch.out").read_text()
    assert refusal.startswith("with_tf_config.py: srun did not start this task") and refusal.count("\n") == 1


def test_two_nodes_give_the_numbers_of_two_local_workers(cluster, undisturbed):
    job = submit(cluster, "--cpus-per-task=2", variables={"SLURM_DEBUG": "1"})  # srun says what it asks for
    ended = wait_for_end(cluster, job, "COMPLETED")
    assert ended["NodeList"] == "n[2,10]" and ended["Restarts"] == "0"
    assert "worker 1 of 2 (chief)\n" in log_of(cluster) and "worker 2 of 2\n" in log_of(cluster)
    assert re.search(r"^srun: cpus-per-task +: 2$", log_of(cluster), re.MULTILINE), log_of(cluster)
    assert_same_results(cluster.folder, undisturbed)
    assert not (cluster.folder / "backups" / "run").exists()


@pytest.mark.parametrize("number", [1, 0], ids=["worker", "chief"])
def test_a_killed_worker_requeues_the_job_which_resumes_exactly(cluster, undisturbed, number):
    job = submit(cluster)
    wait_for_epoch(cluster, job, 3)
    os.kill(pid_of_worker(cluster, number), signal.SIGKILL)
    assert wait_for_end(cluster, job, "COMPLETED")["Restarts"] == "1"
    assert_resumed(cluster, before_epoch=3)
    assert_same_results(cluster.folder, undisturbed)


def test_a_lost_node_requeues_the_job_on_the_spare_which_resumes_exactly(cluster, undisturbed):
    job = submit(cluster)
    wait_for_epoch(cluster, job, 3)
    cluster.link("n10", "down")
    ended = wait_for_end(cluster, job, "COMPLETED")
    assert ended["NodeList"] == "n[2,11]" and int(ended["Restarts"]) >= 1
    assert_resumed(cluster, before_epoch=3)
    assert_same_results(cluster.folder, undisturbed)


def test_a_cancelled_job_stops_and_leaves_a_backup_for_the_next_of_its_name(cluster, undisturbed):
    job = submit(cluster)
    wait_for_epoch(cluster, job, 3)
    cluster.slurm("scancel", job)
    assert wait_for_end(cluster, job, "CANCELLED", seconds=30)["Restarts"] == "0"
    stopped = re.findall(r"^main.py: (stopped after .*; backed up in .*);", log_of(cluster), re.MULTILINE)
    assert len(stopped) == 2 and stopped[0] == stopped[1], log_of(cluster)
    assert (cluster.folder / "backups" / "run" / "backup.npz").exists()
    assert not (cluster.folder / "history.json").exists()

    wait_for_end(cluster, submit(cluster), "COMPLETED")
    assert_resumed(cluster, before_epoch=3)
    assert_same_results(cluster.folder, undisturbed)


def test_a_run_without_a_name_and_a_wrong_argument_are_refused(cluster):
    job = submit(cluster, "--job-name=train.sbatch")
    assert wait_for_end(cluster, job, "FAILED")["ExitCode"] == "2:0"
    assert "give the run a name of its own" in (cluster.folder / "train.sbatch.out").read_text()
    # And a wrong argument is not tried again.
    wrong = submit(cluster, arguments=["--epochs", "none"])
    ended = wait_for_end(cluster, wrong, "FAILED")
    assert ended["ExitCode"] == "2:0" and ended["Restarts"] == "0" and "none is not a whole number" in log_of(cluster)


def test_a_run_that_fails_each_time_is_given_up(cluster):
    backup = cluster.folder / "backups" / "run" / "backup.npz"
    backup.parent.mkdir(parents=True)
    backup.touch()
    assert wait_for_end(cluster, submit(cluster), "FAILED")["Restarts"] == "1"
    assert log_of(cluster).count(f"{backup} is an empty file") >= 2


def test_nothing_is_left_when_the_cluster_ends(tmp_path):
    def of_this_cluster():
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            except OSError:
                continue
            found += [process.name] * (str(tmp_path).encode() in text)
        return found

    with SlurmCluster(tmp_path, NODES, seconds=100) as slurm:
        slurm.slurm("sbatch", "--nodes=3", "--output=/dev/null", "--wrap=srun sleep 1000", cwd=tmp_path)
        slurm.until(lambda: "RUNNING" in slurm.slurm("squeue", "-h", "-o", "%T"), 20)
        assert len(of_this_cluster()) > 5
    assert of_this_cluster() == []
