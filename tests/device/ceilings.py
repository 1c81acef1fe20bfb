"""What this GPU can do at the shapes of a step, by PyTorch's own operations: the ceilings that the engine is held against.

A process of its own, as it imports torch. Prints a JSON object for each thing that it has measured, or for why it could not: `what`, and `seen`
or `error`. Numbers are random, times are medians by CUDA's events.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
from torch.nn import functional

RECIPES = pathlib.Path(__file__).resolve().parent.parent.parent / "recipes" / "bench"
# A recipe's model, its slots and its rows.
MODELS = (("qwen2.5-7b", 16_384, 1), ("qwen3-4b", 32_768, 2))
CHUNKS = (4096, 2048)
WARM_UPS, REPEATS = 2, 7
RANK = 16
GIB = 1 << 30


class Model:
    def __init__(self, name, slots, rows):
        config = json.loads((RECIPES / name / "config.json").read_text())
        self.name, self.slots, self.rows = name, slots, rows
        self.hidden, self.inside, self.vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = config.get("head_dim", self.hidden // self.heads)

    def products(self):
        """(name, inputs, outputs) of what a layer multiplies by."""
        queries, keys = self.heads * self.width, self.groups * self.width
        return (("q", self.hidden, queries), ("k, v", self.hidden, keys), ("o", queries, self.hidden), ("gate, up", self.hidden, self.inside),
                ("down", self.inside, self.hidden))


def tell(what, **told):
    print(json.dumps({"what": what, **told}), flush=True)


def milliseconds(work, repeats=REPEATS):
    for _ in range(WARM_UPS):
        work()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end))
    return statistics.median(spans)


def rate(operations, spent):
    return f"{operations / spent / 1e9:.0f} TFLOP/s"


def drawn(*size):
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


def products(model, chunk):
    seen = []
    for name, inputs, outputs in model.products():
        x, weight, dy = drawn(chunk, inputs), drawn(outputs, inputs), drawn(chunk, outputs)
        operations = 2 * chunk * inputs * outputs
        forward, backward = milliseconds(lambda: functional.linear(x, weight)), milliseconds(lambda: dy @ weight)
        seen.append(f"{name} {forward:.3f} ms {rate(operations, forward)}, its backward {rate(operations, backward)}")
    tell(f"{model.name}: products of {chunk} rows", seen="; ".join(seen))


def head(model, tokens):
    x, weight = drawn(tokens, model.hidden), drawn(model.vocabulary, model.hidden)
    spent = milliseconds(lambda: functional.linear(x, weight))
    tell(f"{model.name}: logits of {tokens} rows", seen=f"{spent:.2f} ms, {rate(2 * tokens * model.hidden * model.vocabulary, spent)}")


def thin_products(model, chunk):
    """Of low-rank additions; they are bound by memory, so that their rate is bytes of the large matrix."""
    x, low, a, b = drawn(chunk, model.hidden), drawn(chunk, RANK), drawn(RANK, model.hidden), drawn(model.inside, RANK)
    y = drawn(chunk, model.inside)
    seen = []
    for name, large, work in (("x·A", x, lambda: functional.linear(x, a)), ("adding x·A·B", y, lambda: y.addmm_(low, b.t())),
                              ("gradient of A", x, lambda: low.t() @ x), ("gradient of B", y, lambda: y.t() @ low)):
        spent = milliseconds(work)
        seen.append(f"{name} {spent:.3f} ms, {2 * large.numel() / spent / 1e6:.0f} GB/s")
    tell(f"{model.name}: thin products of {chunk} rows, rank {RANK}", seen="; ".join(seen))


def flash(q, k, v, causal):
    """Forward and backward as kvtune calls them: (B, tokens, heads, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    tokens, keys = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5

    def forward():
        return torch.ops.aten._flash_attention_forward(q, k, v, None, None, tokens, keys, 0.0, causal, False, scale=scale)

    out, lse, state, unused = forward()[:4]
    dout = torch.randn_like(out)

    def backward():
        return torch.ops.aten._flash_attention_backward(dout, q, k, v, out, lse, None, None, tokens, keys, 0.0, causal, state, unused,
                                                        scale=scale)
    return forward, backward


def cudnn(q, k, v, causal, bias=None):
    """The same of cuDNN's, whose causal mask begins at the first key."""
    tokens, keys = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5

    def forward():
        return torch.ops.aten._cudnn_attention_forward(q, k, v, bias, None, None, tokens, keys, True, 0.0, causal, False, scale=scale)

    made = forward()
    out, lse, seed, offset = made[0], made[1], made[6], made[7]
    dout = torch.randn_like(out)

    def backward():
        return torch.ops.aten._cudnn_attention_backward(dout, q, k, v, out, lse, seed, offset, bias, None, None, tokens, keys, 0.0, causal,
                                                        scale=scale)
    return forward, backward


def attention(model, chunk):
    past = model.slots - chunk
    per_group = model.heads // model.groups
    q = drawn(model.rows, model.heads, chunk, model.width)
    # The query heads of a group as one head's tokens: all of them see all of the past.
    folded = q.reshape(model.rows, model.groups, per_group * chunk, model.width)
    cache = [drawn(model.rows, model.groups, model.slots, model.width) for _ in range(2)]
    of_past, of_chunk = [x[:, :, :past] for x in cache], [x[:, :, past:] for x in cache]
    square = chunk * (chunk + 1) // 2

    def from_end():
        later = torch.ones(chunk, model.slots, dtype=torch.bool, device="cuda").triu(past + 1)
        return torch.zeros(1, 1, chunk, model.slots, dtype=torch.bfloat16, device="cuda").masked_fill_(later, float("-inf"))

    for name, pairs, made in (
        ("FlashAttention, the past alone, folded", chunk * past, lambda: flash(folded, *of_past, False)),
        ("cuDNN, the past alone, folded", chunk * past, lambda: cudnn(folded, *of_past, False)),
        ("FlashAttention, the chunk alone", square, lambda: flash(q, *of_chunk, True)),
        ("cuDNN, the chunk alone", square, lambda: cudnn(q, *of_chunk, True)),
        ("FlashAttention, joined, causal to the last key", chunk * past + square, lambda: flash(q, *cache, True)),
        ("cuDNN, joined, its mask as a bias", chunk * past + square, lambda: cudnn(q, *cache, False, from_end())),
    ):
        what = f"{model.name}: attention of {model.rows} × {chunk} tokens on {model.slots} slots: {name}"
        try:
            forward, backward = (milliseconds(work, 5) for work in made())
        except Exception as error:  # a kernel that does not serve is an answer
            tell(what, seen=f"does not serve: {str(error).splitlines()[0][:200]}")
            continue
        operations = 4 * pairs * model.rows * model.heads * model.width
        tell(what, seen=f"forward {forward:.2f} ms, {rate(operations, forward)}; backward {backward:.2f} ms, {rate(2.5 * operations, backward)}")


def choosing(model, chunk):
    """Victims of a full cache by their scores, and the moves that follow."""
    scores = torch.rand(model.rows, model.groups, model.slots, device="cuda")
    victims = scores.topk(chunk, dim=-1, largest=False).indices
    entries = drawn(model.rows, model.groups, model.slots, model.width)
    index = victims.unsqueeze(-1).expand(-1, -1, -1, model.width)
    new = drawn(*index.shape)
    seen = [f"{name} {milliseconds(work):.3f} ms" for name, work in (
        ("topk", lambda: scores.topk(chunk, dim=-1, largest=False)), ("topk, unsorted", lambda: scores.topk(chunk, dim=-1, largest=False, sorted=False)),
        ("argsort", lambda: scores.argsort(dim=-1)), ("stable argsort", lambda: torch.argsort(scores, dim=-1, stable=True)),
        ("gather of keys", lambda: entries.gather(2, index)), ("scatter of keys", lambda: entries.scatter_(2, index, new)),
    )]
    tell(f"{model.name}: {chunk} of {model.slots} slots", seen="; ".join(seen))


def device_memory():
    x = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    tell("copy within the device, read and written", seen=f"{2 * x.numel() / milliseconds(lambda: y.copy_(x)) / 1e6:.0f} GB/s")


def square_product():
    x, y = drawn(8192, 8192), drawn(8192, 8192)
    spent = milliseconds(lambda: x @ y)
    tell("product of two matrices of 8192 × 8192, bf16", seen=f"{spent:.2f} ms, {rate(2 * 8192**3, spent)}")


def pinned_memory():
    spans = []
    for _ in range(2):
        begun = time.perf_counter()
        memory = torch.empty(2 * GIB, dtype=torch.uint8, pin_memory=True)
        spans.append(time.perf_counter() - begun)
        del memory
    tell("pinning 2 GiB", seen=f"{spans[0]:.2f} s; again, from libtorch's cache: {1e3 * spans[1]:.2f} ms")


def copies():
    host = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(GIB, dtype=torch.uint8, device="cuda").random_() for _ in range(2)]
    pageable = torch.ones(GIB, dtype=torch.uint8)
    lanes = [torch.cuda.Stream() for _ in range(2)]

    def both():
        now = torch.cuda.current_stream()
        for lane in lanes:
            lane.wait_stream(now)
        with torch.cuda.stream(lanes[0]):
            there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(lanes[1]):
            host[1].copy_(there[1], non_blocking=True)
        for lane in lanes:
            now.wait_stream(lane)

    seen = [f"{name} {amount / milliseconds(work, 5) / 1e6:.1f} GB/s" for name, amount, work in (
        ("to the device", GIB, lambda: there[0].copy_(host[0], non_blocking=True)),
        ("to the host", GIB, lambda: host[1].copy_(there[1], non_blocking=True)), ("both ways at once", 2 * GIB, both),
        ("to the device from memory that is not pinned", GIB, lambda: there[0].copy_(pageable)),
    )]
    tell("copies of 1 GiB", seen="; ".join(seen))


