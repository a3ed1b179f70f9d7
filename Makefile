# `make demo` and `make test` each do all their set-up: a .venv in the checkout, then the job.
# `make test-wheels` is the slow part of the tests: real CuTe DSL wheels in fresh environments, minutes of downloads.
PYTHON ?= python3
VENV ?= .venv
DEMO ?= .demo
BIN := $(VENV)/bin

.PHONY: demo test test-wheels lint bench clean

demo: $(VENV)/.demo
	$(BIN)/python -m tests.integration.exports qwen3-moe $(DEMO) --original
	$(BIN)/trtllm-b12x verify $(DEMO)/nvfp4 --original $(DEMO)/original --require-b12x

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --ignore tests/integration/test_payload.py

test-wheels: $(VENV)/.test
	$(BIN)/python -m pytest tests/integration/test_payload.py

bench: $(VENV)/.demo
	$(BIN)/python -m benchmarks.overhead

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.demo: requirements/demo.txt requirements/constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make demo PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements/demo.txt
	$(BIN)/python -m pip install --quiet -c requirements/constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.demo requirements/test.txt
	$(BIN)/python -m pip install --quiet -r requirements/test.txt
	touch $@

clean:
	rm -rf $(VENV) $(DEMO)
