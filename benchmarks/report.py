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


def clip_table() -> str:
    result = load("clip")
    r, rows = result["results"], []
    torch, ours, goals = "torch foreach", "ga.clip_grad_norm_", {"over": 1.38, "under": 4}
    for dtype in ("float32", "bfloat16"):
        for name in r[dtype]["over"]:
            row = [f"{dtype}: {name}"]
            for case in ("over", "under"):
                m = r[dtype][case][name].get("replayed")
                times = m and f"{m['times_torch']:.2f}x"
                if m and dtype == "float32" and name == ours:
                    times = verdict(times, f"{goals[case]}x", m["times_torch"] >= goals[case])
                share = m and (", nothing to move" if m["of_copy_rate"] is None else f", {m['of_copy_rate']:.0%}")
                row += [f"{m['ms']:.3g} ms{share}, {times}" if m else "cannot be captured", f"{r[dtype][case][name]['launched']['ms']:.3g} ms"]
            rows.append((*row, str(r[dtype]["host"][name]["syncs"])))
    errors = {dtype: r[dtype]["norm_error"] for dtype in ("float32", "bfloat16")}
    return (f"Clipping {r['float32']['elements'] / 1e6:.0f} M gradients ({r['float32']['tensors']} tensors), over the threshold and under it, replayed from a CUDA "
            "graph (time, share of the copy rate on the bytes that must move, against `torch.nn.utils.clip_grad_norm_(foreach=True)`) and launched from "
            "Python behind other work:\n\n"
            + markdown(("gradients, by", "over: replayed", "from Python", "under: replayed", "from Python", "host waits"), rows)
            + "\n\n" + bound(r) + "\n\nOf 1,000 tensors of 1,000 elements:\n\n" + small_rows(r["small"], torch, ours, 2)
            + f"\n\nThe norm's error against float64: ours {errors['float32'][ours]:.0e}, torch {errors['float32'][torch]:.0e}; of bf16 gradients "
              f"{errors['bfloat16'][ours]:.0e} and {errors['bfloat16'][torch]:.0e}.\n\n" + source(result))


def bound(r) -> str:
    """What the goals ask for, against what the copy rate of the same run allows."""
    f, rate = r["float32"], r["float32"]["copy_GB_per_s"]
    floors = {case: size * f["elements"] / rate / 1e6 for case, size in (("over", 12), ("under", 4))}
    times = {case: f[case]["torch foreach"]["replayed"]["ms"] / ms for case, ms in floors.items()}
    return (f"At the copy rate of this run ({rate / 1e3:.2f} TB/s) reading twice and writing once takes {floors['over']:.2f} ms, which is {times['over']:.2f}x; "
            f"one read takes {floors['under']:.2f} ms, {times['under']:.2f}x. The goals were set beside a slower run of torch's (1.93 ms).")


def small_rows(small, torch, ours, goal=None) -> str:
    def cell(m, good):
        times = f"{m['times_torch']:.1f}x"
        return f"{m['ms']:.3g} ms, {verdict(times, f'{goal}x', m['times_torch'] >= goal) if good and goal else times}"
    rows = [(name, *(cell(small[kind][key], key == ours) for kind in ("wall", "replayed"))) for name, key in ((torch, torch), (ours, ours))]
    return markdown(("by", "from Python, by the host's clock", "replayed"), rows)


