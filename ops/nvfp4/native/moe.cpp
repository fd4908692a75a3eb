// The mixture-of-experts layer for CPUs: decode a weight row once, multiply it with every token of its expert.
//
// GCC vector extensions instead of intrinsics, so the same source serves x86 and Arm. Every dot product adds in the
// same order whatever else is in the batch, so a row's bits never depend on its neighbours or on the thread count.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

typedef uint32_t u8 __attribute__((vector_size(32)));
typedef float f8 __attribute__((vector_size(32)));

constexpr f8 E2M1 = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
constexpr float MIN_NORMAL = 1.1754943508222875e-38f;
enum Activation { SILU, SWIGLUOAI, SWIGLUSTEP, GELU, GELU_TANH, RELU2 };
enum Precision { W4A16, W4A4_STATIC, W4A4_PER_TOKEN };
enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };

struct ScaleTable {
  float value[256];
  ScaleTable() {
    for (int b = 0; b < 256; ++b) {
      int e = (b >> 3) & 15, m = b & 7;
      float v = e ? std::ldexp(1.0f + m / 8.0f, e - 7) : std::ldexp(m / 8.0f, -6);
      if ((b & 0x7F) == 0x7F) v = NAN;
      value[b] = b & 0x80 ? -v : v;
    }
  }
};
const ScaleTable E4M3;

inline f8 load8(const float* p) {
  f8 v;
  std::memcpy(&v, p, 32);
  return v;
}

// Eight codes of one word, element i in bits 4i..4i+3, times their block scale.
inline f8 decode_word(uint32_t word, float scale) {
  const u8 codes = (u8{} + word) >> u8{0, 4, 8, 12, 16, 20, 24, 28};
  const f8 magnitude = __builtin_shuffle(E2M1, codes & 7);
  return (f8)((u8)magnitude ^ ((codes & 8) << 28)) * scale;
}

void decode_row(const uint8_t* codes, const uint8_t* scales, int64_t k, float* out) {
  for (int64_t g = 0; g < k / 16; ++g) {
    uint32_t words[2];
    std::memcpy(words, codes + 8 * g, 8);
    // A NaN scale reaches the output even over zero codes: NaN * 0 is NaN.
    const float scale = E4M3.value[scales[g]];
    const f8 first = decode_word(words[0], scale), second = decode_word(words[1], scale);
    std::memcpy(out + 16 * g, &first, 32);
    std::memcpy(out + 16 * g + 8, &second, 32);
  }
}

inline float dot(const float* w, const float* x, int64_t k) {
  f8 even = {}, odd = {};
  for (int64_t i = 0; i < k; i += 16) {
    even += load8(w + i) * load8(x + i);
    odd += load8(w + i + 8) * load8(x + i + 8);
  }
  const f8 total = even + odd;
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += total[i];
  return sum;
}

inline float sigmoid(float v) {
  float z = std::exp(-std::fabs(v));
  return (v >= 0 ? 1.0f : z) / (1.0f + z);
}
inline float above(float v, float top) { return v > top ? top : v; }
inline float both(float v, float top) { return v > top ? top : v < -top ? -top : v; }

float activate(int kind, float g, float u, float alpha, float beta, float limit) {
  switch (kind) {
    case SILU:
      g = above(g, limit);
      return g * sigmoid(g) * both(u, limit);
    case SWIGLUOAI:
      g = above(g, limit);
      return g * sigmoid(alpha * g) * (both(u, limit) + beta);
    case SWIGLUSTEP:
      return above(g * sigmoid(g), limit) * both(u, limit);
    case GELU:
      return 0.5f * g * (1.0f + std::erf(g * 0.7071067811865476f)) * u;
    case GELU_TANH:
      return g * sigmoid(1.5957691216057308f * (g + 0.044715f * g * g * g)) * u;
    default:
      return g > 0 ? g * g : g <= 0 ? 0.0f : g;
  }
}

