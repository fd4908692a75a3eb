// What stands around the two GEMMs: slots sorted by expert, and the sum over a token's experts. See compile.py.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct Sort {
    const void* ids;     // [slots] global expert ids
    const void* map;     // global to local ids, or null
    int* order;          // [slots] out: live slots by expert, in their order
    int4* tiles;         // out: expert, first sorted row, rows, 0
    int* num_tiles;      // out
    u64* health;         // tokens per expert are added here, or null
    int slots, num_ids, experts, tile, wide_ids, wide_map;
};

constexpr int MAX_EXPERTS = 1024;

__device__ __forceinline__ int local_expert(const Sort& a, int slot) {
    long long id = a.wide_ids ? ((const long long*)a.ids)[slot] : ((const int*)a.ids)[slot];
    if (id < 0 || id >= a.num_ids) return -1;
    if (a.map) {
        id = a.wide_map ? ((const long long*)a.map)[id] : ((const int*)a.map)[id];
        if (id < 0 || id >= a.experts) return -1;
    }
    return (int)id;
}

// Sums of a and b over the block; every thread gets them, and v becomes the sum of v over the threads before.
__device__ __forceinline__ void scan(int& v, int& a, int& b) {
    __shared__ int sums[3][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    int run = v;
    for (int d = 1; d < 32; d *= 2) {
        int up = __shfl_up_sync(~0u, run, d);
        if (lane >= d) run += up;
    }
    for (int d = 16; d; d /= 2) a += __shfl_xor_sync(~0u, a, d), b += __shfl_xor_sync(~0u, b, d);
    if (lane == 31) sums[0][warp] = run, sums[1][warp] = a, sums[2][warp] = b;
    __syncthreads();
    v = run - v, a = 0, b = 0;
    for (int w = 0; w < warps; ++w) {
        if (w < warp) v += sums[0][w];
        a += sums[1][w], b += sums[2][w];
    }
}

// One block per expert; each counts all ids, so that no block waits for another. No order depends on timing.
extern "C" __global__ void __launch_bounds__(1024) sort(const __grid_constant__ Sort a) {
    __shared__ int counts[MAX_EXPERTS];
    const int e = blockIdx.x, t = threadIdx.x, lane = t & 31;
    for (int i = t; i < a.experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    const int share = (a.slots + blockDim.x - 1) / blockDim.x;
    const int first = t * share, last = min(a.slots, first + share);
    int mine = 0;
    for (int i = 0; i < share; ++i) {
        const int expert = first + i < last ? local_expert(a, first + i) : -1;
        const u32 same = __match_any_sync(~0u, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) atomicAdd(&counts[expert], __popc(same));
        mine += expert == e;
    }
    __syncthreads();
    int start = 0, tile = 0, place = mine;
    for (int i = t; i < e; i += blockDim.x) start += counts[i], tile += (counts[i] + a.tile - 1) / a.tile;
    scan(place, start, tile);
    const int count = counts[e], tiles = (count + a.tile - 1) / a.tile;
    if (mine)
        for (int i = first, to = start + place; i < last; ++i)
            if (local_expert(a, i) == e) a.order[to++] = i;
    for (int i = t; i < tiles; i += blockDim.x)
        a.tiles[tile + i] = make_int4(e, start + i * a.tile, min(a.tile, count - i * a.tile), 0);
    if (t == 0) {
        if (e == a.experts - 1) *a.num_tiles = tile + tiles;
        if (a.health) a.health[e] += count;
    }
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

__device__ __forceinline__ u32 pack2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// out[token] = the sum of its live slots in routing order, in float32; zero where there is none.
extern "C" __global__ void __launch_bounds__(256) sum(const __grid_constant__ Sum a) {
    const int column = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (column >= a.width) return;
    Sort route{};
    route.ids = a.ids, route.map = a.map, route.num_ids = a.num_ids, route.experts = a.experts;
    route.wide_ids = a.wide_ids, route.wide_map = a.wide_map;
    float acc[8] = {};
    const int slot = blockIdx.x * a.top_k;
    const u16* from = a.partial + (u64)slot * a.width + column;
#pragma unroll 4
    for (int j = 0; j < a.top_k; ++j)
        if (local_expert(route, slot + j) >= 0) {
            const uint4 v = *(const uint4*)(from + (u64)j * a.width);
            add2(acc, v.x), add2(acc + 2, v.y), add2(acc + 4, v.z), add2(acc + 6, v.w);
        }
    *(uint4*)(a.out + (u64)blockIdx.x * a.width + column) =
        make_uint4(pack2(acc[0], acc[1]), pack2(acc[2], acc[3]), pack2(acc[4], acc[5]), pack2(acc[6], acc[7]));
}
