from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle_exporter import catalogue
from eagle_exporter.kernels.classes import MAX_FILE_BYTES, PATTERNS, ClassFileError, Classifier, parse, read

NAMES = {
    "allreduce_nccl": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclKernel_AllReduce_RING_LL_Sum_half(ncclWorkElem)",
    ],
    "allreduce_custom": [
        (
            "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(sglang::RankData*, sglang::RankSignals, "
            "sglang::Signal*, __nv_bfloat16*, int, int)"
        ),
        "void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*, vllm::RankSignals, vllm::Signal)",
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer::"
            "trtllm_allreduce_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 8, false, false>(flashinfer::"
        ),
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
        "two_shot_all_reduce_kernel_inplace",
        "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)",
    ],
    "collective": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymDevKernel_AllGather_STMC(ncclSymDevArgs)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*, float*)",
        "deep_ep::internode_ll::dispatch<true, 7168>",
    ],
    "attention": [
        "_fwd_kernel",
        "_fwd_kernel_stage2",
        "_fwd_grouped_kernel_stage1",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)1, 128u>>",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 4u>",
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true, 128u>",
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
            "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> >>>>>"
        ),
        "void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64>>(Flash_fwd_mla_params)",
        "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u>",
        "fmhaSm100fKernel_QkvE4m3OBfloat16HQk576HV512",
        "void (anonymous namespace)::fused_rope_kernel<true, 128l, true, __nv_bfloat16, long, 16u>",
    ],
    "gemm": [
        "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false>",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 1024u, 1u, 256u>",
        "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tuple",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(T1::Params)",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_warpgroupsize1x1x1",
        "_w8a8_block_fp8_matmul",
    ],
    "moe": [
        "fused_moe_kernel",
        "void marlin_moe_wna16::Marlin<__nv_bfloat16, 1, 256>",
        "moe_align_block_size_kernel",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu",
        "bmm_E2m1E2m1_Fp32_sm100f",
        "_fwd_kernel_ep_scatter_1",
        "void moe::dev::routing::routingDeepSeek::routingMainKernel<>",
        "void topkGatingSoftmax<float, 8, 256, 4, 16>(float const*, bool const*, float*, int)",
    ],
    "norm": [
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*)",
        "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*)",
        "void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
    ],
    "sampling": [
        "void VerifyTreeGreedy<int, long>(int*, int*, int*, long*, long*, long*, long*, long*, unsigned int)",
        "build_tree_efficient(long*, long*, long*, bool*, long*, long*, long*, long*, int, int, int, int)",
        "void flashinfer::sampling::OnlineSoftmaxMapKernel<1024u, 4u, float>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned>>",
        "void at::native::sbtopk::gatherTopK<c10::BFloat16, unsigned int, 2, false>",
        "_draft_topk1_partial_argmax_kernel",
        "_draft_topk1_finalize_kernel",
        "fill_bonus_tokens",
    ],
    "kv": [
        "void (anonymous namespace)::store_kvcache<2048l, 4, true, long>((anonymous namespace)::StoreKVCacheParams)",
        "create_flashinfer_kv_indices_triton",
        "generate_draft_decode_kv_indices",
        "get_num_kv_splits_triton",
        "assign_draft_cache_locs_contiguous",
        "assign_extend_cache_locs",
        "compute_position_kernel",
        "assign_req_to_token_pool",
        "set_mla_kv_buffer_kernel",
        "void (anonymous namespace)::fused_rope_store_kernel<true, 128l, true, __nv_bfloat16, __nv_bfloat16, long>",
        "_fused_qk_rope_reshape_and_cache_kernel",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>",
    ],
    "memcpy": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "memcpy32_post",
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
            "direct_copy_kernel_cuda(at::TensorIteratorBase&)>>"
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<at::native::(anonymous "
            "namespace)::OpaqueType<8u>, unsigned int, 2, 128, 1, 16>"
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "TensorListMetadata<2>, at::native::(anonymous namespace)::UnaryOpFunctor<float, 2, 1, 1>, at::native::"
            "Copy<float, float> >"
        ),
    ],
    "other": [
        "void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16, ((anonymous namespace)::ActivationKind)0>",
        "_static_quant_fp8",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >",
        "triton_poi_fused_add_mul_0",
        "_vocab_parallel_embedding_kernel",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long, unsigned int, 2, 2, -2>",
        "void at_cuda_detail::cub::detail::scan::DeviceScanKernel<at_cuda_detail::cub::detail::scan::policy_hub<long>>",
    ],
}
"""Real names: from recorded traces, and from kernel tables that people have published."""


@pytest.mark.parametrize(("kernel_class", "name"), [(key, name) for key, names in NAMES.items() for name in names])
def test_real_kernels_have_their_class(kernel_class: str, name: str) -> None:
    assert Classifier().match(name) == kernel_class


def test_every_class_has_a_pattern_and_every_pattern_a_class() -> None:
    assert {name for name, _ in PATTERNS} == set(catalogue.KERNEL_CLASSES) == set(NAMES)


def test_a_name_that_nobody_knows_is_other_and_told_apart() -> None:
    classifier = Classifier()
    assert classifier.match("zz_unheard_of") is None
    assert classifier("zz_unheard_of") == "other"


def test_patterns_of_a_file_come_first(tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_text("# ours\n\nmoe   my_kernel(_v2)?$\nattention\tnvjet\n")
    classifier = Classifier(read(path))
    assert classifier("my_kernel_v2") == "moe"
    assert classifier("nvjet_sm90") == "attention"
    assert classifier("_fwd_kernel") == "attention", "the others stay"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gem nvjet", "line 1: 'gem' is no kernel class"),
        ("gemm nvjet\n\ngemm", "line 3: a regular expression is missing"),
        ("gemm nvjet(", "line 1: 'nvjet\\(' is no regular expression"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(ClassFileError, match=message):
        parse(text)


def test_a_file_that_is_none_is_a_clear_error_and_never_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ClassFileError, match="No such file"):
        read(tmp_path / "missing")
    with pytest.raises(ClassFileError, match="regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ClassFileError, match="regular file"):
        read(tmp_path / "pipe")
    (tmp_path / "long").write_text("# " + "x" * MAX_FILE_BYTES)
    with pytest.raises(ClassFileError, match="longer"):
        read(tmp_path / "long")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ClassFileError, match="UTF-8"):
        read(tmp_path / "binary")
