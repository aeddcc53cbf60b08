# Two images from one file (README: "Containers"):
#   docker build --tag megatron_ext .                     for GPUs, on NVIDIA's PyTorch image
#   docker build --target cpu --tag megatron_ext:cpu .    for laptops and CI
# A base image with a Transformer Engine that Megatron-Core 0.16 was written for: 2.9 to 2.11.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.01-py3
ARG CPU_IMAGE=python:3.11.14-slim-bookworm

FROM ${CPU_IMAGE} AS cpu
# PyTorch's CPU wheels are a tenth of the size of pip's default: name their index here.
ARG PIP_EXTRA_INDEX_URL=
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trainer
WORKDIR /opt/megatron_ext
# The dependencies before the sources, so that a change of these leaves that layer alone.
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
RUN mkdir megatron_ext tools examples && touch megatron_ext/__init__.py tools/__init__.py \
    && pip install --no-cache-dir --constraint constraints.txt torch \
    && pip install --no-cache-dir --constraint constraints.txt --editable '.[test]'
COPY --chown=trainer . .
RUN chown trainer .
USER 10001
CMD ["python", "tools/environment.py"]

FROM ${BASE_IMAGE} AS gpu
RUN useradd --create-home --uid 10001 trainer
WORKDIR /opt/megatron_ext
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY docker/constraints.py docker/
# The image's torch, Transformer Engine, flash-attn and Apex were built for each other: constraints.py pins all that is
# installed to what it is, so that pip adds what is missing or fails, but never replaces. The image's own
# PIP_CONSTRAINT (empty since 25.10) is put aside: it would hold for the build of this package, too.
RUN python docker/constraints.py constraints.txt >/tmp/constraints.txt \
    && mkdir megatron_ext tools examples && touch megatron_ext/__init__.py tools/__init__.py \
    && PIP_CONSTRAINT='' pip install --no-cache-dir --constraint /tmp/constraints.txt --editable '.[test]' \
    && python docker/constraints.py --verify /tmp/constraints.txt
COPY --chown=trainer . .
RUN chown trainer .
USER 10001
CMD ["python", "tools/environment.py"]
