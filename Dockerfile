# Two images from one file:
#   docker build --tag megatron_ext .                     for GPUs, on NVIDIA's PyTorch image
#   docker build --target cpu --tag megatron_ext:cpu .    for laptops and CI
# `make docker-digests` asks the registries for the digests of these tags, which are those of all platforms. NVIDIA's image
# has Python 3.12, torch 2.13 and CUDA 13; its Transformer Engine must be in the range of the extra `gpu`, its numpy 2.0 or
# later, and docker/flash-attn-4.lock is for linux/amd64.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3@sha256:43c018d6a12963f1a1bad85ef8574b5c2a978eec2be0ebcacfb87f69e0d210e1
ARG CPU_IMAGE=python:3.13.16-slim-bookworm@sha256:a1165e272e578941b84abc79e4ab38a0305cd12803a5c4247979ac7655f4d641

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
# NVIDIA's image sets 1: products in fp32 would then have 10 bits.
ENV TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0
RUN useradd --create-home --uid 10001 trainer
WORKDIR /opt/megatron_ext
COPY pyproject.toml setup.py requirements.lock README.md LICENSE ./
COPY docker/missing.py docker/flash-attn-4.lock docker/
# The image's torch, Transformer Engine, flash-attn and Apex were built for each other: nothing of these is replaced. The
# locks give what is missing, FlashAttention 4 and newer ones of its companions included, and the last line of this step
# and of the next one fail where an installed version is not good enough.
# hadolint ignore=DL3013,DL3042
RUN python docker/missing.py requirements.lock docker/flash-attn-4.lock >/tmp/missing.lock \
    && mkdir megatron_ext tools examples && touch megatron_ext/__init__.py tools/__init__.py \
    && export PIP_CONSTRAINT='' \
    && pip install --no-cache-dir --require-hashes --no-deps --requirement /tmp/missing.lock \
    && pip install --no-cache-dir --no-deps --editable . \
    && pip install --no-index --dry-run 'megatron_ext[test]'
COPY --chown=trainer . .
# pip cannot check FlashAttention 4: its lock leaves out the libraries of CUDA 12, for which its compiler asks.
RUN chown trainer . \
    && python -c "import sys; from megatron_ext.attention import adapters; sys.exit(adapters.flash_attn_4_missing())"
USER 10001
CMD ["python", "tools/environment.py"]
