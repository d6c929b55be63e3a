"""main.py is killed with SIGKILL, again and again, at random moments, and restarted by --max-restarts.

However often, it ends with the history and the weights of the run that nobody killed, to the last bit.
CHAOS_KILLS says how many kills (5 are one run; `make chaos N=100`), CHAOS_SEED which ones.
"""

import json
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
from legacy import only_keras_3
from saved_results import arrays_in, results_in

from local_cluster import LocalCluster

SCRIPT = pathlib.Path(__file__).with_name("chaos_case.py")
ARGUMENTS = ["--epochs", "5", "--steps-per-epoch", "8", "--per-worker-batch-size", "16", "--learning-rate", "0.01"]
RUNS = -(-int(os.environ.get("CHAOS_KILLS", "5")) // 5)
SEED = int(os.environ.get("CHAOS_SEED", "0"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    only_keras_3("for Keras 3; tf_keras has its own"),
]


def plan_of(run):
    """Five kills of one run, one at each kind of moment, the end last; after each, the run gets a little further."""
    chance = random.Random(1000 * SEED + run)

    def kill(moment, numbers, chiefs_numbers=None):
        victims = chance.choice([[0], [1], [0, 1]])
        return {"moment": moment, "victims": victims, "number": chance.choice(chiefs_numbers or numbers)}

    kills = [
        kill("start-up", range(6)),  # before main.py, around the strategy, the data, the model
        kill("step", [0, 1]),  # around the first step
        kill("step", range(2, 14)),  # somewhere in the epoch, or in the next
        kill("backup", range(2)),  # around the first backup after the start
    ]
    chance.shuffle(kills)
    kills.append(kill("end", range(7)))
    for planned in kills:
        # The chief passes by more often: at makedirs, the half-written file, rename; at remove.
        if planned["moment"] == "backup" and planned["victims"] == [0]:
            planned["number"] = chance.randrange(14)
    return {"kills": kills, "save_freq": chance.choice(["epoch", 3])}


def results(folder):
    """History and weights that main.py has written in this folder."""
    weights = arrays_in(folder / "model.keras")
    assert len(weights) >= 6
    return json.loads((folder / "history.json").read_text()), weights


def arguments_in(folder, plan):
    (folder / "plan.json").write_text(json.dumps(plan))
    return [folder / "plan.json", *ARGUMENTS, "--backup-dir", folder / "backup", *results_in(folder)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with LocalCluster(SCRIPT, 2, arguments_in(folder, {"kills": [], "save_freq": "epoch"})) as cluster:
        cluster.wait(deadline=120)
    return results(folder)


@pytest.mark.parametrize("run", range(RUNS))
def test_a_run_killed_at_random_moments_ends_like_the_undisturbed_one(undisturbed, tmp_path, run):
    plan = plan_of(run)
    command = [sys.executable, SCRIPT.parents[2] / "local_cluster.py", "--max-restarts", "5", "--deadline", "330"]
    ended = subprocess.run(
        [*command, SCRIPT, *arguments_in(tmp_path, plan)], capture_output=True, text=True, timeout=360, check=False
    )
    kills = (tmp_path / "kills").read_text()
    print(f"chaos {run}:", json.dumps(plan), kills, sep="\n")
    assert ended.returncode == 0, ended.stderr
    assert len({line.split(":")[0] for line in kills.splitlines()}) == 5, "each start but the last was to be killed"
    assert ended.stderr.count("killed by SIGKILL") == 5
    (history, weights), expected = results(tmp_path), undisturbed
    assert history == expected[0]
    assert weights.keys() == expected[1].keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(values, expected[1][name])
    assert not (tmp_path / "backup").exists()
