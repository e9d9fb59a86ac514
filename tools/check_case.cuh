// What the programs that check CUDA kernels share: cases in words, tensors on the GPU, the formula in double. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

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

// ------------------------------------------------------------------------------------------------------------- formula

__device__ double element(const void* p, int dtype, int64_t at) {
  switch (dtype) {
    case FFPA_FP32: return static_cast<const float*>(p)[at];
    case FFPA_FP16: return __half2float(static_cast<const __half*>(p)[at]);
    default: return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[at]);
  }
}

__device__ int64_t bstride(const ffpa_tensor& t, int axis) { return t.extent[axis] == 1 ? 0 : t.stride[axis]; }

// Scores from the formula in ffpa.h, in double; shares nothing with the kernels but the definition of dropout.
struct Formula {
  ffpa_forward_problem f;
  int64_t group, n_seqs, d_qk, d_v;
  double scale;

  struct Place {  // of a sequence
    int64_t q_batch, q_row, n_q, kv_batch, kv_row, n_kv;
  };
  __device__ Place place(int b) const {
    Place s{b, 0, f.q.extent[2], b, 0, f.k.extent[2]};
    const auto ints = [](const ffpa_tensor& t) { return static_cast<const int*>(t.data); };
    if (f.cu_seqlens_q.rank)
      s.q_row = ints(f.cu_seqlens_q)[b], s.n_q = ints(f.cu_seqlens_q)[b + 1] - s.q_row, s.q_batch = 0;
    if (f.cu_seqlens_kv.rank)
      s.kv_row = ints(f.cu_seqlens_kv)[b], s.n_kv = ints(f.cu_seqlens_kv)[b + 1] - s.kv_row, s.kv_batch = 0;
    if (f.kv_batch_idx.rank) s.kv_batch = ints(f.kv_batch_idx)[b];
    if (f.seqlens_kv.rank) s.n_kv = ints(f.seqlens_kv)[b];
    return s;
  }
  // Element offsets of rows.
  __device__ int64_t q_row(const ffpa_tensor& t, const Place& s, int h, int64_t i) const {
    return s.q_batch * t.stride[0] + h * t.stride[1] + (s.q_row + i) * t.stride[2];
  }
  __device__ int64_t kv_row(const ffpa_tensor& t, const Place& s, int h, int64_t j) const {
    return s.kv_batch * t.stride[0] + h / group * t.stride[1] + (s.kv_row + j) * t.stride[2];
  }
  __device__ static double dot(const ffpa_tensor& x, int64_t at_x, const ffpa_tensor& y, int64_t at_y, int64_t n) {
    double sum = 0;
    for (int64_t d = 0; d < n; ++d)
      sum += element(x.data, x.dtype, at_x + d * x.stride[3]) * element(y.data, y.dtype, at_y + d * y.stride[3]);
    return sum;
  }
  // -inf where row i does not see key j; `slope`: derivative of the softcap.
  __device__ double logit(const Place& s, int b, int h, int64_t i, int64_t j, double* slope = nullptr) const {
    const int64_t diagonal = f.anchor == FFPA_BOTTOM_RIGHT ? i + s.n_kv - s.n_q : i;
    if (slope) *slope = 1;
    if (f.causal && j > diagonal) return -INFINITY;
    if (f.window_right >= 0 && j > diagonal + f.window_right) return -INFINITY;
    if (f.window_left >= 0 && j < diagonal - f.window_left) return -INFINITY;
    const auto at = [&](const ffpa_tensor& t) {
      return b * bstride(t, 0) + h * bstride(t, 1) + i * bstride(t, 2) + j * bstride(t, 3);
    };
    if (f.mask.rank && !static_cast<const uint8_t*>(f.mask.data)[at(f.mask)]) return -INFINITY;
    double a = scale * dot(f.q, q_row(f.q, s, h, i), f.k, kv_row(f.k, s, h, j), d_qk);
    if (f.softcap > 0) {
      const double t = tanh(a / f.softcap);
      a = f.softcap * t;
      if (slope) *slope = 1 - t * t;
    }
    if (f.bias.rank) a += element(f.bias.data, f.bias.dtype, at(f.bias));
    if (f.alibi_slopes.rank)
      a -= static_cast<const float*>(f.alibi_slopes.data)[h] * fabs(static_cast<double>(i + s.n_kv - s.n_q - j));
    return a;
  }
  // What dropout multiplies a probability by.
  __device__ double kept(int b, int h, int64_t i, int64_t j) const {
    if (f.dropout_p == 0) return 1;
    const Dropout drop{f.dropout_seed, f.dropout_offset, static_cast<uint32_t>(llround(f.dropout_p * 65536)), 1.f};
    const Philox4 bits = drop.bits(b * f.q.extent[1] + h, i, j / 8);
    return drop.keep(bits, j % 8) ? 1 / (1 - f.dropout_p) : 0;
  }
  __device__ double sink(int h) const {
    return f.sinks.rank ? element(f.sinks.data, f.sinks.dtype, h * f.sinks.stride[0]) : -INFINITY;
  }
};

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

