#!/bin/sh
# Install a wheel into an empty environment and use it as a new user would: `stepscope doctor`, and
# the snippet of the README.
#
#   scripts/try_wheel.sh DIRECTORY_OF_WHEEL PYTHON [PIP_OPTIONS ...]
set -eu
wheels=$(realpath "$1") python=$2 readme=$(realpath README.md)
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@" "$wheels"/stepscope-*.whl
# Not in the repository, whose files would hide what the wheel lacks.
cd "$folder"
sed -n '/^```python/,/^```/{/^```/d;p}' "$readme" >snippet.py
test -s snippet.py
PATH=$folder/venv/bin:$PATH
stepscope --version
stepscope doctor || test $? = 1
python snippet.py
echo "the wheel works in an empty environment"
