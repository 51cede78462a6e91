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
rm -rf "$out/runs"
mkdir -p "$out/runs"
git worktree add --quiet --force --detach "$base" "$commit"
trap 'git worktree remove --force "$base"' EXIT

record() { # SIDE ROUND FOLDER SCRIPT [ARGUMENTS ...]
  local run=$out/runs/$1-$2 folder=$3
  shift 3
  # Packages of the commit itself, not those that are installed.
  if ! (cd "$folder" && PYTHONPATH="$folder:$folder/src${PYTHONPATH:+:$PYTHONPATH}" \
    stepscope inspect --stop --no-memory --steps "${STEPS:-20}" --traced 1 --page "$run.html" "$@") \
    >"$run.log" 2>&1 || [[ ! -e $run.jsonl ]]; then
    echo "the script failed, or no step was recorded: $run.log" >&2
    tail -n 20 "$run.log" >&2
    exit 1
  fi
}

for ((round = 1; round <= ${ROUNDS:-8}; round++)); do
  echo "round $round of ${ROUNDS:-8}" >&2
  if ((round % 2)); then
    record base "$round" "$base" "$@"
    record new "$round" "$new" "$@"
  else
    record new "$round" "$new" "$@"
    record base "$round" "$base" "$@"
  fi
done

cat "$out"/runs/base-*.jsonl >"$out/base.jsonl"
cat "$out"/runs/new-*.jsonl >"$out/new.jsonl"
code=0
stepscope compare "$out/base.jsonl" "$out/new.jsonl" --markdown --fail-above "${LIMIT:-5%}" \
  >"$out/comment.md" || code=$?
cat "$out/comment.md"
exit "$code"
