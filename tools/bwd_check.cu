// Checks and times the CUDA backward kernels on a GPU, without torch or the C ABI. SPDX-License-Identifier: Apache-2.0
//
//   bwd_check < cases.txt      one case a line: words of "key=value" (check_case.cuh), '#' starts a comment
//
// Words beside those of `build`:
//   need=qkvbs  gradients wanted (b: of bias, s: of sinks)     dlse=1  a gradient of lse comes in     repeat=n  runs compared bitwise
//   dout=expanded|transposed|offset  how dout lies in memory   samples=n  rows and keys compared      time=n    runs timed
//   gemm=n      instead of a case: time cuBLAS on n x n x n
//
// o and lse are those of plain loops in double where that is feasible, else made up (the gradients are a function of them too). Samples of
// the gradients are compared with plain loops in double. Memory past lengths holds NaN; gradients and workspace are poisoned
// before each run. Prints a line a case; exit status 1 if one failed.
//
// The kernels are called one by one, those that are linked in: so each can be built and timed alone.
#include "check_case.cuh"
#include "core/half.h"
#include "kernels/any/bwd_delta.h"
#include "kernels/sm90/bwd_host.h"

namespace ffpa::sm90 {
namespace bwd_dq {
[[gnu::weak]] Status run(const Problem&, const attn::BackwardParams&, cudaStream_t);
}
namespace bwd_dkdv {
[[gnu::weak]] Status run(const Problem&, const attn::BackwardParams&, cudaStream_t);
}
namespace bwd_dbias {
[[gnu::weak]] Status run(const Problem&, const attn::BackwardParams&, cudaStream_t);
}
}  // namespace ffpa::sm90

// ------------------------------------------------------------------------------------------------------------- reference

// Rows (b, h, i) or, of k and v, (b, h_kv, j).
struct Row {
  int b, h, i;
};