def tail_table() -> str:
    result = load("tail")
    r, rows = result["results"], []
    for dtype in ("float32", "bfloat16"):
        for name, m in r[dtype]["replayed"].items():
            times, share = f"{m['times_torch']:.2f}x", f"{m['of_copy_rate']:.0%}"
            if dtype == "float32" and name == "ours":
                times, share = verdict(times, "1.45x", m["times_torch"] >= 1.45), verdict(share, "93%", m["of_copy_rate"] >= 0.93)
            rows.append((f"{dtype}: {name}", f"{m['ms']:.2f} ms", share, times, f"{r[dtype]['launched'][name]['ms']:.2f} ms"))
    stages = {dtype: ", ".join(f"`{name}` {ms:.3g}" for name, ms in r[dtype]["stages"].items()) for dtype in ("float32", "bfloat16")}
    same, exact = r["drift"]["same gradients, from foreach"], r["drift"]["same gradients, from float64"]
    far = verdict(f"{same['ours']['max']:.1e}", f"at most twice torch's {same['fused']['max']:.1e}", same["ours"]["max"] <= 2 * same["fused"]["max"])
    return (f"The tail of a step (add the last gradients, clip at 1.0, AdamW, clear the sums) for {r['float32']['elements'] / 1e6:.0f} M parameters "
            f"({r['float32']['tensors']} tensors; bfloat16: with fp32 masters), replayed from a CUDA graph and launched from Python behind other work; shares are "
            f"of the copy rate on the {r['float32']['bytes']['whole']} bytes per parameter that must move ({r['float32']['bytes']['sums there already']}, bfloat16 "
            f"{r['bfloat16']['bytes']['sums there already']}, where the sums are there already, which is compared with torch's without its addition):\n\n"
            + markdown(("weights, by", "replayed", "of the copy rate", "against torch's best", "from Python"), rows)
            + f"\n\nStages of ours, each alone, in milliseconds: {stages['float32']}; bfloat16: {stages['bfloat16']}."
              "\n\nClip and AdamW of 1,000 tensors of 1,000 elements:\n\n" + small_rows(r["small"], "torch", "ours")
            + f"\n\nAfter 100 steps with the same gradients no weight is farther from torch's foreach AdamW than {far}; from AdamW in float64 they are "
              f"{exact['ours']['rms']:.1e} apart (root of the mean square), torch's {exact['foreach']['rms']:.1e}.\n\n" + source(result))


def step_table() -> str:
    result, rows = load("step"), []
    goals = {"1024": {"ours": 1.15, "ours, deterministic": 1.0}, "256": {"ours": 1.35, "ours, deterministic": 1.2}}
    for T, found in result["results"].items():
        for name, m in found.items():
            times, memory = f"{m['times_torch']:.2f}x", f"{m['peak_GiB']:.1f} GiB"
            if name in goals[T]:
                times = verdict(times, f"{goals[T][name]:g}x", m["times_torch"] >= goals[T][name])
                memory += f", {verdict(format(m['memory'], '.2f') + 'x', '1.05x at most', m['memory'] <= 1.05)}"
            rows.append((f"T = {T}: {name}", f"{m['ms']:.1f} ms", f"{m['tokens_per_s'] / 1e3:,.1f}K", times, f"{m['mfu']:.0%}", memory))
    return ("One whole optimizer step of `llama-350m` (batch 4, 4 micro-batches, AdamW, clipped at 1.0), compiled and replayed as one CUDA graph. torch: bf16 "
            "autocast over fp32 weights, foreach clip, fused AdamW (the script is in `benchmarks/step.py`), and not deterministic. Ours: bf16 weights with fp32 "
            "masters, `accumulate=\"fused\"`, `replay=\"graph\"`, and the same with `deterministic=True`:\n\n"
            + markdown(("step", "time", "tokens/s", "against torch", "MFU", "peak memory"), rows) + "\n\n" + source(result))


def graphs_table() -> str:
    result = load("graphs")
    r, goals, rows = result["results"], {"4 x 1024": 1.25, "4 x 256": 3, "1 x 128": 6}, []
    names = {"plain torch": "plain torch, eager", "ours, eager": "ours, eager", "ours, replayed": "ours, replayed",
             "ours, replayed, compiled": "ours, compiled and replayed"}
    for name, told in names.items():
        cells = []
        for shape, goal in goals.items():
            m = r["speed"][shape][name]
            goal = None if name == "plain torch" else 1 if name == "ours, eager" else goal
            times = f"{m['times_plain']:.2f}x"
            busy = f", GPU busy {m['gpu_busy']:.0%}" if "gpu_busy" in m else ""
            cells.append(f"{m['ms']:.1f} ms, {verdict(times, f'{goal}x', m['times_plain'] >= goal) if goal else times}{busy}")
        rows.append((told, *cells))
    host, wanted = [], {"replay": 1, "a list of 3 micro-batches, replayed": 4}
    for name, m in r["ledger"].items():
        graph_launches, waits = f"{m['graph_launches']:,}", f"{m['syncs']:,}"
        if name in wanted:
            graph_launches, waits = verdict(graph_launches, wanted[name], m["graph_launches"] == wanted[name]), verdict(waits, 0, m["syncs"] == 0)
        host.append((name, f"{m['launches']:,}", graph_launches, waits, f"{m['copies'].get('DtoH', [0, 0])[1]:,} bytes"))
    return ("One step of `llama-350m`, one micro-batch, against plain torch (fp32 weights, bf16 autocast, autograd, foreach clip, fused AdamW, nothing compiled):\n\n"
            + markdown(("step", *(f"batch {shape.replace(' x ', ', T = ')}" for shape in goals)), rows)
            + f"\n\nWhat the host did in one of them ({r['what'].split(', ', 1)[1]}):\n\n"
            + markdown(("step", "kernel launches", "graph launches", "host waits", "downloaded"), host)
            + "\n\n" + graphs_facts(r) + "\n\n" + source(result))


