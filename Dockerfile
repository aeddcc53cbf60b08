# Two images from one file (README: "Containers"):
#   docker build --tag megatron_ext .                     for GPUs, on NVIDIA's PyTorch image
#   docker build --target cpu --tag megatron_ext:cpu .    for laptops and CI
# `make docker-digests` asks the registries for the digests of these tags. NVIDIA's is that of linux/amd64: for another
# platform give --build-arg BASE_IMAGE. Its Transformer Engine must be one that Megatron-Core 0.16 supports, 2.9 to 2.11.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.01-py3@sha256:38ed2ecb2c16d10677006d73fb0a150855d6ec81db8fc66e800b5ae92741007e
ARG CPU_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${CPU_IMAGE} AS cpu
# PyTorch's CPU wheels are a tenth of the size of pip's default: name their index here.
ARG PIP_EXTRA_INDEX_URL=
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trainer
WORKDIR /opt/megatron_ext
# The dependencies before the sources, so that a change of the sources keeps that layer. torch is another file on each
# index, so it is pinned by version; all else by checksum, as in `make setup`.
COPY pyproject.toml setup.py constraints.txt requirements.lock README.md LICENSE ./
RUN mkdir megatron_ext tools examples && touch megatron_ext/__init__.py tools/__init__.py \
    && pip install --no-cache-dir --constraint constraints.txt torch \
    && pip install --no-cache-dir --require-hashes --no-deps --requirement requirements.lock \
    && pip install --no-cache-dir --no-deps --editable .
COPY --chown=trainer . .
RUN chown trainer .
USER 10001
CMD ["python", "tools/environment.py"]

FROM ${BASE_IMAGE} AS gpu
RUN useradd --create-home --uid 10001 trainer
WORKDIR /opt/megatron_ext
COPY pyproject.toml setup.py requirements.lock README.md LICENSE ./
COPY docker/missing.py docker/flash-attn-4.lock docker/
# The image's torch, Transformer Engine, flash-attn and Apex were built for each other: nothing that is installed is
# replaced, the locks give what is missing, FlashAttention 4 included, and the last line fails where an installed version
# is not good enough.
# hadolint ignore=DL3013,DL3042
RUN cat requirements.lock docker/flash-attn-4.lock >/tmp/all.lock && python docker/missing.py /tmp/all.lock >/tmp/missing.lock \
    && mkdir megatron_ext tools examples && touch megatron_ext/__init__.py tools/__init__.py \
    && export PIP_CONSTRAINT='' \
    && pip install --no-cache-dir --require-hashes --no-deps --requirement /tmp/missing.lock \
    && pip install --no-cache-dir --no-deps --editable . \
    && pip install --no-index --dry-run 'megatron_ext[test]'
COPY --chown=trainer . .
RUN chown trainer .
USER 10001
CMD ["python", "tools/environment.py"]
