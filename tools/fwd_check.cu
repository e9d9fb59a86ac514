// Checks and times the CUDA forward kernels on a GPU, without torch or the C ABI. SPDX-License-Identifier: Apache-2.0
//
//   fwd_check < cases.txt      one case a line: words of "key=value" (see Case), '#' starts a comment
//
// Sampled rows are compared with plain loops in double on the GPU, written from the formula in ffpa.h and sharing nothing with the
// kernels but the dropout definition. Memory past lengths holds NaN; o and lse are poisoned before the run. Prints a line a case;
// exit status 1 if one failed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "core/philox.h"
#include "core/problem.h"

#define CUDA_OK(x)                                                                           \
  do {                                                                                       \
    if (cudaError_t e = (x); e != cudaSuccess) {                                             \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e)), exit(2); \
    }                                                                                        \
  } while (0)

namespace ffpa::sm90 {
namespace fwd_cluster_dv {
std::string plan_forward(const Problem&, Choice*);
Status run_forward(const Problem&, const Choice&, void*, void*);
}  // namespace fwd_cluster_dv
namespace fwd_quad_dv {
std::string plan_forward(const Problem&, Choice*);
Status run_forward(const Problem&, const Choice&, void*, void*);
}  // namespace fwd_quad_dv
namespace fwd_single {
std::string plan_forward(const Problem&, Choice*);
Status run_forward(const Problem&, const Choice&, void*, void*);
}  // namespace fwd_single
}  // namespace ffpa::sm90

using namespace ffpa;

struct Case {
  std::map<std::string, std::string> words;
  int64_t integer(const char* key, int64_t otherwise) const {
    auto it = words.find(key);
    return it == words.end() ? otherwise : std::atoll(it->second.c_str());
  }
  double number(const char* key, double otherwise) const {
    auto it = words.find(key);
    return it == words.end() ? otherwise : std::atof(it->second.c_str());
  }
  std::string text(const char* key, const char* otherwise) const {
    auto it = words.find(key);
    return it == words.end() ? otherwise : it->second;
  }
};

// ------------------------------------------------------------------------------------------------------------- reference

__device__ double element(const void* p, int dtype, int64_t at) {
  switch (dtype) {
    case FFPA_FP32: return static_cast<const float*>(p)[at];
    case FFPA_FP16: return __half2float(static_cast<const __half*>(p)[at]);
    default: return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[at]);
  }
}

struct Row {
  int b, h, i;
};

struct Reference {
  ffpa_forward_problem f;
  int64_t group, n_seqs, d_qk, d_v;
  double scale;
};

__device__ int64_t bstride(const ffpa_tensor& t, int axis) { return t.extent[axis] == 1 ? 0 : t.stride[axis]; }

