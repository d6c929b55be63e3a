"""clusters/: what with_tf_config.py makes of an engine's environment; the Kubernetes manifests."""

import json
import os
import pathlib
import re
import subprocess
import sys

import faults
import kubernetes_validate
import nbformat
import pytest
import with_tf_config
import yaml

import multi_worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "clusters"
PROGRAM = CLUSTERS / "with_tf_config.py"

KUBERNETES = "1.34"

# What `scontrol show hostnames` of Slurm prints for these lists.
HOSTS = {"n[2,10]": "n2 n10", "n[1-4]": "n1 n2 n3 n4", "n[1-2]-ib": "n1-ib n2-ib", "n7": "n7"}
SCONTROL = "#!/bin/sh\ncase \"$3\" in\n" + "".join(
    f"'{nodes}') for host in {hosts}; do echo $host; done;;\n" for nodes, hosts in HOSTS.items()
)  # fmt: skip
SCONTROL += "*) echo \"Invalid hostlist: $3\" >&2; exit 1;;\nesac\n"


@pytest.fixture
def run(tmp_path):
    """Runs with_tf_config.py with this environment and no other; returns exit code, output, errors."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)

    def run(*arguments, **environment):
        done = subprocess.run(
            [sys.executable, PROGRAM, *arguments], env={"PATH": f"{tmp_path}:{os.defpath}"} | environment,
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def srun(nodes, tasks_per_node, index, node, local, job=1):
    values = {
        "SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_PROCID": index, "SLURM_NODEID": node, "SLURM_LOCALID": local,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


PRINT = ("--port-base", "7000", "sh", "-c", "echo $TF_CONFIG")


@pytest.mark.parametrize(
    "nodes, tasks_per_node, place, workers",
    [
        ("n7", "1", (0, 0, 0), ["n7:7000"]),
        ("n[2,10]", "1(x2)", (1, 1, 0), ["n2:7000", "n10:7000"]),
        ("n[1-2]-ib", "2,1", (1, 0, 1), ["n1-ib:7000", "n1-ib:7001", "n2-ib:7000"]),
        ("n[1-4]", "2(x3),1", (6, 3, 0),
         ["n1:7000", "n1:7001", "n2:7000", "n2:7001", "n3:7000", "n3:7001", "n4:7000"]),
    ],
)  # fmt: skip
def test_a_slurm_task_gets_its_place_among_all_tasks(run, nodes, tasks_per_node, place, workers):
    code, output, errors = run(*PRINT, **srun(nodes, tasks_per_node, *place))
    assert (code, errors) == (0, "")
    assert json.loads(output) == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place[0]}}


def test_a_proxy_for_the_web_is_not_between_the_workers(run):
    command = ("--port-base", "7000", "sh", "-c", "echo $no_grpc_proxy")
    place = srun("n[2,10]", "2,1", 2, 1, 0)
    assert run(*command, **place, http_proxy="http://proxy:3128")[1] == "n2,n10\n"
    assert run(*command, **place, no_proxy="localhost,.site")[1] == "localhost,.site,n2,n10\n"
    assert run(*command, **place, no_proxy="a", no_grpc_proxy="b")[1] == "b,n2,n10\n"


def test_more_tasks_on_a_node_than_a_job_has_ports_are_refused(run):
    code, output, errors = run("true", **srun("n7", "17", 0, 0, 0))
    assert code == 2 and errors.startswith("with_tf_config.py: more than 16 tasks on one node: give --port-base")
    assert run("--port-base", "7000", "true", **srun("n7", "17", 0, 0, 0)) == (0, "", "")


@pytest.mark.parametrize("job, port", [(1, 12016), (2, 12032), (1250, 12000), (4_000_000_001, 12016)])
def test_jobs_that_share_a_node_get_ports_of_their_own(run, job, port):
    _, output, _ = run("sh", "-c", "echo $TF_CONFIG", **srun("n7", "2", 1, 0, 1, job))
    assert json.loads(output)["cluster"]["worker"] == [f"n7:{port}", f"n7:{port + 1}"]


@pytest.mark.parametrize(
    "environment, said",
    [
        ({}, "srun did not start this task (SLURM_STEP_NODELIST is not set): write srun before it"),
        ({"SLURM_JOB_ID": "1", "SLURM_NODELIST": "n7", "SLURM_PROCID": "0"}, "srun did not start this task"),
        (srun("n[2,10]", "2(x2)", 1, 1, 0), "not laid out in blocks, node by node: give srun --distribution=block"),
        (srun("n[2,10]", "1", 1, 1, 0), "not laid out in blocks"),
        (srun("n[2,10]", "two", 0, 0, 0), "SLURM_STEP_TASKS_PER_NODE='two' cannot be read"),
        (srun("nonsense[", "1", 0, 0, 0), "scontrol cannot read the node list 'nonsense[': Invalid hostlist"),
        (srun("n7", "1", 0, 0, 0) | {"SLURM_HET_SIZE": "2"}, "heterogeneous"),
        (srun("n7", "1", 0, 0, 0) | {"PATH": ""}, "scontrol"),
    ],
)
def test_a_wrong_place_gives_one_line_and_exit_2(run, environment, said):
    code, output, errors = run(*PRINT, **environment)
    assert (code, output) == (2, "") and said in errors
    assert errors.startswith("with_tf_config.py: ") and errors.count("\n") == 1


def test_no_command_or_one_that_is_not_there_gives_one_line_and_exit_2(run):
    task = srun("n7", "1", 0, 0, 0)
    for command, said in ((), "no command to run"), (("no-such-program",), "no-such-program"):
        code, _, errors = run(*command, **task)
        assert code == 2 and said in errors and errors.count("\n") == 1


def test_the_command_takes_this_process_s_place(run):
    code, output, _ = run("sh", "-c", "echo $$ $0 --epochs; exit 7", **srun("n7", "1", 0, 0, 0))
    assert code == 7 and output.endswith(" sh --epochs\n")


# -- Kubernetes ------------------------------------------------------------------------------------------


def manifests(name):
    return list(yaml.safe_load_all((CLUSTERS / "kubernetes" / name).read_text()))


def pod_of(tfjob):
    """The workers' pod template of a TFJob as a Pod."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}} | {
        "spec": tfjob["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    }


def test_the_manifests_fit_the_published_schemas():
    service, job = manifests("job.yaml")
    (tfjob,) = manifests("tfjob.yaml")
    for manifest in service, job, pod_of(tfjob):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    # Proof that the check sees a fault.
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError, match="completionsMode"):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_the_job_s_numbers_and_names_agree():
    service, job = manifests("job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    workers, subdomain = (container["command"][container["command"].index(name) + 1] for name in ("--workers", "--service"))
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(workers) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert subdomain == pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["restartPolicy"] == "OnFailure" and job["spec"]["backoffLimit"] > 0


def test_the_job_s_own_command_gives_each_pod_its_tf_config(run):
    _, job = manifests("job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    python, program, *arguments = container["command"]
    assert (python, ROOT / program) == ("python", PROGRAM)
    for index in range(2):
        pod = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"digits-{index}"}
        code, output, errors = run(*arguments, "sh", "-c", "echo $TF_CONFIG", **pod)
        assert (code, errors) == (0, "")
        workers = ["digits-0.digits:2222", "digits-1.digits:2222"]
        assert json.loads(output) == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}


