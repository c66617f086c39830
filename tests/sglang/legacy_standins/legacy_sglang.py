"""The CPU branches that SGLang 0.5.6 to 0.5.12 lack for EAGLE; for tests, SGLang's source stays as it is.

Each module is changed while SGLang imports it, so that everything that imports from it later sees the change. Triton's
kernels run in its interpreter (``TRITON_INTERPRET=1``), except attention, which would take minutes there.
"""

import contextlib
import importlib.abc
import importlib.util
import inspect
import sys
import types

_SPECULATIVE = "sglang.srt.speculative"
_ATTENTION = "sglang.srt.layers.attention.triton_ops"


def prepare():
    """Leave a note for each module; called once in each process, before SGLang imports them."""
    for name, change in {
        f"{_SPECULATIVE}.eagle_utils": _take_kernels_of_the_standin,
        f"{_SPECULATIVE}.eagle_info_v2": _take_the_branch_of_cuda,
        f"{_ATTENTION}.decode_attention": _replace_decode_attention,
        f"{_ATTENTION}.extend_attention": _replace_extend_attention,
        "sglang.srt.layers.activation": _keep_the_own_layers,
        "sglang.srt.layers.layernorm": _keep_the_own_layers,
        "sglang.srt.layers.rotary_embedding": _make_rotary_embeddings_without_vllm,
        "sglang.srt.layers.torchao_utils": _quantise_nothing,
        "sglang.srt.models.llama": _name_the_rotary_base,
    }.items():
        sys.meta_path.insert(0, _AroundImport(name, contextlib.contextmanager(change)))
    _make_streams_stand_still()


class _AroundImport(importlib.abc.MetaPathFinder):
    """Executes a module's body within the context ``change(module)``."""

    def __init__(self, name, change):
        self.name = name
        self.change = change

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            with self.change(module):
                execute(module)

        spec.loader.exec_module = exec_module
        return spec


def _take_kernels_of_the_standin(eagle_utils):
    import sgl_kernel

    yield
    # As on CUDA: the module's own calls, of the stand-in's kernels.
    eagle_utils._is_cuda = True
    eagle_utils.sgl_build_tree_kernel_efficient = sgl_kernel.build_tree_kernel_efficient


def _take_the_branch_of_cuda(eagle_info_v2):
    yield
    # assign_extend_cache_locs_func has branches for CUDA and NPU; the kernel of the first is Triton's.
    eagle_info_v2._is_cuda = True


@contextlib.contextmanager
def _vllm(name, get):
    """``from vllm.name import x`` gives ``get("x")`` meanwhile. Not for longer: SGLang asks whether vLLM is there."""
    path = ""
    ours = []
    for part in f"vllm.{name}".split("."):
        path = f"{path}.{part}" if path else part
        ours.append(path)
        sys.modules[path] = types.ModuleType(path)
    sys.modules[path].__dict__["__getattr__"] = get
    try:
        yield
    finally:
        for path in ours:
            del sys.modules[path]


def _keep_the_own_layers(layers):
    """Until 0.5.8 these modules end by taking vLLM's layers where they see no GPU; here they get their own back."""
    name = layers.__name__.rpartition(".")[2]
    with _vllm(f"model_executor.layers.{name}", lambda layer: getattr(layers, layer)):
        yield


def _make_rotary_embeddings_without_vllm(rotary_embedding):
    """Until 0.5.8 the constructor takes vLLM's kernel where it sees no GPU, and uses it on a GPU only."""
    yield
    original = rotary_embedding.RotaryEmbedding.__init__

    def initialise(self, *arguments, **keywords):
        with _vllm("_custom_ops", lambda _name: None):
            original(self, *arguments, **keywords)

    rotary_embedding.RotaryEmbedding.__init__ = initialise


def _name_the_rotary_base(llama):
    """Until 0.5.9 models ask for a name that transformers 5 has no more, and take 10000 when it is not there."""
    yield
    original = llama.LlamaDecoderLayer.__init__

    def initialise(self, config, *arguments, **keywords):
        if not hasattr(config, "rope_theta"):
            config.rope_theta = config.rope_parameters["rope_theta"]
        original(self, config, *arguments, **keywords)

    llama.LlamaDecoderLayer.__init__ = initialise