__global__ void reference_rows(Reference x, const Row* rows, double* scores, int64_t score_stride, double* o,
                               double* lse) {
  const ffpa_forward_problem& f = x.f;
  const Row r = rows[blockIdx.x];
  double* s = scores + blockIdx.x * score_stride;
  const int thread = threadIdx.x;
  int64_t q_row = 0, n_q = f.q.extent[2], kv_row = 0, n_kv = f.k.extent[2], q_batch = r.b, kv_batch = r.b;
  const auto ints = [](const ffpa_tensor& t) { return static_cast<const int*>(t.data); };
  if (f.cu_seqlens_q.rank) q_row = ints(f.cu_seqlens_q)[r.b], n_q = ints(f.cu_seqlens_q)[r.b + 1] - q_row, q_batch = 0;
  if (f.cu_seqlens_kv.rank)
    kv_row = ints(f.cu_seqlens_kv)[r.b], n_kv = ints(f.cu_seqlens_kv)[r.b + 1] - kv_row, kv_batch = 0;
  if (f.kv_batch_idx.rank) kv_batch = ints(f.kv_batch_idx)[r.b];
  if (f.seqlens_kv.rank) n_kv = ints(f.seqlens_kv)[r.b];
  const int64_t diagonal = f.anchor == FFPA_BOTTOM_RIGHT ? r.i + n_kv - n_q : r.i;
  const int hk = r.h / x.group;
  __shared__ double red[256];
  const auto reduce = [&](double v, bool max_) {
    red[thread] = v;
    __syncthreads();
    for (int w = 128; w; w /= 2) {
      if (thread < w) red[thread] = max_ ? fmax(red[thread], red[thread + w]) : red[thread] + red[thread + w];
      __syncthreads();
    }
    const double out = red[0];
    __syncthreads();
    return out;
  };
  double top = -INFINITY;
  for (int64_t j = thread; j < n_kv; j += 256) {
    bool visible = true;
    if (f.causal && j > diagonal) visible = false;
    if (f.window_right >= 0 && j > diagonal + f.window_right) visible = false;
    if (f.window_left >= 0 && j < diagonal - f.window_left) visible = false;
    if (visible && f.mask.rank)
      visible = static_cast<const uint8_t*>(f.mask.data)[r.b * bstride(f.mask, 0) + r.h * bstride(f.mask, 1) +
                                                         r.i * bstride(f.mask, 2) + j * bstride(f.mask, 3)];
    double a = -INFINITY;
    if (visible) {
      a = 0;
      for (int d = 0; d < x.d_qk; ++d)
        a += element(f.q.data, f.q.dtype,
                     q_batch * f.q.stride[0] + r.h * f.q.stride[1] + (q_row + r.i) * f.q.stride[2] + d) *
             element(f.k.data, f.k.dtype,
                     kv_batch * f.k.stride[0] + hk * f.k.stride[1] + (kv_row + j) * f.k.stride[2] + d);
      a *= x.scale;
      if (f.softcap > 0) a = f.softcap * tanh(a / f.softcap);
      if (f.bias.rank)
        a += element(
            f.bias.data, f.bias.dtype,
            r.b * bstride(f.bias, 0) + r.h * bstride(f.bias, 1) + r.i * bstride(f.bias, 2) + j * bstride(f.bias, 3));
      if (f.alibi_slopes.rank)
        a -= static_cast<const float*>(f.alibi_slopes.data)[r.h] * fabs(static_cast<double>(r.i + n_kv - n_q - j));
    }
    s[j] = a;
    top = fmax(top, a);
  }
  top = reduce(top, true);
  const double sink = f.sinks.rank ? element(f.sinks.data, f.sinks.dtype, r.h * f.sinks.stride[0]) : -INFINITY;
  const double m = fmax(top, sink);
  double sum = 0;
  const Dropout drop{f.dropout_seed, f.dropout_offset, static_cast<uint32_t>(llround(f.dropout_p * 65536)), 1.f};
  for (int64_t j = thread; j < n_kv; j += 256) {
    double p = s[j] == -INFINITY ? 0 : exp(s[j] - m);
    sum += p;
    if (f.dropout_p > 0) {
      const Philox4 bits = drop.bits(r.b * f.q.extent[1] + r.h, r.i, j / 8);
      p = drop.keep(bits, j % 8) ? p / (1 - f.dropout_p) : 0;
    }
    s[j] = p;
  }
  sum = reduce(sum, false) + (sink == -INFINITY ? 0 : exp(sink - m));
  if (thread == 0) lse[blockIdx.x] = sum == 0 ? -INFINITY : m + log(sum);
  __syncthreads();
  for (int d = thread; d < x.d_v; d += 256) {
    double a = 0;
    for (int64_t j = 0; j < n_kv; ++j)
      if (s[j] != 0)
        a += s[j] * element(f.v.data, f.v.dtype,
                            kv_batch * f.v.stride[0] + hk * f.v.stride[1] + (kv_row + j) * f.v.stride[2] + d);
    o[blockIdx.x * x.d_v + d] = sum == 0 ? 0 : a / sum;
  }
}

// ---------------------------------------------------------------------------------------------------------------- inputs

