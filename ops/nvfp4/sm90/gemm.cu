// Grouped GEMM of a mixture-of-experts layer for sm_90a: NVFP4 weights times 16-bit activations.
//
// Operands are swapped: 64 rows of weights are the M side of wgmma and come from registers, so that a decoded weight
// never passes through shared memory; tokens are the N side and come from shared memory. Producer warps keep a ring of
// stages full (bulk copies of packed weights, cp.async gathers of token rows); consumer warpgroups decode one block of
// 64 x 64 weights while the matrix instructions of the block before are in flight. Thread blocks stay on their SM and
// take tiles in turn.
//
// The includer defines (see compile.py):
//   NMAX            tokens a tile; FOR_VARIANTS(F) is a list of F(n) with the widths that products may have
//   WGS, RB         consumer warpgroups, and blocks of 64 weight rows of each
//   KB, STAGES      blocks of 64 along K per stage, stages of the ring
//   SPLIT           1: all warpgroups take the same rows and share out K
//   FIRST           1: activation; 0: times the router weight
//   GATED           1: gate and up interleaved in groups of 8 rows, for the first GEMM with an up projection
//   KIND, LIMITED   the activation
//   SCALE           of activations: 0 none, 1 shared, 2 per expert, 3 per row
//   ROUTE           1: at most 32 slots, sorted by every thread block for itself
//   PRODUCERS       threads that fill the ring
//   PRODUCER_REGS, CONSUMER_REGS   0: as compiled
//   MIN_BLOCKS      per SM
//   EXPECTED_SMEM   bytes of shared memory by compile.py's count

struct Args {
    const u8* weights;          // [E, rows/64, ceil(K/64), 2304]: codes, then scales of a block
    const float* global_scale;  // [E, 2] or [E]
    const float* bias;          // [E, rows] in the order of the checkpoint, or null
    const u16* x;               // [*, K]
    const float* row_scale;     // see SCALE
    const float* router;        // router weights by expert, as order
    const int* order;           // slots by expert
    const int4* tiles;          // expert, first sorted row, rows, -
    const int* num_tiles;
    const void* ids;            // few slots (ROUTE): every block sorts them for itself; order, tiles and so on are unused
    const void* map;
    const float* topk_weights;
    u16* out;                   // [slots, width]
    int K, width, blocks, row_tiles, divisor;  // blocks: 64-row blocks of one expert; width: columns of out
    int slots, num_ids, experts, wide_ids, wide_map;
    float alpha, beta, limit;
};

constexpr int RBT = SPLIT ? RB : WGS * RB;
constexpr int X_BYTES = KB * NMAX * 128;
constexpr int BLOCK_BYTES = 2048 + 256;
constexpr int WEIGHT_BYTES = RBT * KB * BLOCK_BYTES;
constexpr int FEATURES = GATED ? 32 * RB : 64 * RB;  // of out, per warpgroup
constexpr int PITCH = FEATURES * 2 + 16;             // bytes of a staged token, padded against bank conflicts
constexpr int OUT_BYTES = NMAX * PITCH;
constexpr int PER_STAGE = SPLIT ? KB / WGS * RB : KB * RB;  // blocks of one warpgroup
constexpr int WRITERS = SPLIT ? 1 : WGS;               // warpgroups that store results
constexpr int LOADS = (NMAX * 8 + PRODUCERS - 1) / PRODUCERS;  // 16-byte pieces of one block, per thread

// Shared memory, from a 1024-byte boundary.
constexpr int OFF_WEIGHTS = STAGES * X_BYTES;
constexpr int OFF_OUT = OFF_WEIGHTS + STAGES * WEIGHT_BYTES;
constexpr int OFF_SUM = OFF_OUT + WRITERS * OUT_BYTES;
constexpr int OFF_FACTOR = OFF_SUM + (SPLIT ? (WGS - 1) * RB * NMAX * 256 : 0);
constexpr int OFF_FULL = OFF_FACTOR + WRITERS * NMAX * 8;
constexpr int OFF_EMPTY = OFF_FULL + STAGES * 8;
constexpr int OFF_ROUTE = (OFF_EMPTY + STAGES * 8 + 8 + 15) / 16 * 16;
constexpr int SMEM_BYTES = OFF_ROUTE + ROUTE * (32 * 24 + 16) + 1024;
static_assert(SMEM_BYTES == EXPECTED_SMEM, "compile.py counts shared memory differently");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
// Once per warp, when all its lanes are here.
__device__ __forceinline__ void bar_arrive(u32 bar) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nLOOP:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra LOOP;\nDONE:\n}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_arrive(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void warpgroup_sync(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); }
__device__ __forceinline__ void all_sync(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(WGS * 128) : "memory"); }
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;"); }
template <int N>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N));
}

