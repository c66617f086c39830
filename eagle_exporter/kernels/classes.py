"""Which class a kernel belongs to, by its name.

A table of patterns, first match wins, so order matters: "norm" comes before "flash" (flashinfer's norms carry its
name), grouped GEMMs of experts before GEMMs, all-reduces fused with a norm before norms. Names were taken from recorded
traces (SGLang 0.5.16, triton backend, H200) and from the sources of SGLang, flashinfer, DeepGEMM, DeepEP, FlashMLA,
CUTLASS, NCCL and PyTorch; operators (``aten::``) are what a capture without a GPU sees.

``EAGLE_EXPORTER_KERNEL_CLASSES`` names a file with more patterns, which come first: one a line, a class and a regular
expression, ``#`` begins a comment.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from eagle_exporter import catalogue

MAX_FILE_BYTES = 64 * 1024
_MAX_NAME = 4096

PATTERNS: tuple[tuple[str, str], ...] = (
    # --- communication ------------------------------------------------------------------------------------
    # Kernels for symmetric memory are NCCL's too, but no protocol is chosen for them. The name of any other says
    # RING_LL or TREE_LL whatever protocol runs: NCCL compiles one kernel for all of them (src/device/generate.py).
    ("allreduce_custom", r"ncclSym\w*AllReduce"),
    ("collective", r"ncclSym"),
    ("allreduce_nccl", r"nccl\w*(Kernel|Dev)\w*_?AllReduce|rccl\w*AllReduce"),
    ("collective", r"ncclDevKernel|ncclKernel|ncclDevFunc"),
    (
        "allreduce_custom",
        (
            r"cross_device_reduce|quick_?reduce|allreduce_prototype|all_?reduce|one_?shot.*reduce|two_?shot.*reduce"
            r"|twoshot|oneshotAllreduce"
        ),
    ),
    (
        "collective",
        (
            r"all_?gather|reduce_?scatter|all_?to_?all|deep_ep::|multimem|nvshmem|send_?recv|broadcast_(kernel|one)"
            r"|^c10d::|gloo:"
        ),
    ),
    # --- experts ------------------------------------------------------------------------------------------
    (
        "moe",
        (
            r"moe|expert|m_grouped|grouped_?gemm|groupproblemshape|gemmgrouped|topkgating|topk_softmax|grouped_topk"
            r"|kimi_k2|expandinputrows|finalizemoe|ep_scatter|ep_gather|post_reorder|pre_reorder|_masked_post_quant"
            r"|routing(main|indices|renorm|deepseek)|\bbmm_(e4m3|e2m1|bfloat16|mxe)|_matmul_ogs|_p_matmul|marlin_moe"
        ),
    ),
    # --- norms, before attention: flashinfer::norm ----------------------------------------------------------
    ("norm", r"rms_?norm|layer_?norm|add_?rms|l2_?norm|_norm_kernel|norm::|group_?norm|normkernel"),
    # --- what prepares or stores keys and values, a rotary embedding fused with it included ------------------
    (
        "kv",
        (
            r"store_kv|kv_?buffer|reshape_and_cache|kv_?cache_?(copy|move|store|transfer)|(copy|move|transfer|write|append)_"
            r"?\w*kv|req_to_token|cache_locs?|kv_indices|kv_splits|get_last_loc|compute_position|evict_mask|page_table"
            r"|create_extend_after_decode|concat_mla|concatmla|block_table|appendpaged|radix_?tree|rope_(store|write|cache)"
        ),
    ),
    # --- attention, with its rotary embedding ---------------------------------------------------------------
    (
        "attention",
        (
            r"flash(::|_fwd|attn|_attn|mla|_mla)|flashinfer::(batch|single|persistent|mergestate|variablelength|hopper)"
            r"|batch(decode|prefill|mla)|single(decode|prefill)|mergestate|merge_state|merge_attn|fmha|_fwd_kernel"
            r"|_fwd_grouped_kernel|attention|attn|mla_|_mla|\bmla|mqa_logits|sm(90|100)::(fwd|decode|prefill)|rope|rotary"
            r"|rotaryposids|splitkv|scaled_dot_product|sparse_topk_indices"
        ),
    ),
    # --- sampling and the tree ------------------------------------------------------------------------------
    (
        "sampling",
        (
            r"sampling|argmax|argmin|multinomial|softmax|softcap|top_?k|top_?p|radixsort|radixfindkth|bitonicsort"
            r"|sort|verify_?tree|tree_?speculative|build_tree|draft_topk|bonus_tokens|token_bitmask|penalt|temperature"
            r"|distribution_(nullary|elementwise)|exponential|rejection|logprob|::max\b|cumsum|scan_by_key"
        ),
    ),
    # --- dense linear algebra -------------------------------------------------------------------------------
    (
        "gemm",
        (
            r"nvjet|gemm|cublas|splitkreduce|gemv|matmul|cutlass::kernel|cutlass_\d+|xmma|marlin|_mm_kernel|dot_kernel"
            r"|aten::(addmm|mm|bmm|baddbmm|linear|einsum)\b|reduce_1block_kernel|int8_scaled_mm|fp8_scaled_mm|awq_|gptq"
            r"|mul_mat|mkldnn_linear|onednn|tensorop"
        ),
    ),
    # --- copies ---------------------------------------------------------------------------------------------
    (
        "memcpy",
        (
            r"^mem(cpy|set)|memcpy\d+_post|direct_copy|copy_kernel|catarraybatchedcopy|::copy<|copy_device_to_device"
            r"|aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_pin_memory|pin_memory|is_pinned)\b"
        ),
    ),
    # --- known, and none of these ---------------------------------------------------------------------------
    (
        "other",
        (
            r"^(void )?at(::|_cuda_detail::)|\(anonymous namespace\)::elementwise_kernel|elementwise_kernel"
            r"|act_and_mul|silu|gelu|swiglu|quant|embedding|gather_rows|indexselect|cub::|thrust::|^triton_(poi|red|per)_"
            r"|^aten::|hadamard|fill|causal_conv1d|gated_delta|mamba|^prim::|^detach"
        ),
    ),
)
"""``(class, regular expression)``; the expression is searched for, in any case."""


class ClassFileError(ValueError):
    """The file of further patterns cannot be used; the message names it, the line, and what is wrong."""


class Classifier:
    """Classifies kernel names."""

    def __init__(self, more: tuple[tuple[str, str], ...] = ()) -> None:
        """Use the patterns `more`, then `PATTERNS`."""
        self._table = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in (*more, *PATTERNS)]
        self._known: dict[str, str | None] = {}

    def match(self, name: str) -> str | None:
        """Return the class of a kernel, None when no pattern knows it."""
        if name not in self._known:
            short = name[:_MAX_NAME]
            self._known[name] = next((found for found, pattern in self._table if pattern.search(short)), None)
        return self._known[name]

    def __call__(self, name: str) -> str:
        """Return the class of a kernel; what no pattern knows is `catalogue.UNCLASSIFIED`."""
        return self.match(name) or catalogue.UNCLASSIFIED


def read(path: Path) -> tuple[tuple[str, str], ...]:
    """Read a file of further patterns.

    Raises:
        ClassFileError: It is no file, unreadable, too large, or a line is wrong.
    """
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ClassFileError(f"{path} is not a regular file")
            data = os.read(descriptor, MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ClassFileError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ClassFileError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    try:
        return parse(data.decode())
    except UnicodeDecodeError as error:
        raise ClassFileError(f"{path} is not UTF-8 text") from error
    except ClassFileError as error:
        raise ClassFileError(f"{path}, {error}") from error


def parse(text: str) -> tuple[tuple[str, str], ...]:
    """Parse lines of a class and a regular expression.

    Raises:
        ClassFileError: A line is wrong.
    """
    patterns: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, *rest = stripped.split(maxsplit=1)
        pattern = rest[0] if rest else ""
        if name not in catalogue.KERNEL_CLASSES:
            raise ClassFileError(
                f"line {number}: {name!r} is no kernel class; wanted one of {', '.join(catalogue.KERNEL_CLASSES)}"
            )
        if not pattern:
            raise ClassFileError(f"line {number}: a regular expression is missing after {name}")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ClassFileError(f"line {number}: {pattern!r} is no regular expression: {error}") from error
        patterns.append((name, pattern))
    return tuple(patterns)
