"""STAND-IN, not sgl-kernel: what the eagle-exporter demo needs of SGLang's CPU kernels, in plain torch.

SGLang has a CPU path for EAGLE, but its kernels come from a CPU build of ``sgl-kernel`` that is published
nowhere as a wheel. This package takes its place for one purpose: a Llama target with an EAGLE or EAGLE-3
draft, served with ``SGLANG_USE_CPU_ENGINE=1 --device cpu`` and the ``intel_amx`` attention backend. Names,
arguments and results follow the calls in SGLang 0.5.16 to 0.5.23 (``sglang/kernels/ops/speculative``,
``sglang/kernels/ops/kvcache``, ``srt/mem_cache/allocation.py``,
``srt/layers/attention/intel_amx_backend.py``). It is written for correctness; its timings say nothing about
SGLang's kernels.

Nothing here knows the demo's models or the exporter. This folder is on the import path of the demo's SGLang
server only. It leaves out ``convert_weight_packed``, by which SGLang would take the machine for one with AMX
kernels.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

if __name__ != "sgl_kernel":
    raise ImportError("this folder goes on the import path of the demo's server; it is no part of eagle_exporter")

__version__ = "0.0.0+eagle.exporter.standin"

_TREE_MASK_FULL = 0
_TREE_MASK_QUERY_ONLY = 1


# KV slots. ``req_to_token[request, position]`` is the slot of a token in the KV pool.


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Enter new slots, concatenated over the requests, at positions [start, end) of each request."""
    taken = 0
    for request, start, end in _rows(req_pool_indices, start_offset, end_offset):
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Collect the slots of positions [start, end) of each request into ``out_cache_loc``, concatenated."""
    filled = 0
    for request, start, end in _rows(req_pool_indices, start_offset, end_offset):
        out_cache_loc[filled : filled + end - start] = req_to_token[request, start:end].to(out_cache_loc.dtype)
        filled += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Collect the ``topk * num_steps`` slots after each request's sequence, for its draft branches."""
    width = topk * num_steps
    for row, (request, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        out_cache_loc[row * width : (row + 1) * width] = req_to_token[request, length : length + width].to(
            out_cache_loc.dtype
        )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """A slot table with one row per draft branch: the request's sequence, then the branch's own slots.

    Returns:
        Shape ``(requests * topk, pool_len)``, the dtype of ``req_to_token``.
    """
    table = req_to_token.new_zeros((req_pool_indices.numel() * topk, pool_len))
    row = 0
    for request, length in _rows(req_pool_indices, seq_lens):
        for branch in range(topk):
            first = length + branch * num_steps
            table[row, :length] = req_to_token[request, :length]
            table[row, length : length + num_steps] = req_to_token[request, first : first + num_steps]
            row += 1
    return table


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Take the last accepted token of each request (its bonus token) out of rows of ``accept_stride``."""
    rows = torch.arange(accept_lens.numel(), dtype=torch.int64)
    last = rows * accept_stride + accept_lens.to(torch.int64) - 1
    bonus_tokens[: rows.numel()] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Move the slots of accepted tree nodes (``accept_index``, -1 for none) to the front."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted >= 0].to(torch.int64)
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy KV rows ``src_loc`` to ``tgt_loc`` in every layer's buffer (addresses, row sizes in bytes)."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, row_size in _rows(data_ptrs, strides):
        # All reads before the first write: the two sets of rows may overlap.
        contents = [ctypes.string_at(address + row * row_size, row_size) for row in sources]
        for row, content in zip(targets, contents, strict=True):
            ctypes.memmove(address + row * row_size, content, row_size)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's input tokens one to the left and enter its new token at the end."""
    new_tokens = topk_index.reshape(-1)
    for row, (start, length) in enumerate(_rows(extend_start_loc, extend_seq_lens)):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        end = start + length - 1 if select_index is None else int(select_index[row])
        input_ids[end] = new_tokens[row]


# The draft tree. Node 0 of a request is the root (the last accepted token); its other nodes are candidates.


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Link the selected candidates into a tree: ancestors' mask, positions, first child and next sibling.

    ``selected_index`` are candidate numbers; candidate ``c`` descends from beam entry ``c // topk``, whose
    own candidate number is ``parent_list[c // topk]`` (entry 0 is the root). All output tensors are filled in
    place; ``retrieve_next_token`` and ``retrieve_next_sibling`` come filled with -1.

    Raises:
        NotImplementedError: for a bit-packed mask.
    """
    if int(tree_mask_mode) not in (_TREE_MASK_FULL, _TREE_MASK_QUERY_ONLY):
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}")
    mask = tree_mask.view(-1)
    mask_offset = 0
    for request, prefix in enumerate(verified_seq_len.tolist()):
        selected = selected_index[request].tolist()
        beam = parent_list[request].tolist()
        node_of_candidate = {candidate: node for node, candidate in enumerate(selected, start=1)}

        parents = [-1] * draft_token_num
        for node, candidate in enumerate(selected, start=1):
            beam_entry = candidate // topk
            # A node without its parent in the tree (possible with tied scores only) stays unlinked.
            parents[node] = 0 if beam_entry == 0 else node_of_candidate.get(beam[beam_entry], -1)

        width = draft_token_num + (prefix if int(tree_mask_mode) == _TREE_MASK_FULL else 0)
        rows = mask[mask_offset : mask_offset + draft_token_num * width].view(draft_token_num, width)
        rows = rows[:, width - draft_token_num :]
        mask_offset += draft_token_num * width
        rows.fill_(False)
        rows[:, 0] = True
        for node in range(draft_token_num):
            depth_of_node = 0
            ancestor = node
            while ancestor > 0:
                rows[node, ancestor] = True
                depth_of_node += 1
                ancestor = parents[ancestor]
            positions[request * draft_token_num + node] = prefix + depth_of_node

        # Backwards, each node before its later siblings: children stay in ascending order.
        for node in range(draft_token_num - 1, 0, -1):
            parent = parents[node]
            if parent >= 0:
                retrieve_next_sibling[request, node] = retrieve_next_token[request, parent]
                retrieve_next_token[request, parent] = node
        first = request * draft_token_num
        retrieve_index[request] = torch.arange(first, first + draft_token_num)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's greedy tokens down each request's tree.

    Fills ``accept_index`` with the accepted nodes (shape ``(requests, num_steps + 1)``, root first, -1 after
    the last), ``accept_token_num`` with their number without the root, and ``predicts`` at each accepted node
    with the target's token there; at the last one that is the bonus token.
    """
    target_tokens = target_predict.reshape(-1).tolist()
    for request in range(candidates.shape[0]):
        tokens = candidates[request].tolist()
        index = retrive_index[request].tolist()
        first_child = retrive_next_token[request].tolist()
        next_sibling = retrive_next_sibling[request].tolist()

        node = 0
        accepted = 0
        accept_index[request, 0] = index[0]
        while True:
            target_token = target_tokens[index[node]]
            predicts[index[node]] = target_token
            if accepted + 1 == accept_index.shape[1]:
                break
            child = first_child[node]
            while child >= 0 and tokens[child] != target_token:
                child = next_sibling[child]
            if child < 0:
                break
            node = child
            accepted += 1
            accept_index[request, accepted] = index[node]
        accept_token_num[request] = accepted


# Attention over the paged KV pool, registered below as torch.ops.sgl_kernel.*


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, logit_cap: float, mask: Tensor | None
) -> Tensor:
    """Attention of one request.

    Shapes: queries (tokens, heads, width), keys and values (context, kv heads, width), mask (tokens, context)
    with True where a token may look; the result has the shape of the queries, with the values' width.
    """
    groups = queries.shape[1] // keys.shape[1]
    q = queries.transpose(0, 1)
    k = keys.to(queries.dtype).transpose(0, 1).repeat_interleave(groups, dim=0)
    v = values.to(queries.dtype).transpose(0, 1).repeat_interleave(groups, dim=0)
    if not logit_cap or logit_cap <= 0:
        out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)[0]
        return out.transpose(0, 1)
    scores = logit_cap * torch.tanh(q.float() @ k.float().transpose(1, 2) * scale / logit_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v.float()).transpose(0, 1)


