"""Causes the faults of lesson 7's table, on two hosts of hosts.py, and prints what the workers say. Linux, as root.

    python clusters/faults.py                        # lists the faults
    python clusters/faults.py "another model" ...    # causes these; ALL: each of them, about 20 minutes

Needs nft (Debian's package nftables) for the two firewalls.

Each line that tells something is printed with its host and the seconds since the fault; for faults at the start, since
both workers were started. What is not over by then is ended after 100 seconds: an hour is not waited for.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from hosts import Hosts, what_is_missing

PROJECT = pathlib.Path(__file__).resolve().parents[1]
BOTH = ("a:7000", "b:7000")
SECONDS = 100
TELLING = (
    r"Error|Waiting for|Started server|heartbeat|refused|failed to connect|mismatch|main\.py:|worker \d|loss:|exit"
)
DROP = "table inet f { chain c { type filter hook input priority 0; policy accept; tcp dport 7000 drop; }; }"
OTHER_MODEL = (
    "dense = tf.keras.layers.Dense\ntf.keras.layers.Dense = lambda units, **more: dense(min(units, 64), **more)"
)
HURRY = "main.PEER_SECONDS = 20"
HANGS = f"{HURRY}\nimport signal\nmain.Progress.on_epoch_end = lambda *_: signal.pause()"


class Trial:
    """main.py on hosts a and b, and all that it writes: [(time, host, line)]."""

    def __init__(self, hosts):
        self.hosts, self.workers, self.lines, self.fault = hosts, {}, [], time.monotonic()

    def start(self, host, index, *options, cluster=BOTH, first="", **environment):
        """first: Python that runs before main.py's own."""
        config = {"cluster": {"worker": cluster}, "task": {"type": "worker", "index": index}}
        environment = {"TF_CONFIG": json.dumps(config), "no_grpc_proxy": "a,b", **environment}
        environment |= {"TF_CPP_MIN_LOG_LEVEL": "0", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONUNBUFFERED": "1"}
        code = f"import sys\nimport main\nimport tensorflow as tf\n{first}\nsys.exit(main.main())"
        options = ["--epochs", "200", "--steps-per-epoch", "20", "--per-worker-batch-size", "8", *options]
        command = self.hosts.command(host, "env", f"--chdir={PROJECT}", sys.executable, "-c", code, *options)
        worker = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        self.workers[host] = worker
        threading.Thread(target=self._read, args=[host, worker], daemon=True).start()
        self.fault = time.monotonic()

    def _read(self, host, worker):
        for line in worker.stdout:
            self.lines.append((time.monotonic(), host, line.rstrip()))
        self.lines.append((time.monotonic(), host, f"exit code {worker.wait()}"))

    def both(self, **more):
        for index, host in enumerate("ab"):
            self.start(host, index, **more)

    def training(self):
        """Starts both, and returns in their third epoch: now is the fault."""
        self.both()
        self.wait(lambda: sum("Epoch 3/" in line for _, _, line in self.lines) == 2)
        self.fault = time.monotonic()

    def wait(self, condition):
        end = time.monotonic() + SECONDS
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)

    def signal(self, host, number):
        """To the worker itself, which runs in the hosts' namespace: nsenter waits for it."""
        marks = [b"import main\n", f'"index": {"ab".index(host)}}}'.encode()]
        inside = os.stat(f"/proc/{self.hosts.pid}/ns/pid").st_ino
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                if all(mark in text for mark in marks) and os.stat(process / "ns/pid").st_ino == inside:
                    os.kill(int(process.name), number)
            except OSError:
                continue  # it has ended meanwhile


def cut_for_four_seconds(trial):
    trial.training()
    trial.hosts.link("b", "down")
    time.sleep(4)
    trial.hosts.link("b", "up")


def then(act):
    """A fault in the middle of training."""
    return lambda trial: (trial.training(), act(trial))


def behind_a_firewall(host):
    return lambda trial: (trial.hosts.run(host, "nft", "-f", "-", input=DROP), trial.both())


def only_b_differs(*options, **more):
    return lambda trial: (trial.start("a", 0, "--epochs", "4"), trial.start("b", 1, "--epochs", "4", *options, **more))


FAULTS = {  # by the words in lesson 7's table
    "a worker never starts": lambda trial: trial.start("a", 0),
    "the chief never starts, or its name or port is wrong": lambda trial: trial.start("b", 1),
    "a worker's name does not resolve": lambda trial: trial.both(cluster=("a:7000", "nowhere:7000")),
    "a worker's port is wrong": lambda trial: (trial.start("a", 0, cluster=("a:7000", "b:7001")), trial.start("b", 1)),
    "a firewall before a worker": behind_a_firewall("b"),
    "a firewall before the chief": behind_a_firewall("a"),
    "a proxy for the web is set": lambda trial: trial.both(http_proxy="http://192.0.2.254:9", no_grpc_proxy=""),
    "hosts in another order": lambda trial: (trial.start("a", 0), trial.start("b", 1, cluster=BOTH[::-1])),
    "the same index twice": lambda trial: (trial.start("a", 0), trial.start("b", 0)),
    "another model": only_b_differs(first=OTHER_MODEL),
    "another seed or batch size": only_b_differs("--per-worker-batch-size", "32"),  # lesson 7 itself tries the seed
    "fewer epochs on one worker": only_b_differs("--epochs", "2"),
    "`kill -9` of a worker": then(lambda trial: trial.signal("b", signal.SIGKILL)),
    "a cable is cut": then(lambda trial: trial.hosts.link("b", "down")),
    "a cable is cut for 4 s": cut_for_four_seconds,
    "a machine stands still": then(lambda trial: trial.signal("b", signal.SIGSTOP)),
    "a worker's Python hangs, its machine lives": lambda trial: (
        trial.start("a", 0, first=HURRY), trial.start("b", 1, first=HANGS),
    ),
}  # fmt: skip


def cause(name):
    with tempfile.TemporaryDirectory() as folder, Hosts(folder, ["a", "b"], seconds=3 * SECONDS) as hosts:
        trial = Trial(hosts)
        FAULTS[name](trial)
        trial.wait(lambda: all(worker.poll() is not None for worker in trial.workers.values()))
        print(f"# {name}", flush=True)
        said = set()
        for moment, host, line in list(trial.lines):
            words = re.sub("^.*?] ", "", line)[:200]
            if re.search(TELLING, line) and "log messages before" not in line and (host, words) not in said:
                said.add((host, words))
                print(f"{moment - trial.fault:7.1f} {host}  {words}", flush=True)


def main(names):
    unknown = [name for name in names if name not in FAULTS and name != "ALL"]
    if unknown or not names:
        print(*FAULTS, sep="\n")
        return f"faults.py: no such fault: {', '.join(unknown)}" if unknown else 0
    if missing := what_is_missing():
        return f"faults.py: {missing}"
    for name in FAULTS if "ALL" in names else names:
        cause(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
