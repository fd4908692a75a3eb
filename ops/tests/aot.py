"""Compile every Triton kernel ahead of time, no GPU needed: `python aot.py 80 90 100` prints a line a kernel.

Runs in a process of its own: the interpreter, once chosen, cannot be left again.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nvfp4 import tiles
from nvfp4.format import ACTIVATIONS
from nvfp4.kernels import health, ids, moe, quantize, route

BF16, F32, I32, I64, U8, F64 = "*bf16", "*fp32", "*i32", "*i64", "*u8", "*fp64"


def gemm1(tile, scale="none", kind="silu", bias=None, x=BF16, packed=False):
    return moe.gemm1, {
        "x_ptr": x, "x_scale_ptr": None if scale == "none" else F32, "slots_ptr": I32, "starts_ptr": I32,
        "w_ptr": U8, "bytes_ptr": U8, "global_ptr": F32, "bias_ptr": bias, "h_ptr": x,
        "K": "i32", "INTER": "i32", "E": "i32", "slots_per_row": "i32", "alpha": "fp32",
        "beta": "fp32", "limit": "fp32", "SCALE": scale,
        "GATED": kind != "relu2", "KIND": ACTIVATIONS[kind], "LIMITED": kind == "swigluoai", **blocks(tile),
        "E_BLOCK": 128, "PACKED": packed,
    }, tile  # fmt: skip


def gemm2(tile, scale="none", packed=False):
    return moe.gemm2, {
        "h_ptr": BF16, "h_scale_ptr": None if scale == "none" else F32, "router_ptr": F32, "slots_ptr": I32,
        "starts_ptr": I32, "w_ptr": U8, "bytes_ptr": U8, "global_ptr": F32, "bias_ptr": None, "out_ptr": F32,
        "K": "i32", "N": "i32", "E": "i32", "SCALE": scale, **blocks(tile), "E_BLOCK": 128,
        "PACKED": packed,
    }, tile  # fmt: skip


def blocks(tile):
    return {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "EVEN_K": True}


def kernels():
    """(kernel, arguments, tile): pointers and scalars are type names, the rest are constants."""
    small, large = tiles.choose(8, 128, 2048), tiles.choose(32768, 128, 2048)
    yield gemm1(small)
    yield gemm1(large, "token", "swigluoai", F32)
    yield gemm1(tiles.choose(6000, 128, 2048), "expert", "relu2")
    yield gemm1(small, x=F32)
    yield gemm1(large, x=F32)
    yield gemm2(small)
    yield gemm2(large, "token")
    yield gemm1(small, packed=True)
    yield gemm2(large, packed=True)
    yield moe.linear, {
        "x_ptr": BF16, "x_scale_ptr": None, "w_ptr": U8, "bytes_ptr": U8, "global_ptr": F32, "bias_ptr": None,
        "out_ptr": BF16, "M": "i32", "K": "i32", "N": "i32", "global_stride": 0, "SCALE": "none", **blocks(small),
    }, small  # fmt: skip
    yield moe.sum_slots, {
        "partial_ptr": F32, "ids_ptr": I32, "map_ptr": None, "out_ptr": BF16, "N": "i32", "num_ids": "i32", "E": "i32",
        "TOP_K": 8, "BLOCK": 1024,
    }, None  # fmt: skip
    for map_ptr in (None, I32):
        yield ids.sort_slots, {
            "ids_ptr": I64, "map_ptr": map_ptr, "starts_ptr": I32, "slots_ptr": I32, "health_ptr": I64, "R": "i32",
            "num_ids": "i32", "E": "i32", "TOKENS_FIELD": 9, "BLOCK": 1024,
        }, None  # fmt: skip
    for per_token in (True, False):
        yield quantize.quantize_rows, {
            "x_ptr": BF16, "scale_ptr": F32, "codes_ptr": U8, "bytes_ptr": U8, "token_scale_ptr": F32, "K": "i32",
            "PER_TOKEN": per_token, "BLOCK": 2048,
        }, None  # fmt: skip
    for scale in ("token", "shared", "expert"):
        yield quantize.fake_quantize_rows, {
            "x_ptr": BF16, "ids_ptr": I32, "map_ptr": None, "scale_ptr": F32, "out_ptr": BF16, "row_scale_ptr": F32,
            "K": "i32", "slots_per_row": "i32", "num_ids": "i32", "E": "i32", "SCALE": scale, "BLOCK": 2048,
        }, None  # fmt: skip
    yield quantize.dequantize_rows, {
        "codes_ptr": U8, "bytes_ptr": U8, "scale_ptr": F32, "out_ptr": BF16, "K": "i32", "SCALE_PER_ROW": 1,
        "BLOCK": 2048,
    }, None  # fmt: skip
    for scoring in ("softmax", "sigmoid", "sqrt_softplus"):
        yield route.route_rows, {
            "logits_ptr": BF16, "bias_ptr": F32, "ids_ptr": I32, "weights_ptr": F32, "E": "i32", "stride": "i32",
            "scale": "fp32", "TOP_K": 8, "SCORING": scoring, "RENORMALIZE": True, "BLOCK": 128, "K_BLOCK": 8,
        }, None  # fmt: skip
    yield health.count_rows, {
        "x_ptr": BF16, "y_ptr": BF16, "ids_ptr": I32, "health_ptr": I64, "H": "i32", "num_ids": "i32", "TOP_K": 8,
        "BLOCK": 1024, "K_BLOCK": 8,
    }, None  # fmt: skip
    yield health.probe_rows, {"x_ptr": BF16, "partial_ptr": F32, "K": "i32", "BLOCK": 1024}, None
    yield health.probe_total, {"partial_ptr": F32, "stats_ptr": F64, "rows": "i32", "K": "i32", "BLOCK": 1024}, None


def main() -> None:
    names = {"gemm1", "gemm2", "linear"}
    types = ("*", "i32", "fp32")
    for kernel, arguments, tile in kernels():
        is_type = {n: isinstance(v, str) and v.startswith(types) for n, v in arguments.items()}
        signature = {n: v if is_type[n] else "constexpr" for n, v in arguments.items()}
        constants = {(kernel.arg_names.index(n),): v for n, v in arguments.items() if not is_type[n]}
        aligned = [["tt.divisibility", 16]]
        attributes = {(kernel.arg_names.index(n),): aligned for n, v in arguments.items() if is_type[n] and v != "fp32"}
        options = {"enable_fp_fusion": kernel.__name__ in names}
        options |= {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
        for arch in map(int, sys.argv[1:]):
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
            binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            local = [line for line in binary.asm["ptx"].splitlines() if ".local" in line]
            mma = next((m for m in ("tcgen05.mma", "wgmma", "mma.sync") if m in binary.asm["ptx"]), "-")
            print(f"{kernel.__name__} sm_{arch} {len(binary.asm['cubin'])} bytes {mma} local={len(local)}", flush=True)


if __name__ == "__main__":
    main()
