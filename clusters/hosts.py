"""Several hosts on one machine, to see what a network does to a job. Linux alone, as root.

    with Hosts(folder, ["a", "b"]) as hosts:
        hosts.run("a", "ping", "-c1", "b")
        hosts.link("b", "down")    # pulls b's cable

Each host is a network namespace: its own address, ports, host name and link; files and programs are shared. All of it
lives in the namespaces of one process: when that ends, Linux ends every process in them, and takes down networks and
mounts. It ends with this object, with the Python process that made it, and after `seconds` in any case.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

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


def what_is_missing():
    """Why no such hosts can be made here, in words; "" if they can."""
    needed = ("bash", "hostname", "ip", "mount", "nsenter", "timeout", "unshare")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (on Linux, in the packages iproute2, util-linux, mount and hostname)"
    if os.geteuid() != 0:
        return "needs root"
    try:
        with tempfile.TemporaryDirectory() as folder, Hosts(folder, ["a"], seconds=30):
            return ""
    except RuntimeError as error:
        return str(error)


class Hosts:
    """Hosts on one machine: each has its own network, address (192.0.2.N), ports and name; files are shared."""

    def __init__(self, folder, names, seconds=600):
        self.folder, self.names = pathlib.Path(folder), names
        addresses = [f"192.0.2.{number} {name}\n" for number, name in enumerate(names, start=1)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n192.0.2.254 hub\n" + "".join(addresses))
        namespaces = "unshare --mount --uts --ipc --net --pid --fork --kill-child"
        self.holder = subprocess.Popen(
            ["timeout", "--signal=KILL", str(seconds), *namespaces.split(), "bash", "-c", SET_UP, "bash", *names],
            cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self.holder.stdout.readline().strip()
        if not self.pid:
            said = self.holder.stderr.read().strip().splitlines() or ["not in the time given"]
            self.close()
            raise RuntimeError(f"namespaces are not allowed here ({said[0]})")

    def command(self, host, *command):
        """The command line, a list, that runs `command` on a host, or on the hub (host None)."""
        on_host = ["nsenter", f"--net={self.folder}/{host}.net", f"--uts={self.folder}/{host}.uts"] if host else []
        return [str(part) for part in ["nsenter", f"--target={self.pid}", "--all", "--wd=.", *on_host, *command]]

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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.holder.pid, signal.SIGKILL)  # `timeout` leads a group of its own: all in it
            self.holder.wait()
        self.holder.stdout.close()
        self.holder.stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
