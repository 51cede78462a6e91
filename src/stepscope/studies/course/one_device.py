"""Problems about one device: timing, profiling, dtypes, memory, attention."""

from __future__ import annotations

from stepscope.studies.course.problem import Part, Problem, Show

_NAIVE = {"attention": ("reference",), "compile": ("no",), "optimizer": ("torch",)}
_TOY = {"subject": ("toy",)}
_MEMORY_THERE = {"size": ("2.7b",), "context": (128, 256, 512), "attention": ("reference",)}
_FLOAT32 = {"dtype": ("float32",)}
_BOTH = {"dtype": ("float32", "bfloat16")}
_FORWARD = {"mode": ("forward",)}
_NSYS = "stepscope profile-nsys --size small --context 512"

BENCHMARKING_SCRIPT = Problem(
    "benchmarking_script",
    "Timing a training step",
    (
        Part(
            "Which script times the forward pass, the backward pass and the optimizer of a model"
            " of any size, after warm-up steps, on an idle device?",
            (
                Show(
                    "steps",
                    ("benchmark.phases-sum",),
                    only=_FLOAT32,
                    committed=_NAIVE | {"context": (512,)},
                ),
            ),
            label="a",
            code="stepscope.studies.benchmark",
        ),
        Part(
            "How long do the forward pass, the backward pass and the optimizer take for each size,"
            " and how much do the samples vary?",
            (
                Show(
                    "steps",
                    ("benchmark.phase-times", "benchmark.backward-over-forward"),
                    ("benchmark-times", "benchmark-size"),
                    only=_FLOAT32,
                    committed=_NAIVE | {"context": (512,)},
                ),
            ),
            label="b",
        ),
        Part(
            "What changes without warm-up steps, or with only one or two of them, and why?",
            (
                Show(
                    "first steps",
                    (
                        "warmup.first-step",
                        "warmup.few-steps",
                        "warmup.steps-needed",
                        "warmup.steps-unknown",
                        "warmup.unlike-processes",
                    ),
                    ("warmup-curve", "warmup-steps"),
                ),
            ),
            label="c",
        ),
    ),
)

NSYS_PROFILE = Problem(
    "nsys_profile",
    "Kernels of a training step",
    (
        Part(
            "How long is the forward pass under the profiler, and does it agree with the timer?",
            (
                Show(
                    "traces",
                    ("profile.timer-agrees", "profile.timer-differs"),
                    ("profile-timer", "profile-sizes"),
                    only=_FLOAT32,
                    committed=_NAIVE,
                ),
            ),
            label="a",
            command=_NSYS,
        ),
        Part(
            "Which kernel takes the most time of a forward pass, how often does it run, and is it"
            " also the first with the backward pass?",
            (
                Show(
                    "traces",
                    ("profile.top-kernel",),
                    ("profile-top",),
                    only=_FLOAT32,
                    committed=_NAIVE,
                ),
            ),
            label="b",
        ),
        Part(
            "Which kernels other than matmuls take a share of the forward pass that matters?",
            (
                Show(
                    "traces",
                    ("profile.other-kernels",),
                    ("profile-others",),
                    only=_FLOAT32 | _FORWARD,
                    committed=_NAIVE,
                ),
            ),
            label="c",
        ),
        Part(
            "How does the share of matmuls change from inference to a full training step with"
            " AdamW, and what grows instead?",
            (
                Show(
                    "traces",
                    ("profile.matmul-share",),
                    ("profile-matmul", "profile-classes"),
                    only=_FLOAT32,
                    committed=_NAIVE,
                ),
            ),
            label="d",
        ),
        Part(
            "Within attention, how does the time of the softmax compare with that of the two"
            " matmuls, and how do their FLOPs compare?",
            (
                Show(
                    "traces",
                    ("profile.softmax",),
                    ("profile-softmax",),
                    only=_FLOAT32,
                    committed=_NAIVE,
                ),
            ),
            label="e",
        ),
    ),
)

ACCUMULATION = Problem(
    "mixed_precision_accumulation",
    "Sums in narrow dtypes",
    (
        Part(
            "How exact is a sum of a thousand small numbers, by the dtypes of the terms and of the"
            " accumulator?",
            (
                Show(
                    "sums",
                    ("accumulation.sums", "accumulation.rounded-term", "accumulation.stalled"),
                    ("accumulation-sums", "accumulation-drift"),
                    only={"part": ("sum",)},
                ),
            ),
        ),
    ),
)

