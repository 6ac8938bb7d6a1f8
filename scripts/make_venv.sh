#!/bin/sh
# Make a virtual environment at $1 with the newest suitable Python, or say in one line what is missing.
set -eu
venv=$1

for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$python; break; fi
done
if [ -z "${found:-}" ]; then
    echo "Python 3.11 or newer is needed: install one, or name it: make PYTHON=/path/to/python3" >&2
    exit 1
fi

trap 'rm -rf "$venv"' EXIT # half an environment would pass for a whole one
# Debian and Ubuntu ship ensurepip apart, in python3-venv. A pip outside can stand in for it.
if "$found" -c 'import ensurepip, venv' 2>/dev/null; then
    "$found" -m venv "$venv"
elif "$found" -m pip --version >/dev/null 2>&1 && "$found" -m venv --without-pip "$venv" 2>/dev/null; then
    "$found" -m pip --python "$venv/bin/python" install --quiet pip
else
    echo "$found cannot make virtual environments: sudo apt-get install python3-venv (Debian, Ubuntu)" >&2
    exit 1
fi

# Installing a dependency group takes pip 25.1.
"$venv/bin/python" -m pip install --quiet --upgrade "pip>=25.1"
trap - EXIT
