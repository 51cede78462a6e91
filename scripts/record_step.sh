#!/usr/bin/env bash
# Records the data of docs/results/step.md and docs/results/compile.md on one H200, part by part.
#
#   scripts/record_step.sh race-512 pieces      two parts
#   scripts/record_step.sh                      all parts: about an hour
#
#   race-512    xl, 2.7b and small at context 512 (11 min, most of it compilation)
#   race-2048   2.7b and xl at context 2048 (12 min)
#   race-long   8b at 32,768 tokens (5 min)
#   loss        300 steps of every rung, three seeds in parallel (4 min)
#   ladder      small: each change alone and on top of the others, waterfalls (2 min)
#   ladder-xl   xl: each change on top of the others, waterfalls (4 min)
#   compile     torch.compile against eager: small, by block and full model (2 min)
#   compile-by  the same by size in bf16 and in fp32, attention alone, small by mode (4 + 4 + 3 + 3 min)
#   pieces      our kernels alone against eager and torch.compile (4 min)
#   energy      the energy of our step by part (4 min)
#   tuned       2.7b at context 512 against max-autotune by block (4 min)
#
# Races, energy, compile-by and loss accept names after a colon, to record only these:
# race-512:xl-512,small-512; compile-by:fp32;
# loss:low-precision-grads,narrow-stream only trains these rungs, each with all rungs below it.
#
#   RESULTS     folder of the records (results); each part has a file until all are concatenated
#   WORK        folder of intermediate files (stepscope-out/step)
set -uo pipefail
cd "$(dirname "$0")/.."
export STEPSCOPE_STUDIES=step_race,step_loss PYTHONPATH=benchmarks
python=${PYTHON:-.venv/bin/python}
results=${RESULTS:-results}
work=${WORK:-stepscope-out/step}
mkdir -p "$results" "$work"
# Compiling a full model takes minutes: it is done with one attention, the one that is faster by
# block, and with CUDA graphs where launches leave gaps, which is at context 512.
forms=('baseline: block' 'backward graph' 'low-memory')

run() { # FOLDER SECONDS ARGUMENTS...
    rm -rf "${work:?}/$1"
    timeout --signal=INT --kill-after=20 "$2" \
        "$python" -m stepscope run "${@:3}" --no-report --out "$work/$1"
}

keep() { # FILE FOLDER...: concatenate the newest runs of these folders
    : > "$work/$1.part"
    for folder in "${@:2}"; do
        "$python" -m stepscope export latest --out "$work/$folder" --digits 6 --to "$work/part.jsonl" \
            && cat "$work/part.jsonl" >> "$work/$1.part"
    done
    if [ -s "$work/$1.part" ]; then
        mv "$work/$1.part" "$results/$1.jsonl"
    else
        echo "== $1: nothing was recorded" >&2
        missing=yes
    fi
}

race() { # RACE MODE: mode of the fully compiled model, which is tried last
    run "$1" 480 step-race --race "$1" --heat-seconds 170 --form-seconds 150 --min-seconds 6 \
        --forms "${forms[@]}" "baseline: model $2 sdpa_cudnn"
    keep "race-$1" "$1"
}

part() { # NAME, or NAME:SOME,NAMES
    local only=""
    [[ $1 != *:* ]] || only=${1#*:}
    only=${only//,/ }
    case ${1%%:*} in
    race-512)
        for name in ${only:-xl-512 2.7b-512 small-512}; do
            race "$name" reduce-overhead
        done
        ;;
    race-2048)
        for name in ${only:-2.7b-2048 xl-2048}; do
            race "$name" default
        done
        ;;
    race-long)
        run 8b 360 step-race --race 8b-32768 --scopes block --modes default --rounds 3 --blocks 2
        keep race-long 8b
        ;;
    loss)
        for seed in 0 1 2; do
            # shellcheck disable=SC2086 # several names
            run "loss-$seed" 400 step-loss --seeds "$seed" ${only:+--only $only} \
                > "$work/loss-$seed.txt" 2>&1 &
        done
        wait
        keep loss-all loss-0 loss-1 loss-2
        ;;
    ladder)
        run ladder 240 step --part ladder waterfall
        keep step-ladder ladder
        ;;
    ladder-xl)
        run ladder-xl 300 step --part ladder waterfall --size xl --how 'so far'
        keep step-ladder-xl ladder-xl
        ;;
    compile)
        run compile 300 compile --part trace model --dtype bfloat16 --attention auto
        keep compile-small compile
        ;;
    compile-by)
        for name in ${only:-bf16 fp32 attention modes}; do
            case $name in
            bf16) words='--part model --compile block --size medium large xl 2.7b --dtype bfloat16 --attention auto' ;;
            fp32) words='--part model --compile block --size small large 2.7b' ;;
            modes) words='--part model --compile block --compile-mode reduce-overhead max-autotune --dtype bfloat16 --attention auto' ;;
            attention) words='--part attention --head-dim 64 128 --attention-context 1024 4096 16384' ;;
            *)
                echo "$name is not a part of compile-by" >&2
                exit 2
                ;;
            esac
            # shellcheck disable=SC2086 # several words
            run "compile-$name" 270 compile $words
            keep "compile-$name" "compile-$name"
        done
        ;;
    pieces)
        timeout --signal=INT --kill-after=20 300 \
            "$python" benchmarks/fused_pieces.py --out "$results/pieces_h200.jsonl"
        ;;
    energy)
        timeout --signal=INT --kill-after=20 420 "$python" benchmarks/energy_by_part.py \
            ${only:-xl-512 2.7b-512 xl-2048 2.7b-2048} --out "$results/energy-by-part_h200.jsonl"
        ;;
    tuned)
        run tuned 400 step-race --race 2.7b-512 --modes reduce-overhead max-autotune \
            --attentions sdpa_cudnn --form-seconds 250 --heat-seconds 300 --min-seconds 6 \
            --forms 'baseline: block' 'stepscope: eager auto fused projections optimizer-in-backward graph'
        keep race-tuned tuned
        ;;
    *)
        echo "$1 is not a part" >&2
        exit 2
        ;;
    esac
}

missing=""
parts=("$@")
[ $# -gt 0 ] || parts=(race-512 race-2048 race-long loss ladder ladder-xl compile compile-by pieces energy tuned)
for one in "${parts[@]}"; do
    echo "== $one"
    part "$one"
done
if [ $# -eq 0 ] && [ -n "$missing" ]; then
    echo "== not concatenated: a part is missing; record it, then concatenate the files of $results" >&2
    exit 1
elif [ $# -eq 0 ]; then
    rm -f "$results"/step-*_h200.jsonl
    for study in step race loss compile; do
        cat "$results/$study"-*.jsonl > "$work/$study.jsonl" && rm "$results/$study"-*.jsonl
    done
    mv "$work/step.jsonl" "$results/step_h200.jsonl"
    mv "$work/race.jsonl" "$results/step-race_h200.jsonl"
    mv "$work/loss.jsonl" "$results/step-loss_h200.jsonl"
    mv "$work/compile.jsonl" "$results/compile_h200.jsonl"
    "$python" scripts/make_docs.py
fi