def launches():
    x, count = torch.zeros(32, device="cuda"), 2000
    for _ in range(100):
        x.add_(1.0)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        x.add_(1.0)
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    whole = time.perf_counter() - begun
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1.0)
    captured = milliseconds(graph.replay)
    tell("launches of a small operation", seen=f"{1e6 * host / count:.1f} µs each on the host, {1e6 * whole / count:.1f} µs with the device; "
         f"{1e3 * captured / count:.1f} µs each in a graph of {count}")


def everything():
    """In the order of their worth."""
    models = [Model(*model) for model in MODELS]
    yield "product", square_product, ()
    yield "memory of the device", device_memory, ()
    for chunk in CHUNKS:
        yield "attention", attention, (models[0], chunk)
    for chunk in (2048, 4096, 8192):
        yield "products", products, (models[0], chunk)
    yield "thin products", thin_products, (models[0], CHUNKS[0])
    for model in models:
        yield "choosing", choosing, (model, CHUNKS[0])
    yield "pinned memory", pinned_memory, ()
    yield "copies", copies, ()
    yield "launches", launches, ()
    yield "logits", head, (models[0], 2048)
    yield "attention", attention, (models[1], CHUNKS[0])
    yield "products", products, (models[1], CHUNKS[0])
    yield "attention", attention, (models[1], CHUNKS[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=75, help="what has not begun by then is left out")
    asked = parser.parse_args()
    begun = time.monotonic()
    if not torch.cuda.is_available():
        return tell("PyTorch", error="it finds no CUDA device")
    torch.cuda.set_device(torch.device(asked.device) if ":" in asked.device else 0)
    torch.manual_seed(1)
    tell("PyTorch", seen=f"{torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}, "
         f"{torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count} multiprocessors")
    for name, work, arguments in everything():
        what = ": ".join([name, *(str(getattr(argument, "name", argument)) for argument in arguments)])
        if time.monotonic() - begun > asked.seconds:
            tell(what, error=f"not begun within {asked.seconds:.0f} s")
            continue
        try:
            work(*arguments)
        except Exception as error:  # what follows is to be measured whatever this was
            tell(what, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
