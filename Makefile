# `make train` and `make test` are all a newcomer needs. Variables:
#   PYTHON=python3.12     another interpreter (it gets an environment of its own)
#   CONFIG=configs/x.py   another config for `make train`; ARGS="--config.epochs=3"
#   PART=2/4              of `make test-slow`: every fourth test, or case of one, from the second
PYTHON ?= python3
CONFIG ?= configs/digits.py
ARGS ?=
PART ?= 1/1
# Two more than cores: many tests wait. A file in one process, in the order of conftest.py;
# one that dies ends the run, which otherwise might wait for ever.
WORKERS ?= 4
XDIST := --dist loadfile --no-loadscope-reorder --max-worker-restart=0

MINOR := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
ifeq ($(MINOR),)
$(error no interpreter '$(PYTHON)' here: give one of Python 3.11 or newer, e.g. make PYTHON=python3.12)
endif
ifneq ($(shell [ $(MINOR) -ge 311 ] && echo ok),ok)
$(error $(PYTHON) is Python $(MINOR), jaxscale needs 3.11 or newer: make PYTHON=python3.12)
endif
# Pinned for the versions we test; a newer Python takes what pip resolves.
PINS := $(wildcard requirements/py$(MINOR).txt)
TFDS_PINS := $(wildcard requirements/py$(MINOR)-tfds.txt)
DOCS_PINS := $(wildcard requirements/py$(MINOR)-docs.txt)
# Installs the pins of a file, with hashes, if there is one.
pinned = $(if $(2),$(1)/python -m pip install --quiet --require-hashes -r $(2))
# Of pip, where all is pinned: nothing without a hash is downloaded, not even to build jaxscale.
NOTHING_ELSE := --no-deps --no-build-isolation
VENV := .venv$(if $(filter 311,$(MINOR)),,$(MINOR))
BIN := $(VENV)/bin

.PHONY: benchmarks train quick test test-slow test-others test-gpu test-bare agreement others lint format notebooks docs docs-env env jpeg tfds fashion_mnist try-wheel lock licences audit clean

train: env
	$(BIN)/python -m jaxscale.train --config $(CONFIG) $(ARGS)

# One module at a time: what to run after each change. What it compiles is kept for the
# next time.
quick: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/$(VENV)/compiled
quick: env
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) $(XDIST) tests/unit

test: env
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) $(XDIST)

test-slow: env
	$(BIN)/python -m pytest -m "slow and not optimized" -n $(WORKERS) $(XDIST) --part $(PART)
	$(BIN)/python -m pytest -m "slow and optimized" -n $(WORKERS) $(XDIST) --part $(PART)

# Against PyTorch, torchvision, timm, transformers, datasets, zarr, xarray and XProf, and with
# trackers (wandb, mlflow, trackio, mlperf-logging), in an environment of their own;
# `agreement` writes what was measured into docs/weights.md.
test-others: others
	$(VENV)-others/bin/python -m pytest -n 2 $(XDIST) tests/others

# On the GPUs of this machine, in an environment with the extra cuda12 or cuda13:
# make test-gpu BIN=.venv/bin. JAXSCALE_GPU_TESTS=cpu tests their code on a CPU.
test-gpu: env
	JAXSCALE_GPU_TESTS=$${JAXSCALE_GPU_TESTS:-gpu} $(BIN)/python -m pytest --confcutdir=tests/gpu tests/gpu

# A first run as on a GPU machine, with JAX's libraries alone and jaxscale from its source tree:
# training, the GPU tests and benchmarks/accelerator.py at tiny sizes, on a CPU.
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3.12)
test-bare: .venv-bare/.installed
	PYTHONPATH=. JAX_PLATFORMS=cpu .venv-bare/bin/python benchmarks/accelerator.py --tiny --turns 1

.venv-bare/.installed: Makefile
	$(PYTHON312) -m venv .venv-bare
	.venv-bare/bin/python -m pip install --quiet jax==0.11.2 flax==0.12.12 optax==0.2.8 \
	  orbax-checkpoint==0.12.8 safetensors==0.8.0 pytest==9.2.0
	touch $@

agreement: others
	PYTHONPATH=tests $(VENV)-others/bin/python -m others.agreement

others: $(VENV)-others/.installed

$(VENV)-others/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)-others
	$(call pinned,$(VENV)-others/bin,$(PINS))
	$(VENV)-others/bin/python -m pip install --quiet -e '.[others,dev]'
	touch $@

