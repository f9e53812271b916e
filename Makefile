# Each target sets up .venv by itself; a second call starts at once. Python: 3.11 or 3.12 (PYTHON=… chooses one).
.PHONY: help setup quickstart test lint bench bench-peers docs clean
.DEFAULT_GOAL := help

BIN := .venv/bin
NAME := quickstart-$(shell date +%Y%m%d-%H%M%S)
export OMP_NUM_THREADS := 1
export RAY_USAGE_STATS_ENABLED := 0
export TOKENIZERS_PARALLELISM := false

help:
	@echo "make quickstart   train the toy policy on this machine's CPU and write a report"
	@echo "make test         the whole CPU test suite (ARGS='-k word' is passed to pytest)"
	@echo "make lint         ruff and mypy"
	@echo "make bench        ratios against bare vLLM and bare Gloo on this machine"
	@echo "make bench-peers  samples per second against TRL, on a real model (installs TRL into .venv; about ten minutes)"
	@echo "make docs         the table of recipe keys in docs/recipe.md"
	@echo "make setup        only the environment in .venv"

setup:
	@tools/venv.sh

quickstart: setup
	@$(BIN)/grpo-dist train quickstart run.name=$(NAME) $(ARGS)
	@$(BIN)/grpo-dist report runs/$(NAME)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: setup
	@$(BIN)/python -c 'import trl' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check -q -e '.[peers]'
	@$(BIN)/python -m benchmarks.peers $(ARGS)

docs: setup
	@$(BIN)/python tools/write_docs.py

clean:
	rm -rf .venv
