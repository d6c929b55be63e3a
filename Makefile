# make train · make lab · make test · make check: each sets itself up in .venv. See README.md.
#   PYTHON=python3.12            the Python that makes .venv
#   ENV_PYTHON=/path/to/python   an environment that you have already; nothing is installed into it
PYTHON ?= python3
VENV   ?= .venv
ifdef ENV_PYTHON
PY := $(ENV_PYTHON)
else
PY := $(VENV)/bin/python
RUN_READY := $(VENV)/run-ready
DEV_READY := $(VENV)/dev-ready
FLOORS_READY := .venv-floors/ready
endif
FLOORS_PY := .venv-floors/bin/python
export CUDA_VISIBLE_DEVICES ?= -1

.PHONY: train lab check test floors tf_keras clean

train: $(RUN_READY)
	rm -rf trained && mkdir trained
	$(PY) local_cluster.py --workers 2 --log-dir trained main.py --model-path trained/model.keras --history trained/history.json
	$(PY) tools/verify_training.py trained

lab: $(RUN_READY)
	$(PY) -m jupyterlab notebooks

check: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) tools/make_mnist_sample.py --check
	$(PY) -m pytest -q tests/unit

test: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) tools/make_mnist_sample.py --check
	$(PY) -m pytest -q

# The oldest versions that requirements.txt allows.
floors: $(FLOORS_READY)
	$(FLOORS_PY) -m pytest -q tests/workers

# Keras 2, for people with old code.
tf_keras: $(DEV_READY)
	TF_USE_LEGACY_KERAS=1 $(PY) -m pytest -q tests/workers

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; choose one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/run-ready: $(VENV)/bin/python requirements.txt
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/dev-ready: $(VENV)/bin/python requirements.txt requirements-dev.txt
	$(PY) -m pip install --quiet -r requirements-dev.txt
	touch $@ $(VENV)/run-ready

.venv-floors/ready: requirements-floors.txt requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv-floors
	$(FLOORS_PY) -m pip install --quiet -r requirements-floors.txt
	touch $@

clean:
	rm -rf .venv .venv-floors trained