def graphs_facts(r) -> str:
    """Bits, seconds and bytes, in sentences."""
    bits, grown = r["bits"], {name: max(0, m["allocated"], m["reserved"], m["device"]) / 2**20 for name, m in r["memory"].items()}
    elements = f"{bits['weights'] / 1e6:.0f} M weights"
    equal = ", ".join(f"{pair.replace(', ', ' against ')} " + verdict(f"{m['losses']} of {bits['steps']} losses and {m['weights']:,} of {elements}", 0,
                                                                    not any(m.values())) for pair, m in bits["exact"].items())
    apart = bits["free"]["apart"]
    worst = verdict(", ".join(f"{value:.1e}" for value in apart.values()), "0.1", max(apart.values()) <= 0.1)
    seconds = ", ".join(f"{name} {verdict(f'{s:.1f} s', '10 s', s < 10)}" for name, s in r["capture_s"].items())
    memory = ", ".join(f"{m['count']:,} {name.split(', ')[1]} ({name.split(', ')[0]}) {verdict(f'{grown[name]:.3g} MiB', 0, grown[name] == 0)}"
                       for name, m in r["memory"].items())
    return (f"After {bits['steps']} deterministic steps with a cosine schedule, dropout, clipping (in {bits['clipped']} of them), a NaN ({bits['skipped']} "
            f"skipped) and two alternating lengths, not equal bit for bit: {equal}. Not deterministic, the losses of eager and replay are apart by {worst} at "
            f"steps {', '.join(apart)}. From the first call to the end of the first step, warm-up and capture included: {seconds}. Memory grows by: {memory}.")


def encoder_table() -> str:
    result, rows = load("encoder"), []
    r = result["results"]
    kinds = {name: d for name, d in r["backward"].items() if isinstance(d, dict)}
    for name, d in kinds.items():
        ways, goals, atomics = d["ways"], d["goals"], d["best_atomics"]
        known, line = ways["ours, segments known"], ways["ours, segments in line"]
        wanted = ((known, "dense", goals["dense"]), (known, "atomics", goals["atomics"]), (line, "dense", goals["in_line"]), (line, "atomics", 1))
        times = [verdict(f"{m['times_' + peer]:.1f}x", f"{least:g}x", m["times_" + peer] >= least) for m, peer, least in wanted]
        share = known["of_copy_rate"].get("replayed", known["of_copy_rate"]["launched"])
        rows.append((name, f"{encoder_ms(known)}, {share:.0%}", *times[:2], encoder_ms(line), *times[2:], encoder_ms(ways["embedding_dense_backward"]),
                     f"{encoder_ms(ways[atomics])}, {atomics.split(', ')[1]}", encoder_ms(ways["index_add_ deterministic, fp32"])))
    head = ("tokens", "ours, segments known", "against dense", "against atomics", "ours, segments in line", "against dense", "against atomics", "dense",
            "atomics", "`index_add_`, deterministic")
    size = "{tokens:,} tokens of {vocab:,}, {C} channels".format(**r["backward"])
    return (f"The gradient of the token embedding ({size}, bf16), added into fp32 sums, replayed from a CUDA graph; shares are of the copy rate, on the "
            "gradient, read once, and the rows of the sums that have a token, read and written. Peers: `embedding_dense_backward`, which fills a fresh bf16 "
            "table, and `index_add_`: with atomics, fp32 or bf16, whichever is faster, and in its deterministic form:\n\n" + markdown(head, rows)
            + "\n\n" + encoder_low(kinds) + " " + encoder_rungs(kinds) + "\n\n" + encoder_grid(r["grid"]) + "\n\n" + encoder_facts(r) + "\n\n" + source(result))


