"""The leaderboard test of the 2026 assignment: a full training step of the 8B model.

    stepscope run leaderboard                                     # two GPUs
    stepscope run leaderboard --ranks 1                           # one GPU, half of the batch
    stepscope run leaderboard --size tiny --context 64 --device cpu

The full step, AdamW included, at context 32,768 with one sequence on each of two GPUs,
timed as the handout does: ten seconds of warm-up, then the mean over thirty. The caches of
torch.compile and Triton are empty folders, and the whole run has ten minutes, counted from
the start of the ranks. With a smaller model or fewer GPUs the same test runs, and its result says
what is missing.
"""

from __future__ import annotations

from stepscope.studies.base import Study
from stepscope.studies.leaderboard.cases import LeaderboardCase, LeaderboardFlags


class Leaderboard(Study[LeaderboardFlags, LeaderboardCase]):
    name = "leaderboard"
    title = "Leaderboard test"
    question = (
        "How long is a full training step of the 8B model on two GPUs, and is the run over within"
        " ten minutes from empty caches?"
    )
    examples = (
        "stepscope run leaderboard",
        "stepscope run leaderboard --ranks 1",
        "stepscope run leaderboard --size tiny --context 64 --vocab 512 --seconds 2"
        " --warmup-seconds 1",
    )
    flags = LeaderboardFlags
    case = LeaderboardCase
    fresh_process = True
    no_model = "it times the model of the assignment"

    def cases(self, flags: LeaderboardFlags) -> tuple[LeaderboardCase, ...]:
        return (*LeaderboardCase.combinations(flags, "ranks"),)


STUDY = Leaderboard()
