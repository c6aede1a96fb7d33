# Engine of a worker on an NVIDIA GPU, with flash-attn; the rest is as in docker/Dockerfile. make image-adapter-cuda, or
#   docker build -f docker/adapter-cuda.Dockerfile -t sie-adapter-cuda .
# torch brings its CUDA libraries. The image CUDA has the compiler for flash-attn, in the major version of torch.version.cuda.
# TORCH_INDEX: index with builds of torch for another CUDA. TORCH_CUDA_ARCH_LIST: 8.0 A100, 8.9 L4, 9.0 H100 and H200.
ARG CUDA=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92
ARG BASE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143

FROM ${CUDA} AS dependencies
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG TORCH_INDEX=""
ARG MAX_JOBS=4
ARG TORCH_CUDA_ARCH_LIST="8.0;8.9;9.0"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv --without-pip /opt/sie \
    && python3 -m venv /opt/bill
WORKDIR /src
COPY constraints.txt .
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN /opt/bill/bin/pip install cyclonedx-bom==7.5.0
# hadolint ignore=DL3013,DL3059
RUN pip --python /opt/sie/bin/python install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
# flash-attn in the version of the extra `flash`, compiled for the torch above, in its own layer
RUN pip --python /opt/sie/bin/python install ninja==1.13.2 wheel==0.48.0 einops==0.8.2 \
    && TORCH_CUDA_ARCH_LIST="$TORCH_CUDA_ARCH_LIST" MAX_JOBS="$MAX_JOBS" \
       pip --python /opt/sie/bin/python install --no-build-isolation --no-deps flash-attn==2.8.3.post2
COPY pyproject.toml docker/trim.sh ./
# hadolint ignore=DL3013
RUN mkdir catalog && touch LICENSE README.md \
    && pip --python /opt/sie/bin/python install ".[image-adapter-cuda]" \
    && /opt/bill/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file /opt/sie/sbom.cdx.json /opt/sie/bin/python \
    && sh trim.sh /opt/sie

FROM dependencies AS code
COPY . .
# hadolint ignore=DL3013
RUN pip --python /opt/sie/bin/python install --no-deps --ignore-installed --prefix /opt/code .

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home sie && install -d -o sie -g sie -m 0700 /run/sie /home/sie/.cache /home/sie/.cache/huggingface
USER 10001
ENV PATH=/opt/sie/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
HEALTHCHECK --interval=20s --timeout=5s --start-period=120s CMD ["python", "-ISc", \
    "import os, socket; socket.socket(socket.AF_UNIX).connect(os.environ.get('SIE_IPC_SOCKET_PATH', '/tmp/sie-ipc.sock'))"]
ENTRYPOINT ["sie", "adapter"]
COPY --from=dependencies /opt/sie /opt/sie
COPY --from=code /opt/code /opt/sie
ARG BASE
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="sie-adapter-cuda" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}"
