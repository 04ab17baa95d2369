"""The values of a report again, from the raw files beside it and without compress: `recompute.py OUTPUT/report`."""

import json
import re
import sys
from pathlib import Path

import numpy as np
from scipy import stats

# Names are keys of raw rows; o is for original, r for result, s for the one measured; a: times or bytes, w: log ratios.
FORMULAS = """perplexity: exp(mean(nll_s)); kl.median: median(kl); tv.mean: mean(tv); kl.max: max(kl)
kl.mean: mean(kl); accuracy.mcnemar_p: stats.binom.sf(sum(correct_o > correct_r) - 1, sum(correct_o != correct_r), 0.5)
kl.p99: quantile(kl, 0.99); similarity.spearman: stats.spearmanr(o, r)[0]; accuracy.losses: sum(correct_o > correct_r)
kl.p999: quantile(kl, 0.999); T.p90: 1e3 * quantile(a, 0.9); T.p99: 1e3 * quantile(a, 0.99); memory.peak: a[0] / 1e6
top1.agreement: 100 * mean(same_top1); cosine.p5: quantile(cosine, 0.05); throughput.decode: c["batch"] / median(a)
perplexity.ratio: exp(mean(nll_r - nll_o)); accuracy: 100 * mean(correct_s); accuracy.gains: sum(correct_o < correct_r)
cosine.mean: mean(cosine); ndcg.drop: 100 * mean((rank_o <= 10) / log2(1 + rank_o) - (rank_r <= 10) / log2(1 + rank_r))
ndcg: 100 * mean((rank_s <= 10) / log2(1 + rank_s)); T.ratio: exp(median(add.outer(w, w)[triu_indices(len(w))]) / 2)
accuracy.drop: 100 * mean(correct_o - correct_r); accuracy.expected_drop: 100 * nanmean(probability_o - probability_r)
accuracy.flips: 100 * mean(correct_o != correct_r); accuracy.expected: 100 * nanmean(probability_s); T: 1e3 * median(a)
accuracy.recovery: 100 * sum(correct_r) / sum(correct_o); generation.length_ratio: len(hstack(r)) / len(hstack(o))
accuracy.recovery_corrected: 100 * (sum(correct_r) - nansum(chance)) / (sum(correct_o) - nansum(chance))
accuracy.margin_shift: nanmean(margin_r - margin_o); throughput.prefill: c["batch"] * c["prompt"] / median(a)
generation.repetition: 100 * (1 - sum([len({*zip(i, i[1:], i[2:], i[3:])}) for i in s]) / sum([len(i[3:]) for i in s]))
generation.first_divergence: median([cumprod([x == y for x, y in zip(*two)]).sum() for two in zip(o, r)])"""
KEYS = {"prefill": "ttft", "decode": "tpot", "load": "seconds", "peak": "bytes", "ratio": "cpu_seconds"}
folder, rows, worst = Path(sys.argv[1]), [], 0.0
for r in (json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()):
    r |= {f"{key}_{s}": v for s in ("original", "result") if r["kind"] == "task" for key, v in r.pop(s).items()}
    rows.append((r.pop("seconds") if "phase" in r else {"own": r["kind"] == "floor"}) | r.get("workload", {}) | r)
report = json.loads((folder / "report.json").read_text())["measurements"]
for m in (m for m in report if m["value"] is not None and not re.match("size|bits|param|kv", m["metric"])):
    metric, c, own = m["metric"], m["conditions"], m["subject"] == "original/original"
    want = {k: c[k] for k in ("prompt", "new_tokens", "batch") if "variant" in c and k in c} | {"left_out": False}
    want |= {"own": own, "phase": "floor" if own else "measure", "task": m["task"], "comparison": c.get("comparison")}
    found = [row for row in rows if all(value in (None, row.get(key, value)) for key, value in want.items())]
    formula = re.search(rf"(^|; ){re.sub('^(latency.[a-z0-9]+|cpu)', 'T', metric)}: ([^;\n]+)", FORMULAS, re.M)[2]
    for letter, side in (("o", "original"), ("r", "result"), ("s", m["subject"])):
        formula = re.sub(rf"(\b|_){letter}\b", rf"\1{side}", formula)
    x = {name: [row[name] for row in found if name in row] for name in re.findall(r"\w+", formula)}
    x = {name: v if "generation" in metric else np.hstack(v).astype(float) for name, v in x.items() if v}
    name = KEYS.get(key := (metric + ".").split(".")[1], key)
    at = ("side", 1, 0) if own else ("variant", c.get("variant"), c.get("original"))
    a, b = ([row[name] for row in found if name in row and row[at[0]] == which] for which in at[1:])
    w = np.array_split(np.log(np.add(a[::2], a[1::2]) / np.add(b[::2], b[1::2])), min(len(b) // 2, 512)) if b else []
    value = eval(formula, vars(np) | {"stats": stats, "c": c, "a": a, "w": np.array([*map(np.median, w)])}, x)
    worst = np.maximum(worst, off := abs(value - m["value"]) / max(abs(m["value"]), 1e-6))
    print(f"{metric:28} {m['subject']:17} {m['task'] or '':16} {m['value']:<24} {value:<24} {off:.1e}")
sys.exit(int(not worst <= 1e-9))
