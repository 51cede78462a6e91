"""Classes of operators by name, and of the kernels that Inductor fuses from them."""

from __future__ import annotations

import re

from stepscope.analysis.kernels.classes import Class

_NAMES: dict[Class, str] = {
    "matmul": (
        "mm addmm bmm baddbmm matmul linear addbmm mv addmv dot _scaled_mm _grouped_mm"
        " convolution _convolution mkldnn_convolution convolution_backward _int_mm einsum outer"
        " cudnn_convolution"
    ),
    "softmax": (
        "softmax _softmax log_softmax _log_softmax _softmax_backward_data"
        " _log_softmax_backward_data _safe_softmax prepare_softmax_online"
    ),
    "reduction": (
        "sum mean max min amax amin argmax argmin var std norm cumsum prod any all var_mean"
        " std_mean logsumexp sum_to_size native_layer_norm native_layer_norm_backward layer_norm"
        " rms_norm _fused_rms_norm _fused_rms_norm_backward native_batch_norm linalg_vector_norm"
        " nll_loss nll_loss_nd nll_loss_forward nll_loss_backward cross_entropy_loss"
        " embedding_dense_backward embedding_backward isfinite _local_scalar_dense item topk sort"
        " nonzero group_norm scatter_add scatter_add_ index_add index_add_"
    ),
    "copy/cast": (
        "copy_ copy clone contiguous to _to_copy cat stack slice_backward index_select gather"
        " index embedding repeat pad constant_pad_nd roll flip scatter scatter_ index_put_"
        " _index_put_impl_ index_copy_ split select_backward split_with_sizes_copy _chunk_cat"
        " resize_ unfold_backward repeat_interleave view t transpose permute expand reshape"
        " unsqueeze squeeze slice select as_strided _unsafe_view detach alias unbind chunk narrow"
        " flatten unflatten empty empty_like empty_strided _reshape_alias lift_fresh detach_"
        " new_empty result_type numpy_T mT adjoint requires_grad_ set_ split_with_sizes"
        " resolve_conj resolve_neg expand_as view_as is_nonzero new_empty_strided promote_types"
    ),
    "elementwise": (
        "__and__ __ilshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ _conj_physical abs"
        " acos acosh add addcdiv addcmul angle arange asin asinh atan atan2 atanh bernoulli"
        " binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits"
        " bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor"
        " ceil celu clamp clamp_max clamp_min clip complex conj_physical copysign cos cosh deg2rad"
        " digamma div dropout elu elu_backward eq equal erf erfc erfinv exp exp2 expm1 exponential"
        " eye feature_dropout fill float_power floor floor_divide fmax fmin fmod frac frexp full"
        " full_like gcd ge gelu gelu_backward glu glu_backward gt hardshrink hardshrink_backward"
        " hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward"
        " heaviside huber_loss huber_loss_backward hypot i0 igamma igammac isclose isinf isnan"
        " isneginf isposinf kl_div lcm ldexp le leaky_relu leaky_relu_backward lerp lgamma"
        " linspace log log10 log1p log2 log_sigmoid log_sigmoid_backward log_sigmoid_forward"
        " logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward"
        " lt masked_fill masked_fill_backward maximum minimum mish mish_backward mse_loss"
        " mse_loss_backward mul mvlgamma nan_to_num native_dropout native_dropout_backward ne neg"
        " new_full new_ones new_zeros nextafter normal one_hot ones ones_like polar polygamma"
        " positive pow prelu rad2deg rand rand_like randint randint_like randn randn_like random"
        " reciprocal relu relu6 remainder round rrelu rsqrt rsub scalar_tensor selu sgn sigmoid"
        " sigmoid_backward sign signbit silu silu_backward sin sinc sinh smooth_l1_loss"
        " smooth_l1_loss_backward softplus softplus_backward softshrink softshrink_backward sqrt"
        " square sub tan tanh tanh_backward threshold threshold_backward tril tril_indices triu"
        " triu_indices true_divide trunc uniform where xlogy zero zeros zeros_like"
    ),
}
"""Operators of each class. Views count as copies. The elementwise ones include those that only
write values they generate; in-place operators are among them without the underscore at the end."""
_CLASSES = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_RECURRENT = re.compile(r"(?:^|_)(?:rnn|lstm|gru)(?:_|$)")
_RECURRENT_GATES = re.compile(r"^_thnn_(?:fused|differentiable)_(?:lstm|gru)_cell")
"""Gate arithmetic after the matmuls of a recurrent cell."""
_CONVOLUTION = re.compile(r"(?:^|_)conv(?:olution)?(?:[123]d)?(?:_|$)")
"""`conv2d`, `_slow_conv2d_backward`, `slow_conv_dilated2d`, `mkldnn_convolution_backward`; not
`_convert_indices`."""
_REDUCTION = re.compile(r"(?:batch|layer|group|instance|rms)_norm|pool[123]d")
_ATTENTION = re.compile(r"scaled_dot_product|flash_attention|efficient_attention|flex_attention")
_OPTIMIZER = re.compile(r"^_foreach_|^_fused_(adam|adamw|sgd|adagrad)|^_amp_")
_COMMUNICATION = re.compile(
    r"^(c10d|_c10d_functional|nccl|gloo|record_param_comms|_allgather_base_|all_?reduce)"
)
_INDUCTOR_NAMES = re.compile(r"^triton_\w{3}_fused_?(.*?)_?\d*$")
_KNOWN = {name for name, kind in _CLASSES.items() if kind != "elementwise"}
_MAX_WORDS = max(name.count("_") for name in _KNOWN) + 1


