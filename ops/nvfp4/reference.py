"""References: vectorised torch with the signatures of the operators, in float32. They are the CPU kernels too.

No checks here; the operators make them. Only ``oracle`` is dumber.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import format as fmt
from .health import Field, ProbeField


def quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See operators.quantize."""
    return fmt.quantize_blocks(x, global_scale.reshape(1))


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See operators.quantize."""
    token_scale = per_token_scale(x)
    return *fmt.quantize_blocks(x, token_scale), token_scale


def per_token_scale(x: Tensor) -> Tensor:
    """Global scale of each row [..., 1] from its finite elements."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
    magnitude = x.to(torch.float32).abs()
    return fmt.scale_of_amax(torch.where(torch.isfinite(magnitude), magnitude, 0.0).amax(-1, keepdim=True))


def dequantize(codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See operators.dequantize."""
    scale = global_scale.reshape(1) if global_scale.numel() == 1 else global_scale
    return (fmt.dequantize_blocks(codes, block_scale) * scale).to(dtype)


def fake_quantize(x: Tensor, precision: str, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What a GEMM sees of x [n, K]: float32 values without their global scale, and that scale (None, [1] or [n, 1])."""
    if precision == "w4a16":
        return x.to(torch.float32), None
    if precision == "w4a4_static":
        assert scale is not None
        codes, block_scale = fmt.quantize_blocks(x, scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1))
        return fmt.dequantize_blocks(codes, block_scale), scale.reshape(-1, 1)
    codes, block_scale, token_scale = quantize_per_token(x)
    return fmt.dequantize_blocks(codes, block_scale), token_scale


def linear(x, codes, block_scale, global_scale, a_scale=None, bias=None, *, precision="w4a16"):
    """See operators.linear."""
    values, scale = fake_quantize(x, precision, a_scale)
    out = (values @ fmt.dequantize_blocks(codes, block_scale).T) * times(global_scale.reshape(1, -1), scale)
    return (out if bias is None else out + bias.to(torch.float32)).to(x.dtype)


def times(scale: Tensor, activation_scale: Tensor | None) -> Tensor:
    """The factor of a product: weight scale times activation scale, where there is one."""
    return scale if activation_scale is None else scale * activation_scale


def route(logits, bias=None, *, top_k, scoring="softmax", renormalize=True, scale=1.0):
    """See operators.route."""
    logits = logits.to(torch.float32).contiguous()
    if scoring == "softmax":
        scores = torch.softmax(logits, -1)
    elif scoring == "sigmoid":
        scores = torch.sigmoid(logits)
    else:
        scores = F.softplus(logits).sqrt()
    choice = logits if scoring == "softmax" and bias is None else scores
    choice = choice if bias is None else choice + bias.to(torch.float32)
    choice = torch.where(torch.isnan(choice), float("-inf"), choice)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if scoring == "softmax" else 1e-20))
    return ids.to(torch.int32), weights * scale


def activate(g: Tensor, u: Tensor | None, activation: str, alpha: float, beta: float, limit: float | None) -> Tensor:
    """The gated activations of the field; clamps keep NaN."""
    if activation == "relu2":
        return torch.relu(g) ** 2
    assert u is not None
    if activation in ("silu", "swigluoai") and limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if activation == "silu":
        return F.silu(g) * u
    if activation == "swigluoai":
        return g * torch.sigmoid(alpha * g) * (u + beta)
    if activation == "swiglustep":
        return F.silu(g) * u if limit is None else F.silu(g).clamp(max=limit) * u.clamp(-limit, limit)
    return F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none") * u


