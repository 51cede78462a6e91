#!/bin/sh
# Run the studies on several ranks and write results/parallel_MACHINE.jsonl, for the page in docs/.
#   scripts/record_parallel.sh cpu     about three minutes on 2 cores; nothing else should run
#   scripts/record_parallel.sh h200    NCCL at one rank, gloo between two ranks that share the GPU
set -eu
cd "$(dirname "$0")/.."
machine=${1:?cpu or h200}
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT

record() {
    # Status 1: a case failed, which its record reports.
    stepscope run "$@" --out "$out" || [ $? -eq 1 ]
    stepscope export latest --out "$out" --digits 6 --to "$out/part.jsonl"
    cat "$out/part.jsonl" >> "$out/all.jsonl"
}

case $machine in
cpu)
    collectives='all-reduce all-gather reduce-scatter broadcast'
    record allreduce --device cpu --ranks 2 3 4 --collective $collectives \
        --sizes 1024 16384 262144 4194304 67108864
    record ddp --device cpu --size tiny --context 32 --ranks 2 4 --bucket-mb 1 10 --rounds 12
    record sharding --device cpu --size tiny --context 32 --ranks 2 4
    record fsdp --device cpu --size tiny --context 32 --ranks 2 4
    record rehearsal --device cpu --size tiny --context 16 --batch 1
    export STEPSCOPE_STUDIES=rehearsal_check PYTHONPATH=benchmarks
    record rehearsal-check --device cpu --size tiny --context 16 --batch 1 --ranks 2 4 \
        --bucket-mb 1 4 --rounds 15 --compute waits
    ;;
h200)
    for study in allreduce ddp sharding fsdp; do
        record "$study" --preset h200
    done
    ;;
*)
    echo "cpu or h200, not $machine" >&2
    exit 2
    ;;
esac
mv "$out/all.jsonl" "results/parallel_$machine.jsonl"
