# To get started: `make demo`, `make test`. Both set up their own environment first.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help setup demo test test-all test-megatron test-te test-eval golden check docs package lock audit benchmark soak docker docker-cpu docker-digests clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/  /'

setup: $(VENV)/installed data/smoke/corpus.idx  ## create the virtual environment .venv and the smoke run's small dataset

# torch first, in the version of constraints.txt and in the build that pip is configured to find.
# On Linux without a GPU pip's default is the CUDA build, which works on a CPU but is large; point
# PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels to get the small one.
# All other packages are checked by checksum (requirements.lock, written by `make lock`), except Triton, which comes with
# torch's CUDA build.
$(VENV)/installed: pyproject.toml setup.py constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "$(VENV): has $$($(BIN)/python --version), needs Python 3.11 to 3.13: rm -r $(VENV), and add PYTHON=python3.12" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch "triton; sys_platform == 'linux'"
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

data/smoke/corpus.idx: | $(VENV)/installed
	examples/smoke_data.sh

demo: setup      ## pretrain a 5M-parameter Llama on the standard library's sources: about 4 minutes on 2 cores
	examples/demo.sh

test: setup      ## the tests, about 12 minutes on 2 cores
	$(BIN)/python -m pytest -rs -n 2 --dist loadfile -m 'not slow'

test-all: test   ## the slow tests as well, more than an hour more
	$(BIN)/python -m pytest -rs -n 2 --dist loadfile -m slow

VERSION ?= 0.19.2
WHICH ?= -m 'not slow' tests/checkpoint tests/context_parallel tests/engine tests/golden tests/parity tests/run tests/token_weighting
test-megatron: setup build/megatron/$(VERSION)  ## tests under Megatron-Core VERSION=0.19.2, by default those of all that uses it; WHICH='-m slow tests/engine'
	PYTHONPATH=$(CURDIR)/build/megatron/$(VERSION) $(BIN)/python -m pytest -rs -n 2 --dist loadfile $(WHICH)

# Its Python files alone are used, so a version for later ones runs on Python 3.11 as well; so do those of Muon, which
# import one name that only later versions have.
build/megatron/%: | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --ignore-requires-python --python-version 3.12 --only-binary=:all: --no-deps \
		--target $@ megatron-core==$* $(shell sed -n 's/^\(emerging-optimizers[^;]*\).*/\1/p' constraints.txt)
	echo 'import typing, typing_extensions; typing.override = typing_extensions.override' > $@/sitecustomize.py

TE_VERSION := $(if $(filter command,$(firstword $(origin VERSION))),$(VERSION),2.20.2)
test-te: setup build/transformer_engine/$(TE_VERSION) $(MEGATRON:%=build/megatron/%)  ## Transformer Engine's layers and attention on a CPU: VERSION=2.20.2 MEGATRON=0.19.2 SOME='-k grouped'
	TRANSFORMER_ENGINE=$(CURDIR)/build/transformer_engine/$(TE_VERSION) PYTHONPATH=$(MEGATRON:%=$(CURDIR)/build/megatron/%) \
		$(BIN)/python -m pytest -rs tests/transformer_engine $(SOME)

# Its Python and what that imports; of its compiled part the signatures, from the C++ sources. pip asks these for their
# requirements, which fails without CUDA, but it leaves them unpacked.
build/transformer_engine/%: | $(VENV)/installed
	rm -rf $@.new
	$(BIN)/python -m pip install --quiet --no-deps --target $@.new transformer_engine==$* \
		einops==0.8.2 ml_dtypes==0.6.0 onnx==1.23.2 onnx_ir==1.1.0 onnxscript==0.7.2
	mkdir $@.new/sources
	-TMPDIR=$(CURDIR)/$@.new/sources $(BIN)/python -m pip download --quiet --no-clean --no-deps --no-build-isolation \
		--no-binary transformer_engine_torch --dest $@.new/sources transformer_engine_torch==$* 2> $@.new/pip.log
	$(BIN)/python tests/transformer_engine/signatures.py $@.new/sources > $@.new/signatures.json
	rm -rf $@.new/sources
	mv $@.new $@

test-eval: setup ## lm-eval in training, on a trained model and on its export, and W&B, after installing both
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[eval,wandb]'
	$(BIN)/python -m pytest -rs -n 2 tests/tools/test_evaluate_lm_eval.py tests/run/test_lm_eval.py tests/monitoring/test_metrics.py

golden: setup    ## rewrite the reference losses of tests/golden, after an intended change
	REWRITE_GOLDEN=1 $(BIN)/python -m pytest -q tests/golden
	git --no-pager diff --stat tests/golden

SCRIPTS := .ci/run .ci/trixie benchmarks/*.sh docs/experiments/*.sh examples/*.sh examples/slurm/*.sh examples/slurm/*.sbatch

check: setup     ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy megatron_ext
	$(BIN)/shellcheck $(SCRIPTS)
	$(BIN)/hadolint Dockerfile

docs: setup      ## the site of docs/ in build/docs, warnings as errors
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --quiet --strict

package: setup   ## build the wheel, install it into a new environment, run each of its commands
	$(BIN)/python -m pytest -rs tests/test_wheel.py

lock:            ## rewrite requirements.lock: the checksums of the packages in constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip compile pyproject.toml --extra test --extra dev --constraint constraints.txt --overrides <(echo \
		"torch; python_version < '3'") --no-emit-package triton --no-emit-package setuptools --universal --python-version 3.11 \
		--generate-hashes --no-annotate --custom-compile-command "make lock" --quiet --output-file requirements.lock

audit: setup     ## check all pinned packages against the Python advisory database
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip-audit
	$(BIN)/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off || \
		{ echo 'audit: something was found, or the database did not answer for every pin: see above' >&2; exit 1; }

benchmark: setup ## measure the cost of context-parallel plans
	$(BIN)/python benchmarks/context_parallel.py

HOURS ?= 2
EVERY ?= 30
soak: setup      ## HOURS=2 of training on a CPU under faults, compared step by step
	$(BIN)/python benchmarks/soak.py --hours $(HOURS) --every $(EVERY) --output build/soak

docker:          ## the image for GPUs, on NVIDIA's PyTorch image
	docker build --tag megatron_ext .

docker-cpu:      ## the image for laptops and CI, and its environment report
	docker build --target cpu --build-arg PIP_EXTRA_INDEX_URL --tag megatron_ext:cpu .
	docker run --rm megatron_ext:cpu

docker-digests:  ## the current digests of the Dockerfile's base images, to update them
	@sed -nE 's/^ARG (BASE|CPU)_IMAGE=([^@]+).*/\2/p' Dockerfile | xargs -n 1 docker buildx imagetools inspect

clean:           ## remove the files of setup, demo and tests; your own data and runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build/docs
	examples/clean.sh smoke demo
