# The words the README uses; CI runs the same ones.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup serve test test-vllm vllm-env check bench demo-corruption screenshots
.DEFAULT_GOAL := setup

setup: .venv/ready

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Twinpool needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up .venv: this takes about a minute, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[local]' --group dev
	@touch $@

serve: setup          ## the default model from one prefill and one decode worker, on port 8000
	$(BIN)/twinpool serve

test: setup vllm-env  ## every test, real engines included
	$(BIN)/python -m pytest

test-vllm: setup vllm-env  ## those of two real vLLM engines alone, in twelve minutes at most
	$(BIN)/python -m pytest -m vllm --session-timeout 720

vllm-env: setup       ## stock vLLM for this processor, outside this folder, once a machine; says so where it cannot run
	$(BIN)/python -m tests.vllm.environment

demo-corruption: setup vllm-env  ## a wrong answer under HTTP 200 from stock vLLM, and how Twinpool prevents it
	$(BIN)/python -m demos.corruption

screenshots: setup    ## the pictures in docs/images, in Chromium
	$(BIN)/python -m demos.screenshots

check: setup          ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup          ## the measurements the README quotes
	$(BIN)/python benchmarks/interference.py
