"""Start, watch and stop the workers of one job on this machine, from a notebook or from a shell.

    with LocalCluster("main.py", workers=2, args=["--epochs", 3]) as cluster:
        cluster.wait(deadline=60)
        print(cluster.log(0))

    python local_cluster.py --workers 2 main.py --epochs 3

Whatever happens, no worker is left. All are ended with SIGKILL: one that waits for peers ignores the rest.
"""

import argparse
import atexit
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref

LOG_LINES = 15  # How much of a worker's log an error shows.
SURVIVORS_SECONDS = 5  # After one worker fails: time for the others to log what they saw (about 2 s).

# Linux ends a worker whose launcher is gone, even by SIGKILL, if the worker asks for it. So each starts as
# these lines: they ask (1 is PR_SET_PDEATHSIG), see that the launcher is still there, and become the script.
START_TIED_TO_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class WorkerFailed(RuntimeError):
    """A worker failed or did not end in time. First line: which and how; then the end of each such log."""


class LocalCluster:
    """Worker processes that all run one script, each told by TF_CONFIG who it is and where the others are.

    Args:
        script: path of the Python file.
        workers: how many; or how many of each job: {"chief": 1, "worker": 2}. Numbered 0, 1, 2 in that order.
        args: the script's arguments.
        log_dir: folder for the logs, worker_0.log and so on. Default: a temporary one, gone with this object.
        env: variables for the workers, beside this process's own. GPUs are hidden unless this sets
            CUDA_VISIBLE_DEVICES: workers that share a machine would all take the same ones.
        grace: seconds that the rest may run on after the first worker has ended well. The end of a worker's fit may
            take 60 s (lesson 6); one that takes longer, or that waits for a peer which has left, has failed.
    Raises:
        FileNotFoundError: no such script. ValueError: fewer than one worker.
    """

    def __init__(self, script, workers=2, args=(), log_dir=None, env=None, grace=75):
        jobs = {"worker": workers} if isinstance(workers, int) else workers
        self.tasks = [{"type": job, "index": index} for job, count in jobs.items() for index in range(count)]
        if not self.tasks:
            raise ValueError(f"a cluster needs at least one worker, not {workers}")
        if not pathlib.Path(script).is_file():
            raise FileNotFoundError(f"no such script: {script}")
        self.command = [str(part) for part in (sys.executable, script, *args)]
        self.env, self.grace = env or {}, grace
        if log_dir is None:
            log_dir = tempfile.mkdtemp(prefix="local_cluster_")
            weakref.finalize(self, shutil.rmtree, log_dir, ignore_errors=True)
        os.makedirs(log_dir, exist_ok=True)
        self.names = [f"{task['type']} {task['index']}" for task in self.tasks]
        self.log_files = [pathlib.Path(log_dir, name.replace(" ", "_") + ".log") for name in self.names]
        self.processes, self.reserved_ports = [], []

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def start(self):
        """Starts all workers, on new ports, with empty logs. May be called again after `stop` or `wait`."""
        if self.reserved_ports:
            raise RuntimeError("this cluster has been started; stop it first")
        atexit.register(self.stop)
        try:
            ports, self.reserved_ports = reserve_ports(len(self.tasks))
            self.processes, cluster = [], {}
            for task, port in zip(self.tasks, ports):
                # Not "localhost": that may mean ::1, where TensorFlow need not listen.
                cluster.setdefault(task["type"], []).append(f"127.0.0.1:{port}")
            for task, log_file in zip(self.tasks, self.log_files):
                self.processes.append(self._start_worker({"cluster": cluster, "task": task}, log_file))
        except BaseException:
            self.stop()
            raise

    def _start_worker(self, tf_config, log_file):
        command = self.command
        # To Linux, the launcher is the thread that started the worker, and only the main one surely lasts.
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            command = [command[0], "-S", "-c", START_TIED_TO_LAUNCHER, str(os.getpid()), *command]
        # gRPC would look for 127.0.0.1 behind a proxy that is set for the web, and wait for an hour.
        own = {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONUNBUFFERED": "1", "no_grpc_proxy": "127.0.0.1"}
        env = os.environ | own | self.env
        env["TF_CONFIG"] = json.dumps(tf_config)
        with open(log_file, "wb") as log:
            # In this process group, as all of it is killed when a notebook restarts.
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def status(self):
        """Returns {"worker 0": "running", ...}; or "not started", "exit code 1", "killed by SIGKILL"."""
        if not self.processes:
            return dict.fromkeys(self.names, "not started")
        return {name: in_words(process.poll()) for name, process in zip(self.names, self.processes)}

    def log(self, number):
        """Returns the text that this worker has written so far, errors included."""
        path = self.log_files[number]
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def kill(self, number):
        """Ends one worker like `kill -9`, or like the loss of its machine. Returns when it is gone."""
        self.processes[number].kill()
        self.processes[number].wait()

    def stop(self):
        """Ends every worker that still runs. Returns when all are gone; logs and status stay."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for reserved in self.reserved_ports:
            reserved.close()
        self.reserved_ports = []
        atexit.unregister(self.stop)

    def wait(self, deadline, follow=None):
        """Returns when all workers have ended with exit code 0. However it ends, no worker runs afterwards.

        Args:
            deadline: seconds from now.
            follow: number of a worker whose lines are printed here as they come.
        Raises:
            WorkerFailed: another exit code; or still running at the deadline, or `grace` seconds after the
                first ended well. When one fails, the others get SURVIVORS_SECONDS to log what they saw.
        """
        if not self.processes:
            raise RuntimeError("this cluster has not been started")
        end, limit = time.monotonic() + deadline, f"at the deadline of {round(deadline, 1):g} s"
        first_failed = first_finished = None
        shown = 0
        try:
            while True:
                codes = [process.poll() for process in self.processes]
                shown = self._print_log(follow, shown)
                now = time.monotonic()
                if first_failed is None and any(codes):
                    first_failed = next(number for number, code in enumerate(codes) if code)
                    end = min(end, now + SURVIVORS_SECONDS)
                elif first_finished is None and 0 in codes:
                    first_finished = self.names[codes.index(0)]
                    if now + self.grace < end:
                        end, limit = now + self.grace, f"{self.grace:g} s after {first_finished} ended well"
                if None not in codes or now >= end:
                    break
                time.sleep(0.05)
        finally:
            self.stop()
            self._print_log(follow, shown, unfinished_line=True)
        if any(code != 0 for code in codes):
            raise WorkerFailed(self._failure(codes, first_failed, limit))

    def _print_log(self, number, shown, unfinished_line=False):
        """Prints a worker's log from byte `shown` to its last whole line. Returns where that ends."""
        if number is None:
            return shown
        with open(self.log_files[number], "rb") as log:
            log.seek(shown)
            new = log.read()
        if not unfinished_line:
            new = new[: new.rfind(b"\n") + 1]
        if new:
            print(new.decode("utf-8", errors="replace"), end="", flush=True)
        return shown + len(new)

    def _failure(self, codes, first_failed, limit):
        bad = [number for number, code in enumerate(codes) if code != 0]
        if first_failed is None:
            what = f"{', '.join(self.names[number] for number in bad)} still running {limit}"
        else:
            bad.sort(key=lambda number: number != first_failed)
            what = f"{self.names[first_failed]} failed: {in_words(codes[first_failed])}"
        text = f"{what}; all workers have been ended."
        for number in bad:
            log_end = "\n".join(self.log(number).rstrip().splitlines()[-LOG_LINES:]) or "(it wrote nothing)"
            text += f"\n--- {self.names[number]} ({in_words(codes[number])}), the end of its log:\n{log_end}"
        return text


def reserve_ports(count):
    """Returns free ports, and as many sockets: each keeps one from all other programs until it is closed.

    The kernel hands out a free port once, so two launches at once get different ones. SO_REUSEADDR, set after
    that, lets in only who names this very port and sets it too: the worker's TensorFlow server.
    """
    sockets = [socket.socket() for _ in range(count)]
    for reserved in sockets:
        reserved.bind(("", 0))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    ports = [reserved.getsockname()[1] for reserved in sockets]
    for port, reserved in zip(ports, sockets):
        with socket.socket() as like_the_worker:
            like_the_worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                like_the_worker.bind(("", port))
            except OSError:  # Not Linux: a port that is kept is of no use to the worker.
                reserved.close()
    return ports, sockets


def in_words(code):
    """Says what a process's return code means; None means that it runs."""
    if code is None or code >= 0:
        return "running" if code is None else f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def main():
    parser = argparse.ArgumentParser(description="Run a script as the workers of one job on this machine.")
    add = parser.add_argument
    add("--workers", type=int, default=2, metavar="N", help="how many (default 2)")
    add("--deadline", type=float, default=600, metavar="S", help="seconds, restarts included (default 600)")
    add("--max-restarts", type=int, default=0, metavar="R", help="if one fails, restart ALL, R times at most")
    add("--grace", type=float, default=75, metavar="S", help="seconds for the rest once one ended (75)")
    add("--log-dir", metavar="DIR", help="where to keep the logs (default: nowhere)")
    add("script", metavar="SCRIPT")
    add("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")
    asked = parser.parse_args()
    end, restarts = time.monotonic() + asked.deadline, 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        cluster = LocalCluster(asked.script, asked.workers, asked.args, asked.log_dir, grace=asked.grace)
    except (OSError, ValueError) as error:
        parser.exit(2, f"local_cluster.py: {error}\n")
    while True:
        try:
            with cluster:
                return cluster.wait(end - time.monotonic(), follow=0)
        except OSError as error:  # a log that cannot be written, an output that nobody reads
            parser.exit(2, f"local_cluster.py: {error}\n")
        except WorkerFailed as failure:
            if restarts >= asked.max_restarts or time.monotonic() >= end:
                parser.exit(1, f"local_cluster.py: {failure}\n")
            restarts += 1
            reason = str(failure).splitlines()[0]
            sys.stderr.write(f"local_cluster.py: {reason} Restart {restarts} of {asked.max_restarts}.\n")
        except KeyboardInterrupt:
            parser.exit(130, "local_cluster.py: interrupted; all workers have been ended.\n")


if __name__ == "__main__":
    main()