// Known to the compiler as the same in all lanes: what follows from it takes uniform registers.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(~0u, v, 0); }

// Operand B: rows of 64 elements (128 bytes) in the 128-byte swizzle, 1024 bytes from one group of 8 rows to the next.
__device__ __forceinline__ u64 token_descriptor(u32 address) {
    return (u64)(1024 >> 4 | 1 << 30) << 32 | (u32)uniform((address & 0x3FFFF) >> 4 | 1 << 16);
}

// a times the low (0) or high (1) half of s, both halves; one instruction.
template <int HIGH>
__device__ __forceinline__ u32 times(u32 a, u32 s) {
    u32 d;
    if (HIGH)
        asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; mul.rn.bf16x2 %0, %1, t;}" : "=r"(d) : "r"(a), "r"(s));
    else
        asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; mul.rn.bf16x2 %0, %1, t;}" : "=r"(d) : "r"(a), "r"(s));
    return d;
}

// Eight codes of one word to the A fragment of one m64k16 (layout.py says which bits are whose), 2^-19 of their values:
// the bits are 2^-126 of e2m1 read as bfloat16, subnormals included, and the scales 2^107 of theirs. Exact.
__device__ __forceinline__ void decode(u32 w, u32 scales, u32* a) {
    const u32 mask = 0x81C081C0u;
    a[0] = times<0>(w & mask, scales);
    a[1] = times<1>(w << 6 & mask, scales);
    a[2] = times<0>(__funnelshift_r(w, w, 4) & mask, scales);
    a[3] = times<1>((w << 2 & 0x80C080C0u) | (w >> 6 & 0x01000100u), scales);
}

__device__ __forceinline__ float sigmoid(float v) {
    float z = __expf(-fabsf(v));
    return __fdividef(v >= 0 ? 1.f : z, 1.f + z);
}
__device__ __forceinline__ float clamp_above(float v, float top) { return v > top ? top : v; }  // keeps NaN
__device__ __forceinline__ float clamp_both(float v, float top) { return v > top ? top : v < -top ? -top : v; }
__device__ __forceinline__ float activate(float g, float u, const Args& a) {
#if KIND == 0
    if (LIMITED) g = clamp_above(g, a.limit), u = clamp_both(u, a.limit);
    return g * sigmoid(g) * u;
#elif KIND == 1
    if (LIMITED) g = clamp_above(g, a.limit), u = clamp_both(u, a.limit);
    return g * sigmoid(a.alpha * g) * (u + a.beta);
#elif KIND == 2
    float v = g * sigmoid(g);
    if (LIMITED) v = clamp_above(v, a.limit), u = clamp_both(u, a.limit);
    return v * u;
#elif KIND == 3
    return 0.5f * g * (1.f + erff(g * 0.7071067811865476f)) * u;
#elif KIND == 4
    return g * sigmoid(2.f * 0.7978845608028654f * (g + 0.044715f * g * g * g)) * u;
#else
    return g > 0 ? g * g : g <= 0 ? 0.f : g;
#endif
}

// WGMMA_WRAPPERS

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Where a block reads what the sort made: past L1, since this kernel may have begun before, or its own shared memory.
__device__ __forceinline__ int4 tile_part(const Args& a, int tile, int total) {
    if (tile >= total) return make_int4(0, 0, 0, 0);
    return ROUTE ? a.tiles[tile / a.row_tiles] : __ldcg(a.tiles + tile / a.row_tiles);
}
__device__ __forceinline__ int num_tiles(const Args& a) { return uniform((ROUTE ? *a.num_tiles : __ldcg(a.num_tiles)) * a.row_tiles); }

