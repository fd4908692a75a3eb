// Checkpoint layout to the layout of gemm.cu (layout.py), one expert of one projection a launch: a block for each 64 x 64
// weights, a thread for the 32 that it holds in the matrix instruction. See compile.py.

struct Pack {
    const u8* codes;   // [rows, K/2]; gate then up, if gated
    const u8* scales;  // [rows, K/16]
    u8* out;           // [blocks, steps, 2304]
    int rows, K, gated;
};

// Row of the checkpoint that row i of the layout holds, or -1: padding.
__device__ __forceinline__ int source_row(const Pack& a, int i) {
    if (!a.gated) return i < a.rows ? i : -1;
    const int feature = i / 16 * 8 + i % 8, half = a.rows / 2;
    return feature >= half ? -1 : i % 16 < 8 ? feature : half + feature;
}

// e4m3 to exponent 5, mantissa 3, bias 10; the sign and a zero are the codes' business.
__device__ __forceinline__ u32 scale_byte(u32 byte) {
    const u32 exponent = byte >> 3 & 15, mantissa = byte & 7;
    if ((byte & 127) == 127) return 0xFC;
    if (exponent) return byte + (3 << 3);
    if (!mantissa) return 0;
    const int shift = __clz(mantissa) - 28;  // mantissa * 2^-9, normalised
    return (4 - shift) << 3 | (mantissa << shift & 7);
}

extern "C" __global__ void __launch_bounds__(128) pack(const __grid_constant__ Pack a) {
    const int step = blockIdx.x, t = threadIdx.x, warp = t >> 5, lane = t & 31;
    const int row = blockIdx.y * 64 + warp * 16 + (lane >> 2);
    const int rows[2] = {source_row(a, row), source_row(a, row + 8)};
    u32 words[4], kept[2][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const int k = step * 64 + s * 16;
        u32 c[2][2][2];  // row high, column high, odd column
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool live = rows[r] >= 0 && k < a.K;
            const u32 scale = live ? a.scales[(long long)rows[r] * (a.K / 16) + k / 16] : 0;
            kept[r][s] = scale_byte(scale & 127);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 two = live ? a.codes[(long long)rows[r] * (a.K / 2) + k / 2 + (lane & 3) + h * 4] : 0;
                two = scale & 127 ? two ^ (scale >> 7) * 0x88 : 0;
                c[r][h][0] = two & 15, c[r][h][1] = two >> 4;
            }
        }
        words[s] = 0;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const u32 c0 = c[0][0][odd], c1 = c[1][0][odd], c2 = c[0][1][odd], c3 = c[1][1][odd];
            const u32 half = (c0 >> 3) << 15 | (c0 & 7) << 6 | (c1 >> 3) << 9 | (c1 & 7) | (c2 & 7) << 10 |
                             (c[0][1][1 - odd] >> 3) << 3 | (c3 >> 3) << 13 | (c3 >> 2 & 1) << 14 | (c3 & 3) << 4;
            words[s] |= half << (16 * odd);
        }
    }
    u8* out = a.out + ((long long)blockIdx.y * gridDim.x + step) * 2304;
    ((uint4*)out)[t] = make_uint4(words[0], words[1], words[2], words[3]);
    if ((lane & 3) == 0) {
        u32 two[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 even = kept[0][2 * i] << 4 | kept[1][2 * i] << 20;
            const u32 odd = kept[0][2 * i + 1] << 4 | kept[1][2 * i + 1] << 20;
            two[i] = even | odd << 8 | odd >> 24;
        }
        ((uint2*)(out + 2048))[t >> 2] = make_uint2(two[0], two[1]);
    }
}
