"""Real kernel names with everything they state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stepscope
from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.kernels.names import describe, describe_operator, linear_role
from stepscope.analysis.kernels.operators import inductor_parts

FP32, TF32, FP16, BF16 = (
    "FP32 cores",
    "TF32 tensor cores",
    "FP16 tensor cores",
    "BF16 tensor cores",
)
ANONYMOUS = "at::native::(anonymous namespace)::"

MATMULS = {
    "ampere_sgemm_128x64_tn": ("cuBLAS", FP32, "128x64", "tn", ""),
    "ampere_sgemm_128x128_nn": ("cuBLAS", FP32, "128x128", "nn", ""),
    "ampere_sgemm_64x32_sliced1x4_tn": ("cuBLAS", FP32, "64x32", "tn", ""),
    "volta_sgemm_128x64_nn": ("cuBLAS", FP32, "128x64", "nn", ""),
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_tn_align1>(T1::Params)":
        ("CUTLASS", FP32, "128x256", "tn", "1"),
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>(T1::Params)":
        ("CUTLASS", FP32, "128x64", "nt", "1"),
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x128_16x3_nn_align4>"
    "(cutlass_80_tensorop_s1688gemm_256x128_16x3_nn_align4::Params)":
        ("CUTLASS", TF32, "256x128", "nn", "4"),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x64_32x4_nn_align8>"
    "(T1::Params)": ("CUTLASS", BF16, "256x64", "nn", "8"),
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_64x1_tn_align8>"
    "(T1::Params)": ("CUTLASS", FP16, "32x32", "tn", "8"),
    "void cutlass::Kernel2<cutlass_75_tensorop_f16_s1688gemm_f16_128x64_32x2_tn_align8>"
    "(T1::Params)": ("CUTLASS", FP16, "128x64", "tn", "8"),
    "cutlass_80_tensorop_i16832gemm_s8_128x64_128x3_tn_align16":
        ("CUTLASS", "INT8 tensor cores", "128x64", "tn", "16"),
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn": ("cuBLAS", FP16, "128x128", "tn", ""),
    "ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_tn":
        ("cuBLAS", FP16, "64x64", "tn", ""),
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn":
        ("cuBLAS", BF16, "128x64", "tn", ""),
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize256x64x8_stage3_warpsize2x2x1_ffma_aligna4"
    "_alignc4_execute_kernel__5x_cublas": ("cuBLAS", FP32, "256x64x8", "tn", "4"),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_warpgroupsize1x1x1_execute"
    "_segment_k_off_kernel__5x_cublas": ("cuBLAS", BF16, "128x128x64", "nn", ""),
    "sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize128x128x32_warpgroupsize2x1x1_execute"
    "_segment_k_off_kernel__5x_cublas": ("cuBLAS", TF32, "128x128x32", "nt", ""),
    "nvjet_tst_192x8_64x8_2x1_v_bz_TNT": ("cuBLAS", BF16, "192x8", "tn", ""),
    "nvjet_tst_64x24_64x16_4x1_v_bz_splitK_TNT": ("cuBLAS", BF16, "64x24", "tn", ""),
    "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN": ("cuBLAS", BF16, "192x192", "nt", ""),
    "nvjet_tss_128x256_64x4_2x1_v_badd_coopA_NTN": ("cuBLAS", BF16, "128x256", "nt", ""),
    "nvjet_sm90_hss_320x128_64x3_1x2_h_bz_coopB_NNT": ("cuBLAS", FP16, "320x128", "nn", ""),
    "nvjet_sm90_hsh_8x64_64x16_4x1_v_bz_TNN": ("cuBLAS", FP16, "8x64", "tn", ""),
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT": ("cuBLAS", BF16, "256x128", "tn", ""),
    "nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN":
        ("cuBLAS", BF16, "64x64", "tn", ""),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16,"
    " false>(cublasLt::cublasSplitKParams<float>, float const*)": ("cuBLAS", FP32, "", "", ""),
    "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false, cublasGemvTensorStridedBatched"
    "<float const> >(int)": ("cuBLAS", FP32, "", "", ""),
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(int)":
        ("cuBLAS", FP32, "", "", ""),
    "void internal::gemvx::kernel<int, int, float, float, float>(int)":
        ("cuBLAS", FP32, "", "", ""),
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>,"
    " cutlass::bfloat16_t>>(int)": ("CUTLASS", BF16, "", "", ""),
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_16x4_nhwc"
    "_align4>(T1::Params)": ("cuDNN", TF32, "128x128", "", "4"),
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0>(unsigned int)":
        ("DeepGEMM", "FP8 tensor cores", "", "", ""),
    "volta_scudnn_128x64_relu_small_nn_v1": ("cuDNN", FP32, "128x64", "nn", ""),
    "volta_fp16_s884cudnn_fp16_256x64_ldg8_relu_f2f_exp_small_nhwc_tn_v1":
        ("cuDNN", FP16, "256x64", "tn", ""),
    "void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int)":
        ("cuDNN", FP32, "", "", ""),
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int)":
        ("cuDNN", FP32, "", "", ""),
    "void cudnn::detail::dgrad2d_alg1_1<float, 0, 6, 7, 5, 4, 5, true, true>(int, int, int)":
        ("cuDNN", FP32, "", "", ""),
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32_MI16x16x1_SN_LDSB1_AFC1_ISA942":
        ("Tensile", "BF16 matrix cores", "128x256x32", "tn", ""),
    "Cijk_Ailk_Bjlk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT64x32x128_MI16x16x1_SN_ISA942":
        ("Tensile", "BF16 matrix cores", "64x32x128", "nt", ""),
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSA0_ISA90a":
        ("Tensile", "FP16 matrix cores", "128x128x32", "nn", ""),
    "Cijk_Ailk_Bljk_SB_MT64x64x16_SN_APM1_ISA906": ("Tensile", FP32, "64x64x16", "nn", ""),
    "Cijk_Alik_Bljk_F8F8S_BH_MT256x256x128_MI16x16x1_ISA942":
        ("Tensile", "FP8 matrix cores", "256x256x128", "tn", ""),
    "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN"
    "_transOut_schedP2x1x2x3_biasM_bN_tma_tmaOpt_clmp_swiGlu_dynBatch_sm100f":
        ("TensorRT-LLM", "FP8 tensor cores", "128x16x256", "", ""),
    "bmm_Bfloat16_E2m1E2m1_Fp32_t128x32x512_s4_et128x32_sm100f":
        ("TensorRT-LLM", "FP4 tensor cores", "128x32x512", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MATMULS)
def test_a_matmul_name_states_its_unit_tile_and_layout(name: str) -> None:
    described = describe(name)
    assert described.kind == "matmul"
    properties = described.library, described.unit, described.tile
    assert (*properties, described.layout, described.alignment) == MATMULS[name]


FLASH = "pytorch_flash::Flash_{}_kernel_traits<64, 128, 64, {}, false, false, cutlass::{}"
ATTENTIONS = {
    f"void pytorch_flash::flash_fwd_kernel<{FLASH.format('fwd', '4', 'bfloat16_t')}>, true>(int)":
        ("flash_fwd_kernel", "FlashAttention", BF16, "128x64", "forward"),
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<"
    + FLASH.format("bwd", "8, 4, 4, 4", "half_t") + ">, true>(int)":
        ("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "FlashAttention", FP16, "128x64",
         "backward"),
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>(int)":
        ("FlashAttnFwdSm90", "FlashAttention", "", "", "forward"),
    "fmha_cutlassF_f16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel"
    "<cutlass::half_t, cutlass::arch::Sm80, true, 64, 128, 128>::Params)":
        ("fmha_cutlassF_f16_aligned_64x128_rf_sm80", "CUTLASS", FP16, "64x128", "forward"),
    "fmha_cutlassB_bf16_aligned_128x128_k128_sm80":
        ("fmha_cutlassB_bf16_aligned_128x128_k128_sm80", "CUTLASS", BF16, "128x128", "backward"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0":
        ("sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "cuDNN",
         "FP16/BF16 tensor cores", "64x128x128", "forward"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0_0":
        ("sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0_0", "cuDNN",
         "FP16/BF16 tensor cores", "64x64x128", "backward"),
    "void cudnn::fusion::compute_dot_do_o<true>(void const*, void const*, void*)":
        ("compute_dot_do_o", "cuDNN", "", "", "backward"),
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)":
        ("convert_dq_to_16bits", "cuDNN", "", "", "backward"),
    "forward_kernel": ("forward_kernel", "Stepscope", "", "", "forward"),
    "key_value_kernel": ("key_value_kernel", "Stepscope", "", "", "backward"),
    "query_kernel": ("query_kernel", "Stepscope", "", "", "backward"),
    "delta_kernel": ("delta_kernel", "Stepscope", "", "", "backward"),
    "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext":
        ("fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
         "", "", "", ""),
    "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_4abcdEEEEvT_":
        ("FmhaBatchPrefillWithPagedKVCacheKernel", "Composable Kernel", "", "", ""),
    "attn_fwd": ("attn_fwd", "", "", "", "forward"),
    "sage_fwd": ("sage_fwd", "", "", "", "forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_kernel_name_states_its_direction(name: str) -> None:
    described = describe(name)
    assert described.kind == "attention"
    properties = described.short, described.library, described.unit
    assert (*properties, described.tile, described.role) == ATTENTIONS[name]


def test_every_stepscope_kernel_has_a_class() -> None:
    source = Path(stepscope.__file__).parent
    launched = {
        name
        for package in ("attention", "kernels", "optim")
        for path in (source / package).rglob("*.py")
        for name in re.findall(r"(\w+_kernel)\[", path.read_text())
    }
    assert len(launched) >= 13
    assert {name for name in launched if describe(name).library != "Stepscope"} == set()
    assert describe("adamw_one_kernel").kind == "optimizer"
    assert describe("norm_backward_kernel")[:3] == (
        "norm_backward_kernel",
        "Stepscope",
        "reduction",
    )


OTHERS = {
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
    " std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)":
        ("vectorized_elementwise_kernel · add", "ATen", "elementwise"),
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const"
    "::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&, int)>":
        ("elementwise_kernel · direct_copy", "ATen", "copy/cast"),
    "void at::native::vectorized_elementwise_kernel<(int)8, at::native::bfloat16_copy_kernel_cuda"
    "(at::TensorIteratorBase &)::[lambda(float) (instance 1)]>":
        ("vectorized_elementwise_kernel · bfloat16_copy", "ATen", "copy/cast"),
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
    "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>"
    " > >(at::TensorIteratorBase&, int)>": ("elementwise_kernel · Mul", "ATen", "elementwise"),
    "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#2}>":
        ("vectorized_elementwise_kernel · exp", "ATen", "elementwise"),
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float,"
    " float, float, float>, unsigned int, float, 4> >(at::native::ReduceOp<float>)":
        ("reduce_kernel · Mean", "ATen", "reduction"),
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*,"
    " float const*, int, int, int, bool const*, int, bool)":
        ("softmax_warp_forward", "ATen", "softmax"),
    "void <unnamed>::softmax_warp_backward<c10::BFloat16, c10::BFloat16, float, (int)9, (bool)1,"
    " (bool)0>(T2 *, const T1 *)": ("softmax_warp_backward", "ATen", "softmax"),
    f"void {ANONYMOUS}cunn_SoftMaxForward<4, float, float, float,"
    f" {ANONYMOUS}SoftMaxForwardEpilogue>(float*, float const*, int)":
        ("cunn_SoftMaxForward", "ATen", "softmax"),
    f"void {ANONYMOUS}multi_tensor_apply_kernel<{ANONYMOUS}TensorListMetadata<2>,"
    f" {ANONYMOUS}BinaryOpListAlphaFunctor<float, 2, 2, 0>, std::plus<float>, float>(int)":
        ("multi_tensor_apply_kernel", "ATen", "optimizer"),
    "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::"
    "TensorListMetadata<(int)2>, std::plus<float>, float>(T1, T2, T3...)":
        ("multi_tensor_apply_kernel", "ATen", "optimizer"),
    f"void {ANONYMOUS}CatArrayBatchedCopy<{ANONYMOUS}OpaqueType<4u>, unsigned int, 4, 64, 64>(int)":
        ("CatArrayBatchedCopy", "ATen", "copy/cast"),
    f"void {ANONYMOUS}indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(int)":
        ("indexSelectLargeIndex", "ATen", "copy/cast"),
    f"void {ANONYMOUS}nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(int)":
        ("nll_loss_forward_reduce_cuda_kernel_2d", "ATen", "reduction"),
    f"void {ANONYMOUS}embedding_backward_feature_kernel<float, float, long>(int)":
        ("embedding_backward_feature_kernel", "ATen", "reduction"),
    "void at::native::triu_tril_kernel<bool, int, true, 8, false>(int)":
        ("triu_tril_kernel", "ATen", "elementwise"),
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int)":
        ("DeviceRadixSortOnesweepKernel", "CUB", "other"),
    "triton_poi_fused_add_addmm_gelu_mul_0":
        ("triton_poi_fused_add_addmm_gelu_mul_0", "Inductor", "elementwise"),
    "triton_poi_fused__to_copy_transpose_view_7":
        ("triton_poi_fused__to_copy_transpose_view_7", "Inductor", "copy/cast"),
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_4":
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_4", "Inductor", "reduction"),
    "triton_per_fused_native_layer_norm_5":
        ("triton_per_fused_native_layer_norm_5", "Inductor", "reduction"),
    "triton_per_fused__softmax_masked_fill_mul_2":
        ("triton_per_fused__softmax_masked_fill_mul_2", "Inductor", "softmax"),
    "triton_red_fused__log_softmax_3":
        ("triton_red_fused__log_softmax_3", "Inductor", "softmax"),
    "triton_tem_fused_flex_attention_0":
        ("triton_tem_fused_flex_attention_0", "Inductor", "attention"),
    "triton_tem_fused_mm_4": ("triton_tem_fused_mm_4", "Inductor", "matmul"),
    "triton_tem_fused_0": ("triton_tem_fused_0", "Inductor", "other"),
    "triton_for_fused_11": ("triton_for_fused_11", "Inductor", "optimizer"),
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)":
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "NCCL", "communication"),
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)":
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "NCCL", "communication"),
    "Memcpy HtoD (Pageable -> Device)": ("Memcpy HtoD, pageable", "CUDA", "copy/cast"),
    "Memcpy HtoD (Pinned -> Device)": ("Memcpy HtoD", "CUDA", "copy/cast"),
    "Memset (Device)": ("Memset", "CUDA", "copy/cast"),
    "_attn_fwd": ("_attn_fwd", "", "attention"),
    "paged_attention_v2_kernel": ("paged_attention_v2_kernel", "", "attention"),
    "fused_moe_kernel": ("fused_moe_kernel", "", "other"),
    "": ("", "", "other"),
    "</script><script>alert(1)</script>": ("</script><script>alert(1)</script>", "", "other"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_kernel_has_a_library_and_a_class(name: str) -> None:
    described = describe(name)
    assert (described.short, described.library, described.kind) == OTHERS[name]
    assert described.kind in CLASSES
    assert not described.unit


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmul"),
        ("aten::bmm", "matmul"),
        ("aten::_softmax", "softmax"),
        ("aten::_log_softmax_backward_data", "softmax"),
        ("aten::mean", "reduction"),
        ("aten::nll_loss_forward", "reduction"),
        ("aten::copy_", "copy/cast"),
        ("aten::cat", "copy/cast"),
        ("aten::mul", "elementwise"),
        ("aten::mul_", "elementwise"),
        ("aten::gelu_backward", "elementwise"),
        ("aten::special_erfcx", "elementwise"),
        ("aten::mkldnn_rnn_layer", "matmul"),
        ("aten::mkldnn_rnn_layer_backward", "matmul"),
        ("aten::_cudnn_rnn", "matmul"),
        ("aten::_cudnn_rnn_backward", "matmul"),
        ("aten::lstm", "matmul"),
        ("aten::gru_cell", "matmul"),
        ("aten::quantized_lstm", "matmul"),
        ("aten::_cudnn_rnn_flatten_weight", "copy/cast"),
        ("aten::_thnn_fused_lstm_cell", "elementwise"),
        ("aten::native_batch_norm", "reduction"),
        ("aten::native_batch_norm_backward", "reduction"),
        ("aten::cudnn_batch_norm_backward", "reduction"),
        ("aten::max_pool2d_with_indices", "reduction"),
        ("aten::_fft_r2c", "other"),
        ("aten::linalg_eigh", "other"),
        ("aten::_foreach_addcmul_", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("c10d::allreduce_", "communication"),
        ("autograd::engine::evaluate_function: MmBackward0", "other"),
        ("MmBackward0", "other"),
    ],
)
def test_an_operator_has_a_class(name: str, kind: str) -> None:
    assert describe_operator(name).kind == kind


def test_every_operator_that_torch_calls_pointwise_has_a_class() -> None:
    torch = pytest.importorskip("torch")
    pointwise = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, bare = name.partition(".")[0].partition("::")
        packet = getattr(torch.ops.aten, bare, None) if space == "aten" else None
        names = [] if packet is None else packet.overloads()
        overloads = [getattr(packet, overload) for overload in names]
        if any(torch.Tag.pointwise in overload.tags for overload in overloads):
            pointwise.append(f"aten::{bare}")
    assert len(pointwise) > 200
    assert [name for name in pointwise if describe_operator(name).kind == "other"] == []


def test_a_fused_name_lists_its_operators() -> None:
    assert inductor_parts("triton_poi_fused__to_copy__unsafe_view_add_addmm_139") == [
        "_to_copy",
        "_unsafe_view",
        "add",
        "addmm",
    ]
    assert inductor_parts("triton_tem_fused_0") == []


@pytest.mark.parametrize(
    ("name", "phase", "operator", "role"),
    [
        ("ampere_sgemm_128x64_tn", "forward", "aten::mm", "forward"),
        ("ampere_sgemm_128x64_nn", "backward", "aten::mm", "dX"),
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN", "backward", "aten::mm", "dW"),
        ("ampere_sgemm_128x64_nn", "backward", "aten::bmm", ""),
        ("void gemmSN_TN_kernel<float>(int)", "backward", "aten::mm", ""),
        ("delta_kernel", "backward", "", "backward"),
    ],
)
def test_the_layout_distinguishes_dx_from_dw(
    name: str, phase: str, operator: str, role: str
) -> None:
    assert linear_role(describe(name), phase, operator) == role


WORDS = {
    "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)":
        ("bn_bw_1C11_kernel_new", "cuDNN", "reduction"),
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(int)":
        ("winogradForwardData4x4", "cuDNN", "matmul"),
    "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, float>(int)":
        ("nchwToNhwcKernel", "cuDNN", "copy/cast"),
    "void cudnn::ops::scalePackedTensor_kernel<float, float>(long, float*, float)":
        ("scalePackedTensor_kernel", "cuDNN", "elementwise"),
    "MIOpenBatchNormFwdTrainSpatial": ("MIOpenBatchNormFwdTrainSpatial", "MIOpen", "reduction"),
    "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_1aE":
        ("kernel_grouped_conv_fwd_xdl_cshuffle_v3", "", "matmul"),
    "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256EEEvPT0_":
        ("add_rmsnorm_quant_kernel", "AITER", "reduction"),
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassEEEEEvT_":
        ("Rmsnorm2dFwd", "Composable Kernel", "reduction"),
    "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type"
    " vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)":
        ("fused_add_rms_norm_kernel", "vLLM", "reduction"),
    "void vllm::reshape_and_cache_flash_kernel<__hip_bfloat16>(int)":
        ("reshape_and_cache_flash_kernel", "vLLM", "copy/cast"),
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>(int)":
        ("multi_tensor_apply_kernel", "", "optimizer"),
    "batched_transpose_32x32_half": ("batched_transpose_32x32_half", "", "copy/cast"),
    "void convert_everything<float>(int)": ("convert_everything", "", "other"),
    "void normal_kernel<float>(int)": ("normal_kernel", "", "other"),
    "_Z": ("_Z", "", "other"),
    "_ZN999999999999x": ("x", "", "other"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_a_kernel_of_any_library_is_classified_by_words(name: str) -> None:
    described = describe(name)
    assert (described.short, described.library, described.kind) == WORDS[name]


@pytest.mark.parametrize(
    "name",
    [
        "_slow_conv2d_forward",
        "_slow_conv2d_backward",
        "slow_conv_dilated2d",
        "slow_conv3d_forward",
        "slow_conv_transpose2d",
        "thnn_conv2d",
        "mkldnn_convolution",
        "mkldnn_convolution_backward",
        "conv2d",
        "conv_transpose1d",
        "_conv_depthwise2d",
        "_nnpack_spatial_convolution",
    ],
)
def test_convolutions_of_every_backend_are_matmuls(name: str) -> None:
    assert describe_operator(f"aten::{name}").kind == "matmul"


def test_conversions_are_not_convolutions() -> None:
    assert describe_operator("aten::_convert_indices_from_csr_to_coo").kind != "matmul"