__device__ __forceinline__ void produce(const Args& a, u32 base, u32 full, u32 empty) {
    const int t = threadIdx.x - WGS * 128, chunk = t & 7, lane_row = t >> 3, warp = t >> 5, lane = t & 31;
    constexpr int WARPS = PRODUCERS / 32;
    constexpr int ROWS = PRODUCERS / 8;  // rows of one load; with 4, the swizzle alternates
    const u32 even = lane_row * 128 + ((chunk ^ (lane_row & 7)) << 4);
    const u32 odd = ROWS == 4 ? even ^ 64 : even;  // row + 4
    const int kt = (a.K + 63) / 64, steps = (kt + KB - 1) / KB;
    const int total = num_tiles(a);
    Ring ring;
    int4 next = tile_part(a, blockIdx.x, total);
    int ahead = 0;  // stages of the first tile whose weights are under way
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const int4 part = make_int4(uniform(next.x), uniform(next.y), uniform(next.z), 0);
        next = tile_part(a, tile + gridDim.x, total);
        const int block = tile % a.row_tiles * RBT;
        const int blocks = min(RBT, a.blocks - block), mine = max(0, (blocks - warp + WARPS - 1) / WARPS);
        const u8* weights = a.weights + ((u64)part.x * a.blocks + block) * kt * BLOCK_BYTES;
        // Each producer warp brings some of the row blocks.
        auto bring = [&](int s, int stage) {
            const int bytes = min(KB, kt - s * KB) * BLOCK_BYTES;
            bar_expect(full + stage * 8, mine * bytes);
#pragma unroll
            for (int b = 0; b < RBT; b += WARPS)
                if (b + warp < blocks)
                    bulk_copy(base + OFF_WEIGHTS + stage * WEIGHT_BYTES + (b + warp) * KB * BLOCK_BYTES,
                              weights + ((u64)(b + warp) * kt + s * KB) * BLOCK_BYTES, bytes, full + stage * 8);
        };
        if (!FIRST && tile == blockIdx.x) {  // weights wait for nobody
            ahead = min(STAGES, steps);
            if (lane == 0)
                for (int s = 0; s < ahead; ++s) bring(s, s);
            previous_done();
        }
        const u16* x[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int r = lane_row + i * ROWS;
            x[i] = a.x + (r < part.z ? (u64)(a.order[part.y + r] / a.divisor) * a.K + chunk * 8 : 0);
        }
        int k = chunk * 8;
#pragma unroll 1
        for (int s = 0; s < steps; ++s, ring.next()) {
            const u32 bar = full + ring.stage * 8;
            bar_wait(empty + ring.stage * 8, ring.phase ^ 1);
            const int live = min(KB, kt - s * KB);
            if (lane == 0 && s >= ahead) bring(s, ring.stage);
            if (KB > 1 && live < KB) {  // K has ended within the stage: blocks of zero weights
#pragma unroll 1
                for (int b = 0; b < RBT * KB; ++b)
                    if (b % KB >= live)
                        for (int i = t; i < BLOCK_BYTES / 16; i += PRODUCERS)
                            copy_16(base + OFF_WEIGHTS + ring.stage * WEIGHT_BYTES + b * BLOCK_BYTES + i * 16, a.x, 0);
            }
            const u32 to = base + ring.stage * X_BYTES;
#pragma unroll
            for (int kb = 0; kb < KB; ++kb)
#pragma unroll
                for (int i = 0; i < LOADS; ++i)  // zeros past K; nobody reads the columns of rows past the last
                    if (lane_row + i * ROWS < part.z)
                        copy_16(to + (i & 1 ? odd : even) + (kb * NMAX + i * ROWS) * 128, x[i] + kb * 64, k + kb * 64 < a.K ? 16 : 0);
#pragma unroll
            for (int i = 0; i < LOADS; ++i) x[i] += KB * 64;
            k += KB * 64;
            copies_arrive(bar);
        }
        ahead = 0;
    }
}