// o and lse of every row; a CTA a row.
template <class Element>
__global__ void forward_rows(Formula x, double* scores, int64_t score_stride) {
  __shared__ double part[256];
  const int thread = threadIdx.x, h = blockIdx.y, b = blockIdx.z;
  const Formula::Place s = x.place(b);
  const auto sum_of = [&](double v) {
    part[thread] = v;
    __syncthreads();
    double sum = 0;
    for (int t = 0; t < 256; ++t) sum += part[t];
    __syncthreads();
    return sum;
  };
  double* row = scores + (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * score_stride;
  for (int64_t i = 0; i < s.n_q; ++i) {
    double top = x.sink(h);
    for (int64_t j = thread; j < s.n_kv; j += 256) row[j] = x.logit(s, b, h, i, j);
    __syncthreads();
    for (int64_t j = 0; j < s.n_kv; ++j) top = fmax(top, row[j]);
    double sum = 0;
    for (int64_t j = thread; j < s.n_kv; j += 256) sum += row[j] == -INFINITY ? 0 : exp(row[j] - top);
    sum = sum_of(sum) + (x.sink(h) == -INFINITY ? 0 : exp(x.sink(h) - top));
    const double lse = sum == 0 ? -INFINITY : top + log(sum);
    for (int d = thread; d < x.d_v; d += 256) {
      double o = 0;
      for (int64_t j = 0; j < s.n_kv; ++j)
        if (row[j] != -INFINITY)
          o += exp(row[j] - lse) * x.kept(b, h, i, j) *
               element(x.f.v.data, x.f.v.dtype, x.kv_row(x.f.v, s, h, j) + d * x.f.v.stride[3]);
      static_cast<Element*>(x.f.o.data)[x.q_row(x.f.o, s, h, i) + d * x.f.o.stride[3]] = static_cast<float>(o);
    }
    if (thread == 0) static_cast<float*>(x.f.lse.data)[x.q_row(x.f.lse, s, h, i)] = static_cast<float>(lse);
    __syncthreads();
  }
}

struct Gradients {
  Formula x;
  ffpa_tensor dout, dlse;
  const double* delta;  // [B, H_q, longest N_q]
  int64_t n_q;

  struct Pair {
    double p, ds, slope;  // p with dropout's factor; ds of the score after softcap
  };
  __device__ double delta_of(const Formula::Place& s, int b, int h, int64_t i) const {
    const ffpa_tensor& o = x.f.o;
    const double sum = Formula::dot(dout, x.q_row(dout, s, h, i), o, x.q_row(o, s, h, i), x.d_v);
    return sum - (dlse.rank ? static_cast<const float*>(dlse.data)[x.q_row(dlse, s, h, i)] : 0.f);
  }
  __device__ double lse_of(const Formula::Place& s, int h, int64_t i) const {
    return static_cast<const float*>(x.f.lse.data)[x.q_row(x.f.lse, s, h, i)];
  }
  __device__ Pair pair(const Formula::Place& s, int b, int h, int64_t i, int64_t j) const {
    double slope;
    const double logit = x.logit(s, b, h, i, j, &slope);
    if (logit == -INFINITY) return {0, 0, 0};
    const double p = fmin(exp(logit - lse_of(s, h, i)), 1.), kept = x.kept(b, h, i, j);
    const double dp = Formula::dot(dout, x.q_row(dout, s, h, i), x.f.v, x.kv_row(x.f.v, s, h, j), x.d_v) * kept;
    return {p * kept, p * (dp - delta[(b * x.f.q.extent[1] + h) * n_q + i]), slope};
  }
};

__global__ void deltas(Gradients g, double* delta) {
  const int h = blockIdx.y, b = blockIdx.z;
  const Formula::Place s = g.x.place(b);
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < s.n_q; i += gridDim.x * blockDim.x)
    delta[(int64_t{b} * gridDim.y + h) * g.n_q + i] = g.delta_of(s, b, h, i);
}
// A CTA a sample; `terms`: 2 * n doubles for each.
__global__ void dq_rows(Gradients g, const Row* rows, double* terms, int64_t n, double* dq) {
  const Row r = rows[blockIdx.x];
  const Formula::Place s = g.x.place(r.b);
  double* term = terms + 2 * n * blockIdx.x;
  for (int64_t j = threadIdx.x; j < s.n_kv; j += blockDim.x) {
    const auto pair = g.pair(s, r.b, r.h, r.i, j);
    term[j] = pair.ds * pair.slope * g.x.scale;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < g.x.d_qk; d += blockDim.x) {
    double sum = 0;
    for (int64_t j = 0; j < s.n_kv; ++j)
      if (term[j] != 0)
        sum += term[j] * element(g.x.f.k.data, g.x.f.k.dtype, g.x.kv_row(g.x.f.k, s, r.h, j) + d * g.x.f.k.stride[3]);
    dq[blockIdx.x * g.x.d_qk + d] = sum;
  }
}
__global__ void dkdv_rows(Gradients g, const Row* rows, double* terms, int64_t n, double* dk, double* dv) {
  const Row r = rows[blockIdx.x];
  const Formula::Place s = g.x.place(r.b);
  double *term_k = terms + 2 * n * blockIdx.x, *term_v = term_k + n;
  for (int d = threadIdx.x; d < g.x.d_qk; d += blockDim.x) dk[blockIdx.x * g.x.d_qk + d] = 0;
  for (int d = threadIdx.x; d < g.x.d_v; d += blockDim.x) dv[blockIdx.x * g.x.d_v + d] = 0;
  for (int h = r.h * static_cast<int>(g.x.group); h < (r.h + 1) * g.x.group; ++h) {
    for (int64_t i = threadIdx.x; i < s.n_q; i += blockDim.x) {
      const auto pair = g.pair(s, r.b, h, i, r.i);
      term_k[i] = pair.ds * pair.slope * g.x.scale;
      term_v[i] = pair.p;
    }
    __syncthreads();
    const auto add = [&](const ffpa_tensor& t, const double* term, int64_t width, double* sums) {
      for (int d = threadIdx.x; d < width; d += blockDim.x)
        for (int64_t i = 0; i < s.n_q; ++i)
          if (term[i] != 0)
            sums[blockIdx.x * width + d] += term[i] * element(t.data, t.dtype, g.x.q_row(t, s, h, i) + d * t.stride[3]);
    };
    add(g.x.f.q, term_k, g.x.d_qk, dk);
    add(g.dout, term_v, g.x.d_v, dv);
    __syncthreads();
  }
}
// An element of dbias a CTA: at[4 * sample] are its indices.
__global__ void dbias_elements(Gradients g, const int* at, double* dbias) {
  __shared__ double part[256];
  const ffpa_tensor& t = g.x.f.bias;
  const int* e = at + 4 * blockIdx.x;
  double sum = 0;
  for (int b = t.extent[0] == 1 ? 0 : e[0]; b < (t.extent[0] == 1 ? g.x.n_seqs : e[0] + 1); ++b) {
    const Formula::Place s = g.x.place(b);
    const int64_t i0 = t.extent[2] == 1 ? 0 : e[2], i1 = t.extent[2] == 1 ? s.n_q : min(int64_t{e[2] + 1}, s.n_q);
    const int64_t j0 = t.extent[3] == 1 ? 0 : e[3], j1 = t.extent[3] == 1 ? s.n_kv : min(int64_t{e[3] + 1}, s.n_kv);
    if (i1 <= i0 || j1 <= j0) continue;
    for (int h = t.extent[1] == 1 ? 0 : e[1]; h < (t.extent[1] == 1 ? g.x.f.q.extent[1] : e[1] + 1); ++h)
      for (int64_t n = threadIdx.x; n < (i1 - i0) * (j1 - j0); n += blockDim.x)
        sum += g.pair(s, b, h, i0 + n / (j1 - j0), j0 + n % (j1 - j0)).ds;
  }
  part[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < 256; ++i) sum += part[i];
  dbias[blockIdx.x] = sum;
}
__global__ void dsinks_heads(Gradients g, double* dsinks) {
  const int h = threadIdx.x;
  double sum = 0;
  for (int b = 0; b < g.x.n_seqs; ++b) {
    const Formula::Place s = g.x.place(b);
    for (int64_t i = 0; i < s.n_q; ++i) {
      const double lse = g.lse_of(s, h, i);
      if (lse != -INFINITY) sum -= exp(g.x.sink(h) - lse) * g.delta[(b * g.x.f.q.extent[1] + h) * g.n_q + i];
    }
  }
  dsinks[h] = sum;
}

