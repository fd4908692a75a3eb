// What stands around the two GEMMs: slots sorted by expert, and the sum over a token's experts. See compile.py.

struct Sort {
    const void* ids;     // [slots] global expert ids
    const void* map;     // global to local ids, or null
    const float* router; // [slots]
    int* order;          // [slots] out: live slots by expert, in their order
    float* sorted;       // [slots] out: their router weights
    int* counts;         // [experts] out, for cut; or null: few slots, and sort makes the tiles itself
    int4* tiles;         // out: expert, first sorted row, rows, 0
    int* num_tiles;      // out
    u64* health;         // tokens per expert are added here, or null
    int slots, num_ids, experts, tile, wide_ids, wide_map;
};

constexpr int MAX_EXPERTS = 1024;

constexpr int BATCH = 8;  // loads in flight; one at a time, this would be a chain of round trips to L2

__device__ __forceinline__ void load_experts(const Sort& a, int slot, int last, int (&experts)[BATCH]) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) experts[b] = slot + b * 32 < last ? local_expert(a, slot + b * 32) : -1;
}

// One block per expert; each looks at all ids, so that no block waits for another. Each warp takes a run of slots, 32 at
// a time: what it writes follows from the counts of the warps before it, never from timing.
extern "C" __global__ void __launch_bounds__(1024) sort(const __grid_constant__ Sort a) {
    next_may_begin();
    previous_done();
    __shared__ int counts[MAX_EXPERTS];
    __shared__ int sums[3][32];
    const int e = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5, warps = blockDim.x >> 5;
    const bool tiling = !a.counts;
    if (tiling)
        for (int i = t; i < a.experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    const int share = ((a.slots + warps - 1) / warps + 31) / 32 * 32;
    const int first = min(a.slots, warp * share), last = min(a.slots, first + share);
    int mine = 0, less = 0, tile = 0;
    for (int i = first + lane; i - lane < last; i += 32 * BATCH) {
        int experts[BATCH];
        load_experts(a, i, last, experts);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (tiling && experts[b] >= 0) atomicAdd(&counts[experts[b]], 1);
            mine += __popc(__ballot_sync(~0u, experts[b] == e));
            less += __popc(__ballot_sync(~0u, experts[b] >= 0 && experts[b] < e));
        }
    }
    __syncthreads();
    if (tiling)
        for (int i = t; i < e; i += blockDim.x) tile += tiles_of(counts[i], a.tile);
    tile = warp_sum(tile);
    if (lane == 0) sums[0][warp] = less, sums[1][warp] = tile, sums[2][warp] = mine;
    __syncthreads();
    const bool there = lane < warps;
    const int start = warp_sum(there ? sums[0][lane] : 0), count = warp_sum(there ? sums[2][lane] : 0);
    tile = warp_sum(there ? sums[1][lane] : 0);
    int to = start + warp_sum(lane < warp ? sums[2][lane] : 0);
    if (mine)
        for (int i = first + lane; i - lane < last; i += 32 * BATCH) {
            int experts[BATCH];
            load_experts(a, i, last, experts);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const u32 hits = __ballot_sync(~0u, experts[b] == e);
                if (experts[b] == e) {
                    const int place = to + __popc(hits & ((1u << lane) - 1));
                    a.order[place] = i + b * 32, a.sorted[place] = a.router[i + b * 32];
                }
                to += __popc(hits);
            }
        }
    if (tiling) write_tiles(a.tiles + tile, a.tile, e, start, count, t, blockDim.x);
    if (t == 0) {
        if (!tiling) a.counts[e] = count;
        else if (e == a.experts - 1) *a.num_tiles = tile + tiles_of(count, a.tile);
        if (a.health) a.health[e] += count;
    }
}

// One block of 1024 threads: the tiles of all experts from their counts.
extern "C" __global__ void __launch_bounds__(1024) cut(const __grid_constant__ Sort a) {
    next_may_begin();
    previous_done();
    __shared__ int starts[MAX_EXPERTS], tiles[MAX_EXPERTS], sums[2][32];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const int count = t < a.experts ? a.counts[t] : 0, mine = tiles_of(count, a.tile);
    int start = count, tile = mine;  // running sums
    for (int d = 1; d < 32; d *= 2) {
        const int s = __shfl_up_sync(~0u, start, d), m = __shfl_up_sync(~0u, tile, d);
        if (lane >= d) start += s, tile += m;
    }
    if (lane == 31) sums[0][warp] = start, sums[1][warp] = tile;
    __syncthreads();
    start += warp_sum(lane < warp ? sums[0][lane] : 0) - count;
    tile += warp_sum(lane < warp ? sums[1][lane] : 0) - mine;
    starts[t] = start, tiles[t] = tile;
    if (t == MAX_EXPERTS - 1) *a.num_tiles = tile + mine;
    __syncthreads();
    for (int e = warp; e < a.experts; e += 32) write_tiles(a.tiles + tiles[e], a.tile, e, starts[e], a.counts[e], lane, 32);
}

struct Sum {
    const u16* partial;  // [slots, width]
    const void* ids;
    const void* map;
    u16* out;            // [tokens, width]
    int width, top_k, num_ids, experts, wide_ids, wide_map;
};

__device__ __forceinline__ void add2(float* acc, u32 pair) {
    const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
    acc[0] += low, acc[1] += high;
}

// out[token] = the sum of its live slots in routing order, in float32; zero where there is none.
extern "C" __global__ void __launch_bounds__(256) sum(const __grid_constant__ Sum a) {
    previous_done();
    const int column = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (column >= a.width) return;
    float acc[8] = {};
    const int slot = blockIdx.x * a.top_k;
    const u16* from = a.partial + (u64)slot * a.width + column;
#pragma unroll 4
    for (int j = 0; j < a.top_k; ++j)
        if (local_expert(a, slot + j) >= 0) {
            const uint4 v = *(const uint4*)(from + (u64)j * a.width);
            add2(acc, v.x), add2(acc + 2, v.y), add2(acc + 4, v.z), add2(acc + 6, v.w);
        }
    *(uint4*)(a.out + (u64)blockIdx.x * a.width + column) =
        make_uint4(pack2(acc[0], acc[1]), pack2(acc[2], acc[3]), pack2(acc[4], acc[5]), pack2(acc[6], acc[7]));
}
