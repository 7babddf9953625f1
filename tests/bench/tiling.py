#!/usr/bin/env python3
"""What tiling costs: speed under caps of 1 MiB and 16 MiB beside none, in turns, as ratios.

Needs target/release/tegula with its plugins. Each round runs every cap once, in an order that turns from round to round; the figure is the median
of the rounds' ratios to the run without a cap, since these depend less on what else the machine does than any speed. A second run
without a cap in every round shows what the machine alone makes of the same: no difference below that means anything.

    python tiling.py MODEL.gguf [--rounds 7] [--prompt 512] [--generate 128] [--threads 2] [--caps 1MiB,16MiB] [--device cpu]
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


def tegula(args, *words, text=None, cap=None):
    env = {name: value for name, value in os.environ.items() if not name.startswith("TEGULA_MAX_BUFFER")}
    if cap is not None:
        env["TEGULA_MAX_BUFFER"] = cap
    return subprocess.run([args.tegula, *words], input=text, env=env, check=True, capture_output=True, text=True).stdout


def measure(args, text, cap):
    out = json.loads(tegula(args, "run", args.model, "-f", "-", "-n", str(args.generate + 1), "--temperature", "0",
                            "--ignore-eos", "--json", "-q", "-t", str(args.threads), "--device", args.device,
                            "-c", str(args.prompt + args.generate + 64), text=text, cap=cap))
    return {"prompt": out["prompt_tokens_per_s"], "generation": out["tokens_per_s"], "tokens": out["generation"]["tokens"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--caps", default="1MiB,16MiB")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tegula", default=str(ROOT / "target/release/tegula"))
    args = parser.parse_args()
    # About as many tokens as asked for: what is compared has the same text.
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tokens = json.loads(tegula(args, "tokenize", args.model, "--json", text=text))[: args.prompt]
    text = tegula(args, "tokenize", args.model, "--decode", text=json.dumps(tokens))
    runs = {"none": None, **{cap: cap for cap in args.caps.split(",")}, "none again": None}
    names = list(runs)
    measure(args, text, None)  # the file comes into memory
    results = {name: [] for name in names}
    for index in range(args.rounds):
        turned = names[index % len(names):] + names[:index % len(names)]
        for name in turned:
            results[name].append(measure(args, text, runs[name]))
        print(f"round {index + 1}: " + ", ".join(
            f"{name} {results[name][-1]['prompt']:.0f} / {results[name][-1]['generation']:.1f}" for name in names), flush=True)
    said = {name: result[0]["tokens"] for name, result in results.items()}
    if any(tokens != said["none"] for tokens in said.values()):
        print("NOT the same text under every cap")
    for what in ("prompt", "generation"):
        for name in names[1:]:
            ratios = sorted(a[what] / b[what] for a, b in zip(results[name], results["none"]))
            print(f"{what}, cap {name}: median ratio {statistics.median(ratios):.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f}), "
                  f"median {statistics.median(a[what] for a in results[name]):.1f} t/s")


if __name__ == "__main__":
    main()