// One block of 64 x 64 weights: decode, then four matrix instructions; returns when the block before is done.
template <int N>
__device__ __forceinline__ void block(float (&acc)[N / 2], u32 (&frag)[16], uint4& w, const uint2& s, u32 high, u64 desc) {
    asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));  // not before the wait: frag was in use until then
    const u32 keep = 0x0FF00FF0u;
    decode(w.x, (s.x & keep) | high, frag);
    decode(w.y, (__funnelshift_r(s.x, s.x, 8) & keep) | high, frag + 4);
    decode(w.z, (s.y & keep) | high, frag + 8);
    decode(w.w, (__funnelshift_r(s.y, s.y, 8) & keep) | high, frag + 12);
    mma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<N>(acc, frag + 4 * k, desc + 2 * k);
    mma_commit();
    mma_wait<1>();
}

template <int N>
__device__ __forceinline__ void multiply(float (&acc)[RB][N / 2], Ring& ring, const Args& a, u32 base, u8* smem,
                                         u32 full, u32 empty, int wg) {
    const u32 spare = empty + STAGES * 8;  // a barrier that nobody waits for: before the first stage
    const int t = threadIdx.x & 127;
    const int steps = ((a.K + 63) / 64 + KB - 1) / KB;
    u32 frag[2][16];
#pragma unroll
    for (int r = 0; r < RB; ++r)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[r][i] = 0.f;
    const int first = SPLIT ? wg : wg * RB * KB;
    u32 high;
    asm volatile("mov.u32 %0, 0x70007000;" : "=r"(high));  // in a register: with two immediates, one operation more
    u32 previous = spare;
    for (int step = 0; step < steps; ++step) {
        bar_wait(full + ring.stage * 8, ring.phase);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const u8* codes = smem + OFF_WEIGHTS + ring.stage * WEIGHT_BYTES + first * BLOCK_BYTES + t * 16;
        const u8* scales = codes + 2048 - t * 16 + (t >> 2) * 8;
        u64 tokens = token_descriptor(base + ring.stage * X_BYTES + (SPLIT ? wg * NMAX * 128 : 0));
#pragma unroll 1
        for (int pair = 0; pair < PER_STAGE / 2; ++pair) {  // unrolled further, ptxas would wait after every instruction
            // RB 2: two row blocks of one column block. RB 1: two column blocks.
            constexpr int APART = RB == 2 ? KB : SPLIT ? WGS : 1, ON = RB == 2 ? (SPLIT ? WGS : 1) : 2 * APART;
            constexpr int TOKENS = NMAX * 128 >> 4;
            uint4 w[2];
            uint2 s[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                w[i] = *(const uint4*)(codes + i * APART * BLOCK_BYTES);
                s[i] = *(const uint2*)(scales + i * APART * BLOCK_BYTES);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                block<N>(acc[i % RB], frag[i], w[i], s[i], high, tokens + (RB == 2 ? 0 : i * APART * TOKENS));
                if (i == 0 && pair == 0) bar_arrive(previous);
            }
            codes += ON * BLOCK_BYTES, scales += ON * BLOCK_BYTES, tokens += ON * TOKENS;
        }
        previous = empty + ring.stage * 8;
        ring.next();
    }
    mma_wait<0>();
#pragma unroll
    for (int r = 0; r < RB; ++r)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(acc[r][i])::"memory");
    bar_arrive(previous);
}

// SPLIT: the shares of all warpgroups, added up by the first in their order.
template <int N>
__device__ __forceinline__ void gather(float (&acc)[RB][N / 2], u8* smem, int wg) {
    float* sums = (float*)(smem + OFF_SUM) + (threadIdx.x & 127);
    all_sync(9);  // the tile before has been read
    if (wg)
#pragma unroll
        for (int r = 0; r < RB; ++r)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sums[(((wg - 1) * RB + r) * (N / 2) + i) * 128] = acc[r][i];
    all_sync(10);
    if (!wg)
#pragma unroll
        for (int other = 0; other < WGS - 1; ++other)
#pragma unroll
            for (int r = 0; r < RB; ++r)
#pragma unroll
                for (int i = 0; i < N / 2; ++i) acc[r][i] += sums[((other * RB + r) * (N / 2) + i) * 128];
}

