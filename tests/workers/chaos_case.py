"""main.py, with a saboteur: what test_chaos.py starts as each worker.

    python chaos_case.py PLAN.json [main.py's arguments]

The plan, made by test_chaos.py, has under "kills" a list: at which moment which workers send themselves SIGKILL in the
first start, in the second, and so on. A worker counts its starts in a file beside the plan.
"""

import functools
import itertools
import json
import os
import pathlib
import signal
import sys
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
plan_file = pathlib.Path(sys.argv.pop(1))
plan = json.loads(plan_file.read_text())
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
with open(plan_file.with_name(f"starts_of_{me}"), "a+") as starts:
    starts.seek(0)
    start = len(starts.read())
    starts.write("+")
kill = plan["kills"][start] if start < len(plan["kills"]) else {"victims": [], "moment": "none"}


passed = itertools.count()


def pass_by(moment):
    """Called at each moment of this name; at the planned one this process is gone."""
    if me in kill["victims"] and moment == kill["moment"]:
        if next(passed) == kill["number"]:
            with open(plan_file.with_name("kills"), "a") as kills:
                kills.write(f"start {start}: {moment} {kill['number']}, worker {me}\n")
            os.kill(os.getpid(), signal.SIGKILL)


pass_by("start-up")
import main
import mnist_setup
import multi_worker


def around(owner, name, moment):
    """Passes by before and after the function."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*arguments, **options):
        pass_by(moment)
        result = function(*arguments, **options)
        pass_by(moment)
        return result

    mock.patch.object(owner, name, call).start()


gfile, Backup = main.tf.io.gfile, multi_worker.BackupAndRestore


class HalfWritten(gfile.GFile):
    def write(self, content):
        super().write(content[: len(content) // 2])
        self.flush()
        pass_by("backup")
        super().write(content[len(content) // 2 :])


around(main.tf.distribute.MultiWorkerMirroredStrategy, "__init__", "start-up")
around(mnist_setup, "mnist_dataset", "start-up")
around(mnist_setup, "build_and_compile_cnn_model", "start-up")
around(Backup, "on_train_batch_end", "step")
around(Backup, "_write", "backup")
around(Backup, "on_train_end", "end")
around(Backup, "delete", "end")
around(multi_worker, "save_model", "end")
if me == 0:  # the chief alone touches files
    around(gfile, "makedirs", "backup")
    around(gfile, "rename", "backup")
    around(gfile, "remove", "end")
    mock.patch.object(gfile, "GFile", HalfWritten).start()
mock.patch.object(Backup.__init__, "__defaults__", (plan["save_freq"], *Backup.__init__.__defaults__[1:])).start()
code = main.main()
pass_by("end")
sys.exit(code)
