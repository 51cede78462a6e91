#!/usr/bin/env bash
# Compare the training step of the working tree with that of another commit, on this machine.
#
#   examples/ci/compare_commits.sh BASE train.py --batch-size 8
#
# Runs of both commits alternate, so that a change of the machine (clock, temperature, other work)
# affects both. Each run is one sample: the median of its steps. Writes OUT/comment.md. Exit codes
# are those of `stepscope compare --fail-above`: 3 for a slowdown, 4 if it cannot tell; 1 if the
# script fails.
#
#   ROUNDS  runs of each commit; with fewer than 7 no difference can be shown   (8)
#   BUDGET  seconds for all rounds; one that would end later is not started     (600)
#   STEPS   timed steps of each run                                             (20)
#   LIMIT   slowdown of the median that fails                                   (5%)
#   OUT     directory of the pages, logs and records                            (stepscope-ci)
set -euo pipefail

if (($# < 2)); then
  echo "usage: $0 BASE SCRIPT [ARGUMENTS ...]" >&2
  exit 2
fi
commit=$1
shift
new=$PWD
out=$(realpath -m "${OUT:-stepscope-ci}")
base=$out/base
rm -rf "$out/runs" "$out/store"
mkdir -p "$out/runs"
git worktree add --quiet --force --detach "$base" "$commit"
trap 'git worktree remove --force "$base"' EXIT

record() { # SIDE ROUND FOLDER SCRIPT [ARGUMENTS ...]
  local run=$out/runs/$1-$2 folder=$3
  shift 3
  # Packages of the commit itself, not those that are installed.
  if ! (cd "$folder" && PYTHONPATH="$folder:$folder/src${PYTHONPATH:+:$PYTHONPATH}" \
    stepscope inspect --stop-early --no-memory --steps "${STEPS:-20}" \
    --profiled-steps 1 --out "$out/store" --page "$run.html" "$@") \
    >"$run.log" 2>&1 || [[ ! -e $run.jsonl ]]; then
    echo "the script failed, or no step was recorded: $run.log" >&2
    tail -n 20 "$run.log" >&2
    exit 1
  fi
}

rounds=${ROUNDS:-8} budget=${BUDGET:-600} longest=0
SECONDS=0
for ((round = 1; round <= rounds; round++)); do
  begun=$SECONDS
  if ((begun + longest > budget)); then
    echo "$((round - 1)) of $rounds rounds fit into BUDGET=$budget seconds; one takes $longest" >&2
    break
  fi
  echo "round $round of $rounds" >&2
  if ((round % 2)); then
    record base "$round" "$base" "$@"
    record new "$round" "$new" "$@"
  else
    record new "$round" "$new" "$@"
    record base "$round" "$base" "$@"
  fi
  ((SECONDS - begun <= longest)) || longest=$((SECONDS - begun))
done

cat "$out"/runs/base-*.jsonl >"$out/base.jsonl"
cat "$out"/runs/new-*.jsonl >"$out/new.jsonl"
code=0
stepscope compare "$out/base.jsonl" "$out/new.jsonl" --markdown --fail-above "${LIMIT:-5%}" \
  >"$out/comment.md" || code=$?
cat "$out/comment.md"
exit "$code"