MIXED_PRECISION = Problem(
    "benchmarking_mixed_precision",
    "Mixed precision",
    (
        Part(
            "Which dtypes do the parameters, the activations, the logits, the loss and the"
            " gradients of a small network have under float16 autocast?",
            (
                Show(
                    "autocast",
                    ("autocast.dtypes", "autocast.cuda-dtypes"),
                    ("autocast-formats",),
                    only=_TOY,
                ),
            ),
            label="a",
        ),
        Part(
            "Which parts of a norm are sensitive to a narrow dtype, and does bfloat16 need the same"
            " care as float16?",
            (
                Show(
                    "autocast",
                    ("autocast.norm-reductions",),
                    ("autocast-reductions",),
                ),
                Show(
                    "sums",
                    ("accumulation.squares",),
                    ("accumulation-squares",),
                    only={"part": ("square",)},
                ),
            ),
            label="b",
        ),
        Part(
            "How much faster are the passes with bfloat16 autocast than in float32, and how does"
            " that change with the size of the model?",
            (
                Show(
                    "both dtypes",
                    ("benchmark.dtype-by-size", "benchmark.dtype-gain"),
                    ("benchmark-formats",),
                    only=_BOTH,
                    committed=_NAIVE | {"context": (512,)},
                ),
            ),
            label="c",
        ),
    ),
)

MEMORY = Problem(
    "memory_profiling",
    "Memory of a training step",
    (
        Part(
            "How does the memory in use develop over a forward pass and over a training step, and"
            " can the phases be recognized by their peaks?",
            (
                Show(
                    "memory",
                    ("memory.phases",),
                    ("memory-course-forward", "memory-course-train-step"),
                    only=_FLOAT32,
                    committed=_MEMORY_THERE,
                ),
            ),
            label="a",
        ),
        Part(
            "How high is the peak of a forward pass and of a training step at each context?",
            (
                Show(
                    "memory",
                    ("memory.peaks",),
                    ("memory-peaks",),
                    only=_FLOAT32,
                    committed=_MEMORY_THERE,
                ),
            ),
            label="b",
        ),
        Part(
            "How high are both peaks under bfloat16 autocast, and does it change much?",
            (
                Show(
                    "memory",
                    ("memory.mixed-precision", "memory.autocast-more", "memory.autocast-less"),
                    ("memory-peaks",),
                    only=_BOTH,
                    committed=_MEMORY_THERE,
                ),
            ),
            label="c",
        ),
        Part(
            "How large is one float32 activation of the residual stream?",
            (
                Show(
                    "memory",
                    ("memory.residual-stream",),
                    only=_FLOAT32,
                    committed=_MEMORY_THERE,
                ),
            ),
            label="d",
        ),
        Part(
            "How large are the largest allocations of a forward pass, and which line of code makes"
            " them?",
            (
                Show(
                    "memory",
                    ("memory.largest-tensor",),
                    ("memory-saved",),
                    only=_FLOAT32 | _FORWARD,
                    committed=_MEMORY_THERE,
                ),
            ),
            label="e",
        ),
        Part(
            "How much does one block save for backward, which five operations save the most of it,"
            " and how many bytes of gradients does a block produce in the backward pass?",
            (
                Show(
                    "memory",
                    ("memory.block-saved", "memory.block-gradients"),
                    ("memory-block",),
                    only=_FLOAT32,
                    committed=_MEMORY_THERE,
                ),
            ),
            label="f",
            editions=("2026",),
            command=f"{_NSYS} --memory",
        ),
    ),
)

CHECKPOINTING = Problem(
    "gradient_checkpointing",
    "Activation checkpointing",
    (
        Part(
            "Which arrangement of checkpoints has the lowest peak if recomputation is free, and how"
            " do its memory and its compute grow with the number of blocks?",
            (
                Show(
                    "checkpoints",
                    ("checkpointing.nested",),
                    ("checkpointing-strategies",),
                    committed={"attention": ("sdpa",)},
                ),
            ),
            label="a",
        ),
        Part(
            "With one recomputation at most, which segment size has the lowest peak, and what are"
            " the peaks of the next smaller and larger segments?",
            (
                Show(
                    "checkpoints",
                    (
                        "checkpointing.saving",
                        "checkpointing.least-memory",
                        "checkpointing.neighbors",
                    ),
                    ("checkpointing-pareto", "checkpointing-strategies"),
                    committed={"attention": ("sdpa",)},
                ),
            ),
            label="b",
        ),
    ),
    editions=("2026",),
)

