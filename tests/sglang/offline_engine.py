"""Run by the tests in SGLang's interpreter: an offline ``Engine``, as a user's script makes one."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Serve the prompts of the command line and print the answers as JSON."""
    import sglang

    target, draft, requests = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    engine = sglang.Engine(
        model_path=target,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        max_total_tokens=32768,
        max_running_requests=16,
        mem_fraction_static=0.5,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        chunked_prefill_size=2048,
        attention_backend="torch_native",
        prefill_attention_backend="intel_amx",
        speculative_draft_attention_backend="intel_amx",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=draft,
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        log_level="warning",
    )
    answers = [
        engine.generate(input_ids=[prompt], sampling_params={"temperature": 0.0, "max_new_tokens": count})[0][
            "output_ids"
        ]
        for prompt, count in requests
    ]
    print("ANSWERS " + json.dumps(answers), flush=True)
    sys.stdin.readline()
    engine.shutdown()


if __name__ == "__main__":
    main()
