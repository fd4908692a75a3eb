"""Expert ids: which are ours, and the order in which the GEMMs visit routed rows."""

import triton
import triton.language as tl


@triton.jit
def local_expert(raw, map_ptr, num_ids, E):
    """Ids to local experts 0..E-1, or -1 for padding, ids out of range and experts of other ranks."""
    raw = raw.to(tl.int64)
    valid = (raw >= 0) & (raw < num_ids)
    if map_ptr is not None:
        raw = tl.load(map_ptr + tl.where(valid, raw, 0)).to(tl.int64)
        valid = valid & (raw >= 0) & (raw < E)
    return tl.where(valid, raw, -1).to(tl.int32)


@triton.jit(do_not_specialize=["R"])
def sort_slots(
    ids_ptr, map_ptr, starts_ptr, slots_ptr, health_ptr,
    R, num_ids, E,
    TOKENS_FIELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Routed slots 0..R-1 grouped by expert, in order: deterministic, no atomics, one program per expert.

    starts [E + 1] receives where each group begins, slots [R] the slot numbers. With health, the count is added to
    field TOKENS_FIELD + e of its row.
    """
    e = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    less = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for base in range(0, R, BLOCK):
        expert = local_expert(tl.load(ids_ptr + base + lane, mask=base + lane < R, other=-1), map_ptr, num_ids, E)
        less += ((expert >= 0) & (expert < e)).to(tl.int32)
        equal += (expert == e).to(tl.int32)
    start = tl.sum(less, axis=0)
    count = tl.sum(equal, axis=0)
    tl.store(starts_ptr + e, start)
    if e == E - 1:
        tl.store(starts_ptr + E, start + count)
    if health_ptr is not None:
        field = health_ptr + TOKENS_FIELD + e
        tl.store(field, tl.load(field) + count)
    if count > 0:
        for base in range(0, R, BLOCK):
            expert = local_expert(tl.load(ids_ptr + base + lane, mask=base + lane < R, other=-1), map_ptr, num_ids, E)
            mine = (expert == e).to(tl.int32)
            tl.store(slots_ptr + start + tl.cumsum(mine, axis=0) - 1, base + lane, mask=mine > 0)
            start += tl.sum(mine, axis=0)


@triton.jit
def find_tile(starts_ptr, E, tile, ROWS: tl.constexpr, E_BLOCK: tl.constexpr):
    """Which expert the tile-th tile of ROWS rows belongs to, and its first and last sorted row.

    Returns expert = -1 past the last tile: grids are sized by shapes, never by counts.
    """
    e = tl.arange(0, E_BLOCK)
    begin = tl.load(starts_ptr + e, mask=e < E, other=0)
    end = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last <= tile).to(tl.int32), axis=0)
    found = expert < E
    mine = e == expert
    first_row = tl.sum(tl.where(mine, begin + (tile - (last - tiles)) * ROWS, 0), axis=0)
    end_row = tl.sum(tl.where(mine, end, 0), axis=0)
    return tl.where(found, expert, -1), first_row, end_row
