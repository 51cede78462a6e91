"""Problems about several devices: collectives, data parallelism, sharding, accounting."""

from __future__ import annotations

from stepscope.analysis.accounting import CALCULATIONS
from stepscope.studies.course.problem import Edition, Filter, Part, Problem, Show

_TWO: Filter = {"ranks": (2,)}
_2025: tuple[Edition, ...] = ("2025",)
_2026: tuple[Edition, ...] = ("2026",)


def _ddp(
    *findings: str, blocks: tuple[str, ...] = ("ddp-steps",), strategies: tuple[str, ...] = ()
) -> Show:
    return Show(
        "data parallel",
        findings,
        blocks,
        only=_TWO,
        committed={"dtype": ("float32",)},
        strategies=strategies,
    )


def _calculated(name: str, editions: tuple[Edition, ...] = _2026) -> Problem:
    """A problem of arithmetic alone: its questions and answers are those of the calculation."""
    calculation = CALCULATIONS[name]
    lettered = [one for one in calculation.worked().answers if len(one.part) == 1]
    parts = (
        Part(one.question, label=one.part if len(lettered) > 1 else "", calculation=one.part)
        for one in lettered
    )
    return Problem(name, calculation.title, tuple(parts), editions)


DISTRIBUTED_COMMUNICATION = Problem(
    "distributed_communication_single_node",
    "All-reduce on one node",
    (
        Part(
            "How long does an all-reduce take by message size and number of processes, and how do"
            " the two interact?",
            (
                Show(
                    "collectives",
                    (
                        "allreduce.by-size",
                        "allreduce.link",
                        "allreduce.by-ranks",
                        "allreduce.wrong-elements",
                    ),
                    ("allreduce-times", "allreduce-bandwidth", "allreduce-links"),
                    only={"collective": ("all-reduce",)},
                    committed=_TWO,
                ),
            ),
        ),
    ),
)

NAIVE_DDP = Problem(
    "naive_ddp",
    "Naive data parallelism",
    (
        Part(
            "Does averaging each gradient after the backward pass train to the weights of one"
            " process?",
            (_ddp("ddp.correct", blocks=("ddp-steps",)),),
            code='stepscope.parallel.DDP(module, strategy="naive")',
        ),
    ),
)

NAIVE_DDP_BENCHMARKING = Problem(
    "naive_ddp_benchmarking",
    "Cost of naive data parallelism",
    (
        Part(
            "How long is a step of naive data parallelism on two ranks, and which part of it is"
            " communication?",
            (_ddp(blocks=("ddp-steps", "ddp-phases"), strategies=("naive",)),),
        ),
    ),
)

FLAT = Problem(
    "minimal_ddp_flat_benchmarking",
    "One all-reduce for all gradients",
    (
        Part(
            "How long is a step if all gradients are averaged in one call, compared with a call for"
            " each?",
            (_ddp(strategies=("naive", "flat")),),
        ),
    ),
)

OVERLAP = Problem(
    "ddp_overlap_individual_parameters",
    "Averaging during the backward pass",
    (
        Part(
            "Does averaging each gradient as soon as it is ready, while the backward pass goes on,"
            " train to the weights of one process?",
            (_ddp("ddp.correct", "ddp.against-torch", blocks=()),),
            code='stepscope.parallel.DDP(module, strategy="overlap")',
        ),
    ),
)

OVERLAP_BENCHMARKING = Problem(
    "ddp_overlap_individual_parameters_benchmarking",
    "Gain of overlapping communication",
    (
        Part(
            "How long is a step that overlaps single gradients with the backward pass, compared"
            " with the two that do not overlap?",
            (_ddp(strategies=("naive", "flat", "overlap")),),
            label="a",
        ),
        Part(
            "Where do the reductions lie in a timeline of the naive and of the overlapped step?",
            (_ddp("ddp.hidden", blocks=("ddp-timeline",)),),
            label="b",
            command="stepscope profile-nsys --size xl --context 128 --ranks 2",
        ),
    ),
)

BUCKETED = Problem(
    "ddp_overlap_bucketed",
    "Averaging in buckets",
    (
        Part(
            "Does averaging buckets of at most a given size, each as soon as it is complete, train"
            " to the weights of one process?",
            (_ddp("ddp.correct", "ddp.against-torch", blocks=()),),
            code='stepscope.parallel.DDP(module, strategy="bucketed", bucket_mb=25)',
        ),
    ),
    _2025,
)

BUCKETED_BENCHMARKING = Problem(
    "ddp_bucketed_benchmarking",
    "Bucket sizes",
    (
        Part(
            "How long is a step with buckets of 1, 10, 100 and 1000 MB, and is that what one"
            " expects?",
            (
                _ddp(
                    "ddp.fastest",
                    strategies=("overlap", *(f"bucketed {mb} MiB" for mb in (1, 10, 100, 1000))),
                ),
            ),
            label="a",
        ),
        Part(
            "Which overhead do buckets add to a step, by their number, the bandwidth and the"
            " overhead of a call, and which bucket size has the least?",
            (_ddp("ddp.buckets", blocks=("ddp-buckets",)),),
            label="b",
            calculation="b",
        ),
    ),
    _2025,
)

