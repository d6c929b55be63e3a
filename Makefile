# make train · make lab · make test · make check: each sets itself up in .venv. See README.md.
#   PYTHON=python3.12            the Python that makes .venv
#   ENV_PYTHON=/path/to/python   an environment that you have already; nothing is installed into it
#   TF=2.22.0rc0 [KERAS=3.14.1]  these versions instead, in an environment of their own. See UPGRADING.md.
PYTHON ?= python3
VENV   ?= .venv$(addprefix -tf-,$(TF))$(addprefix -keras-,$(KERAS))
ifdef ENV_PYTHON
PY := $(ENV_PYTHON)
ifdef TF
$(error TF=$(TF) would have no effect beside ENV_PYTHON=)
endif
else
PY := $(VENV)/bin/python
RUN_READY := $(VENV)/run-ready
DEV_READY := $(VENV)/dev-ready
endif
ifdef TF
ifneq (,$(filter floors tf_keras test-ray,$(MAKECMDGOALS)))
$(error TF=$(TF) would have no effect: this target has versions of its own)
endif
endif
ifdef KERAS
ifndef TF
$(error KERAS=$(KERAS) needs TF= beside it, or it would have no effect)
endif
endif
FLOORS_PY := .venv-floors/bin/python
export CUDA_VISIBLE_DEVICES ?= -1
SLURM_PACKAGES := munge slurmctld slurmd slurm-client iproute2

# For others there is no such TensorFlow.
python_up_to = $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $(1)) and \
  "Python 3.10 to 3.$(1) is needed; choose one with PYTHON=")'

.PHONY: train lab lint check test bench chaos floors tf_keras test-slurm test-ray clean

train: $(RUN_READY)
	rm -rf trained && mkdir trained
	$(PY) local_cluster.py --workers 2 --log-dir trained main.py --model-path trained/model.keras --history trained/history.json
	$(PY) tools/verify_training.py trained

lab: $(RUN_READY)
	$(PY) -m jupyterlab notebooks

lint: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) tools/make_mnist_sample.py --check
	$(PY) tools/sync_writefile.py --check
	$(PY) tools/draw_diagrams.py --check
	$(PY) tools/refresh_outputs.py --check

check: lint
	$(PY) -m pytest -q tests/lint tests/unit

# Two files of tests at a time: a training on two workers leaves some of two cores idle.
# Whole files, for the tests of one share their launches.
test: lint
	$(PY) -m pytest -q --numprocesses=2 --dist=loadfile

# What lesson 6 claims, measured on this machine, which should be quiet. Writes benchmarks/results/performance.json.
# UPGRADING.md says what to do then. PARTS=knobs measures one part again.
bench: $(DEV_READY)
	$(PY) benchmarks/bench.py $(PARTS)

# main.py killed N times at random moments, 5 times a run, and restarted: about a minute a run. SEED chooses others.
N    ?= 100
SEED ?= 1
chaos: $(DEV_READY)
	CHAOS_KILLS=$(N) CHAOS_SEED=$(SEED) $(PY) -m pytest -q -rP tests/workers/test_chaos.py

# The oldest versions that requirements.txt allows.
floors: .venv-floors/ready
	$(FLOORS_PY) -m pytest -q tests/workers

# Keras 2, for people with old code.
tf_keras: $(DEV_READY)
	TF_USE_LEGACY_KERAS=1 $(PY) -m pytest -q tests/workers

# main.py on a real Slurm, which this starts itself, in namespaces of its own: as root, on Linux. Elsewhere: NOT RUN.
test-slurm: $(DEV_READY)
	@dpkg -s $(SLURM_PACKAGES) >/dev/null 2>&1 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null; } || \
	  echo "make test-slurm: could not install $(SLURM_PACKAGES)" >&2
	timeout --kill-after=10 1800 $(PY) -m pytest -q tests/slurm

# main.py's `train` under Ray Train, in an environment of its own.
test-ray: .venv-ray/ready
	timeout --kill-after=10 1800 .venv-ray/bin/python -m pytest -q tests/ray

$(VENV)/bin/python:
	$(call python_up_to,$(if $(TF),99,13))
	$(PYTHON) -m venv $(VENV)

ifdef TF
# All that is required but TensorFlow and Keras; their nightly builds have names of their own.
$(VENV)/run-ready: $(VENV)/dev-ready
$(VENV)/dev-ready: $(VENV)/bin/python requirements.txt requirements-dev.txt
	grep -hvE '^(tensorflow|keras|tf_keras|-r)\b' requirements.txt requirements-dev.txt > $(VENV)/others.txt
	$(PY) -m pip install --quiet $(if $(findstring dev,$(TF)),tf-nightly,tensorflow)==$(TF) -r $(VENV)/others.txt
ifdef KERAS
	$(PY) -m pip uninstall --quiet --yes keras keras-nightly
	$(PY) -m pip install --quiet $(if $(findstring dev,$(KERAS)),keras-nightly,keras)==$(KERAS)
endif
	touch $(VENV)/run-ready $(VENV)/dev-ready
else
$(VENV)/run-ready: $(VENV)/bin/python requirements.txt
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/dev-ready: $(VENV)/bin/python requirements.txt requirements-dev.txt
	$(PY) -m pip install --quiet -r requirements-dev.txt
	touch $@ $(VENV)/run-ready
endif

.venv-floors/ready: requirements-floors.txt requirements.txt requirements-dev.txt
	$(call python_up_to,12)
	$(PYTHON) -m venv .venv-floors
	$(FLOORS_PY) -m pip install --quiet -r requirements-floors.txt
	touch $@

.venv-ray/ready: clusters/ray/requirements.txt requirements.txt requirements-dev.txt
	$(call python_up_to,13)
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet -r requirements-dev.txt -r clusters/ray/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-* trained
