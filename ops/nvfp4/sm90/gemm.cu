// Grouped GEMM of a mixture-of-experts layer for sm_90a: NVFP4 weights times 16-bit activations.
//
// Operands are swapped: 64 rows of weights are the M side of wgmma and come from registers, so that a decoded weight
// never passes through shared memory; tokens are the N side and come from shared memory. One producer warpgroup keeps a
// ring of stages full (bulk copies of packed weights, cp.async gathers of token rows); consumer warpgroups decode one
// block of 64 x 64 weights while the matrix instructions of the block before are in flight. Blocks stay on their SM and
// take tiles in turn.
//
// The includer defines (see compile.py): NMAX tokens a tile; WGS consumer warpgroups; RB blocks of 64 weight rows per
// warpgroup; KB blocks of 64 along K per stage; STAGES; GATED (1: gate and up interleaved in groups of 8 rows, for the
// first GEMM with an up projection); FIRST (1: activation; 0: times the router weight); KIND, LIMITED; HALF (1: float16);
// SCALE (0 none, 1 shared, 2 per expert, 3 per row); FOR_VARIANTS(F), a list of F(n) with the widths a tile may take.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

struct Args {
    const u8* codes;            // [E, rows/64, ceil(K/64), 2048]
    const u8* scales;           // [E, rows/64, ceil(K/64), 256]
    const float* global_scale;  // [E, 2] or [E]
    const float* bias;          // [E, rows] in the order of the checkpoint, or null
    const u16* x;               // [*, K]
    const float* row_scale;     // see SCALE
    const float* router;        // [slots]
    const int* order;           // slots by expert
    const int4* tiles;          // expert, first sorted row, rows, -
    const int* num_tiles;
    u16* out;                   // [slots, width]
    int K, width, blocks, row_tiles, divisor;  // blocks: 64-row blocks of one expert; width: columns of out
    float alpha, beta, limit;
};

constexpr int RBT = WGS * RB;
constexpr int X_BYTES = KB * NMAX * 128;
constexpr int CODE_BYTES = RBT * KB * 2048;
constexpr int SCALE_BYTES = RBT * KB * 256;
constexpr int FEATURES = GATED ? 32 * RB : 64 * RB;  // of out, per warpgroup
constexpr int PITCH = FEATURES * 2 + 16;             // bytes of a staged token, padded against bank conflicts
constexpr int OUT_BYTES = NMAX * PITCH;
constexpr int PRODUCER = WGS;

// Shared memory, from a 1024-byte boundary.
constexpr int OFF_CODES = STAGES * X_BYTES;
constexpr int OFF_SCALES = OFF_CODES + STAGES * CODE_BYTES;
constexpr int OFF_OUT = OFF_SCALES + STAGES * SCALE_BYTES;
constexpr int OFF_SLOT = OFF_OUT + WGS * OUT_BYTES;
constexpr int OFF_FACTOR = OFF_SLOT + WGS * NMAX * 4;
constexpr int OFF_FULL = OFF_FACTOR + WGS * NMAX * 4;
constexpr int OFF_EMPTY = OFF_FULL + STAGES * 8;
constexpr int SMEM_BYTES = OFF_EMPTY + STAGES * 8 + 1024;
extern "C" __device__ const int smem_bytes = SMEM_BYTES;

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
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// 8 columns of 64 elements: 128-byte rows, the 128-byte swizzle, 1024 bytes from one group of 8 rows to the next.
__device__ __forceinline__ u64 token_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
    u32 d;
#if HALF
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
    return d;
}

// Scale byte i of word, twice. The byte is exponent 5, mantissa 3, bias 10; bf16: scale * 2^118, float16: scale * 2^6.
__device__ __forceinline__ u32 scale_pair(u32 word, int i) {
    u32 pair = __byte_perm(word, 0, 0x4040 | i | i << 8);
#if HALF
    return pair * 128 + 0x2C002C00u;
#else
    return pair * 16 + 0x75807580u;
#endif
}