def test_main_py_takes_the_manifests_arguments_and_their_tf_config(monkeypatch):
    import main

    _, job = manifests("job.yaml")
    (tfjob,) = manifests("tfjob.yaml")
    job_container = job["spec"]["template"]["spec"]["containers"][0]
    tfjob_container = pod_of(tfjob)["spec"]["containers"][0]
    assert job_container["args"][:2] == tfjob_container["command"] == ["python", "main.py"]
    assert job_container["args"][2:] == tfjob_container["args"]
    options = main.parse_arguments(tfjob_container["args"])
    assert options.backup_dir.startswith("/runs/") and options.model_path.startswith("/runs/")
    mounts = [container["volumeMounts"] for container in (job_container, tfjob_container)]
    assert all(mount == [{"name": "runs", "mountPath": "/runs"}] for mount in mounts)
    pod = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "digits-1"}
    config = with_tf_config.from_kubernetes(pod, 2, "digits", port=21111)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert multi_worker.check_tf_config() == config


@pytest.mark.parametrize(
    "environment, said",
    [
        ({}, "not a pod of an Indexed Job"),
        ({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "digits"}, "not a pod of an Indexed Job"),
        ({"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "digits-2"}, "pod 2 of --workers 2: write the Job's number"),
    ],
)
def test_a_pod_that_is_none_of_the_job_s_gives_one_line_and_exit_2(run, environment, said):
    code, output, errors = run("--workers", "2", "--service", "digits", "echo", **environment)
    assert (code, output) == (2, "") and said in errors and errors.count("\n") == 1
    code, _, errors = run("--workers", "2", "echo", **environment)
    assert code == 2 and "both --workers and --service" in errors


def test_the_tfjob_has_what_the_operator_s_reference_asks_for():
    (tfjob,) = manifests("tfjob.yaml")
    assert (tfjob["apiVersion"], tfjob["kind"]) == ("kubeflow.org/v1", "TFJob")
    assert tfjob["spec"].keys() == {"successPolicy", "runPolicy", "tfReplicaSpecs"}
    assert tfjob["spec"]["successPolicy"] == "AllWorkers"
    assert tfjob["spec"]["runPolicy"].keys() <= {
        "activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "schedulingPolicy", "suspend", "ttlSecondsAfterFinished",
    }  # fmt: skip
    assert tfjob["spec"]["tfReplicaSpecs"].keys() == {"Worker"}
    worker = tfjob["spec"]["tfReplicaSpecs"]["Worker"]
    assert worker.keys() == {"replicas", "restartPolicy", "template"}
    assert worker["replicas"] >= 2 and worker["restartPolicy"] == "OnFailure"
    assert [container["name"] for container in worker["template"]["spec"]["containers"]] == ["tensorflow"]


def test_the_dockerfile_copies_files_that_are_there_and_all_that_main_py_needs():
    text = (CLUSTERS / "kubernetes" / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert all((ROOT / name).is_file() for name in copied)
    assert {"main.py", "mnist_setup.py", "multi_worker.py", "data/mnist_sample.npz"} <= set(copied)
    assert "clusters/with_tf_config.py" in copied
    # The same versions as requirements.txt.
    wanted = (ROOT / "requirements.txt").read_text()
    for requirement in re.findall(r'"([^"]+)"', text):
        assert re.search(rf"^{re.escape(requirement)}\s", wanted, re.MULTILINE), requirement


def test_faults_py_has_a_fault_for_each_row_of_lesson_7(capsys):
    cells = {cell.id: cell.source for cell in nbformat.read(ROOT / "notebooks" / "07_many_machines.ipynb", 4).cells}
    rows = [line.split("|")[1].strip() for line in cells["table"].splitlines() if line.startswith("|")]
    assert rows[2:] == list(faults.FAULTS)
    assert faults.main([]) == 0 and capsys.readouterr().out.splitlines() == rows[2:]
    assert faults.main(["another modell"]) == "faults.py: no such fault: another modell"
