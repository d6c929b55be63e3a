"""A real Slurm for tests: one controller and some nodes, each a network namespace with its own name, link and ports.

All of it lives in the namespaces of one process: when that ends, Linux ends every daemon and job in them, and takes
down networks and mounts. It ends with this object, with the test's process, and after `seconds` in any case.
"""

import os
import pathlib
import shutil
import subprocess
import time

NEEDED = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "ip", "unshare", "nsenter"]

# In new namespaces, as their process 1: a hub, and for each node a network, a host name and a cable to the hub.
# Then waits for the end of its input. bash, for it also buries the daemons' orphans.
SET_UP = r"""
set -e
read -r pid _ < /proc/self/stat  # as seen from outside, for here /proc is not yet this namespace's own
mount -t proc proc /proc
mount --bind hosts /etc/hosts
hostname hub
ip link set dev lo up
ip link add name hub type bridge
ip address add 192.0.2.254/24 dev hub
ip link set dev hub up
number=0
for node in "$@"; do
  number=$((number + 1))
  touch $node.net $node.uts
  unshare --net=$node.net --uts=$node.uts hostname $node
  ip link add name $node master hub type veth peer name eth0 netns $PWD/$node.net
  ip link set dev $node up
  nsenter --net=$node.net ip link set dev lo up
  nsenter --net=$node.net ip address add 192.0.2.$number/24 dev eth0
  nsenter --net=$node.net ip link set dev eth0 up
done
echo $pid
read
"""

SLURM_CONF = """
ClusterName=test
SlurmctldHost=hub
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# Without cred_expire a requeued job waits two minutes for its old credential to expire.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
# While a worker takes its time to end, its node does not answer. Slurm would send the order to end it again a minute
# later, when the requeued job runs.
MessageTimeout=30
ReturnToService=2
SlurmdTimeout=10
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def what_is_missing():
    """Why no such cluster can be started here, in words; "" if it can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (make test-slurm installs Debian's packages, as root)"
    if os.geteuid() != 0:
        return "needs root"
    tried = subprocess.run(
        [*"unshare --mount --uts --net --pid --fork ip link add name a type veth peer name b".split()],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return f"namespaces are not allowed here ({tried.stderr.strip()})" if tried.returncode else ""


class Hosts:
    """Hosts on one machine: each has its own network, address (192.0.2.N), ports and name; files are shared."""

    def __init__(self, folder, names, seconds=600):
        self.folder, self.names = pathlib.Path(folder), names
        addresses = [f"192.0.2.{number} {name}\n" for number, name in enumerate(names, start=1)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n192.0.2.254 hub\n" + "".join(addresses))
        namespaces = "unshare --mount --uts --ipc --net --pid --fork --kill-child"
        self.holder = subprocess.Popen(
            ["timeout", "--signal=KILL", str(seconds), *namespaces.split(), "bash", "-c", SET_UP, "bash", *names],
            cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self.holder.stdout.readline().strip()
        if not self.pid:
            self.close()
            raise RuntimeError("the hosts' namespaces could not be made; see stderr")

    def command(self, host, *command):
        """The command line, a list, that runs `command` on a host, or on the hub (host None)."""
        on_host = [f"--net={self.folder}/{host}.net", f"--uts={self.folder}/{host}.uts"] if host else []
        enter = ["nsenter", f"--target={self.pid}", "--all", "--wd=."]
        return [*map(str, [*enter, *(["nsenter", *on_host] if host else []), *command])]

    def run(self, host, *command, check=True, timeout=60, **options):
        """Runs a command on a host to its end. Returns what it printed, both streams."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
        done = subprocess.run(self.command(host, *command), timeout=timeout, **options)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} on {host}: exit code {done.returncode}\n{done.stdout}")
        return done.stdout

    def link(self, host, state):
        """Pulls a host's cable ("down"), or plugs it in again ("up")."""
        self.run(None, "ip", "link", "set", "dev", host, state)

    def close(self):
        """Ends everything on all hosts. Returns when nothing is left."""
        self.holder.stdin.close()
        try:
            self.holder.wait(20)
        except subprocess.TimeoutExpired:
            self.holder.kill()
            self.holder.wait()
        self.holder.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


class SlurmCluster(Hosts):
    """Slurm on such hosts: the controller on the hub, a slurmd on each host."""

    def __init__(self, folder, names, seconds=600):
        super().__init__(folder, names, seconds)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self):
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(folder=self.folder, nodes=",".join(self.names)))
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        (self.folder / "state").mkdir()
        files = ["key-file=munge.key", "socket=munge.socket", "pid-file=munge.pid", "log-file=munge.log"]
        files += ["seed-file=munge.seed"]
        self.run(None, "munged", "--force", *[f"--{name}".replace("=", f"={self.folder}/") for name in files])
        self.slurm("slurmctld")
        for name in self.names:
            self.slurm("slurmd", "-N", name, host=name)
        self.until(lambda: self.slurm("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(self.names), 60)

    def slurm(self, *command, host=None, environment=None, **options):
        """Runs one of Slurm's commands. Returns what it printed."""
        variables = os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"} | (environment or {})
        return self.run(host, *command, env=variables, **options)

    def job(self, number):
        """What Slurm knows of a job: {"JobState": "RUNNING", "Restarts": "0", "NodeList": "n[2,10]", ...}."""
        words = self.slurm("scontrol", "--oneliner", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, condition, seconds):
        """Returns when `condition()` is true."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = "\n".join(
                    f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                    for log in sorted(self.folder.glob("*.log"))
                )
                raise TimeoutError(f"not so after {seconds} s; Slurm's logs end:\n{logs}")
            time.sleep(0.1)