// Eight codes of one word (layout.py says which bits) to the A fragment of one m64k16, times scale / 256.
__device__ __forceinline__ void decode(u32 w, u32 s0, u32 s1, u32* a) {
#if HALF
    const u32 sign = 0x80008000u, mag = 0x0E000E00u;
    a[0] = (w & sign) | (w << 3 & mag);
    a[1] = (w << 3 & sign) | (w << 6 & mag);
    a[2] = (w << 6 & sign) | (w << 9 & mag);
    a[3] = (w << 1 & sign) | (w & 0x0C000C00u) | (w >> 4 & 0x02000200u);
#else
    const u32 three = 0x81C081C0u;
    a[0] = w & three;
    a[1] = w << 3 & three;
    a[2] = w << 6 & three;
    a[3] = (w << 1 & 0x80008000u) | (w >> 3 & 0x01800180u) | (w >> 7 & 0x00400040u);
#endif
    a[0] = multiply2(a[0], s0);
    a[1] = multiply2(a[1], s1);
    a[2] = multiply2(a[2], s0);
    a[3] = multiply2(a[3], s1);
}

__device__ __forceinline__ float sigmoid(float v) {
    float z = __expf(-fabsf(v));
    return (v >= 0 ? 1.f : z) / (1.f + z);
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

__device__ __forceinline__ u32 pack2(float low, float high) {
    u32 d;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#endif
    return d;
}

// WGMMA_WRAPPERS

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ void produce(const Args& a, u32 base, u32 full, u32 empty) {
    const int t = threadIdx.x & 127, chunk = t & 7, lane_row = t >> 3;
    const int target = lane_row * 128 + ((chunk ^ (lane_row & 7)) << 4);
    const int kt = (a.K + 63) / 64, steps = (kt + KB - 1) / KB;
    const int total = *a.num_tiles * a.row_tiles;
    Ring ring;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const int4 part = a.tiles[tile / a.row_tiles];
        const int block = tile % a.row_tiles * RBT;
        const int blocks = min(RBT, a.blocks - block);
        const u8* codes = a.codes + ((u64)part.x * a.blocks + block) * kt * 2048;
        const u8* scales = a.scales + ((u64)part.x * a.blocks + block) * kt * 256;
        int rows[(NMAX + 15) / 16];
#pragma unroll
        for (int i = 0; i < (NMAX + 15) / 16; ++i) {
            const int r = lane_row + i * 16;
            rows[i] = r < part.z ? a.order[part.y + r] / a.divisor : -1;
        }
#pragma unroll 1
        for (int s = 0; s < steps; ++s, ring.next()) {
            const u32 bar = full + ring.stage * 8;
            bar_wait(empty + ring.stage * 8, ring.phase ^ 1);
            const int live = min(KB, kt - s * KB);
            if (t == 0) {
                bar_expect(bar, blocks * live * (2048 + 256));
#pragma unroll 1
                for (int b = 0; b < blocks; ++b) {
                    bulk_copy(base + OFF_CODES + ring.stage * CODE_BYTES + b * KB * 2048,
                              codes + ((u64)b * kt + s * KB) * 2048, live * 2048, bar);
                    bulk_copy(base + OFF_SCALES + ring.stage * SCALE_BYTES + b * KB * 256,
                              scales + ((u64)b * kt + s * KB) * 256, live * 256, bar);
                }
            }
            if (KB > 1 && live < KB) {  // an odd number of blocks along K: one of zero weights
#pragma unroll 1
                for (int b = 0; b < RBT; ++b) {
                    copy_16(base + OFF_CODES + ring.stage * CODE_BYTES + (b * KB + 1) * 2048 + t * 16, a.x, 0);
                    if (t < 16) copy_16(base + OFF_SCALES + ring.stage * SCALE_BYTES + (b * KB + 1) * 256 + t * 16, a.x, 0);
                }
            }
#pragma unroll
            for (int kb = 0; kb < KB; ++kb) {
                const int k = (s * KB + kb) * 64 + chunk * 8;
                const u32 to = base + ring.stage * X_BYTES + kb * NMAX * 128 + target;
                // Zeros past K. Rows past the last stay what they are, for nobody reads their columns.
                const u32 bytes = k < a.K ? 16 : 0;
                const u16* x = a.x + (k < a.K ? k : 0);
#pragma unroll
                for (int i = 0; i < (NMAX + 15) / 16; ++i)
                    if (rows[i] >= 0) copy_16(to + i * 2048, x + (u64)rows[i] * a.K, bytes);
            }
            copies_arrive(bar);
        }
    }
}

