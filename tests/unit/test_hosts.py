"""clusters/hosts.py: hosts of their own on one machine, where the tests have the rights; nothing of them is left."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import time

import hosts
import nbformat
import psutil
import pytest

LESSON = pathlib.Path(__file__).resolve().parents[2] / "notebooks" / "07_many_machines.ipynb"
missing = hosts.what_is_missing()
needs_hosts = pytest.mark.skipif(bool(missing), reason=f"NOT RUN, no hosts: {missing}")
SERVE = "import socket; s = socket.create_server(('', 7000)); print('up', flush=True); s.accept()[0].sendall(b'hello')"
ASK = "import socket; print(socket.create_connection(('b', 7000), timeout=10).recv(9).decode())"


@pytest.fixture
def two(tmp_path):
    with hosts.Hosts(tmp_path, ["a", "b"], seconds=60) as two_hosts:
        yield two_hosts


@needs_hosts
def test_each_host_has_its_own_name_address_and_ports(two):
    assert [two.run(name, "hostname").strip() for name in ("a", "b", None)] == ["a", "b", "hub"]
    with subprocess.Popen(two.command("b", sys.executable, "-c", SERVE), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "up\n"
        assert two.run("a", sys.executable, "-c", ASK) == "hello\n"
    refused = two.run("a", sys.executable, "-c", ASK.replace("'b'", "'a'"), check=False)
    assert "Connection refused" in refused  # the port is b's, not a's


@needs_hosts
def test_a_cut_link_carries_nothing_and_a_mended_one_does(two):
    with subprocess.Popen(two.command("b", sys.executable, "-c", SERVE), stdout=subprocess.PIPE, text=True) as server:
        server.stdout.readline()
        two.link("b", "down")
        assert "Error" in two.run("a", sys.executable, "-c", ASK, check=False)
        two.link("b", "up")
        assert two.run("a", sys.executable, "-c", ASK) == "hello\n"


@needs_hosts
def test_a_command_that_fails_raises_with_what_it_printed(two):
    with pytest.raises(RuntimeError, match="on a: exit code 3\nno such thing"):
        two.run("a", "sh", "-c", "echo no such thing; exit 3")


@needs_hosts
def test_all_ends_with_the_hosts(tmp_path):
    with hosts.Hosts(tmp_path, ["a", "b"], seconds=60) as two:
        namespace = os.readlink(f"/proc/{two.pid}/ns/pid")
        ignore = "trap '' TERM INT; echo up; sleep 1000"
        worker = subprocess.Popen(two.command("a", "sh", "-c", ignore), stdout=subprocess.PIPE, text=True)
        assert worker.stdout.readline() == "up\n"
        assert inside(namespace)
        for kind in ("ipc", "mnt", "net", "pid", "uts"):  # none is this machine's own
            assert os.readlink(f"/proc/{two.pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    assert worker.wait(5) != 0
    worker.stdout.close()
    assert_ends(namespace)


HOLD = """
import pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
import hosts
print(hosts.Hosts(pathlib.Path(sys.argv[2]), ["a", "b"], seconds=60).pid, flush=True)
signal.pause()
"""


@needs_hosts
def test_all_ends_with_the_python_process_that_made_them(tmp_path):
    command = [sys.executable, "-c", HOLD, pathlib.Path(hosts.__file__).parent, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        namespace = os.readlink(f"/proc/{int(maker.stdout.readline())}/ns/pid")
        assert inside(namespace)
        maker.kill()
    assert_ends(namespace)


@needs_hosts
def test_what_linux_refuses_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "SET_UP", "mount -t proc proc /no/such/folder\n")
    assert re.fullmatch(r"namespaces are not allowed here \(mount: .*/no/such/folder.*\)", hosts.what_is_missing())


@needs_hosts
def test_all_ends_after_the_time_given(tmp_path):
    two = hosts.Hosts(tmp_path, ["a", "b"], seconds=3)
    namespace = os.readlink(f"/proc/{two.pid}/ns/pid")
    two.holder.wait(20)
    assert_ends(namespace)
    two.close()


def assert_ends(namespace):
    """No process is in that pid namespace; with the last one, Linux takes down its networks and mounts."""
    end = time.monotonic() + 5
    while inside(namespace):
        assert time.monotonic() < end, f"left: {inside(namespace)}"
        time.sleep(0.05)


def inside(namespace):
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if process.info["status"] != psutil.STATUS_ZOMBIE:
                found += [process.pid] * (os.readlink(f"/proc/{process.pid}/ns/pid") == namespace)
    return found


def test_lesson_7_shows_recorded_words_where_no_hosts_can_be_made(monkeypatch, capsys):
    """And these pass its own checks. (Where hosts can be made, the notebook's own test runs those cells.)"""
    monkeypatch.setattr(hosts, "what_is_missing", lambda: "needs root")
    monkeypatch.setattr(hosts, "Hosts", lambda *_, **__: pytest.fail("it made hosts"))
    cells = {cell.id: cell.source for cell in nbformat.read(LESSON, as_version=4).cells}
    names = {}
    helpers = ["imports", "two-hosts", "run-on-two-hosts", "show-symptom"]
    for cell in [*helpers, "wrong-port", "check-wrong-port", "cut-the-cable", "check-cable"]:
        exec(cells[cell], names)
    printed = capsys.readouterr().out
    assert printed.count("recorded, not run here (needs root):") == 2 and "here:" not in printed