def operator_class(name: str) -> Class | None:
    """Return the class of an operator such as `aten::mm`; None if the name is unknown."""
    named = named_class(name)
    if named is None and name.startswith("aten::"):
        bare = name.removeprefix("aten::").partition(".")[0]
        classes = {_CLASSES.get(one) for one in (bare, bare.rstrip("_"))}
        if bare.startswith("special_") or "elementwise" in classes:
            return "elementwise"
    return named


def named_class(name: str) -> Class | None:
    """Return the class of an operator whose name says more than that it is elementwise; None for
    all others."""
    space, _, bare = name.rpartition("::")
    bare = bare.partition(".")[0]
    if _COMMUNICATION.match(name) or _COMMUNICATION.match(bare):
        return "communication"
    if _ATTENTION.search(bare) or "attention" in space:
        return "attention"
    if space == "stepscope" and "attention" in bare:
        return "attention"
    if _OPTIMIZER.match(bare):
        return "optimizer"
    if space != "aten":
        return None
    return _CLASSES[bare] if bare in _KNOWN else _family(bare)


def _family(bare: str) -> Class | None:
    """Class of operators that have one name per backend."""
    if _RECURRENT_GATES.match(bare):
        return "elementwise"
    if _RECURRENT.search(bare):
        return "copy/cast" if bare.endswith("flatten_weight") else "matmul"
    if _CONVOLUTION.search(bare):
        return "matmul"
    return "reduction" if _REDUCTION.search(bare) else None


def inductor_parts(name: str) -> list[str]:
    """Return the operators in a fused kernel's name: `triton_poi_fused_add_mul_3` -> add, mul."""
    match = _INDUCTOR_NAMES.match(name)
    words = match.group(1).split("_") if match and match.group(1) else []
    parts: list[str] = []
    at = 0
    while at < len(words):
        # The longest known name that starts here; a name may itself start with an underscore.
        for end in range(min(len(words), at + _MAX_WORDS), at, -1):
            part = "_".join(words[at:end])
            if part in _KNOWN:
                break
        else:
            end, part = at + 1, words[at]
        if part:
            parts.append(part)
        at = end
    return parts


def inductor_class(kind: str, parts: list[str]) -> Class:
    """Classify by the kind of kernel (poi, red, per, tem, …) and the operators fused into it."""
    text, classes = "_".join(parts), {_CLASSES.get(part) for part in parts}
    if kind == "tem":
        if "attention" in text:
            return "attention"
        return "matmul" if "matmul" in classes else "other"
    if "softmax" in text:
        return "softmax"
    if kind in ("red", "per", "spl"):
        return "reduction"
    if kind == "for":
        return "optimizer"
    return "copy/cast" if classes == {"copy/cast"} else "elementwise"