def encoder_ms(m) -> str:
    ms = m["ms"]
    return f"{ms['replayed']:.3f} ms" if "replayed" in ms else f"{ms['launched']:.3f} ms (launched: it cannot be captured)"


def encoder_low(kinds) -> str:
    """Sums in bf16, as the peers' tables."""
    cells = []
    for name, d in kinds.items():
        ms, goals = {way: d["ways"][way]["ms"]["replayed"] for way in ("ours, segments known, bf16 sums", "embedding_dense_backward", "index_add_, bf16")}, d["goals"]
        ours, *peers = ms.values()
        cells.append(f"{name} " + ", ".join(verdict(f"{peer / ours:.1f}x", f"{least:g}x", peer / ours >= least)
                                            for peer, least in zip(peers, (goals["dense"], goals["atomics"]))))
    return "With sums in bf16, segments known, against the bf16 table of dense and atomic `index_add_` into bf16: " + "; ".join(cells) + "."


def encoder_rungs(kinds) -> str:
    """The bits, and the ladder's first rungs."""
    def each(what) -> str:
        return ", ".join(f"{name} {what(d)}" for name, d in kinds.items())
    lines = [d["ways"][way] for d in kinds.values() for way in ("ours, segments in line", "ours, segments in line, bf16 sums")]
    differ, atomics, of = sum(m["differ"] for m in lines), "index_add_, fp32", next(iter(kinds.values()))["ways"]
    v1, v2 = (each(lambda d, way=way: encoder_ms(d["ways"][way])) for way in ("encoder_backward_v1", "encoder_backward_v2"))
    return (f"Of ours, fp32 and bf16, {verdict(f'{differ:,}', 0, differ == 0)} sums differ between {lines[0]['runs']} runs (launched, replayed, on another "
            f"stream); of atomic `index_add_` into fp32, between {of[atomics]['runs']} runs: {each(lambda d: format(d['ways'][atomics]['differ'], ','))}. "
            f"The first rungs: `encoder_backward_v1` (atomics) {v1}; `encoder_backward_v2` (buckets) {v2}, after the CPU has made and copied the buckets, "
            f"in milliseconds: {each(lambda d: format(d['buckets_ms'], '.1f'))}.")


def encoder_grid(cases) -> str:
    """The least ratio of each size, and the errors of all cases."""
    kinds, counts, widths, vocabs = (list(dict.fromkeys(c[key] for c in cases)) for key in ("distribution", "tokens", "C", "vocab"))
    rows = []
    for count in counts:
        cells = []
        for C in widths:
            dense, atomics = (min(c[key] for c in cases if (c["tokens"], c["C"]) == (count, C)) for key in ("times_dense", "times_atomics"))
            times = f"{atomics:.2f}x"
            cells.append(f"{verdict(times, '1x', atomics >= 1) if count > counts[0] else times}, {dense:.2f}x")
        rows.append((f"{count:,} tokens", *cells))
    ours, atomics = (max(c["error"][way] for c in cases) for way in ("ours, segments in line", "index_add_, fp32"))
    return (f"Segments found in line, the least ratio over {len(kinds)} kinds of tokens and {len(vocabs)} vocabularies "
            f"({', '.join(f'{v:,}' for v in vocabs)}), against atomic `index_add_` into fp32 and against `embedding_dense_backward`:\n\n"
            + markdown(("", *(f"C = {C}" for C in widths)), rows)
            + f"\n\nIn all {len(cases)} cases the sums are within {ours:.0e} of float64, as a part of the sum of the absolute values (atomics: {atomics:.0e}), and "
              "have the same bits in three runs.")