ATTENTION = Problem(
    "pytorch_attention",
    "Naive attention",
    (
        Part(
            "How long do forward and backward pass of naive attention take at each length and head"
            " dimension, where does the memory run out, which tensors fill it, and how does the"
            " memory saved for backward grow with the length?",
            (
                Show(
                    "attention",
                    ("attention.memory-limit",),
                    (
                        "attention-times",
                        "attention-peak",
                        "attention-forward",
                        "attention-backward",
                    ),
                ),
                Show(
                    "attention",
                    ("attention.memory-growth",),
                    among={"quantity": "saved_bytes", "by": "length"},
                ),
                Show("attention", ("attention.predicted-saved",)),
                # What removes that memory: attention that never stores the scores.
                Show("flash", ("flash.memory-growth",), committed={"heads": (1,)}),
            ),
            label="a",
        ),
    ),
)

COMPILE = Problem(
    "torch_compile",
    "torch.compile",
    (
        Part(
            "How do compiled and uncompiled attention compare, forward and backward, over the grid"
            " of pytorch_attention?",
            (
                Show(
                    "compiled attention",
                    ("compile.phases", "compile.gain"),
                    ("compile-times", "compile-gain-attention"),
                    only={"kind": ("attention",)},
                ),
            ),
            label="a",
            command="stepscope run compile --part attention --no-warm",
        ),
        Part(
            "How does compiling the model change the forward pass, the backward pass and the"
            " training step?",
            (
                Show(
                    "compiled model",
                    ("compile.phases", "compile.gain", "compile.first-step"),
                    ("compile-times", "compile-gain-model"),
                    only={"kind": ("model",)},
                ),
            ),
            label="b",
        ),
    ),
)

_TILED, _KERNELS = {"attention": "tiled"}, {"attention": "triton"}
_ERRORS = ("flash-errors",)

FLASH_FORWARD = Problem(
    "flash_forward",
    "FlashAttention-2, forward",
    (
        Part(
            "Does a tiled forward pass in plain PyTorch, with an online softmax, agree with naive"
            " attention?",
            (
                Show(
                    "flash",
                    ("flash.accuracy",),
                    _ERRORS,
                    only={"attention": ("tiled", "reference")},
                    committed={"heads": (1,)},
                    among=_TILED,
                ),
            ),
            label="a",
            code="stepscope.attention.FlashAttentionTorch",
        ),
        Part(
            "Does the same as a Triton kernel agree with it?",
            (
                Show(
                    "flash",
                    ("flash.accuracy", "flash.own-kernels"),
                    _ERRORS,
                    only={"attention": ("triton", "reference")},
                    committed={"heads": (1,)},
                ),
            ),
            label="b",
            code="stepscope.attention.FlashAttentionTriton",
        ),
        Part(
            "Is a causal mask optional, and do the kernels skip the tiles that it empties? Every"
            " case of the grid is causal.",
            (
                Show(
                    "flash",
                    ("flash.accuracy", "flash.highest-rate"),
                    only={"attention": ("triton", "tiled"), "causal": (True,)},
                    committed={"heads": (1,)},
                ),
            ),
            label="c",
            code="stepscope.attention.FlashAttentionTriton.apply(q, k, v, is_causal)",
        ),
    ),
)

FLASH_BACKWARD = Problem(
    "flash_backward",
    "FlashAttention-2, backward",
    (
        Part(
            "Does a backward pass that recomputes the probabilities from the saved log-sum-exp give"
            " the gradients of naive attention, and what does it save?",
            (
                Show(
                    "flash",
                    ("flash.accuracy", "flash.saved", "flash.memory-growth"),
                    _ERRORS,
                    only={"attention": ("tiled", "triton", "reference")},
                    committed={"heads": (1,)},
                ),
            ),
            code="stepscope.attention.FlashAttentionTorch",
        ),
    ),
)

FLASH_BENCHMARKING = Problem(
    "flash_benchmarking",
    "FlashAttention-2 against naive attention",
    (
        Part(
            "How long do forward, backward and both take with and without the kernel, for each"
            " length, head dimension and dtype, with batch 1 and a causal mask?",
            (
                Show(
                    "flash",
                    ("flash.against-naive", "flash.host-bound"),
                    ("flash-times", "flash-rate"),
                    only={"attention": ("tiled", "triton", "reference")},
                    committed={
                        "heads": (1,),
                        "attention": ("triton", "reference"),
                        "head": (64,),
                    },
                ),
            ),
            label="a",
        ),
    ),
)

PROBLEMS = (
    BENCHMARKING_SCRIPT,
    NSYS_PROFILE,
    ACCUMULATION,
    MIXED_PRECISION,
    MEMORY,
    CHECKPOINTING,
    ATTENTION,
    COMPILE,
    FLASH_FORWARD,
    FLASH_BACKWARD,
    FLASH_BENCHMARKING,
)
