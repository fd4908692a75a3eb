"""Greedy tokens from vLLM as one JSON line: ``python serve_once.py FOLDER '{"tensor_parallel_size": 2}' [OTHER ...]``.

Weights of every OTHER are loaded in place afterwards, for one more line each.
"""

import json
import sys

PROMPTS = ("def ", "import ", "class Foo:\n    def ", "for i in range(")
TOKENS = 24
OPTIONS = {
    "quantization": "compiled-moe", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 128,
    "max_num_seqs": 4, "enforce_eager": True,
}  # fmt: skip


def prompts():
    return [[b + 3 for b in text.encode()] for text in PROMPTS]  # the shipped tokenizer: one token a byte


def main():
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], **OPTIONS | json.loads(sys.argv[2]))
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for folder in (None, *sys.argv[3:]):
        if folder is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            llm.reset_prefix_cache()
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling, use_tqdm=False)
        print("TOKENS " + json.dumps([list(one.outputs[0].token_ids) for one in done]))


if __name__ == "__main__":
    main()