def _extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_extend_len: int,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Attention of several new tokens per request, their keys and values already in the pool. Fills ``o``.

    ``seq_lens`` count the new tokens. A tree mask, where given, restricts them to their ancestors among
    themselves (concatenated ``n * n`` booleans per request).
    """
    _require(not is_cross_attention, "cross attention")
    _require(sinks is None, "attention sinks")
    _require(k_scale == 1.0 and v_scale == 1.0, "a quantised KV cache")
    mask_offset = 0
    for request, length, new, start in _rows(req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc):
        slots = req_to_token[request, :length].to(torch.int64)
        mask = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            among = tree_mask.view(-1)[mask_offset : mask_offset + new * new].view(new, new)
            mask[:, length - new :] = among.to(torch.bool)
            mask_offset += new * new
        elif is_causal:
            mask = mask.tril(length - new)
        if sliding_window and sliding_window > 0:
            mask &= torch.ones_like(mask).triu(length - new - sliding_window + 1)
        out = _attend(q[start : start + new], k_buffer[slots], v_buffer[slots], scale, logit_cap, mask)
        o[start : start + new] = out.to(o.dtype)


def _decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Write one new token per row into the pool at ``loc``, then attend with it. Fills ``o``.

    ``seq_lens`` count the new token.
    """
    _require(not is_cross_attention, "cross attention")
    _require(sinks is None, "attention sinks")
    _require(k_scale == 1.0 and v_scale == 1.0, "a quantised KV cache")
    if k is not None and v is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for row, (request, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        first = max(0, length - sliding_window) if sliding_window and sliding_window > 0 else 0
        slots = req_to_token[request, first:length].to(torch.int64)
        out = _attend(q[row : row + 1], k_buffer[slots], v_buffer[slots], scale, logit_cap, None)
        o[row : row + 1] = out.to(o.dtype)


def _rows(*columns: Tensor) -> zip[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _require(supported: bool, what: str) -> None:
    if not supported:
        raise NotImplementedError(f"the sgl_kernel stand-in of the eagle-exporter demo does not do {what}")


def _with_scales(position: int, function: Callable[..., None]) -> Callable[..., None]:
    """Accept calls of SGLang before 0.5.19, which lack the two KV scales at ``position``."""

    def call(*arguments: Any) -> None:
        if isinstance(arguments[position], float):
            function(*arguments)
        else:
            function(*arguments[:position], 1.0, 1.0, *arguments[position:])

    return call


torch.ops.sgl_kernel.extend_attention_cpu = _with_scales(6, _extend_attention)
torch.ops.sgl_kernel.decode_attention_cpu = _with_scales(3, _decode_attention)
