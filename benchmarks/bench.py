"""Measures what lesson 6 claims: `make bench`, or some of its parts.

    python benchmarks/bench.py [--quick] [--launches N] [--rounds N] [--steps N] [--results FILE.json] [PART ...]

A part (see PARTS) compares cases: how many workers make their steps on which road, of which model, at which batch;
measure.py knows the roads and the models. One launch of the workers goes round and round through all of its cases, and
launches of one and of two workers take turns. What counts is a ratio: the median over pairs of the same launch and
round. A busy moment of the machine meets all cases of a launch; cases of different launches are less sure. All times go into FILE.json
(results/performance.json), each part with the machine, the versions and the settings it was taken with.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from local_cluster import LocalCluster

RESULTS = HERE / "results" / "performance.json"
ABOUT = (
    "milliseconds: [[median of a step in each round], for each launch]; loopback_bytes: of all workers, a step; "
    "start_up: the chief's seconds from launch to the first steps of the case, for each launch"
)
LAUNCH_SECONDS = 600
PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy")
BATCHES = (16, 32, 64, 128, 256, 512, 1024)  # images a step and worker


def case(workers, road, model, batch, **knobs):
    """A case as (name, case); the name says it all: "2 fit cnn 64 threads=1"."""
    name = " ".join([f"{workers} {road} {model} {batch}", *(f"{knob}={value}" for knob, value in knobs.items())])
    return name, {"workers": workers, "road": road, "model": model, "batch": batch, **knobs}


def with_one(roads, model, batch):
    """Two workers on these roads, and one that makes the same global batch alone."""
    return [*(case(2, road, model, batch) for road in roads), case(1, "fit", model, 2 * batch)]


def flat(lists):
    return dict(pair for pairs in lists for pair in pairs)


PARTS = {
    # Is `fit` with our mend as fast as it can be?
    "roads": flat(with_one(("fit", "tf_keras", "loop"), model, 64) for model in ("small", "cnn", "large")),
    # What is a step made of? A model with many weights, one with few, and the exchange alone.
    "many_weights": flat(with_one(("fit",), "cnn", batch) for batch in BATCHES),
    "few_weights": flat(with_one(("fit",), "conv", batch) for batch in BATCHES[::2]),
    "exchange": dict(
        case(2, "all_reduce", numbers, 1)
        for numbers in (
            1_000,
            10_000,
            100_000,
            300_000,
            1_000_000,
            3_000_000,
            10_000_000,
            "small",
            "conv",
            "cnn",
            "large",
        )
    ),
    # How long until the first step?
    "start_up": flat([[case(1, "fit", "cnn", 64), case(2, "fit", "cnn", 64)]]),
    # What does a knob do? Each case with it, and the same without.
    "knobs": dict(
        [
            *(case(2, "fit", model, 64) for model in ("small", "cnn", "large")),
            *(case(2, "fit", model, 64, threads=1) for model in ("small", "cnn")),
            *(case(2, "fit", model, 64, bytes_per_pack=1_000_000) for model in ("cnn", "large")),
            *(case(1, "fit", model, 64) for model in ("small", "cnn")),
            *(case(workers, "fit", "small", 64, steps_per_execution=10) for workers in (1, 2)),
            *(case(1, "fit", model, 64, precision="mixed_bfloat16") for model in ("small", "cnn")),
            *(case(1, "fit", "small", 64, data=data) for data in ("png", "png+parallel", "png+prefetch", "png+cache")),
        ]
    ),
}
QUICK = {"quick": dict(with_one(("fit", "loop"), "small", 64))}


# Arithmetic


def spread(values):
    """(lower quartile, median, upper quartile)."""
    return tuple(statistics.quantiles(values, n=4, method="inclusive")) if len(values) > 1 else (values[0],) * 3


def of_all(launches):
    return [value for rounds in launches for value in rounds]


def ratio(launches, others):
    """`spread` of one case's times over another's, each divided by the one of the same launch and round."""
    return spread([a / b for rounds, there in zip(launches, others) for a, b in zip(rounds, there)])


def bytes_on_wire(weights, workers):
    """Bytes that each worker sends in a ring all-reduce of so many float32 numbers, in a step."""
    return 4 * weights * 2 * (workers - 1) / workers


def reference(name, names):
    """The case to compare with: the same without knobs; for other roads, `fit` of two workers at the global batch."""
    workers, road, model, batch, *knobs = name.split()
    if knobs:
        other = " ".join([workers, road, model, batch, *(["data=png"] if knobs[0].startswith("data=png+") else [])])
    elif workers == "1":
        other = f"2 fit {model} {int(batch) // 2}"
    else:
        other = f"2 fit {model} {batch}"
    return other if other in names and other != name else None


def launches_of(cases):
    """The cases in groups that can share a launch: [((workers, threads, bytes_per_pack), {name: case}), ...]."""
    groups = {}
    for name, one in cases.items():
        groups.setdefault((one["workers"], one.get("threads"), one.get("bytes_per_pack")), {})[name] = one
    return list(groups.items())


def table(milliseconds):
    """Lines of text: each case's median time and quartiles, and its ratio to its reference."""
    lines = [f"{'case':48}{'ms a step':>10}  {'quartiles':17}  ratio (quartiles) to"]
    for name, launches in milliseconds.items():
        low, middle, high = spread(of_all(launches))
        line = f"{name:48}{middle:10.2f}  {f'{low:.2f} to {high:.2f}':17}"
        if other := reference(name, milliseconds):
            low, middle, high = ratio(launches, milliseconds[other])
            line += f"  {middle:.2f} ({low:.2f} to {high:.2f}) {other}"
        lines.append(line)
    return lines