def encoder_facts(r) -> str:
    """Positions, segments, and the whole step."""
    wpe = "; ".join(f"C = {C} {encoder_ms(m['ours'])}, {m['ours']['times_torch']:.1f}x" for C, m in r["positions"].items() if isinstance(m, dict))
    found = "; ".join(f"{m['tokens']:,} tokens of {m['vocab']:,} {encoder_ms({'ms': {kind: some['ours'] for kind, some in m['ms'].items()}})}, "
                      f"{m['times_torch']:.1f}x" for m in r["segments"])
    step, ways, twice = r["step"], dict(r["step"]["ways"]), r["step"]["twice"]
    peer, ours = ways.pop("torch's embeddings"), ways.pop("ours")
    times = verdict(f"{ours['times_torch']:.3f}x", "1x", ours["times_torch"] >= 1)
    others = "".join(f"; {name} {m['ms']:.2f} ms, {m['times_torch']:.3f}x" for name, m in ways.items())
    same = verdict("equal" if twice["weights_equal"] else "not equal", "equal", twice["weights_equal"])
    return (f"The gradient of positions against `add_(dout.sum(0))`: {wpe}. Finding segments against `torch.sort(stable=True)`: {found}.\n\nOne step of GPT-2 "
            f"124M ({step['rows']} x {step['T']} tokens, bf16 autocast, `fused`, replayed): with torch's embeddings {peer['ms']:.2f} ms; with ours "
            f"{ours['ms']:.2f} ms, {times}{others}. After {twice['steps']} deterministic steps, twice, the bits of {twice['weights'] / 1e6:.0f} M weights: {same}.")


def dispatch_table() -> str:
    result = load("dispatch")
    r, rows = result["results"], []
    for case, kinds in r["curves"].items():
        for kind, m in kinds.items():
            cells = []
            for way in ("forward", "backward"):
                best, eager, share = m["times"][m["best_compiled"]][way], min(m["times"][name][way] for name in ("torch", "torch, folded")), m["of_floor"][way]
                floor = max(m["floors_ms"][way], key=m["floors_ms"][way].get)
                cells += [f"{m['ms']['ours'][way]:.3f} ms, {verdict(f'{share:.0%}', '85%', share >= 0.85)} of its floor ({floor})",
                          f"{verdict(f'{best:.2f}x', '1.2x', best >= 1.2)}, {eager:.1f}x"]
            rows.append((f"{case}: {'gated unit' if kind == 'glu' else 'one curve'}", *cells))
    clocks = [m["clock_MHz"] for kinds in r["curves"].values() for m in kinds.values()]
    rates = [m["copy_GB_per_s"] / 1e3 for kinds in r["curves"].values() for m in kinds.values()]
    return (f"The pointwise part of `RichardsGLU`. Its floor is the longer of two times: the bytes at the copy rate of the same run ({min(rates):.2f} to "
            f"{max(rates):.2f} TB/s), and the special functions (powers, logarithms, reciprocals) at 16 per clock and multiprocessor ({min(clocks):,.0f} to "
            f"{max(clocks):,.0f} MHz under load). Against the faster of two writings in torch, compiled and eager:\n\n"
            + markdown(("elements", "forward", "against compiled, eager", "backward", "against compiled, eager"), rows)
            + "\n\n" + attention_table(r["attention"]) + "\n\n" + layers_table(r["layers"]) + "\n\n" + source(result))


