#!/usr/bin/env python3
"""Speed of tegula beside llama.cpp: same file, same tokens, same threads, in turns, as ratios.

Needs the PyPI package llama-cpp-python in the interpreter that runs it (a virtual environment outside the repository), and
target/release/tegula. Each pair runs both once, the one that goes first alternating; the figure is the median of the
pairs' ratios, since these depend less on what else the machine does than either speed.

    python side_by_side.py MODEL.gguf [--pairs 7] [--prompt 512] [--generate 128] [--threads 2]
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def peer(args, text):
    """Prompt and generation speed of llama.cpp: its decode function alone, without the binding's own work or any sampling."""
    import ctypes

    import llama_cpp

    llm = llama_cpp.Llama(args.model, n_ctx=args.prompt + args.generate + 64, n_batch=2048, n_ubatch=512,
                          n_threads=args.threads, n_threads_batch=args.threads, verbose=False, flash_attn=True)
    ctx = llm._ctx.ctx

    def decode(ids):
        array = (ctypes.c_int32 * len(ids))(*ids)
        if llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(array, len(ids))) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(ctx)

    tokens = llm.tokenize(text.encode())[: args.prompt]
    decode(tokens[:16])  # the first run sets buffers up
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
    begin = time.perf_counter()
    decode(tokens)
    prompt = len(tokens) / (time.perf_counter() - begin)
    begin = time.perf_counter()
    for index in range(args.generate):
        decode([tokens[index % len(tokens)]])
    generate = args.generate / (time.perf_counter() - begin)
    return {"prompt": prompt, "generate": generate, "n_prompt": len(tokens)}


def ours(args, text):
    out = subprocess.run([str(ROOT / "target/release/tegula"), "run", args.model, "-p", text, "-n", str(args.generate + 1),
                          "--temperature", "0", "--ignore-eos", "--json", "-q", "-t", str(args.threads),
                          "-c", str(args.prompt + args.generate + 64)],
                         check=True, capture_output=True, text=True).stdout
    result = json.loads(out)
    return {"prompt": result["prompt_tokens_per_s"], "generate": result["tokens_per_s"],
            "n_prompt": len(result["prompt_tokens"])}


def peer_in_process(args, text):
    """A process of its own, so that both start alike."""
    command = ["python", __file__, args.model, "--peer", "--prompt", str(args.prompt), "--generate", str(args.generate),
               "--threads", str(args.threads)]
    import sys
    command[0] = sys.executable
    return json.loads(subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        import sys
        print(json.dumps(peer(args, sys.stdin.read())))
        return
    # About four characters a token; both cut or take what the tokenizer makes of it, and the counts are compared.
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tokens = json.loads(subprocess.run([str(ROOT / "target/release/tegula"), "tokenize", args.model, "--json"], input=text,
                                       check=True, capture_output=True, text=True).stdout)[: args.prompt]
    text = subprocess.run([str(ROOT / "target/release/tegula"), "tokenize", args.model, "--decode"], input=json.dumps(tokens),
                          check=True, capture_output=True, text=True).stdout
    pairs = []
    for index in range(args.pairs):
        order = [ours, peer_in_process] if index % 2 == 0 else [peer_in_process, ours]
        results = {run.__name__: run(args, text) for run in order}
        a, b = results["ours"], results["peer_in_process"]
        pairs.append((a, b))
        print(f"pair {index + 1}: prompt {a['prompt']:.1f} / {b['prompt']:.1f} ({a['n_prompt']} and {b['n_prompt']} tokens), "
              f"generation {a['generate']:.1f} / {b['generate']:.1f}", flush=True)
    for what in ("prompt", "generate"):
        ratios = sorted(a[what] / b[what] for a, b in pairs)
        print(f"{what}: median ratio {statistics.median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f}), medians "
              f"{statistics.median(a[what] for a, _ in pairs):.1f} / {statistics.median(b[what] for _, b in pairs):.1f} t/s")


if __name__ == "__main__":
    main()