// What a tile's results are multiplied with, and where they go; thread t holds what concerns tokens t, t + 128, ...
constexpr int HELD = (NMAX + 127) / 128;
struct Target {
    int slot[HELD] = {};
    float router[HELD] = {};
    float g0, g1;  // 2^19 in them: decode left 2^-19 of every weight
};

__device__ __forceinline__ Target target(const Args& a, const int4& part) {
    const int t = threadIdx.x & 127;
    Target to;
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        if (t + i * 128 < part.z) {
            to.slot[i] = a.order[part.y + t + i * 128];
            if (!FIRST) to.router[i] = a.router[part.y + t + i * 128];
        }
    to.g0 = 524288.f * a.global_scale[part.x * (1 + GATED)];
    to.g1 = GATED ? 524288.f * a.global_scale[part.x * 2 + 1] : to.g0;
    return to;
}

template <int N>
__device__ __forceinline__ void finish(float (&acc)[RB][N / 2], const Args& a, const int4& part, const Target& to, int block,
                                       u8* smem, int wg) {
    const int t = threadIdx.x & 127, warp = t >> 5, lane = t & 31, r0 = lane >> 2;
    float* routers = (float*)(smem + OFF_FACTOR) + wg * NMAX * 2;
    float* row_scales = routers + NMAX;
    u8* staged = smem + OFF_OUT + wg * OUT_BYTES;
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        if (t + i * 128 < N) {
            if (!FIRST) routers[t + i * 128] = to.router[i];
            if (SCALE) row_scales[t + i * 128] = a.row_scale[SCALE == 3 ? to.slot[i] / a.divisor : SCALE == 2 ? part.x : 0];
        }
    warpgroup_sync(wg);  // the factors are there; the tile before has left
#pragma unroll
    for (int r = 0; r < RB; ++r) {
        const int b = block + wg * RB + r;
        // Rows of this thread, in the order of the checkpoint.
        const int f0 = GATED ? b * 32 + warp * 8 + r0 : b * 64 + warp * 16 + r0;
        const int f1 = GATED ? a.width + f0 : f0 + 8;
        float bias0 = 0.f, bias1 = 0.f;
        if (a.bias) {
            const float* bias = a.bias + (u64)part.x * (GATED ? 2 * a.width : a.width);
            bias0 = f0 < a.width ? bias[f0] : 0.f;
            bias1 = (GATED ? f0 : f1) < a.width ? bias[f1] : 0.f;
        }
        u32 packed[GATED ? 1 : 2][N / 8];
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = j * 8 + (lane & 3) * 2 + i;
                const float row = SCALE ? row_scales[token] : 1.f;
                const float c0 = fmaf(acc[r][j * 4 + i], to.g0 * row, bias0);
                const float c1 = fmaf(acc[r][j * 4 + 2 + i], to.g1 * row, bias1);
                if (FIRST) {
                    v[i] = activate(c0, c1, a);
                    if (!GATED) v[2 + i] = activate(c1, c1, a);
                } else {
                    v[i] = c0 * routers[token], v[2 + i] = c1 * routers[token];
                }
            }
            packed[0][j] = pack2(v[0], v[1]);
            if (!GATED) packed[GATED ? 0 : 1][j] = pack2(v[2], v[3]);
        }
        // Transposed by stmatrix: 8 features of one token become 16 consecutive bytes.
        constexpr int HALVES = GATED ? 1 : 2, TOGETHER = 4 / HALVES;
        const int which = lane >> 3;  // of the four matrices that this lane's address is for
        const u32 place = shared_address(staged) + (GATED ? r * 64 + warp * 16 : r * 128 + warp * 32) + which % HALVES * 16 +
                       (which / HALVES * 8 + (lane & 7)) * PITCH;
