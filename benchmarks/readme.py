"""Fills the tables of README.md from benchmarks/results/*.json:  python benchmarks/readme.py [--check]"""
import json
import re
import sys

import common


def load(name: str) -> "dict | None":
    """The newest result of a benchmark, None when there is none."""
    found = sorted(common.RESULTS.glob(f"{name}_*.json"), key=lambda p: json.loads(p.read_text())["date"])
    return json.loads(found[-1].read_text()) if found else None


def markdown(head, rows) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def source(result) -> str:
    return (f"*{result['gpu']}, driver {result['driver']}, torch {result['torch']}, NVRTC {result['nvrtc']}, "
            f"{result['date']}; `benchmarks/results/`.*")


def verdict(value, goal, good) -> str:
    return f"{value} (goal {goal}{'' if good else ': missed'})"


def accumulate_table() -> str:
    result = load("accumulate")
    r = result["results"]
    rows = []
    for dtype, goal in (("float32", 1.07), ("bfloat16", 1.5)):
        for name in ("torch._foreach_add_", "accumulate_v1, per tensor", "accumulate_v2, per tensor", "accumulate_v3, per block", "accumulate_v3, one launch"):
            m = r["addition"][dtype][name]
            best = name.endswith("one launch")
            times, share = f"{m['times_foreach']:.2f}x", f"{m['of_copy_rate']:.0%}"
            rows.append((f"{dtype}: {name}", f"{m['ms']:.2f} ms", verdict(share, "94%", m["of_copy_rate"] >= 0.94) if best and dtype == "float32" else share,
                         verdict(times, f"{goal}x", m["times_foreach"] >= goal) if best else times))
    added, costs = r["micro_batch"], []
    for mode, goal in (("autograd", None), ("arena", 0.05), ("fused", 0.03), ("host", None)):
        cells = []
        for kind in ("replayed", "launched"):
            value = added[kind].get(mode)
            if value is None:
                cells.append("cannot be captured")
                continue
            text = f"{value['added']:+.1%}" if value["added"] < 2 else f"{1 + value['added']:.1f}x the time"
            cells.append(text if goal is None or kind == "launched" else verdict(text, f"{goal:+.0%}", value["added"] <= goal))
        costs.append((f"`{mode}`", *cells))
    count, launch = r["addition"]["elements"], r["launch_us"]
    return (f"Adding {count / 1e6:.0f} M fresh gradients ({r['addition']['tensors']} tensors) to the fp32 sum:\n\n"
            + markdown(("gradients, by", "time", "of the copy rate", "against `_foreach_add_`"), rows)
            + "\n\nWhat accumulating adds to one micro-batch's compiled forward and backward (`llama-350m`, bf16, batch 4, T = 1024), "
              "replayed from a CUDA graph, so that the GPU is measured, and launched from Python, where this machine's host is as slow "
              f"as its GPU ({added['launched']['none']['ms']:.1f} ms against {added['replayed']['none']['ms']:.1f} ms):\n\n"
            + markdown(("accumulation", "replayed", "launched from Python"), costs)
            + "\n\nA launch from Python costs the host, checks included, in microseconds: "
            + verdict(f"{launch['gpuaccel, 3 arguments']:.1f}", 8, launch["gpuaccel, 3 arguments"] <= 8)
            + f"; torch's own `add_` costs {launch['torch add_']:.1f} on the same host.\n\n" + source(result))


def train_table() -> str:
    result = load("train")
    rows = []
    for mode, r in result["results"].items():
        down = r["ledger"]["copies"].get("DtoH", [0, 0])[1] / 2**20
        rows.append((f"`{mode}`", *(f"{r[f'tokens_per_s, {k}'] / 1e3:,.1f}K" for k in (1, 4, 16)), f"{r['accumulation_cost']:.2f}", f"{r['mfu']:.0%}",
                     str(r["ledger"]["launches"]), str(r["ledger"]["syncs"]), f"{down:,.0f} MiB"))
    return ("Whole training steps of `llama-350m` (bf16 with fp32 masters, batch 4, T = 1024, compiled, clipped, torch's fused AdamW), tokens/s by "
            "micro-batches per step; launches, waits and downloads of one step with 4:\n\n"
            + markdown(("accumulation", "1", "4", "16", "16 : 1", "MFU", "launches", "host waits", "downloaded"), rows) + "\n\n" + source(result))


TABLES = {"accumulate": accumulate_table, "train": train_table}


def filled(text: str) -> str:
    for name, make in TABLES.items():
        text = re.sub(rf"(<!-- {name}: made by benchmarks/readme.py -->\n).*?(<!-- /{name} -->)",
                      lambda m: f"{m[1]}{make()}\n{m[2]}", text, flags=re.S)
    return text


if __name__ == "__main__":
    path = common.ROOT / "README.md"
    before = path.read_text()
    after = filled(before)
    if "--check" in sys.argv:
        sys.exit(0 if before == after else "README.md does not show benchmarks/results: run python benchmarks/readme.py")
    path.write_text(after)
