"""ChunkGraph against eager chunks: parity, wall ms of 65,536 tokens in chunks of 2,048, kernels of a replay."""
import copy, statistics, sys, time, traceback
import torch
from torch.profiler import ProfilerActivity, profile
from nsa.config import ModelConfig
from nsa.decode import ChunkGraph
from nsa.model import TinyLM

S, T = 65_536, 2_048
COMPILED = sys.argv[1:] == ["compiled"]
torch.manual_seed(0)
model = TinyLM(ModelConfig.from_mapping({"preset": "m7c_125m"})).to("cuda", torch.bfloat16)
ids = torch.randint(256, (1, S), device="cuda")
sync = torch.cuda.synchronize

@torch.no_grad()
def eager(m, S=S):
    cache = m.new_cache(1, S)
    return torch.cat([m(ids[:, b:b + T], cache=cache)[:, -64:] for b in range(0, S, T)], 1)

def replays(graph):
    graph.forget_all()
    return torch.cat([graph(ids[:, b:b + T])[:, -64:].clone() for b in range(0, S, T)], 1)

def timed(f, n=7):
    out = []
    for _ in range(n):
        sync(); t = time.perf_counter(); f(); sync(); out.append(1e3 * (time.perf_counter() - t))
    return [round(x, 1) for x in out]

with torch.inference_mode():
    want = eager(model).float()
    again = eager(model).float()
    print("eager twice: same bits", torch.equal(want, again))
    m = torch.compile(model, fullgraph=True, dynamic=False) if COMPILED else model
    t = time.perf_counter(); graph = ChunkGraph(m, model.new_cache(1, S), T); sync(); print(f"captured in {time.perf_counter() - t:.1f} s; engaged {graph.engaged}")
    got = replays(graph).float(); got2 = replays(graph).float()
    top = want.abs().max()
    print(f"graph twice: same bits {torch.equal(got, got2)}; max|graph - eager| {float((got - want).abs().max() / top):.4f} of the largest logit; rows alike {(got == want).all(-1).float().mean():.3f}")
    short = 8192
    with torch.no_grad():
        whole = model(ids[:, :short]).float()
    both = {n: x[:, : short // T * 64] for n, x in (("eager", want), ("graph", got))}
    ref = torch.cat([whole[:, b + T - 64: b + T] for b in range(0, short, T)], 1)
    print("against one call of 8,192:", {n: round(float((x - ref).abs().max() / ref.abs().max()), 4) for n, x in both.items()})
    def run():
        graph.forget_all()
        for b in range(0, S, T): graph(ids[:, b:b + T])
    run()
    walls = timed(run); print("graph wall ms", walls)
    t = time.perf_counter(); run(); print(f"host ms of 32 launches {1e3 * (time.perf_counter() - t):.1f}"); sync()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run(); sync()
    rows = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows) / 1e3
    print(f"device {total:.1f} ms, kernels {sum(e.count for e in rows) / 32 / 12:.1f} a layer and chunk; wall/device {statistics.median(walls) / total:.3f}")
    for e in rows[:60]: print(f"  {e.self_device_time_total / 1e3:8.2f} ms {e.count / 384:6.2f} {e.key[:130]}")
    if not COMPILED: print("eager wall ms", timed(lambda: eager(model), 3))
    m0, tr = 0, torch.cuda.max_memory_allocated() / 2**30
    print(f"peak {tr:.1f} GiB")