# The site, in .site/html/index.html: an environment of its own, warnings are errors.
docs: docs-env
	JAX_PLATFORMS=cpu $(VENV)-docs/bin/python -m sphinx -W --keep-going -q -j auto \
	  -c docs -d .site/doctrees . .site/html

docs-env: $(VENV)-docs/.installed

$(VENV)-docs/.installed: pyproject.toml $(PINS) $(DOCS_PINS)
	$(PYTHON) -m venv $(VENV)-docs
	$(call pinned,$(VENV)-docs/bin,$(or $(DOCS_PINS),$(PINS)))
	$(VENV)-docs/bin/python -m pip install --quiet $(if $(DOCS_PINS),$(NOTHING_ELSE)) -e '.[docs]'
	touch $@

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --project pyright-strict.json --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/code_lines.py
	$(BIN)/python .ci/prose.py
	$(BIN)/jupytext --test --to py:percent colabs/*.ipynb >/dev/null

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: env
	$(BIN)/python docs/notebooks.py

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(call pinned,$(BIN),$(PINS))
	$(BIN)/python -m pip install --quiet $(if $(PINS),$(NOTHING_ELSE)) -e '.[dev]'
	touch $@

# Crops of JPEGs that decode no more than their box: needs a C compiler and
# libjpeg-turbo's header, and is optional.
jpeg: env
	$(BIN)/jaxscale prepare jpeg

# TensorFlow is large and only prepares datasets: it has an environment of its
# own, which training never sees.
tfds: $(VENV)-tfds/.installed

$(VENV)-tfds/.installed: pyproject.toml $(TFDS_PINS)
	$(PYTHON) -m venv $(VENV)-tfds
	$(call pinned,$(VENV)-tfds/bin,$(TFDS_PINS))
	$(VENV)-tfds/bin/python -m pip install --quiet $(if $(TFDS_PINS),$(NOTHING_ELSE)) -e '.[tfds,dev]'
	touch $@

fashion_mnist: tfds
	$(VENV)-tfds/bin/jaxscale prepare fashion_mnist

# Each prints one JSON line and keeps it in benchmarks/results/.
benchmarks: env tfds
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/loop_overhead.py
	$(VENV)-tfds/bin/python benchmarks/jpeg_input.py
	$(VENV)-tfds/bin/python benchmarks/imagenet_input.py

# The wheel in an empty environment of each Python, outside of the repository.
PYTHONS ?= python3.11 python3.12 python3.13
try-wheel:
	packaging/try_wheel.sh $(PYTHONS)

# Pins with hashes for every Python we test, without the address of any package index.
lock: env
	$(BIN)/python -m pip install --quiet uv==0.13.9
	for v in 3.11 3.12 3.13; do n=$$(echo $$v | tr -d .); \
	  $(BIN)/uv pip compile pyproject.toml --extra dev --python-version $$v \
	    --universal --generate-hashes --no-header --no-annotate --upgrade -q -o requirements/py$$n.txt && \
	  $(BIN)/uv pip compile pyproject.toml --extra tfds --extra dev --python-version $$v \
	    --universal --generate-hashes --no-header --no-annotate --upgrade -q -o requirements/py$$n-tfds.txt \
	  || exit 1; done
	$(BIN)/uv pip compile pyproject.toml --extra docs --extra dev --python-version 3.11 \
	  --universal --generate-hashes --no-header --no-annotate -c requirements/py311.txt -q -o requirements/py311-docs.txt
	sed -n 's/^requires = \["\(.*\)"\]$$/\1/p' pyproject.toml | $(BIN)/uv pip compile - --python-version 3.11 \
	  --universal --generate-hashes --no-header --no-annotate -c requirements/py311.txt -q -o requirements/build.txt

# What is installed, with its licence, one line per package.
licences: env
	$(BIN)/python requirements/licences.py

# Known vulnerabilities of what is pinned, by PyPI's advisories: needs the network. In an
# environment of its own, which leaves the tested one as it is.
audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet pip-audit==2.10.1
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --no-deps -r $(PINS)

clean:
	rm -rf $(VENV) $(VENV)-tfds $(VENV)-others $(VENV)-docs $(VENV)-audit .venv-bare .site .pytest_cache .ruff_cache .hypothesis