def attention_table(r) -> str:
    """Polynomial attention, its time and its memory."""
    goals, rows = {"torch": 4, "torch.compile": 2}, []
    for what in ("core", "layer"):
        for case, found in r.items():
            m = found[what]
            times = [verdict(f"{m['times'][name]:.2f}x", f"{goal}x", m["times"][name] >= goal) for name, goal in goals.items()]
            rows.append((f"{what}, {case}", f"{m['ms']['ours']:.2f} ms", *times, f"{m['times']['ours, v1']:.1f}x",
                         " / ".join(f"{m['peak_MiB'][name]:,.0f}" for name in ("ours", *goals)) + " MiB"))
    grown = next(found["long"] for found in r.values() if "long" in found)
    ours, flash = grown["grows"]["ours"], next(found["core"]["times"][name] for found in r.values() for name in found["core"]["times"] if "flash" in name)
    worst = max(max(found["errors"]["ours"].values()) for found in r.values())
    return ("`PolyAttention`, forward and backward, T = 2,048, 16 heads of 64, bf16, on tensor cores, against the same in torch (T x T matrices in bf16), and "
            "against our plain kernels (v1); peak memory of ours, torch's, and torch's compiled:\n\n"
            + markdown(("", "time", "against eager torch", "against compiled", "against v1", "memory"), rows)
            + f"\n\nFrom T = {grown['T'][0]:,} to {grown['T'][1]:,} the memory of ours is " + verdict(f"{ours:.2f}x", "2.2x at most", ours <= 2.2)
            + f", of torch's {grown['grows']['torch']:.1f}x. No result or gradient is farther from float64 than {worst:.1e} (by norm; on the same inputs), and two "
              f"runs have the same bits. Flash attention, which is softmax and has no relative positions, takes {flash:.2f} of the core's time (batch 1).")


def layers_table(r) -> str:
    """GPU against CPU and torch: layers and whole steps."""
    rows = []
    for case, parts in r.items():
        for part, m in parts.items() if isinstance(parts, dict) else ():
            cpu = f"{m['times']['CPU']:,.0f}x"
            if (case, part) == ("batch 32", "step"):
                cpu = verdict(cpu, "8x", m["times"]["CPU"] >= 8)
            compiled = f"{m['times']['torch.compile']:.1f}x" + (f", replayed {m['times']['torch.compile, replayed']:.1f}x" if part == "step" else "")
            rows.append((f"{case}: {'whole step' if part == 'step' else f'`{part}`'}", f"{m['ms']['ours']:.2f} ms", f"{m['ms']['CPU']:,.0f} ms", cpu,
                         f"{m['times']['torch']:.1f}x", compiled))
    return (f"Layers of `poly-7m` (forward and backward) and whole training steps, T = 512: ours in bf16, replayed, against the CPU ({r['cores']} cores of "
            f"{r['cpu']}, fp32) and against the same model in torch's operations on the same GPU; steps in eager mode and compiled are launched from Python:\n\n"
            + markdown(("", "ours", "CPU", "against the CPU", "against eager torch", "against compiled"), rows))


def ddp_table() -> str:
    result, parts = load("ddp"), []
    numbers = sorted((key for key in result["results"] if key.isdigit()), key=int)
    for n in numbers:
        parts.append(f"{n} GPUs:\n\n" + ddp_rows(result["results"][n], int(n)) + "\n\n" + ddp_facts(result["results"][n]))
    return ("Optimizer steps of `llama-350m` (batch 4 per GPU and micro-batch, T = 1024, AdamW, clipped at 1.0) on several GPUs: the rate of each GPU as a share "
            "of the same step's on one GPU that has no others, and, after a plus, the milliseconds above the same step on all GPUs without any word between them: "
            "communication that nothing hides (or, where steps are launched from Python, the host's noise). torch: bf16 autocast over fp32 weights, DDP with `no_sync` (the script is in `benchmarks/ddp_ranks.py`). Ours: "
            "launched in mode `arena`, replayed compiled and in mode `fused`.\n\n" + "\n\n".join(parts) + "\n\n" + source(result))