inline uint32_t bits_of(float v) {
  uint32_t b;
  std::memcpy(&b, &v, 4);
  return b;
}
inline float float_of(uint32_t b) {
  float v;
  std::memcpy(&v, &b, 4);
  return v;
}

inline float round_to(int dtype, float v) {
  if (dtype == BFLOAT16 && v == v) {
    uint32_t b = bits_of(v);
    return float_of((b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000u);
  }
  if (dtype == FLOAT16) return static_cast<float>(static_cast<_Float16>(v));
  return v;
}

inline uint8_t encode_e4m3(float v) {
  v = v < 448.0f ? v : 448.0f;
  if (v < 0.015625f) return static_cast<uint8_t>(bits_of(v + 16384.0f) & 0xFF);
  uint32_t b = bits_of(v);
  return static_cast<uint8_t>(((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - (120 << 3));
}

inline float encode_decode_e2m1(float q) {
  static const float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  float a = std::fabs(q);
  int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return std::signbit(q) ? -magnitude[code] : magnitude[code];
}

// The row as FP4 tensor cores would see it, without its global scale; returns that scale.
float fake_quantize(const float* x, int64_t k, int precision, float static_scale, float* out) {
  float g = static_scale;
  if (precision == W4A4_PER_TOKEN) {
    float amax = 0;
    for (int64_t i = 0; i < k; ++i)
      if (std::isfinite(x[i]) && std::fabs(x[i]) > amax) amax = std::fabs(x[i]);
    g = amax / 2688.0f;
    if (g < MIN_NORMAL) g = 0;
  }
  bool usable = g == 0 || (g >= MIN_NORMAL && std::isfinite(g));
  for (int64_t base = 0; base < k; base += 16) {
    float amax = 0;
    bool fault = !usable;
    for (int i = 0; i < 16; ++i) {
      float a = std::fabs(x[base + i]);
      if (!std::isfinite(a)) fault = true;
      if (a > amax) amax = a;
    }
    float scale = fault || g == 0 || amax == 0 ? 0.0f : E4M3.value[encode_e4m3(amax / (6.0f * g))];
    float step = scale * g;
    for (int i = 0; i < 16; ++i)
      out[base + i] = fault ? NAN : step > 0 ? encode_decode_e2m1(x[base + i] / step) * scale : 0.0f;
  }
  return g;
}

}  // namespace

extern "C" {

struct MoeArguments {
  const float *x, *router, *w13_global, *w2_global, *a13, *a2, *w13_bias, *w2_bias;
  const int64_t* local;  // expert of each slot, or -1
  const uint8_t *w13, *w13_scale, *w2, *w2_scale;
  float* out;
  int64_t tokens, top_k, experts, hidden, inter, a13_count, a2_count;
  int32_t kind, precision, dtype, threads;
  float alpha, beta, limit;
};

void nvfp4_moe(const MoeArguments* p) {
  const int64_t slots = p->tokens * p->top_k, H = p->hidden, I = p->inter;
  const bool gated = p->kind != RELU2;
  const int64_t parts = gated ? 2 : 1;
  std::vector<int64_t> start(p->experts + 1, 0), order(slots), active;
  for (int64_t s = 0; s < slots; ++s)
    if (p->local[s] >= 0) ++start[p->local[s] + 1];
  for (int64_t e = 0; e < p->experts; ++e) {
    if (start[e + 1]) active.push_back(e);
    start[e + 1] += start[e];
  }
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t s = 0; s < slots; ++s)
    if (p->local[s] >= 0) order[next[p->local[s]]++] = s;

  const bool quantised = p->precision != W4A16;
  const bool per_slot = p->precision == W4A4_STATIC && p->a13_count > 1;
  std::vector<float> rows, row_scale, h(slots * I), h_scale(slots, 1.0f), partial(slots * H);
  if (quantised) {
    rows.resize((per_slot ? slots : p->tokens) * H);
    row_scale.resize(per_slot ? slots : p->tokens);
  }
  const int64_t block = 16;
  const int64_t i_blocks = (I + block - 1) / block, h_blocks = (H + block - 1) / block;
  const int64_t n_active = static_cast<int64_t>(active.size());

#pragma omp parallel num_threads(p->threads)
  {
    std::vector<float> weight(2 * (H > I ? H : I));
    float *gate_row = weight.data(), *up_row = gate_row + (H > I ? H : I);
    if (quantised) {
      const int64_t count = per_slot ? slots : p->tokens;
#pragma omp for schedule(static)
      for (int64_t r = 0; r < count; ++r) {
        if (per_slot && p->local[r] < 0) continue;
        float fixed = p->precision == W4A4_STATIC ? p->a13[per_slot ? p->local[r] : 0] : 0.0f;
        row_scale[r] = fake_quantize(p->x + (per_slot ? r / p->top_k : r) * H, H, p->precision, fixed, &rows[r * H]);
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < n_active * i_blocks; ++unit) {
      const int64_t e = active[unit / i_blocks], first = (unit % i_blocks) * block;
      const int64_t last = first + block < I ? first + block : I;
      for (int64_t n = first; n < last; ++n) {
        const int64_t gate_n = e * I * parts + n, up_n = gate_n + I;
        decode_row(p->w13 + gate_n * (H / 2), p->w13_scale + gate_n * (H / 16), H, gate_row);
        if (gated) decode_row(p->w13 + up_n * (H / 2), p->w13_scale + up_n * (H / 16), H, up_row);
        for (int64_t at = start[e]; at < start[e + 1]; ++at) {
          const int64_t s = order[at], r = per_slot ? s : s / p->top_k;
          const float* x = quantised ? &rows[r * H] : p->x + r * H;
          const float a = quantised ? row_scale[r] : 1.0f;
          float g = dot(gate_row, x, H) * (p->w13_global[e * parts] * a), u = 0;
          if (gated) u = dot(up_row, x, H) * (p->w13_global[e * 2 + 1] * a);
          if (p->w13_bias) {
            g += p->w13_bias[gate_n];
            if (gated) u += p->w13_bias[up_n];
          }
          h[s * I + n] = round_to(p->dtype, activate(p->kind, g, u, p->alpha, p->beta, p->limit));
        }
      }
    }
    if (quantised) {
#pragma omp for schedule(static)
      for (int64_t s = 0; s < slots; ++s) {
        if (p->local[s] < 0) continue;
        float fixed = p->precision == W4A4_STATIC ? p->a2[p->a2_count > 1 ? p->local[s] : 0] : 0.0f;
        std::memcpy(gate_row, &h[s * I], I * sizeof(float));
        h_scale[s] = fake_quantize(gate_row, I, p->precision, fixed, &h[s * I]);
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < n_active * h_blocks; ++unit) {
      const int64_t e = active[unit / h_blocks], first = (unit % h_blocks) * block;
      const int64_t last = first + block < H ? first + block : H;
      for (int64_t n = first; n < last; ++n) {
        const int64_t row = e * H + n;
        decode_row(p->w2 + row * (I / 2), p->w2_scale + row * (I / 16), I, gate_row);
        for (int64_t at = start[e]; at < start[e + 1]; ++at) {
          const int64_t s = order[at];
          float y = dot(gate_row, &h[s * I], I) * (p->w2_global[e] * h_scale[s]);
          if (p->w2_bias) y += p->w2_bias[row];
          partial[s * H + n] = y * p->router[s];
        }
      }
    }
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p->tokens; ++t) {
      float* y = p->out + t * H;
      std::memset(y, 0, H * sizeof(float));
      for (int64_t j = 0; j < p->top_k; ++j) {
        const int64_t s = t * p->top_k + j;
        if (p->local[s] < 0) continue;
        for (int64_t n = 0; n < H; ++n) y[n] += partial[s * H + n];
      }
    }
  }
}

}  // extern "C"