def local_ids(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """Ids to local experts in int64, -1 for everything that contributes nothing here."""
    ids = topk_ids.to(torch.int64)
    count = num_experts if expert_map is None else expert_map.numel()
    valid = (ids >= 0) & (ids < count)
    if expert_map is not None:
        ids = expert_map.to(torch.int64)[torch.where(valid, ids, 0)]
        valid &= (ids >= 0) & (ids < num_experts)
    return torch.where(valid, ids, -1)


def moe(
    x, topk_ids, topk_weights,
    w13, w13_block_scale, w13_global_scale, w2, w2_block_scale, w2_global_scale,
    a13_scale=None, a2_scale=None, w13_bias=None, w2_bias=None, expert_map=None, *,
    activation="silu", precision="w4a16", layout="checkpoint", alpha=1.0, beta=0.0, limit=None,
):  # fmt: skip
    """See operators.moe. One expert at a time, each decoded once."""
    inter = w2.shape[2] * 2
    local = local_ids(topk_ids, expert_map, w13.shape[0])
    slots = x.new_zeros((*local.shape, w2.shape[1]), dtype=torch.float32)

    def of(scale: Tensor | None, e: int) -> Tensor | None:
        return scale if scale is None or scale.numel() == 1 else scale[e]

    for e in local.unique().tolist():
        if e < 0:
            continue
        token, j = torch.where(local == e)
        rows, a_scale = fake_quantize(x[token], precision, of(a13_scale, e))
        both = rows @ fmt.dequantize_blocks(w13[e], w13_block_scale[e]).T
        g = both[:, :inter] * times(w13_global_scale[e, 0], a_scale)
        u = both[:, inter:] * times(w13_global_scale[e, 1], a_scale) if fmt.is_gated(activation) else None
        if w13_bias is not None:
            g = g + w13_bias[e, :inter]
            u = u if u is None else u + w13_bias[e, inter:]
        h, a_scale = fake_quantize(
            activate(g, u, activation, alpha, beta, limit).to(x.dtype), precision, of(a2_scale, e)
        )
        y = (h @ fmt.dequantize_blocks(w2[e], w2_block_scale[e]).T) * times(w2_global_scale[e], a_scale)
        if w2_bias is not None:
            y = y + w2_bias[e]
        slots[token, j] = y * topk_weights[token, j].to(torch.float32).unsqueeze(1)
    out: Tensor = slots.new_zeros(x.shape[0], w2.shape[1])
    for choice in range(local.shape[1]):
        out += slots[:, choice]
    return out.to(x.dtype)


def count_health(
    x: Tensor, y: Tensor, topk_ids: Tensor, expert_map: Tensor | None, experts: int, health: Tensor
) -> None:
    """Add one call to a health row; see nvfp4.health."""
    ids = topk_ids.to(torch.int64)
    count = experts if expert_map is None else expert_map.numel()
    live = (ids != -1).any(1)
    health[Field.ROWS] += live.sum()
    health[Field.PADDING_ROWS] += (~live).sum()
    health[Field.IDS_OUT_OF_RANGE] += ((ids < -1) | (ids >= count)).sum()
    for values, rows, elements, amax in (
        (x, Field.NONFINITE_IN_ROWS, Field.NONFINITE_IN, Field.AMAX_IN),
        (y, Field.NONFINITE_OUT_ROWS, Field.NONFINITE_OUT, Field.AMAX_OUT),
    ):
        values = values[live].to(torch.float32)
        bad = ~torch.isfinite(values)
        health[rows] += bad.any(1).sum()
        health[elements] += bad.sum()
        if values.numel():
            largest = torch.where(bad, 0.0, values.abs()).amax().view(torch.int32).to(torch.int64)
            health[amax] = torch.maximum(health[amax], largest)
    local = local_ids(topk_ids, expert_map, experts).flatten()
    health[Field.TOKENS :] += torch.bincount(local[local >= 0], minlength=experts)


def probe(x: Tensor, stats: Tensor) -> None:
    """See operators.probe."""
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
    finite = torch.isfinite(rows)
    clean = torch.where(finite, rows, 0.0)
    stats[ProbeField.CALLS] += 1
    stats[ProbeField.ROWS] += rows.shape[0]
    stats[ProbeField.ELEMENTS] += rows.numel()
    if rows.numel():
        stats[ProbeField.AMAX] = torch.maximum(stats[ProbeField.AMAX], clean.abs().amax())
    stats[ProbeField.SQUARES] += (clean.double() ** 2).sum()
    stats[ProbeField.NAN] += torch.isnan(rows).sum()
    stats[ProbeField.INF] += torch.isinf(rows).sum()
    stats[ProbeField.ZERO_ROWS] += (rows == 0).all(1).sum()
