"""Tells a worker who it is: sets TF_CONFIG from what the engine has set, then becomes the command given.

    srun python clusters/with_tf_config.py python main.py --epochs 10
    python clusters/with_tf_config.py --workers 2 --service digits python main.py --epochs 10

The first line is for Slurm, where srun starts it once a task; the second for the pods of a Kubernetes Indexed Job
with a headless Service. Needs the standard library alone. Wrong place, wrong layout: one line, exit 2.
"""

import argparse
import json
import os
import re
import subprocess
import sys

PORTS_OF_A_JOB = 16


def main():
    parser = argparse.ArgumentParser(description="Set TF_CONFIG from what the engine has set, and become COMMAND.")
    parser.add_argument("--port-base", type=int, metavar="P", help="first port of each host (Slurm: by job; pods: 2222)")
    parser.add_argument("--workers", type=int, metavar="N", help="Kubernetes: the Job's completions")
    parser.add_argument("--service", metavar="NAME", help="Kubernetes: the headless Service, the pods' subdomain")
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    try:
        if not asked.command:
            raise ValueError("no command to run; write it at the end, as in: with_tf_config.py python main.py")
        if asked.workers or asked.service:
            config = from_kubernetes(os.environ, asked.workers, asked.service, asked.port_base)
        else:
            config = from_slurm(os.environ, asked.port_base)
        os.environ["TF_CONFIG"] = json.dumps(config)
        # Where a proxy for the web is set, gRPC would look for the other workers behind it, and wait for an hour.
        direct = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))
        hosts = [address.rpartition(":")[0] for address in config["cluster"]["worker"]]
        os.environ["no_grpc_proxy"] = ",".join(dict.fromkeys([*filter(None, direct.split(",")), *hosts]))
        os.execvp(asked.command[0], asked.command)
    except ValueError as error:
        parser.exit(2, f"with_tf_config.py: {error}\n")
    except OSError as error:
        parser.exit(2, f"with_tf_config.py: {error.filename or asked.command[0]}: {error.strerror}\n")


def from_slurm(environment, port_base=None):
    """Returns the TF_CONFIG (a dict) of one task of a Slurm step: worker SLURM_PROCID of all tasks of the step.

    Hosts come in Slurm's own order (n2 before n10); the tasks of one host get consecutive ports. By default the
    first port follows from the job's number, so that two jobs that share a host do not meet: 16 ports each, from
    12000 to 31999, below those that Linux hands out itself.

    Raises ValueError, one line: not started by srun, or the tasks are not laid out in blocks.
    """
    try:
        node_list, counts = environment["SLURM_STEP_NODELIST"], environment["SLURM_STEP_TASKS_PER_NODE"]
        names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
        job, index, *place = (int(environment[name]) for name in names)
    except KeyError as error:
        raise ValueError(f"srun did not start this task ({error.args[0]} is not set): write srun before it") from None
    if int(environment.get("SLURM_HET_SIZE", 1)) > 1:
        raise ValueError("a heterogeneous job has several node lists: use one kind of node")
    counts = tasks_per_node(counts)
    places = [(node, task) for node, count in enumerate(counts) for task in range(count)]
    if index >= len(places) or places[index] != tuple(place):
        raise ValueError("the tasks are not laid out in blocks, node by node: give srun --distribution=block")
    if port_base is None and max(counts) > PORTS_OF_A_JOB:
        raise ValueError(f"more than {PORTS_OF_A_JOB} tasks on one node: give --port-base, for their ports would be another job's")
    hosts = host_names(node_list)
    port = 12000 + PORTS_OF_A_JOB * (job % 1250) if port_base is None else port_base
    return tf_config([f"{hosts[node]}:{port + task}" for node, task in places], index)


def from_kubernetes(environment, workers, service, port=None):
    """Returns the TF_CONFIG (a dict) of one pod of an Indexed Job: worker JOB_COMPLETION_INDEX of `workers`.

    Kubernetes names such a pod JOB-INDEX, and with the Service's name as the pods' subdomain that name is found
    as JOB-INDEX.SERVICE. Each pod has an address of its own, so all can have the same port.

    Raises ValueError, one line: not in such a pod.
    """
    if not (workers and service):
        raise ValueError("Kubernetes needs both --workers and --service")
    index, name = environment.get("JOB_COMPLETION_INDEX", ""), environment.get("HOSTNAME", "")
    if not index.isdecimal() or not name.endswith(f"-{index}"):
        raise ValueError("not a pod of an Indexed Job: JOB_COMPLETION_INDEX is not set, or HOSTNAME does not end with it")
    if int(index) >= workers:
        raise ValueError(f"pod {index} of --workers {workers}: write the Job's number of completions there")
    job = name[: -len(index) - 1]
    return tf_config([f"{job}-{number}.{service}:{port or 2222}" for number in range(workers)], int(index))


def tf_config(addresses, index):
    return {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}


def tasks_per_node(text):
    """Reads Slurm's short form: "2(x3),1" is [2, 2, 2, 1]."""
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def host_names(node_list):
    """The hosts of a Slurm node list such as "n[2,10]-ib", in Slurm's order, as scontrol reads it."""
    shown = subprocess.run(["scontrol", "show", "hostnames", node_list], capture_output=True, text=True)
    if shown.returncode != 0:
        raise ValueError(f"scontrol cannot read the node list {node_list!r}: {shown.stderr.strip()}")
    return shown.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
