# The catalogue's only writer. From the root of the repository: docker build -f docker/config.Dockerfile -t sie-config .
FROM python:3.11 AS build
WORKDIR /src
COPY . .
# without pip, numpy's tests and tools for Fortran, and the symbols of extension modules: a quarter of it. numpy's own cannot be stripped
RUN python -m venv --without-pip /opt/sie \
    && pip --python /opt/sie/bin/python install --no-cache-dir --constraint constraints.txt '.[config,tracing,cli]' \
    && find /opt/sie/lib -path '*/numpy/*' -type d \( -name tests -o -name f2py -o -name distutils \) -prune -exec rm -r {} + \
    && find /opt/sie/lib -name '*.so' -not -path '*/numpy*' -exec strip --strip-unneeded {} +

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home sie
COPY --from=build /opt/sie /opt/sie
USER 10001
ENV PATH=/opt/sie/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 8081
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "-ISc", \
    "import urllib.request as u; u.urlopen('http://127.0.0.1:8081/healthz', timeout=3)"]
ENTRYPOINT ["sie", "config"]
