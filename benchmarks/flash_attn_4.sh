#!/usr/bin/env bash
# Carry FlashAttention 4 to a machine without a network, in pieces of at most 50 MiB:
#   benchmarks/flash_attn_4.sh fetch FOLDER          download the wheels of docker/flash-attn-4.lock for Python 3.12
#   benchmarks/flash_attn_4.sh compile FOLDER        beforehand, without a GPU: the kernels that benchmarks/gpu.sh calls on
#                                                    an H100 or H200, for Python 3.12, with FlashAttention 4 of the same
#                                                    version in the Python that runs this (-e '.[fa4]'): 6 minutes
#   benchmarks/flash_attn_4.sh install FOLDER SITE   there: join the pieces, install into SITE, print what to export
set -euo pipefail
lock=$(dirname "$0")/../docker/flash-attn-4.lock
PYTHON=${PYTHON:-python3}

case ${1:-} in
  fetch)
    folder=${2:?FOLDER is needed}
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    "$PYTHON" -m pip download --quiet --no-deps --require-hashes --requirement "$lock" --dest "$wheels" \
      --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --only-binary :all:
    mkdir -p "$folder"
    rm -f "$folder"/wheels.tar.*
    tar --create --directory "$wheels" . | split --bytes 50M - "$folder/wheels.tar."
    ls -l "$folder"
    ;;
  compile)
    root=$(realpath "$(dirname "$0")/..")
    mkdir -p "${2:?FOLDER is needed}/kernels"
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" FOR_PYTHON=3.12 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR="$2/kernels" \
      "$PYTHON" "$root/tests/attention/compile_flash_attn_4.py" 90
    ;;
  install)
    site=${3:?FOLDER and SITE are needed}
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    cat "$2"/wheels.tar.* | tar --extract --directory "$wheels"
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl
    # pip --target does not process the .pth file that would add the second folder
    echo "export PYTHONPATH=$site:$site/nvidia_cutlass_dsl/dsl_packages:\$PWD" \
      "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=$(realpath "$2")/kernels"
    ;;
  *) sed -n '2,7s/^# //p' "$0" >&2; exit 2 ;;
esac
