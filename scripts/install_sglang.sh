#!/usr/bin/env bash
# Make a virtual environment with SGLang for machines without a GPU, and kvtide in it (editable).
#
#   scripts/install_sglang.sh VERSION VENV     e.g.  scripts/install_sglang.sh 0.5.20 .venvs/sglang-0.5.20
#
# SGLang has no wheel for a CPU: tests/engines/sglang_engine/cpu stands in for sgl-kernel's CPU build (torch
# versions of the few names that SGLANG_USE_CPU_ENGINE=1 needs) and makes PyPI's torchvision import
# beside a CPU torch. Python: $PYTHON, default python3. Runs again in no time where nothing changed.
set -euo pipefail

version=${1:?VERSION of sglang, such as 0.5.20}
venv=${2:?VENV, the directory of the environment}
root=$(cd "$(dirname "$0")/.." && pwd)
torch=2.13.0
torch_index=https://download.pytorch.org/whl/cpu
case $version in
0.5.20) pins='transformers==5.12.1 tokenizers==0.22.2 xgrammar==0.2.1 openai==2.6.1' ;;
0.5.23) pins='transformers==5.19.0 tokenizers==0.23.2 xgrammar==0.2.7 openai==2.8.0' ;;
*) echo "install_sglang: known are 0.5.20 and 0.5.23, not $version" >&2 && exit 2 ;;
esac

inputs=$(cat "$0" "$root/pyproject.toml" "$root"/tests/engines/sglang_engine/cpu/*.p* \
    "$root"/tests/engines/sglang_engine/cpu/sgl_kernel/*.py | sha256sum | cut -c1-16)
stamp="sglang $version, torch $torch, $root, $inputs"
if [ "$(cat "$venv/.done" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

say() { printf '%s\n' "install_sglang: $*" >&2; }
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

if ! "$venv/bin/python" -c "import importlib.metadata as m; assert m.version('sglang') == '$version'" \
    2>/dev/null; then
    say "installing sglang $version and torch $torch into $venv (3.5 GB, some minutes)"
    index=()
    # The CPU build: from PyTorch's own index where the configured ones have another.
    if ! pip install "torch==$torch+cpu"; then
        index=(--extra-index-url "$torch_index")
        pip install "${index[@]}" "torch==$torch+cpu"
    fi
    # shellcheck disable=SC2086 # the pins are words
    pip install ${index[@]+"${index[@]}"} $pins aiohttp 'anthropic>=0.20.0' apache-tvm-ffi==0.1.11 \
        blobfile==3.0.0 compressed-tensors==0.18.0 datasets distro easydict einops fastapi gguf \
        interegular IPython 'kernels<0.15,>=0.14.1' 'llguidance<2.0.0,>=1.7.6' mistral_common \
        modelscope msgspec ninja numba==0.65.1 nvidia-ml-py openai-harmony==0.0.4 orjson \
        outlines==0.1.11 packaging partial_json_parser pillow 'prometheus-client>=0.20.0' psutil \
        py-spy pybase64 pydantic python-multipart 'pyzmq>=25.1.2' requests scipy sentencepiece \
        setproctitle soundfile==0.13.1 tiktoken tqdm uvicorn uvloop watchfiles xxhash zstandard
    pip install --no-deps "sglang==$version" torchvision==0.28.0
fi

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$root"/tests/engines/sglang_engine/cpu/* "$site"/

say "installing kvtide from $root"
pip install --editable "$root" "pytest>=8.3" "pytest-timeout>=2.3"
"$venv/bin/python" -c 'import kvtide, sgl_kernel, sglang' >/dev/null
printf '%s\n' "$stamp" >"$venv/.done"
say "done: $venv"
