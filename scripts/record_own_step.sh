#!/usr/bin/env bash
# Records what docs/walkthrough.md is made of: `advise --verify` for the examples, then the page.
#
#   scripts/record_own_step.sh cpu     the slow example, in small: about ten minutes
#   scripts/record_own_step.sh h200    all three, and a step that is tuned already: about 20 minutes
#
# Words after the machine are the examples to record, all if there are none.
set -euo pipefail
cd "$(dirname "$0")/.."
machine=${1:?cpu or h200}
shift
python=${PYTHON:-.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

record() { # NAME SCRIPT WORDS...
    local name=$1
    shift
    echo "== $name"
    STEPSCOPE_OUT="$scratch/$name" "$python" -m stepscope advise --verify "$@"
    STEPSCOPE_OUT="$scratch/$name" "$python" -m stepscope export latest --digits 6 \
        --to "results/advise-${name}_$machine.jsonl"
}

wanted() { [ $# -eq 1 ] || [[ " ${*:2} " == *" $1 "* ]]; }

if [ "$machine" = cpu ]; then
    record slow --rounds 10 examples/slow.py --steps 2000 --batch 2
else
    gpu=(--device cuda --steps 2000)
    wanted slow "$@" && record slow examples/slow.py "${gpu[@]}" \
        --layers 12 --width 768 --heads 12 --context 512 --batch 8
    wanted nano_gpt "$@" && record nano_gpt examples/nano_gpt.py "${gpu[@]}" \
        --layers 12 --width 768 --heads 12 --context 1024 --batch 8
    wanted vit "$@" && record vit examples/vit.py "${gpu[@]}" \
        --layers 12 --width 768 --heads 12 --image 224 --patch 16 --batch 64
    wanted tuned "$@" && record tuned examples/nano_gpt.py "${gpu[@]}" \
        --layers 12 --width 768 --heads 12 --context 1024 --batch 16 --compile
fi
"$python" scripts/make_docs.py
