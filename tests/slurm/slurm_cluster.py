"""A real Slurm for tests: one controller and some nodes, each a host of clusters/hosts.py, with which all of it ends."""

import os
import shutil
import time

import hosts

NEEDED = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol"]

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
    return hosts.what_is_missing()


class SlurmCluster(hosts.Hosts):
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