#pragma unroll
        for (int j = 0; j < N / 8; j += TOGETHER) {
            if (j + TOGETHER <= N / 8) {
                u32 m[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) m[i] = packed[i % HALVES][j + i / HALVES];
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place + j * 8 * PITCH),
                             "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                             : "memory");
            } else {
#pragma unroll
                for (int i = 0; i < (N / 8 - j) * HALVES; ++i)
                    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(
                                     shared_address(staged) + (GATED ? r * 64 + warp * 16 : r * 128 + warp * 32) +
                                     i % HALVES * 16 + ((j + i / HALVES) * 8 + (lane & 7)) * PITCH),
                                 "r"(packed[i % HALVES][j + i / HALVES])
                                 : "memory");
            }
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    warpgroup_sync(wg);
    // One bulk copy a token, read while the next tile is computed.
    const int column = (block + wg * RB) * (GATED ? 32 : 64), columns = min(FEATURES, a.width - column);
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        if (t + i * 128 < part.z && columns > 0)
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                             a.out + (u64)to.slot[i] * a.width + column),
                         "r"(shared_address(staged) + (t + i * 128) * PITCH), "r"(columns * 2)
                         : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void consume(const Args& a, u32 base, u8* smem, u32 full, u32 empty, int wg) {
    const int total = num_tiles(a);
    Ring ring;
    int4 part = tile_part(a, blockIdx.x, total);
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const int block = tile % a.row_tiles * RBT;
        // Loaded ahead of the products, needed after them.
        const int4 next = tile_part(a, tile + gridDim.x, total);
        const Target to = target(a, part);
        const int4 now = make_int4(uniform(part.x), uniform(part.y), uniform(part.z), 0);
        part = next;
#define VARIANT(n)                                                      \
    if (now.z <= n) {                                                   \
        float acc[RB][n / 2];                                           \
        multiply<n>(acc, ring, a, base, smem, full, empty, wg);         \
        if (SPLIT) gather<n>(acc, smem, wg);                            \
        if (wg < WRITERS) finish<n>(acc, a, now, to, block, smem, wg);  \
        continue;                                                       \
    }
        FOR_VARIANTS(VARIANT)
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#if ROUTE
// At most 32 slots, one a lane of the first warp: what sort and cut of around.cu do, into this block's shared memory.
__device__ __forceinline__ void route(Args& a, u8* smem) {
    int4* tiles = (int4*)(smem + OFF_ROUTE);
    int* order = (int*)(tiles + 32);
    float* router = (float*)(order + 32);
    int* count = (int*)(router + 32);
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        const int expert = lane < a.slots ? local_expert(a, lane) : -1;
        const u32 same = __match_any_sync(~0u, expert), before = same & ((1u << lane) - 1);
        const int rows = __popc(same), parts = tiles_of(rows, NMAX);
        int start = 0, tile = 0;
        for (int other = 0; other < 32; ++other) {
            const int e = __shfl_sync(~0u, expert, other);
            const int p = __shfl_sync(~0u, before ? 0 : parts, other);
            if (e >= 0 && e < expert) ++start, tile += p;
        }
        if (expert >= 0) {
            const int place = start + __popc(before);
            order[place] = lane, router[place] = a.topk_weights[lane];
            if (!before) write_tiles(tiles + tile, NMAX, expert, start, rows, 0, 1);
        }
        const int total = warp_sum(expert >= 0 && !before ? parts : 0);
        if (lane == 0) *count = total;
    }
    a.tiles = tiles, a.order = order, a.router = router, a.num_tiles = count;
}
#endif

extern "C" __global__ void __launch_bounds__(WGS * 128 + PRODUCERS, MIN_BLOCKS) gemm(const __grid_constant__ Args given) {
    extern __shared__ u8 raw[];
    u8* smem = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
    const u32 base = shared_address(smem), full = base + OFF_FULL, empty = base + OFF_EMPTY;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + i * 8, PRODUCERS + PRODUCERS / 32), bar_init(empty + i * 8, WGS * 4);
        bar_init(empty + STAGES * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#if ROUTE
    Args a = given;
    if (FIRST) previous_done();  // the ids; for the second GEMM they were there before the first began
    route(a, smem);
#else
    const Args& a = given;
#endif
    __syncthreads();
    const int wg = uniform(threadIdx.x >> 7);
    if (FIRST || wg != WGS) previous_done();  // the producers of the second GEMM fetch weights before they wait
    next_may_begin();
    if (wg == WGS) {
#if PRODUCER_REGS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGS));
#endif
        produce(a, base, full, empty);
    } else {
#if CONSUMER_REGS
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGS));
#endif
        consume(a, base, smem, full, empty, wg);
    }
}
