#!/usr/bin/env python3
"""Speed of tegula beside llama.cpp: same file, same numbers of tokens, same threads, in turns, as ratios.

`cargo xtask bench --peer` sets up what this needs and runs it: the PyPI package llama-cpp-python in the interpreter, and
target/release/tegula. Each pair runs both programs once, the one that goes first alternating; a figure is the median of the pairs'
ratios, since these depend less on what else the machine does than either speed. Each program runs each case once before it counts.

    python side_by_side.py MODEL.gguf [--pairs 7] [--prompt 512] [--generate 128] [--depth 0,4096] [--sequences 1,8] [--threads 2] [--busy 1] [--json]

With --flash-attention both (the default) the peer runs each case with flash attention on and off, and its faster one counts.
With --busy N, N busy loops run beside both. With --start, the time from starting the program to the first token of a prompt of 16 tokens is
compared too, and the greatest resident memory.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEGULA = ROOT / "target/release/tegula"


def cases(args):
    """(kind, tokens, depth, sequences) of each case, in the order in which `tegula bench` runs them."""
    out = []
    for depth in args.depth:
        out += [("prompt", n, depth, 1) for n in args.prompt if n]
        out += [("generate", n, depth, seqs) for seqs in args.sequences for n in args.generate if n]
    return out


class Peer:
    """llama.cpp through its C functions alone: the binding's own Python work is not measured, nor any sampling."""

    def __init__(self, args, flash_attention):
        import ctypes

        import llama_cpp

        self.c, self.api = ctypes, llama_cpp
        n_ctx = max([(n + depth) * seqs for _, n, depth, seqs in cases(args)] + [64])
        n_seqs = max(args.sequences)
        # The binding sets no number of sequences: its defaults are changed on the way.
        defaults = llama_cpp.llama_context_default_params

        def params():
            out = defaults()
            out.n_seq_max, out.kv_unified = n_seqs, True
            return out

        llama_cpp.llama_cpp.llama_context_default_params = llama_cpp.llama_context_default_params = params
        self.llm = llama_cpp.Llama(args.model, n_ctx=n_ctx, n_batch=2048, n_ubatch=512, n_threads=args.threads,
                                   n_threads_batch=args.threads, verbose=False, flash_attn=flash_attention)
        self.ctx = self.llm._ctx.ctx
        self.batch = llama_cpp.llama_batch_init(n_seqs, 0, 1)

    def decode(self, ids):
        for begin in range(0, len(ids), 2048):
            part = ids[begin:begin + 2048]
            array = (self.c.c_int32 * len(part))(*part)
            if self.api.llama_decode(self.ctx, self.api.llama_batch_get_one(array, len(part))) != 0:
                raise RuntimeError("llama_decode failed")
        self.api.llama_synchronize(self.ctx)

    def forget(self, depth):
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.ctx), -1, depth, -1)

    def step(self, id, position, seqs):
        """One token of each sequence, with logits."""
        batch = self.batch
        batch.n_tokens = seqs
        for i in range(seqs):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = id, position, 1, 1
            batch.seq_id[i][0] = i
        if self.api.llama_decode(self.ctx, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.api.llama_synchronize(self.ctx)

    def run(self, kind, n, depth, seqs):
        """Tokens a second of the first run and of the second."""
        ids = [(i * 7919) % 20000 + 300 for i in range(depth + n)]
        self.forget(0)
        if depth:
            self.decode(ids[:depth])
            for seq in range(1, seqs):
                self.api.llama_memory_seq_cp(self.api.llama_get_memory(self.ctx), 0, seq, -1, -1)
        rates = []
        for _ in range(2):
            self.forget(depth)
            begin = time.perf_counter()
            if kind == "prompt":
                self.decode(ids[depth:])
            else:
                for position, id in enumerate(ids[depth:], depth):
                    self.decode([id]) if seqs == 1 else self.step(id, position, seqs)
            rates.append(n * seqs / (time.perf_counter() - begin))
        return rates


def peer_main(args):
    peer = Peer(args, args.flash_attention == "on")
    print(json.dumps([peer.run(*case) for case in cases(args)]))


def peer(args):
    """The peer in a process of its own, so that both start alike; of its settings the best."""
    settings = ["on", "off"] if args.flash_attention == "both" else [args.flash_attention]
    results = []
    for setting in settings:
        command = [sys.executable, __file__, args.model, "--peer", "--flash-attention", setting, "--threads", str(args.threads)]
        for name in ("prompt", "generate", "depth", "sequences"):
            command += [f"--{name}", ",".join(map(str, getattr(args, name)))]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results.append(json.loads(out.splitlines()[-1]))
    return [max(rates, key=lambda rate: rate[1]) for rates in zip(*results)]


def ours(args):
    command = [str(TEGULA), "bench", args.model, "-r", "1", "--json", "-t", str(args.threads)]
    command += ["-p", ",".join(map(str, args.prompt)), "-n", ",".join(map(str, args.generate)), "-d", ",".join(map(str, args.depth))]
    command += ["--sequences", ",".join(map(str, args.sequences))]
    command += ["--device", args.device] if args.device else []
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [[case["first"], case["median"]] for case in report["cases"]]


PEER_START = """
import sys, llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_threads=int(sys.argv[2]), verbose=False)
llm.eval([(i * 7919) % 20000 + 300 for i in range(16)])
llm.sample(temp=0)
"""


def start(command):
    """Seconds of a whole process, and its greatest resident memory in bytes."""
    import os

    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        raise RuntimeError(f"{command[0]} failed ({status})")
    return time.perf_counter() - begin, usage.ru_maxrss * 1024


def starts(args):
    """[seconds, bytes] of ours and the peer's start; the binding's imports are not held against the peer."""
    a = start([str(TEGULA), "run", args.model, "-p", "The roof of the old house was made of red tiles and it", "-n", "1", "-c", "512",
               "--temperature", "0", "-q", "-t", str(args.threads)])
    b = start([sys.executable, "-c", PEER_START, args.model, str(args.threads)])
    imports = start([sys.executable, "-c", "import llama_cpp"])
    return a, (b[0] - imports[0], b[1])


@contextlib.contextmanager
def busy(n):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def numbers(text):
    return [int(word) for word in text.split(",") if word]


def summary(name, pairs, unit):
    ratios = sorted(a / b for a, b in pairs)
    row = {"case": name, "pairs": len(pairs), "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1],
           "ours": statistics.median(a for a, _ in pairs), "peer": statistics.median(b for _, b in pairs), "unit": unit}
    print(f"{name}: {row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f}), {row['ours']:.1f} / {row['peer']:.1f} {unit}",
          file=sys.stderr, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--prompt", type=numbers, default=[512])
    parser.add_argument("--generate", type=numbers, default=[128])
    parser.add_argument("--depth", type=numbers, default=[0])
    parser.add_argument("--sequences", type=numbers, default=[1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="ours")
    parser.add_argument("--flash-attention", choices=["on", "off", "both"], default="both")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer_main(args)
        return
    pairs, begun = [], []
    with busy(args.busy):
        for index in range(args.pairs):
            order = [ours, peer] if index % 2 == 0 else [peer, ours]
            results = {run.__name__: run(args) for run in order}
            pairs.append((results["ours"], results["peer"]))
            if args.start:
                begun.append(starts(args))
            for case, a, b in zip(cases(args), *pairs[-1]):
                print(f"pair {index + 1}: {case[0]} {case[1]} at depth {case[2]}, {case[3]} sequences: {a[1]:.1f} / {b[1]:.1f} = {a[1] / b[1]:.2f}",
                      file=sys.stderr, flush=True)
    rows = []
    for number, (kind, n, depth, seqs) in enumerate(cases(args)):
        name = f"{kind} {n} at depth {depth}" + (f", {seqs} sequences" if seqs > 1 else "")
        rows.append(summary(name, [(a[number][1], b[number][1]) for a, b in pairs], "t/s"))
        if kind == "prompt":
            rows.append(summary(f"{name}, first run", [(a[number][0], b[number][0]) for a, b in pairs], "t/s"))
    if begun:
        rows.append(summary("start to first token (less is better)", [(a[0], b[0]) for a, b in begun], "s"))
        rows.append(summary("peak memory (less is better)", [(a[1] / 2**20, b[1] / 2**20) for a, b in begun], "MiB"))
    if args.json:
        print(json.dumps({"model": args.model, "threads": args.threads, "busy": args.busy, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