// One block of 64 x 64 weights: decode, then four matrix instructions; returns when the block before is done.
template <int N>
__device__ __forceinline__ void block(float (&acc)[N / 2], u32 (&frag)[16], const uint4& w, const uint2& s, u64 desc) {
    const u32* words = &w.x;
#pragma unroll
    for (int k = 0; k < 4; ++k) decode(words[k], scale_pair(s.x, k), scale_pair(s.y, k), frag + 4 * k);
    mma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<N>(acc, frag + 4 * k, desc + 2 * k);
    mma_commit();
    mma_wait<1>();
}

template <int N>
__device__ __forceinline__ void multiply(float (&acc)[RB][N / 2], Ring& ring, const Args& a, u32 base, u8* smem,
                                         u32 full, u32 empty, int wg) {
    const int t = threadIdx.x & 127;
    const int steps = ((a.K + 63) / 64 + KB - 1) / KB;
    u32 frag[2][16];
#pragma unroll
    for (int r = 0; r < RB; ++r)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[r][i] = 0.f;
    for (int step = 0; step < steps; ++step) {
        bar_wait(full + ring.stage * 8, ring.phase);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const u8* codes = smem + OFF_CODES + ring.stage * CODE_BYTES + wg * RB * KB * 2048 + t * 16;
        const u8* scales = smem + OFF_SCALES + ring.stage * SCALE_BYTES + wg * RB * KB * 256 + (t >> 2) * 8;
        uint4 w[KB * RB];
        uint2 s[KB * RB];
#pragma unroll
        for (int i = 0; i < KB * RB; ++i) {
            w[i] = *(const uint4*)(codes + (i % RB * KB + i / RB) * 2048);
            s[i] = *(const uint2*)(scales + (i % RB * KB + i / RB) * 256);
        }
#pragma unroll
        for (int i = 0; i < KB * RB; ++i) {
            const u64 desc = token_descriptor(base + ring.stage * X_BYTES + i / RB * NMAX * 128);
            block<N>(acc[i % RB], frag[i & 1], w[i], s[i], desc);
            if (i == 0 && step) bar_arrive(empty + (ring.stage ? ring.stage - 1 : STAGES - 1) * 8);
        }
        ring.next();
    }
    mma_wait<0>();
#pragma unroll
    for (int r = 0; r < RB; ++r)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(acc[r][i])::"memory");
    bar_arrive(empty + (ring.stage ? ring.stage - 1 : STAGES - 1) * 8);
}