__device__ float noise(uint64_t i, uint32_t seed) {  // about normal, variance 1
  uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^ static_cast<uint32_t>(i >> 32) * 97u + seed;
  float a = 0;
  for (int r = 0; r < 4; ++r) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    x += r + seed;
    a += (x >> 8) * (1.f / (1 << 24));
  }
  return (a - 2.f) * 1.7320508f;
}
// pattern 0: noise; else column 0 carries the logit: 1 rising by 200 powers of 2 a 128 keys, 2 falling, 3 alternating, 4 one leap
__global__ void fill(void* p, int dtype, int64_t n, float gain, uint32_t seed, int64_t columns, int64_t rows,
                     int pattern, int is_q) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    float v = noise(i, seed) * gain;
    if (pattern && columns) {
      const int64_t c = i % columns, j = i / columns % rows;
      if (c == 0)
        v = is_q           ? 1.f
            : pattern == 1 ? j * 1.09f
            : pattern == 2 ? -1.09f * j
            : pattern == 3 ? (j % 2 ? 100.f : -100.f)
            : pattern == 4 ? (j == rows / 2 ? 300.f : 0.f)
            : pattern == 5 ? -60000.f
                           : (j / 64 % 2 ? 12.f : -12.f) + j * 0.1f;
      else if (pattern == 5)
        v = 0;
      else
        v *= 0.1f;
    }
    if (dtype == FFPA_BF16)
      static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(v);
    else if (dtype == FFPA_FP16)
      static_cast<__half*>(p)[i] = __float2half(v);
    else if (dtype == FFPA_FP32)
      static_cast<float*>(p)[i] = v;
    else
      static_cast<uint8_t*>(p)[i] = v > -0.7f;
  }
}
// NaN in rows [from, extent 2) of batch b, or of all rows of packed memory beyond `from`
__global__ void poison(uint16_t* p, int64_t stride_b, int64_t stride_h, int64_t stride_n, int64_t heads, int64_t rows,
                       int64_t d, const int* from, int batch) {
  const int b = blockIdx.x;
  if (batch >= 0 && b != batch) return;
  const int64_t first = from[b];
  for (int64_t i = first * heads * d + threadIdx.x; i < rows * heads * d; i += blockDim.x) {
    const int64_t n = i / (heads * d), h = i / d % heads, c = i % d;
    p[b * stride_b + h * stride_h + n * stride_n + c] = 0xFFFF;
  }
}
__global__ void minus_infinity(float* p, int64_t n, int64_t every) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
    if (i / 3 % every == 0) p[i] = -INFINITY;
}

