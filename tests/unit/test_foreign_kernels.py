"""Owner of each attention kernel, and records that ran another implementation's kernels."""

from __future__ import annotations

import pytest

from sample_records import record
from stepscope.analysis.kernels.expected import foreign_kernels, owner
from stepscope.attention.triton import backward as triton_backward
from stepscope.attention.triton import forward as triton_forward
from stepscope.records.schema import Record

FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64"
EFFICIENT = "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)"
PLAIN = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128>"


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("forward_kernel", "triton"),
        ("key_value_kernel", "triton"),
        (FLASH, "sdpa_flash"),
        (CUDNN, "sdpa_cudnn"),
        (EFFICIENT, "sdpa_efficient"),
        ("triton_tem_fused_flex_attention_0", "flex"),
        ("triton_poi_fused_mul_0", None),
        (PLAIN, None),
        ("softmax_warp_forward", None),
    ],
)
def test_a_kernel_has_its_owner(kernel: str, name: str | None) -> None:
    assert owner(kernel) == name


def test_stepscopes_kernels_are_recognised_by_name() -> None:
    for module in (triton_forward, triton_backward):
        kernels = [name for name in vars(module) if name.endswith("_kernel")]
        assert kernels
        assert all(owner(name) == "triton" for name in kernels)


def seen(attention: str, **kernels: str) -> Record:
    return record(config={"attention": attention}, attachments={"kernels": kernels})


@pytest.mark.parametrize(
    "profiled",
    [
        seen("triton", forward="forward_kernel", backward="delta_kernel; query_kernel"),
        seen("sdpa_flash", forward=FLASH),
        seen("reference", forward=PLAIN),
        seen("sdpa"),
        seen("sdpa", forward=FLASH),
        seen("none", triton="forward_kernel", sdpa_cudnn=CUDNN),
    ],
)
def test_expected_kernels_are_accepted(profiled: Record) -> None:
    assert foreign_kernels(profiled) is None


@pytest.mark.parametrize(
    ("profiled", "message"),
    [
        (
            seen("triton", forward="forward_kernel", backward=PLAIN),
            "triton did not run its own kernel in the backward but void",
        ),
        (seen("triton", forward=""), "in the forward but none at all"),
        (seen("sdpa_cudnn", forward=FLASH), "sdpa_cudnn ran kernels of sdpa_flash in the forward"),
        (seen("compiled", backward=f"{PLAIN}; {FLASH}"), "compiled ran kernels of sdpa_flash"),
        (
            seen("none", triton="forward_kernel", flex="forward_kernel"),
            "flex ran kernels of triton",
        ),
    ],
)
def test_a_fallback_is_detected(profiled: Record, message: str) -> None:
    assert message in str(foreign_kernels(profiled))
