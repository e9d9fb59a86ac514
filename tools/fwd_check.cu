// Checks and times the CUDA forward kernels on a GPU, without torch or the C ABI. SPDX-License-Identifier: Apache-2.0
//
//   fwd_check < cases.txt      one case a line: words of "key=value" (see Case), '#' starts a comment
//
// Sampled rows are compared with plain loops in double on the GPU, written from the formula in ffpa.h and sharing nothing with the
// kernels but the dropout definition. Memory past lengths holds NaN; o and lse are poisoned before the run. Prints a line a case;
// exit status 1 if one failed.
#include "check_case.cuh"

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

// ------------------------------------------------------------------------------------------------------------- reference

struct Row {
  int b, h, i;
};

__global__ void reference_rows(Formula x, const Row* rows, double* scores, int64_t score_stride, double* o,
                               double* lse) {
  const Row r = rows[blockIdx.x];
  double* s = scores + blockIdx.x * score_stride;
  const int thread = threadIdx.x;
  const Formula::Place place = x.place(r.b);
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
  for (int64_t j = thread; j < place.n_kv; j += 256) top = fmax(top, s[j] = x.logit(place, r.b, r.h, r.i, j));
  top = reduce(top, true);
  const double sink = x.sink(r.h), m = fmax(top, sink);
  double sum = 0;
  for (int64_t j = thread; j < place.n_kv; j += 256) {
    const double p = s[j] == -INFINITY ? 0 : exp(s[j] - m);
    sum += p;
    s[j] = p * x.kept(r.b, r.h, r.i, j);
  }
  sum = reduce(sum, false) + (sink == -INFINITY ? 0 : exp(sink - m));
  if (thread == 0) lse[blockIdx.x] = sum == 0 ? -INFINITY : m + log(sum);
  __syncthreads();
  for (int d = thread; d < x.d_v; d += 256) {
    double a = 0;
    for (int64_t j = 0; j < place.n_kv; ++j)
      if (s[j] != 0) a += s[j] * element(x.f.v.data, x.f.v.dtype, x.kv_row(x.f.v, place, r.h, j) + d * x.f.v.stride[3]);
    o[blockIdx.x * x.d_v + d] = sum == 0 ? 0 : a / sum;
  }
}

bool run_case(const Case& c) {
  Built built = build(c);
  Problem& p = built.problem;
  const ffpa_forward_problem& f = p.fwd();
  const std::vector<int>&len_q = built.len_q, &cu_q = built.cu_q;
  const bool packed = built.packed;
  const int64_t b = p.n_seqs, hq = p.h_q, nkv = p.n_kv, dv = p.d_v;
  const int dtype = f.q.dtype;
  const auto next = [&](int64_t n) { return built.next(n); };

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
  const size_t n = rows.size();
  Row* device_rows = static_cast<Row*>(allocate(n * sizeof(Row)));
  double* scores = static_cast<double*>(allocate(n * (nkv + 1) * 8));
  double* ref_o = static_cast<double*>(allocate(n * dv * 8));
  double* ref_lse = static_cast<double*>(allocate(n * 8));
  CUDA_OK(cudaMemcpy(device_rows, rows.data(), n * sizeof(Row), cudaMemcpyHostToDevice));
  const Formula x = built.formula();
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
    const std::vector<float> ms = measure(times, run);
    const double work = 2.0 * hq * built.visible() * (p.d_qk + dv);
    std::printf("  %.3f ms  %.1f TFLOP/s (best %.1f)", ms[ms.size() / 2], work / ms[ms.size() / 2] / 1e9,
                work / ms[0] / 1e9);
  }
  std::printf("\n");
  std::fflush(stdout);
  return ok;
}

int main() { return run_cases(run_case); }
