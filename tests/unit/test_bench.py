"""What benchmarks/bench.py promises, its arithmetic above all. Nothing is measured here, and no time is asserted."""

import json
import pathlib

import bench
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_spread_is_the_quartiles_and_the_median():
    assert bench.spread([5, 1, 4, 2, 3]) == (2, 3, 4)
    assert bench.spread([1, 2, 3, 10]) == (1.75, 2.5, 4.75)
    assert bench.spread([7]) == (7, 7, 7)


def test_a_ratio_is_of_pairs_so_a_busy_moment_that_meets_both_does_not_show():
    quiet_then_busy, the_same_doubled = [[10, 10], [10, 70]], [[20, 20], [20, 140]]
    assert bench.ratio(the_same_doubled, quiet_then_busy) == (2, 2, 2)
    assert bench.ratio([[10], [30]], [[10], [10]]) == (1.5, 2, 2.5)


@pytest.mark.parametrize(("workers", "share"), [(1, 0), (2, 1), (4, 1.5), (64, 1.96875)])
def test_a_ring_sends_each_weight_twice_but_for_the_part_that_is_ones_own(workers, share):
    assert bench.bytes_on_wire(1_000_000, workers) == 4_000_000 * share


def test_a_name_says_all_of_its_case():
    name, case = bench.case(2, "fit", "cnn", 64, threads=1)
    assert name == "2 fit cnn 64 threads=1"
    assert case == {"workers": 2, "road": "fit", "model": "cnn", "batch": 64, "threads": 1}
    for cases in bench.PARTS.values():
        for name, case in cases.items():
            assert name == bench.case(**case)[0]


def test_one_worker_is_compared_at_the_same_global_batch():
    names = ["2 fit cnn 64", "2 fit cnn 128", "2 loop cnn 64", "1 fit cnn 128"]
    assert [bench.reference(name, names) for name in names] == [None, None, "2 fit cnn 64", "2 fit cnn 64"]


def test_a_knob_is_compared_with_the_same_case_without_it():
    names = ["1 fit small 64", "1 fit small 64 precision=mixed_bfloat16", "1 fit small 64 data=png"]
    names += ["1 fit small 64 data=png+cache"]
    assert [bench.reference(name, names) for name in names] == [None, names[0], names[0], names[2]]


def test_every_knob_and_every_road_has_something_to_be_compared_with():
    for cases in bench.PARTS.values():
        for name, case in cases.items():
            if case["road"] != "all_reduce" and not name.startswith(("2 fit", "1 fit")) or "=" in name:
                assert bench.reference(name, cases), name


def test_cases_share_a_launch_unless_the_workers_must_be_started_otherwise():
    cases = dict(
        [
            bench.case(2, "fit", "cnn", 64),
            bench.case(1, "fit", "cnn", 128),
            bench.case(2, "loop", "cnn", 64),
            bench.case(2, "fit", "cnn", 64, threads=1),
            bench.case(2, "fit", "cnn", 64, bytes_per_pack=9),
            bench.case(2, "fit", "cnn", 64, steps_per_execution=10),
        ]
    )
    groups = {group: list(members) for group, members in bench.launches_of(cases)}
    assert groups == {
        (2, None, None): ["2 fit cnn 64", "2 loop cnn 64", "2 fit cnn 64 steps_per_execution=10"],
        (1, None, None): ["1 fit cnn 128"],
        (2, 1, None): ["2 fit cnn 64 threads=1"],
        (2, None, 9): ["2 fit cnn 64 bytes_per_pack=9"],
    }


def test_times_are_kept_by_launch_and_the_loopback_count_is_the_least(monkeypatch):
    cases = dict([bench.case(2, "fit", "cnn", 64), bench.case(1, "fit", "cnn", 128)])
    answers = iter([(2, [4.0, 5.0], [9, 7]), (1, [2.0, 2.5], [0, 0]), (2, [6.0, 7.0], [8, 8]), (1, [3.0, 3.5], [0, 1])])

    def launch(group, members, rounds, steps):
        workers, times, sent = next(answers)
        assert group[0] == workers and len(members) == 1
        start_up = {"imports": times[0]}
        sent = dict.fromkeys(members, sent)
        return {"milliseconds": dict.fromkeys(members, times), "loopback_bytes": sent, "start_up": start_up}

    monkeypatch.setattr(bench, "launch", launch)
    result = bench.measure(cases, launches=2, rounds=2, steps=5)
    assert result["milliseconds"] == {
        "2 fit cnn 64": [[4.0, 5.0], [6.0, 7.0]],
        "1 fit cnn 128": [[2.0, 2.5], [3.0, 3.5]],
    }
    assert result["loopback_bytes"] == {"2 fit cnn 64": 7, "1 fit cnn 128": 0}
    assert result["start_up"] == {
        "2 fit cnn 64": [{"imports": 4.0}, {"imports": 6.0}],
        "1 fit cnn 128": [{"imports": 2.0}, {"imports": 3.0}],
    }


def test_the_table_shows_medians_quartiles_and_ratios():
    lines = bench.table({"2 fit cnn 64": [[10.0, 12.0, 14.0]], "2 loop cnn 64": [[5.0, 6.0, 7.0]]})
    assert lines[1].split() == "2 fit cnn 64 12.00 11.00 to 13.00".split()
    assert lines[2].split() == "2 loop cnn 64 6.00 5.50 to 6.50 0.50 (0.50 to 0.50) 2 fit cnn 64".split()


def test_saving_a_part_leaves_the_others(tmp_path):
    path = tmp_path / "results" / "performance.json"
    first = {"taken": {"launches": 1}, "milliseconds": {"a": [[1.5, 2.25], [3.0]]}, "loopback_bytes": {"a": 0}}
    bench.save("first", first, path)
    bench.save("second", first, path)
    bench.save("first", {**first, "milliseconds": {"b": [[4.0]]}}, path)
    parts = json.loads(path.read_text())["parts"]
    assert parts == {"first": {**first, "milliseconds": {"b": [[4.0]]}}, "second": first}
    assert '"a": [[1.5, 2.25], [3.0]]' in path.read_text() and path.read_text().endswith("}\n")


def test_provenance_names_versions_and_settings_but_no_host_and_no_path():
    about = bench.provenance(steps=8)
    assert {"day", "machine", "load_before", "python", "tensorflow", "keras", "tf_keras", "threads", "steps"} <= set(
        about
    )
    assert "cores" in about["machine"]
    assert bench.platform.node() not in json.dumps(about) and str(ROOT) not in json.dumps(about)


@pytest.mark.parametrize("arguments", [["no_such_part"], ["--rounds", "many"]])
def test_wrong_arguments_are_refused_before_anything_is_measured(arguments, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("it measured"))
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert arguments[-1] in capsys.readouterr().err


def test_the_results_in_git_are_of_all_parts():
    assert set(json.loads(bench.RESULTS.read_text())["parts"]) == set(bench.PARTS)


@pytest.mark.parametrize("part", bench.PARTS)
def test_a_part_of_the_results_in_git_has_all_of_its_cases(part):
    result = json.loads(bench.RESULTS.read_text())["parts"][part]
    assert list(result["milliseconds"]) == list(bench.PARTS[part]) == list(result["loopback_bytes"])
    for launches in result["milliseconds"].values():
        assert [len(rounds) for rounds in launches] == [result["taken"]["rounds"]] * result["taken"]["launches"]
        assert all(time > 0 for rounds in launches for time in rounds)