def ddp_rows(r, n: int) -> str:
    """Every family of ways, on one GPU and on n."""
    goals = {"4": {2: 0.97, 4: 0.95}.get(n), "1": {2: 0.9}.get(n)}
    rows, counts = [], list(dict.fromkeys(count for found in r["families"].values() for count in found))
    for family, found in r["families"].items():
        names = [name for name in dict.fromkeys(name for some in found.values() for name in some) if name != "each for itself"]
        memory = r.get("memory", {}).get(family, {})
        for name in names:
            cells = []
            for count in counts:
                m = found.get(count, {}).get(name)
                if m is None:
                    cells.append("not measured")
                elif name == "one GPU":
                    cells.append(f"{m['ms']:.1f} ms, {m['tokens_per_s_per_gpu'] / 1e3:,.1f}K tokens/s")
                else:
                    share, goal = f"{m['of_one_gpu']:.1%}", goals.get(count)
                    if name == "all-reduce" and goal:
                        share = verdict(share, f"{goal:.0%}", m["of_one_gpu"] >= goal)
                    if name == "sharded" and "all-reduce" in found[count]:
                        least = found[count]["all-reduce"]["of_one_gpu"]
                        share = verdict(share, f"all-reduce's {least:.1%}", m["of_one_gpu"] >= least)
                    cells.append(f"{m['ms']:.1f} ms, {share}, {m['exposed_ms']:+.1f} ms")
            kept = memory.get(name, {})
            optimizer = f"{kept['optimizer_GiB']:.2f} GiB" if kept else ""
            if name == "sharded" and kept and "one GPU" in memory:
                share = kept["optimizer_GiB"] * n / memory["one GPU"]["optimizer_GiB"]
                optimizer = verdict(optimizer, f"1/{n} and 1% at most", share <= 1.01)
            rows.append((f"{family}: {name}", *cells, f"{kept['peak_GiB']:.1f} GiB" if "peak_GiB" in kept else "", optimizer))
    return markdown(("", *(f"{count} micro-batch{'es' * (count != '1')}" for count in counts), "peak memory", "optimizer's state"), rows)


def ddp_facts(r) -> str:
    """Bits, buckets, the network, and what is missing."""
    said = []
    if "bits" in r:
        ways, b = r["bits"]["ways"], r["bits"]
        said.append(f"Bits, in {b['steps']} deterministic steps of {b['layers']} layers: " + "; ".join(
            f"{name} " + ", ".join(f"{what} {verdict('yes' if yes else 'no', 'yes', yes)}" for what, yes in some.items()) for name, some in ways.items()) + ".")
    if "equal_on_all_ranks" in r:
        said.append("The weights' bits are equal on all ranks after " + "; ".join(
            f"{m['steps']} steps ({family}, {name}): {verdict('yes' if m['equal'] else 'no', 'yes', m['equal'])}"
            for family, some in r["equal_on_all_ranks"].items() for name, m in some.items()) + ".")
    if r.get("buckets"):
        default = next(iter(r["buckets"].values()))["default_ms"]
        said.append(f"Buckets of another size than 32 MB (replayed, 1 micro-batch, {default:.2f} ms): "
                    + ", ".join(f"{size} MB {m['ms']:.2f} ms, {m['times_default']:.3f}x" for size, m in r["buckets"].items()) + ".")
    if "bandwidth" in r:
        said.append("Collectives alone, GB/s on the bus: " + "; ".join(
            f"{name} ({m['bytes'] / 2**20:,.0f} MiB) " + ", ".join(f"`{op}` {some['bus_GB_per_s']:.0f}" for op, some in m.items() if op != "bytes")
            for name, m in r["bandwidth"].items()) + ".")
    settings = ", ".join(f"`{key}={value}`" for key, value in r.get("nccl", {}).items() if key != "version")
    said.append(f"NCCL {r['nccl']['version']}{' with ' + settings if settings else ''}." if "nccl" in r else "")
    missing = [*r["failed"], *r["left_out"]]
    said.append(f"Failed or left out: {'; '.join(missing)}." if missing else "")
    return " ".join(filter(None, said))


TABLES = {"step": step_table, "graphs": graphs_table, "encoder": encoder_table, "accumulate": accumulate_table, "train": train_table, "clip": clip_table,
          "tail": tail_table, "dispatch": dispatch_table, "ddp": ddp_table}


def filled(text: str) -> str:
    """The README with its tables made anew; one without a result stays as it is (tests/test_benchmarks.py says which)."""
    for name, make in TABLES.items():
        text = re.sub(rf"(<!-- {name}: made by benchmarks/readme.py -->\n).*?(<!-- /{name} -->)",
                      lambda m: f"{m[1]}{make()}\n{m[2]}" if load(name) else m[0], text, flags=re.S)
    return text


if __name__ == "__main__":
    path = common.ROOT / "README.md"
    before = path.read_text()
    after = filled(before)
    if "--check" in sys.argv:
        sys.exit(0 if before == after else "README.md does not show benchmarks/results: run python benchmarks/readme.py")
    path.write_text(after)