// ------------------------------------------------------------------------------------------------------------ comparison

double value_of(const void* bits, int dtype, int64_t at) {
  if (dtype == FFPA_FP32) return static_cast<const float*>(bits)[at];
  const uint16_t word = static_cast<const uint16_t*>(bits)[at];
  return dtype == FFPA_BF16 ? float_from_bf16(word) : float_from_fp16(word);
}

struct Error {
  double square_error = 0, square = 0, worst = 0;
  int nans = 0;
  void add(double value, double want) {
    if (std::isnan(value) != std::isnan(want) || std::isinf(value) != std::isinf(want)) ++nans;
    if (!std::isfinite(want) || !std::isfinite(value)) return;
    square_error += (value - want) * (value - want), square += want * want;
    worst = std::max(worst, std::abs(value - want));
  }
  double rmse() const { return square > 0 ? std::sqrt(square_error / square) : std::sqrt(square_error); }
};

template <class T>
std::vector<T> fetched(const T* from, size_t n) {
  std::vector<T> to(n);
  CUDA_OK(cudaMemcpy(to.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

bool run_case(const Case& c) {
  if (c.words.count("gemm")) return time_gemm(c.integer("gemm", 8192));
  Built built = build(c);
  Problem& p = built.problem;
  p.pass = Pass::kBackward;
  ffpa_forward_problem& f = p.args.forward;
  ffpa_backward_problem& g = p.args;
  const int64_t b = p.n_seqs, hq = p.h_q, rows_q = f.q.extent[2];
  const int dtype = f.q.dtype;
  // ---- o, lse, dout, dlse
  const bool exact = static_cast<double>(b) * hq * p.n_q * p.n_kv * (p.d_qk + p.d_v) < 2e9;
  CUDA_OK(cudaMemset(f.o.data, 0, elements(f.o) * 2));
  fill<<<1024, 256>>>(f.lse.data, FFPA_FP32, elements(f.lse), 0.f, 0, 0, 1, 0, 0);
  const Formula x = built.formula();
  if (exact) {
    std::vector<float> empty(elements(f.lse), -INFINITY);
    CUDA_OK(cudaMemcpy(f.lse.data, empty.data(), empty.size() * 4, cudaMemcpyHostToDevice));
    double* scores = static_cast<double*>(allocate(b * hq * (p.n_kv + 1) * 8));
    const dim3 grid(1, static_cast<unsigned>(hq), static_cast<unsigned>(b));
    if (dtype == FFPA_BF16)
      forward_rows<__nv_bfloat16><<<grid, 256>>>(x, scores, p.n_kv + 1);
    else
      forward_rows<__half><<<grid, 256>>>(x, scores, p.n_kv + 1);
  } else {  // lse near the truth for Gaussian data
    std::vector<float> lse(elements(f.lse));
    for (size_t i = 0; i < lse.size(); ++i) {
      const auto row = static_cast<double>(i % static_cast<size_t>(rows_q));
      const double keys = f.causal ? row + 1 : static_cast<double>(p.n_kv);
      lse[i] = static_cast<float>(std::log(keys) + 0.5 +
                                  0.2 * (static_cast<double>(i * 2654435761u >> 8 & 255) / 255 - 0.5));
    }
    CUDA_OK(cudaMemcpy(f.lse.data, lse.data(), lse.size() * 4, cudaMemcpyHostToDevice));
    fill<<<2048, 256>>>(f.o.data, dtype, elements(f.o), 0.05f, built.seed += 7919, 0, 1, 0, 0);
  }
  const std::string lies = c.text("dout", "");
  g.dout = tensor(dtype, {f.o.extent[0], f.o.extent[1], f.o.extent[2], f.o.extent[3] + (lies == "offset" ? 3 : 0)});
  fill<<<2048, 256>>>(g.dout.data, dtype, elements(g.dout), static_cast<float>(c.number("gain_dout", 1)),
                      built.seed += 7919, 0, 1, 0, 0);
  if (lies == "offset") g.dout.extent[3] -= 3, g.dout.data = static_cast<uint16_t*>(g.dout.data) + 1;
  if (lies == "transposed" && g.dout.extent[2] > 1) {  // [.., D_v, N] in memory
    g.dout.stride[3] = g.dout.extent[2];
    g.dout.stride[2] = 1;
  }
  if (lies == "expanded")
    for (int64_t& stride : g.dout.stride) stride = 0;
  if (c.integer("bnhd", 0) && lies.empty()) transpose_heads(&g.dout);
  if (c.integer("dlse", 0)) {
    g.dlse = tensor(FFPA_FP32, {f.lse.extent[0], f.lse.extent[1], f.lse.extent[2]});
    fill<<<1024, 256>>>(g.dlse.data, FFPA_FP32, elements(g.dlse), 1.f, built.seed += 7919, 0, 1, 0, 0);
  }
  // ---- gradients, laid out like their inputs
  const std::string need = c.text("need", "qkvbs");
  const auto wanted = [&](char letter, const ffpa_tensor& of, ffpa_tensor* gradient) {
    if (need.find(letter) == std::string::npos || !present(of)) return;
    *gradient = of;
    gradient->data = allocate(elements(of) * dtype_bytes(of.dtype));
  };
  wanted('q', f.q, &g.dq);
  wanted('k', f.k, &g.dk);
  wanted('v', f.v, &g.dv);
  wanted('b', f.bias, &g.dbias);
  wanted('s', f.sinks, &g.dsinks);

  const sm90::BackwardWorkspace w = sm90::backward_workspace(p);
  char* workspace = static_cast<char*>(allocate(w.bytes));
  const Problem readable = sm90::with_readable_dout(p, workspace);
  attn::BackwardParams params;
  sm90::fill_backward_params(readable, workspace, &params);
  Status status;
  using Kernel = Status (*)(const Problem&, const attn::BackwardParams&, cudaStream_t);
  const auto call = [&](Kernel kernel) {
    if (status.code == FFPA_OK) status = kernel(readable, params, nullptr);
  };
  const bool has_dq = g.dq.rank && sm90::bwd_dq::run, has_dkdv = (g.dk.rank || g.dv.rank) && sm90::bwd_dkdv::run,
             has_dbias = g.dbias.rank && sm90::bwd_dbias::run;
  const auto run_delta = [&] {
    bwd_delta::launch(p, params.lse_log2.data, params.delta.data, w.copies_dout ? workspace + w.dout : nullptr,
                      nullptr);
  };
  const auto run_dsinks = [&] {
    if (g.dsinks.rank) bwd_delta::launch_dsinks(p, params.lse_log2.data, params.delta.data, nullptr);
  };
  const auto run = [&] {
    run_delta();
    run_dsinks();
    if (has_dq) call(sm90::bwd_dq::run);
    if (has_dkdv) call(sm90::bwd_dkdv::run);
    if (has_dbias) call(sm90::bwd_dbias::run);
  };
  const ffpa_tensor* gradients[] = {&g.dq, &g.dk, &g.dv, &g.dbias, &g.dsinks};
  const bool made[] = {has_dq, has_dkdv && g.dk.rank, has_dkdv && g.dv.rank, has_dbias, g.dsinks.rank != 0};
  const auto poison_all = [&] {
    CUDA_OK(cudaMemset(workspace, 0xFF, w.bytes));
    for (const ffpa_tensor* t : gradients)
      if (t->rank) CUDA_OK(cudaMemset(t->data, 0xFF, elements(*t) * dtype_bytes(t->dtype)));
  };
  std::string label;
  for (auto& [key, value] : c.words) label += key + "=" + value + " ";
  if (const std::string reason = sm90::backward_refuses(p); !reason.empty()) {
    std::printf("REFUSED %s: %s\n", label.c_str(), reason.c_str());
    return true;
  }
  poison_all();
  run();
  if (status.code != FFPA_OK) {
    std::printf("FAIL %s: %s\n", label.c_str(), status.text.c_str());
    return false;
  }
  CUDA_OK(cudaDeviceSynchronize());

  // ---- samples: ends of sequences and tiles, and random ones
  const auto samples = [&](int64_t heads, const std::vector<int>& lengths) {
    std::vector<Row> rows;
    const auto n = static_cast<size_t>(c.integer("samples", 24));
    for (int tries = 0; rows.size() < n && tries < 1000; ++tries) {
      const int s = built.next(b), h = built.next(heads), length = lengths[static_cast<size_t>(s)];
      if (!length) continue;
      rows.push_back({s, h,
                      tries % 4 == 0   ? std::min(length - 1, built.next(3))
                      : tries % 4 == 1 ? std::max(0, length - 1 - built.next(3))
                                       : built.next(length)});
    }
    return rows;
  };
  double* delta = static_cast<double*>(allocate(b * hq * p.n_q * 8));
  const Gradients ref{x, readable.args.dout, g.dlse, delta, p.n_q};
  if (p.n_q) deltas<<<dim3(64, static_cast<unsigned>(hq), static_cast<unsigned>(b)), 64>>>(ref, delta);
  const auto on_gpu = [&](const auto& values) {
    void* to = allocate(values.size() * sizeof(values[0]));
    CUDA_OK(cudaMemcpy(to, values.data(), values.size() * sizeof(values[0]), cudaMemcpyHostToDevice));
    return to;
  };
  const auto doubles = [&](size_t n) { return static_cast<double*>(allocate(n * 8)); };
  std::vector<uint16_t> got[5];
  for (int i = 0; i < 5; ++i)
    if (made[i])
      got[i] = fetched(static_cast<const uint16_t*>(gradients[i]->data),
                       static_cast<size_t>(elements(*gradients[i]) * dtype_bytes(gradients[i]->dtype) / 2));
  Error errors[5];
  const auto compare = [&](int i, const std::vector<Row>& rows, const std::vector<double>& want, bool of_q) {
    const ffpa_tensor& t = *gradients[i];
    const bool packed = built.packed;
    for (size_t r = 0; r < rows.size(); ++r) {
      const auto s = static_cast<size_t>(rows[r].b);
      const int64_t first = !packed ? 0 : of_q ? built.cu_q[s] : built.cu_kv[s];
      const int64_t at =
          (packed ? 0 : rows[r].b) * t.stride[0] + rows[r].h * t.stride[1] + (first + rows[r].i) * t.stride[2];
      for (int64_t d = 0; d < t.extent[3]; ++d)
        errors[i].add(value_of(got[i].data(), t.dtype, at + d * t.stride[3]),
                      want[r * static_cast<size_t>(t.extent[3]) + static_cast<size_t>(d)]);
    }
  };
  const int64_t longest = std::max(p.n_q, p.n_kv) + 1;
  if (made[0]) {
    const std::vector<Row> rows = samples(hq, built.len_q);
    double* dq = doubles(rows.size() * static_cast<size_t>(p.d_qk));
    if (!rows.empty())
      dq_rows<<<static_cast<unsigned>(rows.size()), 256>>>(ref, static_cast<Row*>(on_gpu(rows)),
                                                           doubles(rows.size() * 2 * longest), longest, dq);
    compare(0, rows, fetched(dq, rows.size() * static_cast<size_t>(p.d_qk)), true);
  }
  if (made[1] || made[2]) {
    const std::vector<Row> rows = samples(p.h_kv, built.len_kv);
    double *dk = doubles(rows.size() * static_cast<size_t>(p.d_qk)),
           *dv = doubles(rows.size() * static_cast<size_t>(p.d_v));
    if (!rows.empty())
      dkdv_rows<<<static_cast<unsigned>(rows.size()), 256>>>(ref, static_cast<Row*>(on_gpu(rows)),
                                                             doubles(rows.size() * 2 * longest), longest, dk, dv);
    if (made[1]) compare(1, rows, fetched(dk, rows.size() * static_cast<size_t>(p.d_qk)), false);
    if (made[2]) compare(2, rows, fetched(dv, rows.size() * static_cast<size_t>(p.d_v)), false);
  }
  if (made[3]) {
    std::vector<int> at;
    const ffpa_tensor& t = g.dbias;
    for (int i = 0; i < 64; ++i)
      for (int axis = 0; axis < 4; ++axis) at.push_back(built.next(t.extent[axis]));
    double* want = doubles(64);
    dbias_elements<<<64, 256>>>(ref, static_cast<int*>(on_gpu(at)), want);
    const std::vector<double> values = fetched(want, 64);
    for (size_t i = 0; i < 64; ++i) {
      int64_t place = 0;
      for (size_t axis = 0; axis < 4; ++axis) place += at[4 * i + axis] * t.stride[axis];
      errors[3].add(value_of(got[3].data(), t.dtype, place), values[i]);
    }
  }
  if (made[4]) {
    double* want = doubles(static_cast<size_t>(hq));
    dsinks_heads<<<1, static_cast<unsigned>(hq)>>>(ref, want);
    const std::vector<double> values = fetched(want, static_cast<size_t>(hq));
    for (size_t h = 0; h < values.size(); ++h)
      errors[4].add(value_of(got[4].data(), g.dsinks.dtype, static_cast<int64_t>(h)), values[h]);
  }
  CUDA_OK(cudaDeviceSynchronize());

  // ---- every element written, the same bits again
  int unwritten = 0;
  for (int i = 0; i < 5; ++i)
    if (made[i])
      for (uint16_t bits : got[i]) unwritten += bits == 0xFFFF;
  bool same = true;
  for (int64_t n = 0; n < c.integer("repeat", 1); ++n) {
    poison_all();
    run();
    for (int i = 0; i < 5; ++i)
      if (made[i]) same = same && fetched(static_cast<const uint16_t*>(gradients[i]->data), got[i].size()) == got[i];
  }
  bool ok = !unwritten && same;
  std::string figures;
  const char* names[] = {"dq", "dk", "dv", "dbias", "dsinks"};
  for (int i = 0; i < 5; ++i)
    if (made[i]) {
      const Error& e = errors[i];
      const double limit = gradients[i]->dtype == FFPA_FP16 || dtype == FFPA_FP16 ? 6e-4 : 4e-3;
      ok = ok && !e.nans && (e.rmse() < limit || e.worst < 1e-5);
      char text[96];
      std::snprintf(text, sizeof text, " %s %.1e%s", names[i], e.rmse(), e.nans ? " NAN" : "");
      figures += text;
    }
  std::printf("%s %-60s%s%s%s%s", ok ? "ok  " : "FAIL", label.c_str(), figures.c_str(), unwritten ? " UNWRITTEN" : "",
              same ? "" : " UNREPEATABLE", exact ? "" : " (lse made up)");
  if (const int64_t times = c.integer("time", 0)) {
    const double work = 2.0 * static_cast<double>(hq * built.visible());  // of one product, for each column
    const auto q = static_cast<double>(p.d_qk), v = static_cast<double>(p.d_v);
    const auto report = [&](const char* name, double columns, auto timed) {
      const std::vector<float> ms = measure(times, timed);
      std::printf("\n       %-6s %8.3f ms", name, ms[ms.size() / 2]);
      if (columns > 0)
        std::printf("  %.1f TFLOP/s (best %.1f)", work * columns / ms[ms.size() / 2] / 1e9,
                    work * columns / ms[0] / 1e9);
    };
    report("delta", 0, run_delta);
    if (has_dq) report("dq", 2 * q + v, [&] { call(sm90::bwd_dq::run); });
    if (has_dkdv) report("dkdv", 2 * q + 2 * v, [&] { call(sm90::bwd_dkdv::run); });
    if (has_dbias) report("dbias", q + v, [&] { call(sm90::bwd_dbias::run); });
    report("all", 3 * q + 2 * v, run);
  }
  std::printf("\n");
  std::fflush(stdout);
  return ok;
}

int main() { return run_cases(run_case); }