OPTIMIZER_SHARDING = Problem(
    "optimizer_state_sharding",
    "Sharded optimizer",
    (
        Part(
            "Does an optimizer that updates a share of the parameters on each rank, then sends them"
            " to the others, leave the same weights as one that updates all?",
            (
                Show(
                    "sharded optimizer",
                    ("sharding.correct", "sharding.share", "sharding.against-torch"),
                    ("sharding-ways",),
                    committed=_TWO,
                ),
            ),
            code="stepscope.parallel.ShardedOptimizer(params, optimizer_cls, **options)",
        ),
    ),
)

OPTIMIZER_SHARDING_ACCOUNTING = Problem(
    "optimizer_state_sharding_accounting",
    "Memory and time of a sharded optimizer",
    (
        Part(
            "How much memory is in use after the model is built, before and after the optimizer's"
            " step, with and without sharding, and what is it?",
            (
                Show(
                    "sharded optimizer",
                    ("sharding.moments", "sharding.counters", "sharding.share"),
                    ("sharding-moments", "sharding-stations", "sharding-memory"),
                    committed=_TWO,
                ),
            ),
            label="a",
            calculation="a",
        ),
        Part(
            "How long is a step with and without sharding?",
            (
                Show(
                    "sharded optimizer",
                    ("sharding.against-torch",),
                    ("sharding-ways",),
                    committed=_TWO,
                    strategies=("unsharded", "broadcast"),
                ),
            ),
            label="b",
        ),
        Part(
            "How does this sharding differ from the first stage of ZeRO, in memory and in bytes"
            " sent?",
            (
                Show(
                    "sharded optimizer", ("sharding.stage-1",), ("sharding-stages",), committed=_TWO
                ),
            ),
            label="c",
            calculation="c",
        ),
    ),
)

FSDP = Problem(
    "fsdp",
    "Fully sharded data parallelism",
    (
        Part(
            "Does sharding weights, gradients and optimizer state among the ranks train to the"
            " weights of one process, and what is stored on each rank?",
            (
                Show(
                    "fully sharded",
                    ("fsdp.correct", "fsdp.share", "fsdp.against-torch"),
                    ("fsdp-ways", "fsdp-memory"),
                    committed=_TWO,
                ),
                # Two ranks average the gradients of two half batches.
                Show("half batches", ("accumulation.half-batches",), only={"part": ("halves",)}),
            ),
            code="stepscope.parallel.FSDP(module, compute_dtype=None)",
        ),
    ),
    _2026,
)

FSDP_ACCOUNTING = Problem(
    "fsdp_accounting",
    "Memory and overlap of FSDP",
    (
        Part(
            "How much lower is the peak than with a sharded optimizer alone, without the buffers of"
            " gathered weights?",
            (
                Show(
                    "fully sharded",
                    ("fsdp.share", "fsdp.counters"),
                    ("fsdp-memory", "fsdp-stations"),
                    committed=_TWO,
                ),
            ),
            label="a",
            calculation="a",
        ),
        Part(
            "Are the weights of each layer gathered in time for its forward pass?",
            (
                Show(
                    "fully sharded",
                    ("fsdp.in-time", "fsdp.late", "fsdp.gathers"),
                    ("fsdp-timeline", "fsdp-gathers"),
                    committed=_TWO,
                ),
            ),
            label="b",
            calculation="b",
        ),
    ),
    _2026,
)

LEADERBOARD = Problem(
    "leaderboard",
    "The fastest training step",
    (
        Part(
            "How long is a full step of the 8B model (context 32,768, batch 2, AdamW), and does the"
            " run finish within ten minutes from empty caches?",
            (
                Show(
                    "leaderboard",
                    ("leaderboard.step", "leaderboard.total", "leaderboard.missing"),
                    ("leaderboard-parts",),
                ),
                Show(
                    "training race",
                    (
                        "step.race-faster",
                        "step.race-no-difference",
                        "step.race-slower",
                    ),
                    ("step-speed",),
                    committed={"race": ("8b-32768",)},
                ),
            ),
            editions=_2026,
            command="stepscope run leaderboard",
        ),
        Part(
            "How long do forward and backward pass of causal attention take in bfloat16 for 16"
            " heads of 64 and 16,384 tokens?",
            (
                Show(
                    "attention race",
                    ("flash.leaderboard-shape", "flash.against-baseline"),
                    ("flash-race", "flash-speed"),
                    committed={"batch": (1,), "heads": (16,), "seq": (16384,), "head": (64,)},
                ),
            ),
            editions=_2025,
        ),
    ),
    _2026,
    sections=_2025,
)

PROBLEMS = (
    DISTRIBUTED_COMMUNICATION,
    NAIVE_DDP,
    NAIVE_DDP_BENCHMARKING,
    FLAT,
    OVERLAP,
    OVERLAP_BENCHMARKING,
    BUCKETED,
    BUCKETED_BENCHMARKING,
    _calculated("communication_accounting", _2025),
    OPTIMIZER_SHARDING,
    OPTIMIZER_SHARDING_ACCOUNTING,
    FSDP,
    FSDP_ACCOUNTING,
    *(
        _calculated(name)
        for name in (
            "alternate_ring_all_reduce",
            "data_parallel_calcs",
            "fsdp_calcs",
            "tp_calcs",
            "fsdp_tp_calcs",
        )
    ),
    LEADERBOARD,
)