def _quantise_nothing(torchao_utils):
    yield
    # Imports torchao first, and asks then whether there is something to do.
    torchao_utils.apply_torchao_config_to_model = lambda model, *_arguments, **_keywords: model


def _make_streams_stand_still():
    import torch

    torch.cuda.synchronize = lambda *_arguments: None
    torch.cuda.empty_cache = lambda: None
    # The overlap loop tells the allocator which stream uses a tensor; a CPU tensor has no stream.
    torch.Tensor.record_stream = lambda _self, _stream: None


def _attend(queries, keys, values, scale, mask):
    """Attention of one request: (tokens, heads, width), (context, kv heads, width), mask (tokens, context) or None."""
    import torch

    groups = queries.shape[1] // keys.shape[1]
    q = queries.transpose(0, 1)
    k = keys.to(queries.dtype).transpose(0, 1).repeat_interleave(groups, dim=0)
    v = values.to(queries.dtype).transpose(0, 1).repeat_interleave(groups, dim=0)
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)[0]
    return out.transpose(0, 1)


def _by_name(original, replacement):
    """Call ``replacement`` with one namespace of all arguments: their order differs from release to release."""
    signature = inspect.signature(original)

    def function(*arguments, **keywords):
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        given = types.SimpleNamespace(**bound.arguments)
        for name, plain in _PLAIN.items():
            if getattr(given, name, plain) != plain:
                raise NotImplementedError(f"the stand-in's attention with {name}={getattr(given, name)}")
        replacement(given)

    return function


_PLAIN = {
    "is_causal": True,
    "k_scale": 1.0,
    "logit_cap": 0.0,
    "sinks": None,
    "skip_prefix_custom_mask": True,
    "sliding_window_size": -1,
    "v_scale": 1.0,
    "xai_temperature_len": -1,
}
"""What the stand-in's attention knows; anything else is refused."""


def _decode_attention(given):
    """One new token per row, its keys and values already in the pool. Fills ``o``."""
    ends = given.kv_indptr.tolist()
    for row in range(given.q.shape[0]):
        slots = given.kv_indices[ends[row] : ends[row + 1]].long()
        out = _attend(given.q[row : row + 1], given.k_buffer[slots], given.v_buffer[slots], given.sm_scale, None)
        given.o[row : row + 1] = out


def _extend_attention(given):
    """Several new tokens per request after what ``kv_indices`` name of the pool. Fills ``o_extend``.

    ``custom_mask`` has a row for each new token, over the prefix (all true) and the new tokens.
    """
    import torch

    starts, ends = given.qo_indptr.tolist(), given.kv_indptr.tolist()
    for row in range(len(starts) - 1):
        new = slice(starts[row], starts[row + 1])
        count, prefix = new.stop - new.start, ends[row + 1] - ends[row]
        slots = given.kv_indices[ends[row] : ends[row + 1]].long()
        keys = torch.cat([given.k_buffer[slots], given.k_extend[new].view(count, *given.k_buffer.shape[1:])])
        values = torch.cat([given.v_buffer[slots], given.v_extend[new].view(count, *given.v_buffer.shape[1:])])
        mask = torch.ones(count, prefix + count, dtype=torch.bool)
        if given.custom_mask is None:
            mask = mask.tril(prefix)
        else:
            first = int(given.mask_indptr[row])
            rows = given.custom_mask[first : first + mask.numel()].view(mask.shape)
            mask[:, prefix:] = rows[:, prefix:].bool()
        given.o_extend[new] = _attend(given.q_extend[new], keys, values, given.sm_scale, mask)


def _replace_decode_attention(module):
    yield
    module.decode_attention_fwd = _by_name(module.decode_attention_fwd, _decode_attention)


def _replace_extend_attention(module):
    yield
    module.extend_attention_fwd = _by_name(module.extend_attention_fwd, _extend_attention)
