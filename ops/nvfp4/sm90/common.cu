// What the kernels of gemm.cu, around.cu and pack.cu share. compile.py puts it before each of them.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

// Programmatic dependent launch: this kernel may begin while the one before it ends. What that one writes is there after
// previous_done; every kernel of the layer calls it, so that what kernels before it wrote is there as well.
__device__ __forceinline__ void previous_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void next_may_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Two floats rounded to bfloat16, low first.
__device__ __forceinline__ u32 pack2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

__device__ __forceinline__ int warp_sum(int v) {
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

// The expert here that a slot goes to, or -1. A has ids, wide_ids, num_ids, map or null, wide_map, experts.
template <class A>
__device__ __forceinline__ int local_expert(const A& a, int slot) {
    long long id = a.wide_ids ? ((const long long*)a.ids)[slot] : ((const int*)a.ids)[slot];
    if (id < 0 || id >= a.num_ids) return -1;
    if (a.map) {
        id = a.wide_map ? ((const long long*)a.map)[id] : ((const int*)a.map)[id];
        if (id < 0 || id >= a.experts) return -1;
    }
    return (int)id;
}

// How many tiles of at most ``most`` rows hold ``count``.
__device__ __forceinline__ int tiles_of(int count, int most) { return (count + most - 1) / most; }

// Tiles of one expert, every step-th from the first: equal in size, in eights, since a short last one would pad as much
// as it holds.
__device__ __forceinline__ void write_tiles(int4* tiles, int most, int e, int start, int count, int first, int step) {
    const int parts = tiles_of(count, most);
    const int size = parts ? ((count + parts - 1) / parts + 7) / 8 * 8 : 0;
    for (int i = first; i < parts; i += step) tiles[i] = make_int4(e, start + i * size, min(size, count - i * size), 0);
}
