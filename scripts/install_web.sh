#!/usr/bin/env bash
# Make a virtual environment for the tests in tests/web: a browser, schemathesis, axe-core, promtool.
#
#   scripts/install_web.sh VENV          e.g.  scripts/install_web.sh .venvs/web
#
# What the system lacks (chromium, chromedriver, promtool, npm) is installed with apt-get where this
# runs as root on Debian, and named where it does not.
set -euo pipefail

venv=${1:?VENV, the directory of the environment}
root=$(cd "$(dirname "$0")/.." && pwd)

say() { printf '%s\n' "install_web: $*" >&2; }

packages=()
need() { command -v "$1" >/dev/null || packages+=("$2"); }
need chromium chromium
need chromedriver chromium-driver
need promtool prometheus
need npm npm
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "missing: ${packages[*]} (their names on Debian); install them first"
        exit 1
    fi
    say "installing ${packages[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "${packages[@]}" >/dev/null
fi

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[web]"
npm install --silent --no-fund --no-audit --prefix "$root/tests/web" --no-save axe-core@4
say "done: $venv"
