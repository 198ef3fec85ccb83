# Targets: quickstart, test, test-clients, test-gpu, lint, clean.
#
# test-clients runs transformers, accelerate, Lightning, peft and trl in an environment of their own, .venv-clients.
#
# They work in the virtual environment .venv, made when first needed from PYTHON. A torch that PYTHON already has is used
# as it is; otherwise the version in constraints.txt is installed, first and by itself, so that nothing ever pulls in
# another, larger build. On a machine whose default index serves CUDA builds, ask for the CPU build with
#     make quickstart TORCH_INDEX=<URL of PyTorch's index of CPU builds>
# USE_SYSTEM_PYTHON=1 installs into PYTHON itself instead of a virtual environment.
# PYTEST_ARGS="-k pool -x" passes arguments on to pytest.

PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
USE_SYSTEM_PYTHON ?=
VENV := .venv

ifeq ($(USE_SYSTEM_PYTHON),1)
PY := $(PYTHON)
BIN := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
# Stamps of different interpreters must not be taken for each other.
STAMPS := $(VENV)/stamps/$(shell $(PYTHON) -c 'import hashlib, sys; print(hashlib.sha1(sys.executable.encode()).hexdigest()[:12])')
else
BIN := $(CURDIR)/$(VENV)/bin
PY := $(BIN)/python
STAMPS := $(VENV)/stamps
endif

PIP := $(PY) -m pip --disable-pip-version-check
HAS_TORCH := -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7))' 2> /dev/null
# An editable install builds the native libraries once; a change to their sources asks for another.
REQUIREMENTS := pyproject.toml constraints.txt setup.py deepspeed/ops/native/libraries.py $(wildcard csrc/*/*)

.PHONY: quickstart test test-clients run-clients test-gpu lint clean

quickstart: $(STAMPS)/package
	$(BIN)/deepspeed --num_gpus 2 examples/gpt/train.py --deepspeed_config examples/gpt/ds_config.json

test: $(STAMPS)/test
	$(PY) -m pytest --timeout=300 --session-timeout=4500 -m "not slow_clients" $(PYTEST_ARGS)

test-clients:
	$(MAKE) VENV=.venv-clients run-clients

run-clients: $(STAMPS)/clients
	OMP_NUM_THREADS=1 $(PY) -m pytest --timeout=900 tests/clients $(PYTEST_ARGS)

test-gpu: $(STAMPS)/test
	$(PY) -m pytest --timeout=900 -m gpu $(PYTEST_ARGS)

lint: $(STAMPS)/lint
	$(PY) -m ruff check .

clean:
	rm -rf $(VENV) .venv-clients build dist *.egg-info .pytest_cache .hypothesis .ruff_cache deepspeed/ops/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/python:
ifneq ($(USE_SYSTEM_PYTHON),1)
	$(PYTHON) $(HAS_TORCH) && site=--system-site-packages; $(PYTHON) -m venv $$site $(VENV)
endif
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/python constraints.txt
	$(PY) $(HAS_TORCH) || $(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@touch $@

$(STAMPS)/package: $(STAMPS)/torch $(REQUIREMENTS)
	$(PIP) install -e '.[plots]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/torch $(REQUIREMENTS)
	$(PIP) install -e '.[test]'
	@touch $@ $(STAMPS)/package

$(STAMPS)/lint: $(STAMPS)/torch $(REQUIREMENTS)
	$(PIP) install -e '.[lint]'
	@touch $@ $(STAMPS)/package

$(STAMPS)/clients: $(STAMPS)/test tests/clients/requirements.txt
	$(PIP) install -c constraints.txt -r tests/clients/requirements.txt
	@touch $@
