"""What LocalCluster and its command promise: with small scripts; last, with real TensorFlow workers."""

import contextlib
import gc
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import local_cluster
from local_cluster import LocalCluster, WorkerFailed

LAUNCHER = pathlib.Path(local_cluster.__file__)
SECONDS = 30  # How long a test waits for something that takes milliseconds on an idle machine.
TENSORFLOW_SECONDS = 90  # The same for TensorFlow's start, which takes six seconds.

# What the scripts below begin with.
HEAD = """
import json, os, pathlib, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
here = pathlib.Path(__file__).parent

def until(condition):
    give_up = time.monotonic() + 30
    while not condition():
        if time.monotonic() > give_up:
            sys.exit("the test's script waited in vain")
        time.sleep(0.01)

def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True

def write(name, text=""):
    (here / (name + ".part")).write_text(str(text))
    (here / (name + ".part")).rename(here / name)
"""
# As deaf as a TensorFlow worker that waits for its peers.
DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("deaf", flush=True)
write(f"pid_{index}", os.getpid())
while True:
    signal.pause()
"""


@pytest.fixture
def script(tmp_path):
    """Writes a worker's script and returns its path."""

    def write(text, head=HEAD):
        path = tmp_path / "script.py"
        path.write_text(head + textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def shell(tmp_path):
    """Starts the command line (or any Python program); ends it, whatever happens."""
    started = []

    def start(*arguments, program=LAUNCHER, **options):
        command = [sys.executable, str(program), *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
        pipes["env"] = os.environ | {"TMPDIR": str(tmp_path)}  # Where a killed launcher leaves its logs.
        # A background job of a shell ignores SIGINT, and what it starts inherits that; a person's command does not.
        pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        started.append(subprocess.Popen(command, **(pipes | options)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(condition, what, seconds=SECONDS):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"waited {seconds} s in vain: {what}"
        time.sleep(0.01)


def is_running(pid):
    """False for a zombie too: it is dead, only not yet collected by its new parent."""
    try:
        os.kill(pid, 0)
        if not pathlib.Path("/proc/self/stat").exists():
            return True
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def pids(folder, count=2):
    """The workers that the DEAF script has made ready."""
    files = [folder / f"pid_{index}" for index in range(count)]
    until(lambda: all(file.exists() for file in files), "all workers up")
    return [int(file.read_text()) for file in files]


def assert_gone(processes):
    until(lambda: not any(map(is_running, processes)), f"processes {processes} gone")


@contextlib.contextmanager
def ends(numbers):
    """Leaves no process behind when a test of just that fails."""
    try:
        yield
    finally:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


# Who and where


@pytest.mark.timeout(60)
def test_every_worker_is_told_its_own_task_and_the_same_cluster(script):
    with LocalCluster(script("print(json.dumps(config))"), workers=3) as cluster:
        cluster.wait(SECONDS)
        configs = [json.loads(cluster.log(number)) for number in range(3)]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": n} for n in range(3)]
    assert configs[0]["cluster"] == configs[1]["cluster"] == configs[2]["cluster"]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)


@pytest.mark.timeout(60)
def test_a_cluster_may_have_a_chief_and_an_evaluator(script):
    shape = {"chief": 1, "worker": 2, "evaluator": 1}
    with LocalCluster(script("print(json.dumps(config))"), workers=shape) as cluster:
        cluster.wait(SECONDS)
        assert list(cluster.status()) == ["chief 0", "worker 0", "worker 1", "evaluator 0"]
        configs = [json.loads(cluster.log(number)) for number in range(4)]
    assert [config["task"]["type"] for config in configs] == ["chief", "worker", "worker", "evaluator"]
    assert [config["task"]["index"] for config in configs] == [0, 0, 1, 0]
    assert {job: len(addresses) for job, addresses in configs[0]["cluster"].items()} == shape


@pytest.mark.timeout(60)
def test_workers_have_no_gpu_and_no_buffer_and_else_the_callers_environment(script, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("TF_CONFIG", "the caller's own")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    show = "print(json.dumps(dict(os.environ)))"
    with LocalCluster(script(show), workers=1, env={"GREETINGS": "hello"}) as cluster:
        cluster.wait(SECONDS)
        environment = json.loads(cluster.log(0))
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["no_grpc_proxy"] == "127.0.0.1"
    assert environment["TF_CPP_MIN_LOG_LEVEL"] == "2"
    assert environment["GREETINGS"] == "hello"
    assert json.loads(environment["TF_CONFIG"])["task"]["index"] == 0
    assert os.environ["TF_CONFIG"] == "the caller's own"
    with LocalCluster(script(show), workers=1, env={"CUDA_VISIBLE_DEVICES": "1"}) as cluster:
        cluster.wait(SECONDS)
        assert json.loads(cluster.log(0))["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.timeout(60)
def test_arguments_reach_the_script_as_text(script):
    arguments = ["--epochs", 3, pathlib.Path("a b")]
    with LocalCluster(script("print(sys.argv[1:])"), workers=1, args=arguments) as cluster:
        cluster.wait(SECONDS)
        assert cluster.log(0) == "['--epochs', '3', 'a b']\n"


@pytest.mark.timeout(60)
def test_workers_stay_in_this_process_group(script):
    with LocalCluster(script("print(os.getpgid(0))"), workers=2) as cluster:
        cluster.wait(SECONDS)
        assert {cluster.log(0), cluster.log(1)} == {f"{os.getpgid(0)}\n"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, -1, {}, {"worker": 0}])
def test_a_cluster_without_workers_is_refused(script, workers):
    with pytest.raises(ValueError, match="at least one worker"):
        LocalCluster(script(""), workers=workers)


@pytest.mark.timeout(60)
def test_a_missing_script_is_named_before_anything_starts(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such script: .*absent.py"):
        LocalCluster(tmp_path / "absent.py")


# Status, logs, kill


@pytest.mark.timeout(60)
def test_status_says_not_started_running_exit_code_and_signal(script, tmp_path):
    cluster = LocalCluster(script("until((here / 'go').exists) if index < 2 else signal.pause()"), workers=3)
    try:
        assert cluster.status() == dict.fromkeys(["worker 0", "worker 1", "worker 2"], "not started")
        cluster.start()
        assert set(cluster.status().values()) == {"running"}
        (tmp_path / "go").touch()
        ended = {"worker 0": "exit code 0", "worker 1": "exit code 0"}
        until(lambda: cluster.status() == ended | {"worker 2": "running"}, "two at their end")
    finally:
        cluster.stop()
    assert cluster.status() == ended | {"worker 2": "killed by SIGKILL"}


@pytest.mark.timeout(60)
def test_a_line_is_in_the_log_as_soon_as_it_is_printed(script, tmp_path):
    text = "print('first'); until((here / 'go').exists); print('second')"
    with LocalCluster(script(text), workers=2) as cluster:
        until(lambda: cluster.log(0) == cluster.log(1) == "first\n", "the first line in both logs")
        assert set(cluster.status().values()) == {"running"}
        (tmp_path / "go").touch()
        cluster.wait(SECONDS)
        assert cluster.log(1) == "first\nsecond\n"


@pytest.mark.timeout(60)
def test_a_log_holds_errors_and_odd_bytes_and_outlives_the_workers(script):
    text = "sys.stderr.write('error\\n'); os.write(1, b'\\xff caf\\xc3\\xa9\\n')"
    cluster = LocalCluster(script(text), workers=1)
    assert cluster.log(0) == ""
    with cluster:
        cluster.wait(SECONDS)
    assert cluster.log(0) == "error\n\N{REPLACEMENT CHARACTER} café\n"


@pytest.mark.timeout(60)
def test_temporary_logs_are_removed_with_the_cluster_and_log_dir_is_kept(script, tmp_path):
    with LocalCluster(script("print(index)"), workers=1) as cluster:
        cluster.wait(SECONDS)
    folder = cluster.log_files[0].parent
    assert folder.exists()
    del cluster
    gc.collect()
    assert not folder.exists()
    with LocalCluster(script("print(index)"), workers=2, log_dir=tmp_path / "new" / "logs") as cluster:
        cluster.wait(SECONDS)
    del cluster
    gc.collect()
    assert (tmp_path / "new" / "logs" / "worker_1.log").read_text() == "1\n"


@pytest.mark.timeout(60)
def test_kill_ends_one_worker_and_no_other(script, tmp_path):
    with LocalCluster(script(DEAF), workers=2) as cluster:
        first, second = pids(tmp_path)
        cluster.kill(0)
        assert not is_running(first) and is_running(second)
        assert cluster.status() == {"worker 0": "killed by SIGKILL", "worker 1": "running"}


# How a run ends


@pytest.mark.timeout(60)
def test_wait_returns_when_all_have_ended_well_and_leaves_nothing(script):
    with LocalCluster(script("print(config['cluster']['worker'][index])"), workers=2) as cluster:
        assert cluster.wait(SECONDS) is None
        assert set(cluster.status().values()) == {"exit code 0"}
        for number in range(2):
            with socket.socket() as other:
                other.bind(("", int(cluster.log(number).strip().rpartition(":")[2])))


@pytest.mark.timeout(60)
def test_a_failure_names_the_worker_its_exit_code_and_the_end_of_its_log(script):
    text = """
        if index == 1:
            print(*(f"line {number}" for number in range(1, 31)), sep="\\n")
            sys.exit(3)
    """
    with LocalCluster(script(text), workers=2) as cluster, pytest.raises(WorkerFailed) as failure:
        cluster.wait(SECONDS)
    lines = str(failure.value).splitlines()
    assert lines[0] == "worker 1 failed: exit code 3; all workers have been ended."
    assert lines[1] == "--- worker 1 (exit code 3), the end of its log:"
    assert lines[2:] == [f"line {number}" for number in range(16, 31)]


@pytest.mark.timeout(60)
def test_a_script_that_fails_at_import_is_reported_at_once_with_its_error(script):
    with LocalCluster(script("import a_module_that_is_not_there")) as cluster:
        with pytest.raises(WorkerFailed, match="^worker . failed: exit code 1;") as failure:
            cluster.wait(SECONDS)
    assert "No module named 'a_module_that_is_not_there'" in str(failure.value)


@pytest.mark.timeout(60)
def test_a_worker_that_dies_by_a_signal_comes_first_and_then_what_the_survivor_saw(script):
    text = """
        if index == 1:
            write("victim", os.getpid())
            os.kill(os.getpid(), signal.SIGSEGV)
        until((here / "victim").exists)
        until(lambda: is_gone(int((here / "victim").read_text())))
        sys.exit("my peer is gone")
    """
    with LocalCluster(script(text)) as cluster, pytest.raises(WorkerFailed) as failure:
        cluster.wait(SECONDS)
    assert str(failure.value).splitlines() == [
        "worker 1 failed: killed by SIGSEGV; all workers have been ended.",
        "--- worker 1 (killed by SIGSEGV), the end of its log:",
        "(it wrote nothing)",
        "--- worker 0 (exit code 1), the end of its log:",
        "my peer is gone",
    ]


@pytest.mark.timeout(60)
def test_a_survivor_that_does_not_notice_is_ended_soon(script, tmp_path, monkeypatch):
    monkeypatch.setattr(local_cluster, "SURVIVORS_SECONDS", 0.2)
    with LocalCluster(script(DEAF)) as cluster:
        survivor, _ = pids(tmp_path)
        cluster.kill(1)
        with pytest.raises(WorkerFailed) as failure:
            cluster.wait(10 * SECONDS)
    assert not is_running(survivor)
    assert str(failure.value).startswith("worker 1 failed: killed by SIGKILL;")
    assert str(failure.value).endswith("--- worker 0 (running), the end of its log:\ndeaf")


@pytest.mark.timeout(60)
def test_at_the_deadline_all_are_ended_and_those_that_still_ran_are_named(script, tmp_path):
    text = "if index == 1: sys.exit(0)\nif index == 2: write('pid_2', os.getpid()); signal.pause()\n" + DEAF
    with LocalCluster(script(text), workers=3) as cluster:
        until(lambda: cluster.log(0) and (tmp_path / "pid_2").exists(), "workers 0 and 2 up")
        until(lambda: cluster.status()["worker 1"] == "exit code 0", "worker 1 at its end")
        processes = [int((tmp_path / f"pid_{index}").read_text()) for index in (0, 2)]
        with pytest.raises(WorkerFailed) as failure:
            cluster.wait(0.3)
    assert not any(map(is_running, processes))
    assert str(failure.value).splitlines() == [
        "worker 0, worker 2 still running at the deadline of 0.3 s; all workers have been ended.",
        "--- worker 0 (running), the end of its log:",
        "deaf",
        "--- worker 2 (running), the end of its log:",
        "(it wrote nothing)",
    ]


LINGERS = """
write(f"pid_{index}", os.getpid())
until(lambda: (here / "pid_0").exists() and (here / "pid_1").exists())
"""


@pytest.mark.timeout(60)
def test_a_worker_that_lingers_after_the_others_have_ended_is_waited_for(script):
    text = LINGERS + "if index == 1: until(lambda: is_gone(int((here / 'pid_0').read_text())))"
    with LocalCluster(script(text)) as cluster:
        cluster.wait(SECONDS)
        assert cluster.status() == {"worker 0": "exit code 0", "worker 1": "exit code 0"}


@pytest.mark.timeout(60)
def test_a_worker_that_lingers_beyond_the_grace_has_failed(script):
    text = LINGERS + """
if index == 1:
    print("all done")
    write("lingers")
    signal.pause()
until((here / "lingers").exists)
"""
    with LocalCluster(script(text), grace=0.3) as cluster, pytest.raises(WorkerFailed) as failure:
        cluster.wait(10 * SECONDS)
    lines = str(failure.value).splitlines()
    assert lines[0] == "worker 1 still running 0.3 s after worker 0 ended well; all workers have been ended."
    assert lines[-1] == "all done"


@pytest.mark.timeout(60)
def test_a_worker_that_fails_while_the_others_have_ended_well_is_a_failure(script):
    text = LINGERS + "if index == 1: until(lambda: is_gone(int((here / 'pid_0').read_text()))); sys.exit(7)"
    with LocalCluster(script(text)) as cluster:
        with pytest.raises(WorkerFailed, match="^worker 1 failed: exit code 7;"):
            cluster.wait(SECONDS)


@pytest.mark.timeout(60)
def test_wait_can_print_one_workers_lines(script, capsys):
    with LocalCluster(script("print('line of', index); sys.stdout.write('no line end')")) as cluster:
        cluster.wait(SECONDS, follow=1)
    assert capsys.readouterr().out == "line of 1\nno line end"


# Nothing is left


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_ends_all_workers(script, tmp_path, error):
    with pytest.raises(error), LocalCluster(script(DEAF)):
        processes = pids(tmp_path)
        raise error
    assert not any(map(is_running, processes))


@pytest.mark.timeout(60)
def test_stop_ends_workers_that_ignore_sigterm_and_sigint(script, tmp_path):
    with LocalCluster(script(DEAF)) as cluster:
        processes = pids(tmp_path)
        for process in processes:
            os.kill(process, signal.SIGTERM)
            os.kill(process, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.processes[0].wait(timeout=0.2)
        cluster.stop()
        assert not any(map(is_running, processes))
        cluster.stop()


@pytest.mark.timeout(60)
def test_a_start_that_fails_half_way_leaves_no_worker(script, monkeypatch):
    started, popen = [], subprocess.Popen

    def fails_the_second_time(*arguments, **options):
        if started:
            raise OSError("no more processes")
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", fails_the_second_time)
    cluster = LocalCluster(script(DEAF))
    try:
        with pytest.raises(OSError, match="no more processes"):
            cluster.start()
        assert started[0].returncode == -signal.SIGKILL
    finally:
        cluster.stop()


@pytest.mark.timeout(60)
def test_wait_before_start_and_start_twice_are_refused_in_words(script):
    cluster = LocalCluster(script(DEAF), workers=1)
    with pytest.raises(RuntimeError, match="has not been started"):
        cluster.wait(SECONDS)
    with cluster, pytest.raises(RuntimeError, match="stop it first"):
        cluster.start()


@pytest.mark.timeout(60)
def test_a_stopped_cluster_starts_again_on_new_ports_with_empty_logs(script):
    with LocalCluster(script("print(config['cluster'])")) as cluster:
        cluster.wait(SECONDS)
        first = cluster.log(0)
        cluster.start()
        cluster.wait(SECONDS)
        second = cluster.log(0)
    assert len(second.splitlines()) == 1 and first != second


# Workers that a thread has started do not end with the launcher by themselves.
IN_A_THREAD = "thread = threading.Thread(target=cluster.start); thread.start(); thread.join(); "


def in_a_program(tmp_path, how):
    """A program that starts two DEAF workers `how` it says."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(f"""
        import signal, sys, threading
        sys.path.insert(0, {str(LAUNCHER.parent)!r})
        from local_cluster import LocalCluster
        cluster = LocalCluster("script.py", workers=2)
    """) + textwrap.dedent(how))
    return program


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_no_worker_survives_a_sigkill_of_the_launcher(script, shell, tmp_path):
    script(DEAF)
    launcher = shell(program=in_a_program(tmp_path, "cluster.start(); cluster.wait(300)"))
    processes = pids(tmp_path)
    with ends(processes):
        launcher.kill()
        assert_gone(processes)


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_no_worker_survives_a_sigkill_of_the_command(script, shell, tmp_path):
    launcher = shell(script(DEAF))
    processes = pids(tmp_path)
    with ends(processes):
        launcher.kill()
        assert_gone(processes)


@pytest.mark.timeout(60)
def test_no_worker_survives_a_sigkill_of_the_process_group_as_in_a_notebooks_restart(script, shell, tmp_path):
    script(DEAF)
    launcher = shell(program=in_a_program(tmp_path, IN_A_THREAD + "signal.pause()"), start_new_session=True)
    processes = pids(tmp_path)
    with ends(processes):
        os.killpg(launcher.pid, signal.SIGKILL)
        assert_gone(processes)


@pytest.mark.timeout(60)
def test_no_worker_survives_a_program_that_forgets_to_stop(script, shell, tmp_path):
    script(DEAF)
    program = in_a_program(tmp_path, IN_A_THREAD + "sys.stdin.readline()")
    launcher = shell(program=program, stdin=subprocess.PIPE)
    processes = pids(tmp_path)
    with ends(processes):
        launcher.communicate("\n", timeout=SECONDS)
        assert launcher.returncode == 0
        assert not any(map(is_running, processes))


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_worker_whose_launcher_died_before_it_could_ask_does_not_start():
    not_its_parent = str(os.getppid())
    command = [sys.executable, "-c", local_cluster.START_TIED_TO_LAUNCHER, not_its_parent, "echo", "started"]
    worker = subprocess.run(command, capture_output=True, timeout=SECONDS)
    assert (worker.returncode, worker.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.timeout(60)
def test_workers_outlive_a_thread_that_started_them(script, tmp_path):
    cluster = LocalCluster(script(DEAF))

    def start_and_end():
        cluster.start()
        pids(tmp_path)

    try:
        thread = threading.Thread(target=start_and_end)
        thread.start()
        thread.join(SECONDS)
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.processes[1].wait(timeout=0.3)
        assert set(cluster.status().values()) == {"running"}
    finally:
        cluster.stop()


# Ports


@pytest.mark.timeout(60)
def test_eight_launchers_at_once_never_choose_the_same_port(shell, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(LAUNCHER.parent)!r})
        import local_cluster
        print("ready", flush=True)
        sys.stdin.readline()
        ports, kept = local_cluster.reserve_ports(50)
        print(*ports, flush=True)
        sys.stdin.readline()
    """))
    launchers = [shell(program=program, stdin=subprocess.PIPE) for _ in range(8)]
    for launcher in launchers:
        assert launcher.stdout.readline() == "ready\n"
    for launcher in launchers:
        launcher.stdin.write("go\n")
        launcher.stdin.flush()
    ports = [port for launcher in launchers for port in launcher.stdout.readline().split()]
    assert len(ports) == len(set(ports)) == 400


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not share a port that is kept")
def test_a_kept_port_is_refused_to_others_and_open_to_its_worker():
    (port,), kept = local_cluster.reserve_ports(1)
    with kept[0], socket.socket() as other, socket.socket() as worker:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        worker.bind(("", port))
        worker.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS), worker.accept()[0]:
            pass


@pytest.mark.timeout(60)
def test_where_the_kernel_shares_no_port_it_is_free_again_when_the_worker_starts(script, monkeypatch):
    class SocketThatSharesNothing(socket.socket):
        def bind(self, address):
            if self.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                raise OSError("address already in use")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", SocketThatSharesNothing)
    ports, kept = local_cluster.reserve_ports(3)
    assert len(set(ports)) == 3 and all(reserved.fileno() == -1 for reserved in kept)
    with LocalCluster(script("print(index)")) as cluster:
        cluster.wait(SECONDS)


@pytest.mark.timeout(60)
def test_two_clusters_run_at_the_same_time_on_different_ports(script):
    meet = """
        write(f"{sys.argv[1]}_{index}", json.dumps(config["cluster"]["worker"]))
        until(lambda: all((here / f"{name}_{number}").exists() for name in "ab" for number in range(2)))
        print(json.dumps(config["cluster"]["worker"]))
    """
    path = script(meet)
    with LocalCluster(path, args=["a"]) as one, LocalCluster(path, args=["b"]) as other:
        one.wait(SECONDS)
        other.wait(SECONDS)
        assert len({*json.loads(one.log(0)), *json.loads(other.log(0))}) == 4


# From a shell


@pytest.mark.timeout(60)
def test_the_command_prints_the_chiefs_lines_and_exits_0_when_all_ended_well(script, shell):
    command = shell("--workers", 3, script("print('worker', index, sys.argv[1:])"), "--workers", "x", "-h")
    out, err = command.communicate(timeout=SECONDS)
    assert (command.returncode, out, err) == (0, "worker 0 ['--workers', 'x', '-h']\n", "")


@pytest.mark.timeout(60)
def test_the_command_prints_a_line_while_the_chief_still_runs(script, shell, tmp_path):
    command = shell(script("print('first'); until((here / 'go').exists); print('second')"))
    assert command.stdout.readline() == "first\n"
    (tmp_path / "go").touch()
    assert command.communicate(timeout=SECONDS) == ("second\n", "")
    assert command.returncode == 0


@pytest.mark.timeout(60)
def test_the_command_exits_1_and_names_the_worker_when_only_one_failed(script, shell, tmp_path):
    text = "print('fine') if index == 0 else sys.exit('this is why')"
    command = shell("--log-dir", tmp_path / "logs", script(text))
    out, err = command.communicate(timeout=SECONDS)
    assert (command.returncode, out) == (1, "fine\n")
    assert err.splitlines() == [
        "local_cluster.py: worker 1 failed: exit code 1; all workers have been ended.",
        "--- worker 1 (exit code 1), the end of its log:",
        "this is why",
    ]
    assert (tmp_path / "logs" / "worker_1.log").read_text() == "this is why\n"


@pytest.mark.timeout(60)
def test_the_command_ends_at_its_deadline_and_does_not_restart_after_it(script, shell, tmp_path):
    command = shell("--deadline", 1, "--max-restarts", 5, script(DEAF))
    processes = pids(tmp_path)
    with ends(processes):
        out, err = command.communicate(timeout=SECONDS)
        assert not any(map(is_running, processes))
    assert command.returncode == 1
    assert err.startswith("local_cluster.py: worker 0, worker 1 still running at the deadline of 1 s;")
    assert "Restart" not in err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_the_command_and_all_workers(script, shell, tmp_path, number, code):
    command = shell(script(DEAF))
    processes = pids(tmp_path)
    with ends(processes):
        command.send_signal(number)
        out, err = command.communicate(timeout=SECONDS)
        assert not any(map(is_running, processes))
    assert command.returncode == code
    assert "Traceback" not in err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("workers", "name"), [(2, "absent.py"), (0, "script.py"), (-1, "script.py")])
def test_a_missing_script_or_no_worker_is_one_line_and_exit_2(script, shell, workers, name):
    script("")
    command = shell("--workers", workers, name)
    out, err = command.communicate(timeout=SECONDS)
    assert (command.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("local_cluster.py: ")


@pytest.mark.timeout(60)
def test_a_log_that_cannot_be_written_is_one_line_and_exit_2(script, shell, tmp_path):
    (tmp_path / "logs" / "worker_0.log").mkdir(parents=True)
    command = shell("--log-dir", tmp_path / "logs", script(""))
    out, err = command.communicate(timeout=SECONDS)
    assert (command.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("local_cluster.py: ") and "worker_0.log" in err


# Each run leaves a mark with its ports; the scripts below fail until there are marks enough.
MARKS_ITS_RUN = """
runs = len(list(here.glob(f"run_{index}_*")))
write(f"run_{index}_{runs}", config["cluster"]["worker"])
until(lambda: (here / f"run_{1 - index}_{runs}").exists())
"""


@pytest.mark.timeout(60)
def test_max_restarts_starts_all_workers_again_on_new_ports(script, shell, tmp_path):
    text = MARKS_ITS_RUN + "print('run', runs)\nsys.exit('not yet' if index == 1 and runs == 0 else 0)"
    command = shell("--max-restarts", 3, script(text))
    out, err = command.communicate(timeout=SECONDS)
    assert (command.returncode, out) == (0, "run 0\nrun 1\n")
    assert err.splitlines() == [
        "local_cluster.py: worker 1 failed: exit code 1; all workers have been ended. Restart 1 of 3."]
    runs = {path.name: path.read_text() for path in tmp_path.glob("run_*")}
    assert sorted(runs) == ["run_0_0", "run_0_1", "run_1_0", "run_1_1"]
    assert runs["run_0_0"] == runs["run_1_0"] != runs["run_0_1"] == runs["run_1_1"]


@pytest.mark.timeout(60)
def test_max_restarts_gives_up_after_as_many(script, shell, tmp_path):
    command = shell("--max-restarts", 2, script(MARKS_ITS_RUN + "sys.exit('never' if index == 0 else 0)"))
    out, err = command.communicate(timeout=SECONDS)
    assert command.returncode == 1
    assert [line for line in err.splitlines() if "Restart" in line] == [
        f"local_cluster.py: worker 0 failed: exit code 1; all workers have been ended. Restart {number} of 2."
        for number in (1, 2)]
    assert err.rstrip().endswith("the end of its log:\nnever")
    assert len(list(tmp_path.glob("run_*"))) == 6


# With TensorFlow

REAL = """
import json, os, time
if "late" in os.sys.argv and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    time.sleep(600)  # This worker never starts.
import tensorflow as tf
# A call to a peer that is gone already would be tried again and again; with a time-out it is an error.
options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=10)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

@tf.function
def total():
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))

print("sum", float(total()), flush=True)
while "endless" in os.sys.argv:
    total()
"""


@pytest.mark.timeout(200)
def test_a_real_worker_whose_peer_never_starts_ignores_sigterm_and_is_ended_at_the_deadline(script):
    with LocalCluster(script(REAL, head=""), args=["late"], env={"TF_CPP_MIN_LOG_LEVEL": "0"}) as cluster:
        until(lambda: "straggler" in cluster.log(0), "worker 0 waits for its peer", TENSORFLOW_SECONDS)
        cluster.processes[0].terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.processes[0].wait(timeout=2)
        with pytest.raises(WorkerFailed) as failure:
            cluster.wait(0.5)
        assert set(cluster.status().values()) == {"killed by SIGKILL"}
    text = str(failure.value)
    assert text.startswith("worker 0, worker 1 still running at the deadline of 0.5 s;")
    assert "/job:worker/replica:0/task:1" in text
    assert text.endswith("--- worker 1 (running), the end of its log:\n(it wrote nothing)")


@pytest.mark.timeout(200)
def test_when_a_real_worker_is_killed_the_survivors_own_error_is_shown(script, monkeypatch):
    monkeypatch.setattr(local_cluster, "SURVIVORS_SECONDS", 40)
    with LocalCluster(script(REAL, head=""), args=["endless"]) as cluster:
        until(lambda: all("sum 2.0" in cluster.log(number) for number in (0, 1)), "in step", TENSORFLOW_SECONDS)
        cluster.kill(1)
        with pytest.raises(WorkerFailed) as failure:
            cluster.wait(60)
    text = str(failure.value)
    assert text.startswith("worker 1 failed: killed by SIGKILL;")
    # Unavailable if the call was on its way, DeadlineExceeded if it came later.
    assert re.search("(Unavailable|DeadlineExceeded|Internal|Cancelled)Error", text[text.index("--- worker 0 (") :])


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_real_clusters_train_at_the_same_time_even_where_a_web_proxy_is_set(script, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    path = script(REAL, head="")
    with LocalCluster(path) as one, LocalCluster(path) as other:
        one.wait(90)
        other.wait(90)
        for cluster in (one, other):
            assert "sum 2.0" in cluster.log(0) and "sum 2.0" in cluster.log(1)
