# A Beam SDK worker with the package and its locked environment.
#   CPU:  docker build -t batchgen-beam .        (`make image` also passes the Python version of the environment)
#   CUDA: docker build -t batchgen-beam --build-arg BASE=nvidia/cuda:13.2.0-base-ubuntu24.04 .
#   A store's client: --build-arg LOCK=gcp for gs:// and Dataflow, LOCK=aws for s3://.
#   A model for --model=worker:/opt/model: a second Dockerfile, FROM batchgen-beam and COPY model /opt/model.
# PYTHON and BEAM have to be those of the machine that submits the job.  The base needs Python PYTHON with venv, or
# apt-get to install it.  In this release the engine runs on the CPU in either image.
ARG PYTHON=3.12
ARG BEAM=2.77.0
ARG BASE=python:${PYTHON}-slim

FROM apache/beam_python${PYTHON}_sdk:${BEAM} AS beam

FROM ${BASE}
ARG PYTHON
ARG LOCK=run
ENV LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# hadolint ignore=DL3008
RUN command -v python${PYTHON} > /dev/null || { \
      apt-get update \
      && apt-get install --yes --no-install-recommends python${PYTHON} python${PYTHON}-venv \
      && rm -rf /var/lib/apt/lists/*; }
RUN python${PYTHON} -m venv /opt/batchgen
ENV PATH=/opt/batchgen/bin:${PATH}

# The environment changes rarely, the package often: locks first.  What has no wheel is built with the locked tools.
COPY locks/tools.txt locks/${LOCK}.txt /tmp/locks/
RUN pip install --no-cache-dir --require-hashes --only-binary :all: -r /tmp/locks/tools.txt \
    && uv pip install --no-cache --python /opt/batchgen/bin/python --no-build-isolation --require-hashes \
      -r /tmp/locks/${LOCK}.txt

COPY pyproject.toml setup.py README.md LICENSE /tmp/source/
COPY batchgen_beam /tmp/source/batchgen_beam
COPY models /tmp/source/models
COPY pipelines /tmp/source/pipelines
# The native kernels need a C++ compiler here and nowhere else.
# hadolint ignore=DL3008
RUN added=; command -v c++ > /dev/null || { \
      apt-get update && apt-get install --yes --no-install-recommends g++ && added=g++; }; \
    uv pip install --no-cache --offline --python /opt/batchgen/bin/python --no-deps --no-build-isolation /tmp/source \
    && rm -rf /tmp/source /tmp/locks \
    && { [ -z "$added" ] || { apt-get purge --yes --auto-remove $added && rm -rf /var/lib/apt/lists/*; }; }

# Beam starts workers through its own entry point, which must not make another environment.
COPY --from=beam /opt/apache/beam /opt/apache/beam
ENV RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1
# Away from any checkout: folders named models or pipelines there must not be found by `import`.
WORKDIR /var/lib/batchgen
ENTRYPOINT ["/opt/apache/beam/boot"]