// The tensors and options of a case. Outputs are not filled.
struct Built {
  Problem problem;
  bool packed = false;
  std::vector<int> len_q, len_kv, cu_q, cu_kv;
  uint32_t seed = 0, random = 0;
  int next(int64_t n) {
    random = random * 1664525u + 1013904223u;
    return static_cast<int>((random >> 8) % static_cast<uint32_t>(n));
  }
  Formula formula() const {
    const Problem& p = problem;
    return {p.fwd(), p.group, p.n_seqs, p.d_qk, p.d_v, p.scale};
  }
  // Pairs of row and key that see each other by causality, window and length, in one head.
  int64_t visible() const {
    int64_t pairs = 0;
    for (int64_t b = 0; b < problem.n_seqs; ++b) {
      const Sequence s{b, 0, 0, len_q[b], 0, 0, len_kv[b]};
      for (int64_t i = 0; i < s.n_q; ++i) {
        const KeyRange r = visible_keys(problem, s, i);
        pairs += std::max<int64_t>(r.end - r.begin, 0);
      }
    }
    return pairs;
  }
};

Built build(const Case& c) {
  Built x;
  const int64_t b = c.integer("b", 1), hq = c.integer("h", 4), hkv = c.integer("hkv", hq), nq = c.integer("n", 256),
                nkv = c.integer("nkv", nq);
  const int64_t d = c.integer("d", 512), dv = c.integer("dv", d);
  const int dtype = c.text("dtype", "bf16") == "bf16" ? FFPA_BF16 : FFPA_FP16;
  const bool packed = c.integer("packed", 0), lengths = c.integer("lengths", 0);
  uint32_t& seed = x.seed;
  seed = static_cast<uint32_t>(c.integer("seed", 1)) * 1000;
  const int pattern = static_cast<int>(c.integer("pattern", 0));
  x.packed = packed;
  Problem& p = x.problem;
  ffpa_forward_problem& f = p.args.forward;
  std::vector<int>&len_q = x.len_q, &len_kv = x.len_kv, &cu_q = x.cu_q, &cu_kv = x.cu_kv;
  len_q.assign(b, static_cast<int>(nq)), len_kv.assign(b, static_cast<int>(nkv));
  cu_q = cu_kv = {0};
  x.random = seed + 17;
  const auto next = [&](int64_t n) { return x.next(n); };
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

  return x;
}

// -------------------------------------------------------------------------------------------------------------- running

// Milliseconds of each of `times` runs, sorted, after two more.
template <class Run>
std::vector<float> measure(int64_t times, Run run) {
  std::vector<float> ms;
  cudaEvent_t a, z;
  CUDA_OK(cudaEventCreate(&a));
  CUDA_OK(cudaEventCreate(&z));
  for (int i = 0; i < 2; ++i) run();
  for (int64_t i = 0; i < times; ++i) {
    CUDA_OK(cudaEventRecord(a));
    run();
    CUDA_OK(cudaEventRecord(z));
    CUDA_OK(cudaEventSynchronize(z));
    float t;
    CUDA_OK(cudaEventElapsedTime(&t, a, z));
    ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  return ms;
}

// cuBLAS on n x n x n in bf16, the measure of what the machine can do; where the library is there.
inline bool time_gemm(int64_t n) {
  void* library = dlopen("libcublas.so.13", RTLD_NOW);
  if (!library) library = dlopen("libcublas.so.12", RTLD_NOW);
  using Create = int (*)(void**);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                       const void*, void*, int, int, int, int);
  const auto create = library ? reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2")) : nullptr;
  const auto gemm = library ? reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx")) : nullptr;
  void* handle = nullptr;
  if (!create || !gemm || create(&handle)) {
    std::printf("gemm: no cuBLAS here\n");
    return true;
  }
  const ffpa_tensor a = tensor(FFPA_BF16, {n, n}), b = tensor(FFPA_BF16, {n, n}), c = tensor(FFPA_BF16, {n, n});
  for (const ffpa_tensor* t : {&a, &b}) fill<<<2048, 256>>>(t->data, t->dtype, n * n, 1.f, 5, 0, 1, 0, 0);
  const int k = static_cast<int>(n), bf16 = 14, fp32 = 68,
            any = -1;  // CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
  const float one = 1.f, zero = 0.f;
  const std::vector<float> ms = measure(20, [&] {
    gemm(handle, 1, 0, k, k, k, &one, a.data, bf16, k, b.data, bf16, k, &zero, c.data, bf16, k, fp32, any);
  });
  std::printf("gemm %d: %.3f ms, %.1f TFLOP/s\n", k, ms[10], 2.0 * k * k * k / ms[10] / 1e9);
  return true;
}

// Runs each line of standard input; the exit status.
template <class RunCase>
int run_cases(RunCase run_case) {
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
