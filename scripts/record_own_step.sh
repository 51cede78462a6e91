#!/usr/bin/env bash
# Records the data of docs/results/walkthrough.md: `advise --verify` for the examples, then the page.
#
#   scripts/record_own_step.sh cpu     the slow example at a small size: about ten minutes
#   scripts/record_own_step.sh h200    all three, and a tuned step: at most 18 minutes
#
# Arguments after the machine are the examples to record, all if there are none. Each has a time
# budget for its trials; changes with the largest predicted gain come first, and the time for the
# trial of all kept changes together is reserved. Before the trials some steps are recorded, and the
# ceilings of a machine are measured once:
#
#              steps    ceilings   trials     total, on an H200 with a slow host
#   slow       15 s     50 s       280 s      at most 6 minutes
#   nano_gpt   15 s                170 s      at most 4 minutes
#   vit        15 s                260 s      at most 6 minutes
#   tuned      35 s                 30 s      at most 2 minutes, most of it the compiler
#
# A kill loses the running trial, which is at most 140 s of work; every trial before it is in
# WORK, and after SIGTERM or Ctrl-C also in RESULTS. With the same WORK a second call resumes
# where the first ended, with the full time budget.
#
#   RESULTS    folder of the records (results)
#   WORK       folder of intermediate files (stepscope-out/own-step)
set -euo pipefail
cd "$(dirname "$0")/.."
machine=${1:?cpu or h200}
shift
python=${PYTHON:-.venv/bin/python}
results=${RESULTS:-results}
work=${WORK:-stepscope-out/own-step}
mkdir -p "$results" "$work"

record() { # NAME SECONDS ARGUMENTS...
    local name=$1 within=$2 status=0
    shift 2
    echo "== $name: $within s for its trials"
    # Timeout of the command: start-up, the first recording and the ceilings come on top.
    STEPSCOPE_OUT="$work/$name" timeout --signal=TERM --kill-after=20 $((within + 150)) \
        "$python" -m stepscope advise --verify --resume --total-timeout "$within" "$@" || status=$?
    STEPSCOPE_OUT="$work/$name" "$python" -m stepscope export latest --digits 6 \
        --to "$results/advise-${name}_$machine.jsonl" || true
    [ $status -eq 0 ] || echo "== $name ended with status $status; earlier trials are kept" >&2
}

wanted() { [ $# -eq 1 ] || [[ " ${*:2} " == *" $1 "* ]]; }

if [ "$machine" = cpu ]; then
    record slow 1200 --rounds 10 examples/slow.py --steps 2000 --batch 2
else
    ours=(--rounds 11 --timeout 140)
    gpu=(--device cuda --steps 2000)
    large=(--layers 12 --width 768 --heads 12)
    wanted slow "$@" && record slow 280 "${ours[@]}" examples/slow.py "${gpu[@]}" "${large[@]}" \
        --context 512 --batch 32
    wanted nano_gpt "$@" && record nano_gpt 170 "${ours[@]}" examples/nano_gpt.py "${gpu[@]}" \
        "${large[@]}" --context 1024 --batch 32
    # Eight workers create the batches: a single worker on this host takes 90 to 170 ms per batch.
    wanted vit "$@" && record vit 260 "${ours[@]}" examples/vit.py "${gpu[@]}" "${large[@]}" \
        --image 224 --patch 16 --batch 64 --workers 8
    wanted tuned "$@" && record tuned 30 "${ours[@]}" examples/nano_gpt.py "${gpu[@]}" \
        "${large[@]}" --context 1024 --batch 16 --compile
fi
[ "$results" != results ] || "$python" scripts/make_docs.py