std::vector<void*> allocations;
void* allocate(size_t bytes) {
  void* p;
  CUDA_OK(cudaMalloc(&p, std::max<size_t>(bytes, 16)));
  allocations.push_back(p);
  return p;
}
ffpa_tensor tensor(int dtype, std::vector<int64_t> extent) {
  ffpa_tensor t{};
  t.dtype = dtype, t.device_type = FFPA_CUDA, t.rank = static_cast<int>(extent.size());
  int64_t n = 1;
  for (int i = t.rank - 1; i >= 0; --i) t.extent[i] = extent[i], t.stride[i] = n, n *= extent[i];
  t.data = allocate(static_cast<size_t>(n) * dtype_bytes(dtype));
  return t;
}
int64_t elements(const ffpa_tensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.rank; ++i) n *= t.extent[i];
  return n;
}
ffpa_tensor ints(const std::vector<int>& values) {
  ffpa_tensor t = tensor(FFPA_INT32, {static_cast<int64_t>(values.size())});
  CUDA_OK(cudaMemcpy(t.data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
  return t;
}
// [B, H, N, D] seen through memory [B, N, H, D]
void transpose_heads(ffpa_tensor* t) {
  t->stride[2] = t->extent[1] * t->extent[3];
  t->stride[1] = t->extent[3];
}

bool run_case(const Case& c) {
  const int64_t b = c.integer("b", 1), hq = c.integer("h", 4), hkv = c.integer("hkv", hq), nq = c.integer("n", 256),
                nkv = c.integer("nkv", nq);
  const int64_t d = c.integer("d", 512), dv = c.integer("dv", d);
  const int dtype = c.text("dtype", "bf16") == "bf16" ? FFPA_BF16 : FFPA_FP16;
  const bool packed = c.integer("packed", 0), lengths = c.integer("lengths", 0);
  uint32_t seed = static_cast<uint32_t>(c.integer("seed", 1)) * 1000;
  const int pattern = static_cast<int>(c.integer("pattern", 0));
  Problem p;
  ffpa_forward_problem& f = p.args.forward;
  std::vector<int> len_q(b, static_cast<int>(nq)), len_kv(b, static_cast<int>(nkv)), cu_q{0}, cu_kv{0};
  uint32_t random = seed + 17;
  const auto next = [&](int64_t n) {
    random = random * 1664525u + 1013904223u;
    return static_cast<int>((random >> 8) % static_cast<uint32_t>(n));
  };
  if (packed || lengths)
    for (int i = 0; i < b; ++i) {
      if (packed) len_q[i] = i == 1 ? 0 : 1 + next(nq);
      len_kv[i] = i == 2 ? 0 : 1 + next(nkv);
    }
  for (int i = 0; i < b; ++i) cu_q.push_back(cu_q[i] + len_q[i]), cu_kv.push_back(cu_kv[i] + len_kv[i]);
  const int64_t tail = packed ? 37 : 0, tq = cu_q[b] + tail, tkv = cu_kv[b] + tail;
  f.q = packed ? tensor(dtype, {1, hq, tq, d}) : tensor(dtype, {b, hq, nq, d});
  f.k = packed ? tensor(dtype, {1, hkv, tkv, d}) : tensor(dtype, {b, hkv, nkv, d});
  f.v = packed ? tensor(dtype, {1, hkv, tkv, dv}) : tensor(dtype, {b, hkv, nkv, dv});
  f.o = packed ? tensor(dtype, {1, hq, tq, dv}) : tensor(dtype, {b, hq, nq, dv});
  f.lse = packed ? tensor(FFPA_FP32, {1, hq, tq}) : tensor(FFPA_FP32, {b, hq, nq});
  const auto random_fill = [&](const ffpa_tensor& t, float gain, int pattern_ = 0, int is_q = 0) {
    fill<<<2048, 256>>>(t.data, t.dtype, elements(t), gain, seed += 7919, t.rank == 4 ? t.extent[3] : 0,
                        t.rank == 4 ? t.extent[2] : 1, pattern_, is_q);
  };
  random_fill(f.q, static_cast<float>(c.number("gain", 1)), pattern, 1);
  random_fill(f.k, 1, pattern);
  random_fill(f.v, 1);
  if (c.integer("bnhd", 0))
    for (ffpa_tensor* t : {&f.q, &f.k, &f.v, &f.o}) transpose_heads(t);
  if (packed) {
    f.cu_seqlens_q = ints(cu_q), f.cu_seqlens_kv = ints(cu_kv);
    std::vector<int> end{cu_kv[b]};
    const ffpa_tensor from = ints(end);
    for (ffpa_tensor* t : {&f.k, &f.v})
      poison<<<1, 256>>>(static_cast<uint16_t*>(t->data), 0, t->stride[1], t->stride[2], hkv, tkv, t->extent[3],
                         static_cast<int*>(from.data), -1);
  } else if (lengths) {
    f.seqlens_kv = ints(len_kv);
    for (ffpa_tensor* t : {&f.k, &f.v})
      poison<<<b, 256>>>(static_cast<uint16_t*>(t->data), t->stride[0], t->stride[1], t->stride[2], hkv, nkv,
                         t->extent[3], static_cast<int*>(f.seqlens_kv.data), -1);
  }
  f.causal = static_cast<int>(c.integer("causal", 0));
  f.anchor = c.text("anchor", "tl") == "br" ? FFPA_BOTTOM_RIGHT : FFPA_TOP_LEFT;
  f.window_left = c.integer("left", -1), f.window_right = c.integer("right", -1);
  f.softcap = c.number("softcap", 0);
  if (c.words.count("mask")) {  // mask=BHQK as 0/1 flags of the extents that do not repeat, e.g. 0011
    const std::string e = c.text("mask", "0011");
    f.mask =
        tensor(FFPA_BOOL, {e[0] == '1' ? b : 1, e[1] == '1' ? hq : 1, e[2] == '1' ? nq : 1, e[3] == '1' ? nkv : 1});
    random_fill(f.mask, 1);
  }
  if (c.words.count("bias")) {
    const std::string e = c.text("bias", "0011");
    f.bias = tensor(c.integer("bias16", 0) ? dtype : FFPA_FP32,
                    {e[0] == '1' ? b : 1, e[1] == '1' ? hq : 1, e[2] == '1' ? nq : 1, e[3] == '1' ? nkv : 1});
    random_fill(f.bias, 2);
    if (c.integer("biasinf", 0))
      minus_infinity<<<1024, 256>>>(static_cast<float*>(f.bias.data), elements(f.bias), c.integer("biasinf", 0));
  }
  if (c.integer("alibi", 0)) {
    std::vector<float> slopes(hq);
    for (int h = 0; h < hq; ++h) slopes[h] = std::exp2f(-8.f * (h + 1) / hq);
    f.alibi_slopes = tensor(FFPA_FP32, {hq});
    CUDA_OK(cudaMemcpy(f.alibi_slopes.data, slopes.data(), hq * 4, cudaMemcpyHostToDevice));
  }
  if (c.integer("sinks", 0)) {
    std::vector<float> sinks(hq);
    for (int h = 0; h < hq; ++h) sinks[h] = h % 4 == 0 ? 0.5f : h % 4 == 1 ? 8.f : h % 4 == 2 ? -100.f : -INFINITY;
    f.sinks = tensor(FFPA_FP32, {hq});
    CUDA_OK(cudaMemcpy(f.sinks.data, sinks.data(), hq * 4, cudaMemcpyHostToDevice));
  }
  f.dropout_p = c.number("dropout", 0), f.dropout_seed = 0x1234567890abcdefull, f.dropout_offset = 0x900000007ull;
  p.n_seqs = b, p.h_q = hq, p.h_kv = hkv, p.group = hq / hkv, p.n_q = nq, p.n_kv = nkv, p.d_qk = d, p.d_v = dv;
  p.scale = c.words.count("scale") ? c.number("scale", 1) : 1 / std::sqrt(static_cast<double>(d));

  // Run on poisoned outputs.
  CUDA_OK(cudaMemset(f.o.data, 0xFF, elements(f.o) * 2));
  CUDA_OK(cudaMemset(f.lse.data, 0xFF, elements(f.lse) * 4));
  Choice choice;
  Status status;
  using Plan = std::string (*)(const Problem&, Choice*);
  using Run = Status (*)(const Problem&, const Choice&, void*, void*);
  struct Candidate {
    const char* name;
    Plan plan;
    Run run;
  };
  const Candidate candidates[] = {{"single", sm90::fwd_single::plan_forward, sm90::fwd_single::run_forward},
                                  {"cluster_dv", sm90::fwd_cluster_dv::plan_forward, sm90::fwd_cluster_dv::run_forward},
                                  {"quad_dv", sm90::fwd_quad_dv::plan_forward, sm90::fwd_quad_dv::run_forward}};
  std::string kernel, reason;
  Run run_kernel = nullptr;
  const std::string forced = c.text("kernel", "");
  for (const Candidate& candidate : candidates) {
    if (!forced.empty() && forced != candidate.name) continue;
    reason = candidate.plan(p, &choice);
    kernel = candidate.name;
    run_kernel = candidate.run;
    if (reason.empty()) break;
  }
  const auto run = [&] { return run_kernel(p, choice, nullptr, nullptr); };
  std::string label;
  for (auto& [key, value] : c.words) label += key + "=" + value + " ";
  if (!reason.empty()) {
    std::printf("REFUSED %s: %s\n", label.c_str(), reason.c_str());
    return true;
  }
  status = run();
  if (status.code != FFPA_OK) {
    std::printf("FAIL %s: %s\n", label.c_str(), status.text.c_str());
    return false;
  }
  CUDA_OK(cudaDeviceSynchronize());

  // Rows to compare: ends of tiles and sequences, and random ones.
  std::vector<Row> rows;
  const int wanted = static_cast<int>(c.integer("rows", 48));
  for (int64_t tries = 0; static_cast<int>(rows.size()) < wanted && tries < 10 * wanted; ++tries) {
    const int s = next(b), h = next(hq);
    if (!len_q[s]) continue;
    const int i = tries % 4 == 0   ? std::min(len_q[s] - 1, next(3))
                  : tries % 4 == 1 ? std::max(0, len_q[s] - 1 - next(3))
                                   : next(len_q[s]);
    rows.push_back({s, h, i});
  }
  int64_t visible = 0;  // pairs of one head, all sequences
  for (int s = 0; s < b; ++s)
    for (int64_t i = 0; i < len_q[s]; ++i) {
      const int64_t diagonal = f.anchor == FFPA_BOTTOM_RIGHT ? i + len_kv[s] - len_q[s] : i;
      int64_t from = 0, to = len_kv[s];
      if (f.causal) to = std::min(to, diagonal + 1);
      if (f.window_right >= 0) to = std::min(to, diagonal + f.window_right + 1);
      if (f.window_left >= 0) from = std::max<int64_t>(from, diagonal - f.window_left);
      visible += std::max<int64_t>(to - from, 0);
    }
  const size_t n = rows.size();
  Row* device_rows = static_cast<Row*>(allocate(n * sizeof(Row)));
  double* scores = static_cast<double*>(allocate(n * (nkv + 1) * 8));
  double* ref_o = static_cast<double*>(allocate(n * dv * 8));
  double* ref_lse = static_cast<double*>(allocate(n * 8));
  CUDA_OK(cudaMemcpy(device_rows, rows.data(), n * sizeof(Row), cudaMemcpyHostToDevice));
  const Reference x{f, p.group, b, d, dv, p.scale};
  if (n) reference_rows<<<static_cast<unsigned>(n), 256>>>(x, device_rows, scores, nkv + 1, ref_o, ref_lse);
  CUDA_OK(cudaDeviceSynchronize());
  std::vector<double> ho(n * dv), hl(n);
  CUDA_OK(cudaMemcpy(ho.data(), ref_o, n * dv * 8, cudaMemcpyDeviceToHost));
  CUDA_OK(cudaMemcpy(hl.data(), ref_lse, n * 8, cudaMemcpyDeviceToHost));
  std::vector<uint16_t> got(elements(f.o)), again;
  std::vector<float> got_lse(elements(f.lse));
  const bool whole = elements(f.o) < (int64_t{1} << 28);
  const auto fetch = [&](std::vector<uint16_t>& to) {
    CUDA_OK(cudaMemcpy(to.data(), f.o.data, to.size() * 2, cudaMemcpyDeviceToHost));
  };
  fetch(got);
  CUDA_OK(cudaMemcpy(got_lse.data(), f.lse.data, got_lse.size() * 4, cudaMemcpyDeviceToHost));
  double square_error = 0, square = 0, worst = 0, worst_lse = 0;
  int nans = 0;
  for (size_t r = 0; r < n; ++r) {
    const int64_t q_row = packed ? cu_q[rows[r].b] : 0, q_batch = packed ? 0 : rows[r].b;
    const int64_t at = q_batch * f.o.stride[0] + rows[r].h * f.o.stride[1] + (q_row + rows[r].i) * f.o.stride[2];
    for (int64_t e = 0; e < dv; ++e) {
      const uint16_t bits = got[at + e];
      __nv_bfloat16_raw raw_b{bits};
      __half_raw raw_h{bits};
      const double value = dtype == FFPA_BF16 ? __bfloat162float(__nv_bfloat16(raw_b)) : __half2float(__half(raw_h));
      const double want = ho[r * dv + e], error = value - want;
      if (std::isnan(value) != std::isnan(want)) ++nans;
      if (std::isnan(want) || std::isnan(value)) continue;
      square_error += error * error, square += want * want, worst = std::max(worst, std::abs(error));
    }
    const double l = got_lse[q_batch * f.lse.stride[0] + rows[r].h * f.lse.stride[1] + q_row + rows[r].i];
    if (std::isnan(l) || std::isinf(l) != std::isinf(hl[r]))
      ++nans;
    else if (!std::isinf(l))
      worst_lse = std::max(
          worst_lse, std::abs(l - hl[r]) / std::max(1.0, std::abs(hl[r]) * 4e-3));  // the tensor cores' sums truncate
  }
  int unwritten = 0;
  if (whole && !c.integer("nan", 0))
    for (uint16_t bits : got) unwritten += bits == 0xFFFF;
  bool same = true;
  for (int i = 0; i < c.integer("repeat", 1) && whole; ++i) {  // bitwise
    CUDA_OK(cudaMemset(f.o.data, 0xFF, elements(f.o) * 2));
    run();
    again.resize(got.size());
    fetch(again);
    same = same && again == got;
  }
  const double rmse = square ? std::sqrt(square_error / square) : std::sqrt(square_error);
  const bool ok =
      !nans && !unwritten && same && (rmse < (dtype == FFPA_BF16 ? 4e-3 : 6e-4) || worst < 1e-6) && worst_lse < 1e-3;
  std::printf("%s %-10s %-60s rmse %.1e max %.1e lse %.1e%s%s%s", ok ? "ok  " : "FAIL", kernel.c_str(), label.c_str(),
              rmse, worst, worst_lse, nans ? " NAN" : "", unwritten ? " UNWRITTEN" : "", same ? "" : " UNREPEATABLE");
  if (const int64_t times = c.integer("time", 0)) {
    std::vector<float> ms;
    cudaEvent_t a, z;
    CUDA_OK(cudaEventCreate(&a));
    CUDA_OK(cudaEventCreate(&z));
    for (int i = 0; i < 2; ++i) run();
    for (int i = 0; i < times; ++i) {
      CUDA_OK(cudaEventRecord(a));
      run();
      CUDA_OK(cudaEventRecord(z));
      CUDA_OK(cudaEventSynchronize(z));
      float t;
      CUDA_OK(cudaEventElapsedTime(&t, a, z));
      ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    const double work = 2.0 * hq * visible * (d + dv);
    std::printf("  %.3f ms  %.1f TFLOP/s (best %.1f)", ms[ms.size() / 2], work / ms[ms.size() / 2] / 1e9,
                work / ms[0] / 1e9);
  }
  std::printf("\n");
  std::fflush(stdout);
  return ok;
}

int main() {
  std::string line;
  int failed = 0, done = 0;
  while (std::getline(std::cin, line)) {
    line = line.substr(0, line.find('#'));
    std::istringstream in(line);
    Case c;
    for (std::string word; in >> word;) {
      const size_t at = word.find('=');
      c.words[word.substr(0, at)] = at == std::string::npos ? "1" : word.substr(at + 1);
    }
    if (c.words.empty()) continue;
    failed += !run_case(c);
    ++done;
    for (void* p : allocations) CUDA_OK(cudaFree(p));
    allocations.clear();
  }
  std::printf("%d cases, %d failed\n", done, failed);
  return failed != 0;
}