template <int N>
__device__ __forceinline__ void finish(float (&acc)[RB][N / 2], const Args& a, const int4& part, int block, u8* smem,
                                       int wg) {
    const int t = threadIdx.x & 127, warp = t >> 5, lane = t & 31, r0 = lane >> 2;
    int* slots = (int*)(smem + OFF_SLOT) + wg * NMAX;
    float* factors = (float*)(smem + OFF_FACTOR) + wg * NMAX;
    u8* staged = smem + OFF_OUT + wg * OUT_BYTES;
    float g0 = 256.f * a.global_scale[part.x * (1 + GATED)];
    float g1 = GATED ? 256.f * a.global_scale[part.x * 2 + 1] : g0;
    warpgroup_sync(wg);  // slots and factors are there; the tile before has left
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
                const float factor = factors[j * 8 + (lane & 3) * 2 + i];
                const float row = FIRST ? factor : 1.f;
                float c0 = acc[r][j * 4 + i] * (g0 * row), c1 = acc[r][j * 4 + 2 + i] * (g1 * row);
                if (!FIRST && SCALE) {
                    const float scale = SCALE == 3 ? a.row_scale[max(slots[j * 8 + (lane & 3) * 2 + i], 0)]
                                                   : a.row_scale[SCALE == 2 ? part.x : 0];
                    c0 *= scale, c1 *= scale;
                }
                c0 += bias0, c1 += bias1;
                if (FIRST) {
                    v[i] = activate(c0, c1, a);
                    if (!GATED) v[2 + i] = activate(c1, c1, a);
                } else {
                    v[i] = c0 * factor, v[2 + i] = c1 * factor;
                }
            }
            packed[0][j] = pack2(v[0], v[1]);
            if (!GATED) packed[GATED ? 0 : 1][j] = pack2(v[2], v[3]);
        }
        // Transposed by stmatrix: 8 features of one token become 16 consecutive bytes.
        const u32 to = shared_address(staged) + (GATED ? r * 64 + warp * 16 : r * 128 + warp * 32);
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int half = 0; half < (GATED ? 1 : 2); ++half)
                asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(
                                 to + (j * 8 + (lane & 7)) * PITCH + half * 16),
                             "r"(packed[half][j])
                             : "memory");
    }
    warpgroup_sync(wg);
    constexpr int CHUNKS = FEATURES / 8;
    const int column = (block + wg * RB) * (GATED ? 32 : 64);
    for (int i = t; i < part.z * CHUNKS; i += 128) {
        const int token = i / CHUNKS, c = column + i % CHUNKS * 8;
        if (c < a.width)
            *(uint4*)(a.out + (u64)slots[token] * a.width + c) = *(const uint4*)(staged + token * PITCH + i % CHUNKS * 16);
    }
}

__device__ __forceinline__ void consume(const Args& a, u32 base, u8* smem, u32 full, u32 empty, int wg) {
    const int t = threadIdx.x & 127;
    int* slots = (int*)(smem + OFF_SLOT) + wg * NMAX;
    float* factors = (float*)(smem + OFF_FACTOR) + wg * NMAX;
    const int total = *a.num_tiles * a.row_tiles;
    Ring ring;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const int4 part = a.tiles[tile / a.row_tiles];
        const int block = tile % a.row_tiles * RBT;
        warpgroup_sync(wg);  // the copy-out of the tile before has read its slots
        if (t < NMAX) {
            const int slot = t < part.z ? a.order[part.y + t] : -1;
            float factor = 1.f;
            if (FIRST && SCALE) factor = SCALE == 3 ? (slot >= 0 ? a.row_scale[slot / a.divisor] : 1.f)
                                                    : a.row_scale[SCALE == 2 ? part.x : 0];
            if (!FIRST) factor = slot >= 0 ? a.router[slot] : 0.f;
            slots[t] = slot;
            factors[t] = factor;
        }
#define VARIANT(n)                                               \
    if (part.z <= n) {                                           \
        float acc[RB][n / 2];                                    \
        multiply<n>(acc, ring, a, base, smem, full, empty, wg);  \
        finish<n>(acc, a, part, block, smem, wg);                \
        continue;                                                \
    }
        FOR_VARIANTS(VARIANT)
    }
}

extern "C" __global__ void __launch_bounds__((WGS + 1) * 128, 1) gemm(const __grid_constant__ Args a) {
    extern __shared__ u8 raw[];
    u8* smem = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
    const u32 base = shared_address(smem), full = base + OFF_FULL, empty = base + OFF_EMPTY;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(full + i * 8, 128 + 1), bar_init(empty + i * 8, WGS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int wg = threadIdx.x >> 7;
    if (wg == PRODUCER) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGS));
        produce(a, base, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGS));
        consume(a, base, smem, full, empty, wg);
    }
}