# Measuring


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed under this name"


def provenance(**settings):
    """What a reader must know of the machine and the run; nothing that names it or its folders."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return {
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {(names or ['unknown CPU'])[0]}",
        "load_before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "threads": "TensorFlow's default, one a core in every worker, unless a case sets threads",
        **settings,
    }


def launch(group, cases, rounds, steps):
    """Starts the workers of one group of cases; returns what measure.py writes."""
    workers, threads, bytes_per_pack = group
    env = {"LAUNCHED": str(time.time()), "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    if threads:
        env |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        plan, results = pathlib.Path(folder, "plan.json"), pathlib.Path(folder, "results.json")
        settings = {"rounds": rounds, "steps": steps, "warm_up": 2, "results": str(results)}
        communication = {"bytes_per_pack": bytes_per_pack} if bytes_per_pack else {}
        plan.write_text(json.dumps({"cases": cases, "communication": communication, **settings}))
        with LocalCluster(HERE / "measure.py", workers, [plan], env=env) as cluster:
            # TensorFlow's own end may take half a minute more, so the results tell when it is over.
            end = time.monotonic() + LAUNCH_SECONDS
            while not results.exists() and time.monotonic() < end:
                if set(cluster.status().values()) - {"running", "exit code 0"}:
                    break
                time.sleep(0.1)
            if not results.exists():
                cluster.wait(0)  # raises, with the end of the worker's log
            return json.loads(results.read_text())


def measure(cases, launches, rounds, steps):
    """Returns {"milliseconds": {name: [[one a round], one list a launch]}, "loopback_bytes": {name: least of all},
    "start_up": {name: [{what: seconds}, one a launch]}}, the last for the first case of each group.
    """
    milliseconds, sent, start_up = {name: [] for name in cases}, {name: [] for name in cases}, {}
    for _ in range(launches):
        for group, members in launches_of(cases):
            results = launch(group, members, rounds, steps)
            start_up.setdefault(next(iter(members)), []).append(results["start_up"])
            for name in members:
                milliseconds[name].append(results["milliseconds"][name])
                sent[name] += results["loopback_bytes"][name]
    least = {name: min(counts) for name, counts in sent.items()}
    return {"milliseconds": milliseconds, "loopback_bytes": least, "start_up": start_up}


def save(part, result, path):
    """Puts a part's result into the file; the other parts stay."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    whole = {"about": ABOUT, "parts": parts | {part: result}}
    text = json.dumps(whole, indent=1)
    text = re.sub(r"\[[\[\]\d.,\s]+\]", lambda numbers: re.sub(r"\s+", "", numbers[0]).replace(",", ", "), text)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Measures what a step costs, on one worker and on two.")
    parser.add_argument("--quick", action="store_true", help="a few cases, few steps; shown, saved only with --results")
    parser.add_argument("--launches", type=int, default=3, metavar="N", help="of every group of cases (default 3)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="through all cases in a launch (default 4)")
    parser.add_argument(
        "--steps", type=int, default=8, metavar="N", help="of a case in a round; fewer at large batches (default 8)"
    )
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE.json", help="default: results/performance.json")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {min(unknown)}; there are {', '.join(PARTS)}")
    parts = {name: PARTS[name] for name in options.parts or PARTS}
    settings = {"launches": options.launches, "rounds": options.rounds, "steps": options.steps}
    if options.quick:
        parts, settings = QUICK, {"launches": 1, "rounds": 2, "steps": 3}
    for part, cases in parts.items():
        taken = provenance(**settings)
        result = measure(cases, **settings)
        if options.results or not options.quick:
            save(part, {"taken": taken, **result}, options.results or RESULTS)
        print(
            f"\n{part}: {taken['machine']}; load before {taken['load_before']}",
            *table(result["milliseconds"]),
            sep="\n",
        )


if __name__ == "__main__":
    main()
