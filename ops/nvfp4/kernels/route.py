"""Router logits to expert ids and weights."""

import triton
import triton.language as tl


@triton.jit
def route_rows(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr,
    E, stride, scale,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token. Ties go to the lowest id; a NaN never wins, and k distinct ids come out regardless."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < E
    logits = tl.load(logits_ptr + row * stride + e, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        top = tl.max(tl.where(logits == logits, logits, float("-inf")), axis=0)
        z = tl.where(inside, tl.exp(logits - top), 0.0)
        scores = tl.div_rn(z, tl.sum(z, axis=0) + tl.zeros_like(z))
        choice = logits
    else:
        z = tl.exp(-tl.abs(logits))
        if SCORING == "sigmoid":
            scores = tl.div_rn(tl.where(logits >= 0, 1.0, z), 1.0 + z)
        else:
            scores = tl.sqrt(tl.where(logits > 0, logits, 0.0) + tl.log(1.0 + z))
            scores = tl.where(logits == logits, scores, logits)
        choice = scores
    if bias_ptr is not None:
        choice = (scores if SCORING == "softmax" else choice) + tl.load(bias_ptr + e, mask=inside, other=0.0).to(
            tl.float32
        )
    choice = tl.where(choice == choice, choice, float("-inf"))
    slot = tl.arange(0, K_BLOCK)
    ids = tl.zeros((K_BLOCK,), tl.int32)
    weights = tl.zeros((K_BLOCK,), tl.float32)
    open_ = inside
    for j in tl.static_range(TOP_K):
        best = tl.max(tl.where(open_, choice, float("-inf")), axis=0)
        winner = tl.min(tl.where(open_ & (choice == best), e, BLOCK), axis=0)
        score = tl.sum(tl.where(e == winner, scores, 0.0), axis=0)
        ids = tl.where(slot == j, winner, ids)
        weights = tl.where(slot == j, score, weights)
        open_ = open_ & (e != winner)
    if RENORMALIZE:
        weights = tl.div_rn(
            weights, tl.sum(weights, axis=0) + (0.0 if SCORING == "softmax" else 1e-20) + tl.zeros_like(weights)
        )
    tl.store(ids_ptr + row * TOP_K + slot, ids, mask=slot < TOP_K)
    tl.store(weights_ptr + row * TOP_K + slot, weights * scale, mask=slot < TOP_K)
