// Every refusal of a forward or backward problem, word for word: argument, rule, value.
// SPDX-License-Identifier: Apache-2.0
//
// A case takes a valid problem, breaks one rule, and gives the status and the text that must come of it.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "api/problems.h"

namespace ffpa::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kHuge = int64_t{1} << 62;

struct ForwardCase {
  std::unique_ptr<Forward> (*make)();
  std::function<void(Forward&)> bend;
  std::string text;  // of the refusal; empty: the problem must pass
  ffpa_status status = FFPA_INVALID_ARGUMENT;
};

std::unique_ptr<Forward> small() { return dense(); }
std::unique_ptr<Forward> fp16() { return dense({.dtype = FFPA_FP16}); }
std::unique_ptr<Forward> fp64() { return dense({.dtype = FFPA_FP64}); }

#define BEND(...)                                   \
  [](Forward& f) {                                  \
    [[maybe_unused]] ffpa_forward_problem& p = f.p; \
    [[maybe_unused]] Memory& m = f.memory;          \
    __VA_ARGS__;                                    \
  }

void run(const std::vector<ForwardCase>& cases) {
  int number = 0;
  for (const ForwardCase& c : cases) {
    const auto f = c.make();
    c.bend(*f);
    ffpa_plan plan;
    std::memset(&plan, 0xAB, sizeof plan);
    const ffpa_status status = ffpa_forward_plan(&f->p, &plan);
    SCOPED_TRACE(testing::Message() << "case " << number++ << ": " << c.text);
    if (c.text.empty()) {
      EXPECT_EQ(status, FFPA_OK) << ffpa_last_error();
      continue;
    }
    EXPECT_EQ(status, c.status);
    EXPECT_EQ(ffpa_last_error(), c.text);
    const ffpa_plan zero{};
    EXPECT_EQ(std::memcmp(&plan, &zero, sizeof plan), 0) << "a failed plan is zeroed";
  }
}

TEST(Validation, PassesWhatIsRight) {
  run({
      {small, BEND({  // q, k, v and o side by side in one [B, N, 4, H, D] buffer
         const ffpa_tensor all = m.tensor(FFPA_FP32, {2, 3, 4 * 4 * 8});
         int64_t at = 0;
         for (ffpa_tensor* t : {&p.q, &p.k, &p.v, &p.o}) {
           *t = {static_cast<float*>(all.data) + at, FFPA_FP32, FFPA_CPU, 0, 4, {2, 4, 3, 8}, {384, 8, 128, 1}};
           at += 32;
         }
       }),
       ""},
      {small, BEND(), ""},
      {fp16, BEND(), ""},
      {fp64, BEND(), ""},
      {packed, BEND(), ""},
      {paged, BEND(), ""},
      {small, BEND(p.lse = {}), ""},
      {small, BEND(p.q.stride[0] = p.q.stride[1] = 0; p.k.stride[2] = 0; p.v.stride[3] = 0), ""},
      {small, BEND(p.has_scale = 1; p.scale = -2; p.softcap = 30; p.causal = 1; p.window_left = 0; p.anchor = 1), ""},
      {small, BEND(p.dropout_p = 1; p.dropout_state = m.tensor(FFPA_INT64, {2})), ""},
      {small, BEND(p.mask = m.tensor(FFPA_BOOL, {1, 4, 1, 5})), ""},
      {small, BEND(p.bias = m.tensor(FFPA_FP32, {2, 1, 3, 1})), ""},
      {fp16, BEND(p.bias = m.tensor(FFPA_FP16, {1, 1, 1, 1}); p.sinks = m.tensor(FFPA_FP16, {4})), ""},
      {small, BEND(p.alibi_slopes = m.tensor(FFPA_FP32, {2, 4}); p.sinks = m.tensor(FFPA_FP32, {4})), ""},
      {small, BEND(p.alibi_slopes = m.tensor(FFPA_FP32, {4})), ""},
      {small, BEND(p.kv_batch_idx = m.int32s({1, 1}); p.seqlens_kv = m.int32s({0, 5})), ""},
      {small,
       BEND(p.q.extent[0] = p.k.extent[0] = p.v.extent[0] = p.o.extent[0] = p.lse.extent[0] = 0; p.q.data = nullptr),
       ""},
      {small, BEND(p.q.extent[1] = p.o.extent[1] = p.lse.extent[1] = 0), ""},
      {small, BEND(p.k.extent[2] = p.v.extent[2] = 0), ""},
      {packed, BEND(p.max_seqlen_q = 3; p.max_seqlen_kv = 100; p.mask = m.tensor(FFPA_BOOL, {2, 1, 3, 5})), ""},
      {packed, BEND(p.mask = m.tensor(FFPA_BOOL, {2, 4, 7, 9})), ""},
      {packed, BEND(p.k.extent[0] = p.v.extent[0] = 2; p.k.stride[0] = p.v.stride[0] = 0; p.cu_seqlens_kv = {}), ""},
      {paged, BEND(p.mask = m.tensor(FFPA_BOOL, {2, 4, 3, 5})), ""},
      {paged, BEND(p.q.extent[0] = p.o.extent[0] = p.lse.extent[0] = 1; p.cu_seqlens_q = m.int32s({0, 2, 3})), ""},
  });
}

TEST(Validation, Structs) {
  ffpa_plan plan;
  EXPECT_EQ(ffpa_forward_plan(nullptr, &plan), FFPA_INVALID_ARGUMENT);
  EXPECT_STREQ(ffpa_last_error(), "problem: must not be null");
  const auto f = dense();
  EXPECT_EQ(ffpa_forward_plan(&f->p, nullptr), FFPA_INVALID_ARGUMENT);
  EXPECT_STREQ(ffpa_last_error(), "plan: must not be null");
  f->p.struct_size = 3;
  EXPECT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_INVALID_ARGUMENT);
  EXPECT_EQ(ffpa_last_error(), "problem.struct_size: must be " + std::to_string(sizeof(ffpa_forward_problem)) +
                                   " (set by ffpa_forward_problem_init), but is 3");
}

TEST(Validation, Tensors) {
  run({
      {small, BEND(p.q = {}), "q: must be given, but is absent"},
      {small, BEND(p.o = {}), "o: must be given, but is absent"},
      {small, BEND(p.lse.rank = 0), "lse: rank must be at least 1 (an absent tensor is all zero), but is 0"},
      {small, BEND(p.q.rank = 3), "q: rank must be 4, but is 3"},
      {small, BEND(p.k.rank = -1), "k: rank must be 4, but is -1"},
      {small, BEND(p.v.rank = 77), "v: rank must be 4, but is 77"},
      {small, BEND(p.lse.rank = 4), "lse: rank must be 3, but is 4"},
      {small, BEND(p.q.dtype = 99), "q: dtype must be one of ffpa_dtype, but is 99"},
      {small, BEND(p.q.dtype = FFPA_INT32), "q: dtype must be fp64, fp32, fp16 or bf16, but is int32"},
      {small, BEND(p.k.dtype = FFPA_BF16), "k: dtype must be q's, fp32, but is bf16"},
      {small, BEND(p.v.dtype = FFPA_FP16), "v: dtype must be q's, fp32, but is fp16"},
      {small, BEND(p.o.dtype = FFPA_FP16), "o: dtype must be q's, fp32, but is fp16"},
      {fp16, BEND(p.lse.dtype = FFPA_FP16), "lse: dtype must be fp32 when q is fp16, but is fp16"},
      {fp64, BEND(p.lse.dtype = FFPA_FP32), "lse: dtype must be fp64 when q is fp64, but is fp32"},
      {small, BEND(p.q.device_type = 5), "q: device_type must be 0 (cpu) or 1 (cuda), but is 5"},
      {small, BEND(p.q.device_index = 2), "q: device_index must be 0 on the cpu, but is 2"},
      {small, BEND(p.q.device_type = FFPA_CUDA; p.q.device_index = -1),
       "q: device_index must be at least 0, but is -1"},
      {small, BEND(p.k.device_type = FFPA_CUDA), "k: must lie on q's device, cpu 0, but lies on cuda 0"},
      {small, BEND(p.mask = m.tensor(FFPA_BOOL, {1, 1, 1, 1}); p.mask.device_type = 1; p.mask.device_index = 3),
       "mask: must lie on q's device, cpu 0, but lies on cuda 3"},
      {small, BEND(p.q.extent[2] = -4), "q: extent 2 must be from 0 to 2^31 - 1, but is -4"},
      {small, BEND(p.k.extent[2] = int64_t{1} << 31), "k: extent 2 must be from 0 to 2^31 - 1, but is 2147483648"},
      {small, BEND(p.k.stride[1] = -1), "k: stride 1 must be at least 0, but is -1"},
      {small, BEND(p.v.data = nullptr), "v: data must not be null unless an extent is 0, but extents are [2, 2, 5, 6]"},
      {small, BEND(p.q.data = static_cast<char*>(p.q.data) + 3),
       "q: data must be aligned to its dtype's 4 bytes, but is off by 3"},
      {small, BEND(p.q.extent[0] = p.q.extent[2] = INT32_MAX; p.q.stride[0] = p.q.stride[2] = 0),
       "q: extents must multiply to less than 2^63 bytes, but are [2147483647, 4, 2147483647, 8]"},
      {small, BEND(p.q.stride[0] = kHuge),
       "q: extents times strides must stay below 2^63 bytes, but extents are [2, 4, 3, 8] and strides "
       "[4611686018427387904, 24, 8, 1]"},
      {small, BEND(p.q.stride[0] = p.q.stride[1] = kHuge / 8),
       "q: extents times strides must stay below 2^63 bytes, but extents are [2, 4, 3, 8] and strides "
       "[576460752303423488, 576460752303423488, 8, 1]"},
      {small, BEND(p.o.stride[0] = 0),
       "o: is written, so its strides must place elements without overlap, but extents are [2, 4, 3, 6] and strides "
       "[0, 18, 6, 1]"},
      {small, BEND(p.o.stride[2] = 5),
       "o: is written, so its strides must place elements without overlap, but extents are [2, 4, 3, 6] and strides "
       "[72, 18, 5, 1]"},
      {small, BEND(p.lse.stride[2] = 0),
       "lse: is written, so its strides must place elements without overlap, but extents are [2, 4, 3] and strides "
       "[12, 3, 0]"},
      {small, BEND(p.o.data = p.q.data),
       "o: is written, so it must not share memory with q, but both start at the same address"},
      {small, BEND(p.lse.data = p.o.data),
       "o: is written, so it must not share memory with lse, but both start at the same address"},
      {small, BEND(p.o.data = static_cast<float*>(p.q.data) + 3),
       "o: is written, so it must not share memory with q, but starts 12 bytes behind its start and meets it"},
      {small, BEND(p.k.data = static_cast<float*>(p.o.data) + 143),  // o's last element is k's first
       "o: is written, so it must not share memory with k, but starts 572 bytes before its start and meets it"},
      {small, BEND(p.q.dtype = FFPA_FP8_E4M3),
       "q: dtype fp8_e4m3 is reserved for quantised inputs and not computed yet", FFPA_NOT_SUPPORTED},
      {small, BEND(p.v.dtype = FFPA_INT8), "v: dtype int8 is reserved for quantised inputs and not computed yet",
       FFPA_NOT_SUPPORTED},
      {small, BEND(p.k_scale = m.tensor(FFPA_FP32, {1})),
       "k_scale: is reserved for quantised inputs and must be absent", FFPA_NOT_SUPPORTED},
  });
}

TEST(Validation, Shapes) {
  run({
      {small, BEND(p.k.extent[3] = 7), "k: extent 3 (D_qk) must equal q's, 8, but is 7"},
      {small, BEND(p.v.extent[0] = 1), "v: extent 0 (B) must equal k's, 2, but is 1"},
      {small, BEND(p.v.extent[1] = 1), "v: extent 1 (H_kv) must equal k's, 2, but is 1"},
      {small, BEND(p.v.extent[2] = 4), "v: extent 2 (N_kv) must equal k's, 5, but is 4"},
      {small, BEND(p.k.extent[0] = p.v.extent[0] = 1), "k: extent 0 (B) must equal q's, 2, but is 1"},
      {small, BEND(p.q.extent[1] = 3), "q: extent 1 (H_q) must be a multiple of k's (H_kv), 2, but is 3"},
      {small, BEND(p.k.extent[1] = p.v.extent[1] = 0),
       "q: extent 1 (H_q) must be a multiple of k's (H_kv), 0, but is 4"},
      {small, BEND(p.o.extent[0] = 1), "o: extent 0 (B) must equal q's, 2, but is 1"},
      {small, BEND(p.o.extent[1] = 3), "o: extent 1 (H_q) must equal q's, 4, but is 3"},
      {small, BEND(p.o.extent[2] = 2), "o: extent 2 (N_q) must equal q's, 3, but is 2"},
      {small, BEND(p.o.extent[3] = 5), "o: extent 3 (D_v) must equal v's, 6, but is 5"},
      {small, BEND(p.lse.extent[2] = 2), "lse: extent 2 (N_q) must equal q's, 3, but is 2"},
      {small, BEND(p.mask = m.tensor(FFPA_FP32, {1, 1, 3, 5})), "mask: dtype must be bool, but is fp32"},
      {small, BEND(p.mask = m.tensor(FFPA_BOOL, {3, 5})), "mask: rank must be 4, but is 2"},
      {small, BEND(p.mask = m.tensor(FFPA_BOOL, {3, 1, 3, 5})), "mask: extent 0 must be 1 or B, 2, but is 3"},
      {small, BEND(p.mask = m.tensor(FFPA_BOOL, {2, 2, 3, 5})), "mask: extent 1 must be 1 or H_q, 4, but is 2"},
      {small, BEND(p.mask = m.tensor(FFPA_BOOL, {2, 4, 4, 5})), "mask: extent 2 must be 1 or N_q, 3, but is 4"},
      {small, BEND(p.bias = m.tensor(FFPA_FP32, {2, 4, 3, 6})), "bias: extent 3 must be 1 or N_kv, 5, but is 6"},
      {fp16, BEND(p.bias = m.tensor(FFPA_BF16, {2, 4, 3, 5})), "bias: dtype must be fp32 or q's, fp16, but is bf16"},
      {small, BEND(p.alibi_slopes = m.tensor(FFPA_FP16, {4})), "alibi_slopes: dtype must be fp32, but is fp16"},
      {small, BEND(p.alibi_slopes = m.tensor(FFPA_FP32, {2})),
       "alibi_slopes: extent 0 (H_q) must equal q's, 4, but is 2"},
      {small, BEND(p.alibi_slopes = m.tensor(FFPA_FP32, {1, 4})),
       "alibi_slopes: extent 0 (B) must equal the number of sequences, 2, but is 1"},
      {small, BEND(p.alibi_slopes = m.tensor(FFPA_FP32, {2, 4, 1})), "alibi_slopes: rank must be 1, but is 3"},
      {small, BEND(p.sinks = m.tensor(FFPA_FP32, {3})), "sinks: extent 0 (H_q) must equal q's, 4, but is 3"},
      {small, BEND(p.sinks = m.tensor(FFPA_BF16, {4})), "sinks: dtype must be fp32 or q's, fp32, but is bf16"},
      {small, BEND(p.dropout_state = m.tensor(FFPA_INT32, {2})), "dropout_state: dtype must be int64, but is int32"},
      {small, BEND(p.dropout_state = m.tensor(FFPA_INT64, {1})),
       "dropout_state: extent 0 (seed, offset) must be 2, but is 1"},
  });
}

TEST(Validation, Options) {
  run({
      {small, BEND(p.has_scale = 2), "has_scale: must be 0 or 1, but is 2"},
      {small, BEND(p.causal = -1), "causal: must be 0 or 1, but is -1"},
      {small, BEND(p.deterministic = 5), "deterministic: must be 0 or 1, but is 5"},
      {small, BEND(p.batch_invariant = 2), "batch_invariant: must be 0 or 1, but is 2"},
      {small, BEND(p.anchor = 2), "anchor: must be 0 (top left) or 1 (bottom right), but is 2"},
      {small, BEND(p.engine = 4), "engine: must be one of ffpa_engine, from 0 to 3, but is 4"},
      {small, BEND(p.has_scale = 1; p.scale = kNan), "scale: must be finite in fp32, but is nan"},
      {small, BEND(p.has_scale = 1; p.scale = kInf), "scale: must be finite in fp32, but is inf"},
      {small, BEND(p.has_scale = 1; p.scale = 1e300), "scale: must be finite in fp32, but is 1e+300"},
      {small, BEND(p.scale = kNan), ""},  // not read
      {small, BEND(p.softcap = -1), "softcap: must be 0 or a positive number that is finite in fp32, but is -1"},
      {small, BEND(p.softcap = kNan), "softcap: must be 0 or a positive number that is finite in fp32, but is nan"},
      {small, BEND(p.softcap = kInf), "softcap: must be 0 or a positive number that is finite in fp32, but is inf"},
      {small, BEND(p.dropout_p = 1.5), "dropout_p: must be from 0 to 1, but is 1.5"},
      {small, BEND(p.dropout_p = -0.5), "dropout_p: must be from 0 to 1, but is -0.5"},
      {small, BEND(p.dropout_p = kNan), "dropout_p: must be from 0 to 1, but is nan"},
      {small, BEND(p.window_left = -2), "window_left: must be at least -1, but is -2"},
      {small, BEND(p.window_right = -9), "window_right: must be at least -1, but is -9"},
      {small, BEND(p.window_right = INT64_MAX; p.window_left = INT64_MAX), ""},
      {small, BEND(p.max_seqlen_q = -1), "max_seqlen_q: must be at least 0, but is -1"},
      {small, BEND(p.max_seqlen_kv = -1), "max_seqlen_kv: must be at least 0, but is -1"},
      {small, BEND(p.num_splits = -1), "num_splits: must be from 0 to 1024, but is -1"},
      {small, BEND(p.num_threads = 5000), "num_threads: must be from 0 to 4096, but is 5000"},
      {small, BEND(p.kernel = "quantum"),
       "kernel: must name a kernel of this build (ffpa_kernel_at lists them), but is \"quantum\""},
      {small, BEND(p.kernel = "ref_bwd_loops"),
       "kernel: must name a forward kernel, but \"ref_bwd_loops\" is a backward kernel"},
      {small, BEND(p.kernel = "ref_fwd_loops"; p.engine = FFPA_ENGINE_CPU),
       "kernel: must belong to the engine asked for, cpu, but \"ref_fwd_loops\" belongs to ref"},
  });
}

TEST(Validation, PackedSequences) {
  run({
      {small, BEND(p.cu_seqlens_q = m.int32s({0, 3})),
       "q: extent 0 must be 1 with cu_seqlens_q (packed rows), but is 2"},
      {small, BEND(p.cu_seqlens_kv = m.int32s({0, 3})),
       "cu_seqlens_kv: must come with cu_seqlens_q: packed k and v need packed q"},
      {packed, BEND(p.cu_seqlens_q.dtype = FFPA_INT64), "cu_seqlens_q: dtype must be int32, but is int64"},
      {packed, BEND(p.cu_seqlens_q = m.int32s({})), "cu_seqlens_q: extent 0 (B + 1) must be at least 1, but is 0"},
      {packed, BEND(p.cu_seqlens_kv = m.int32s({0, 4})),
       "cu_seqlens_kv: extent 0 (B + 1) must equal cu_seqlens_q's, 3, but is 2"},
      {packed, BEND(ints(p.cu_seqlens_q)[0] = 1), "cu_seqlens_q: entry 0 must be 0, but is 1"},
      {packed, BEND(ints(p.cu_seqlens_q)[2] = 2),
       "cu_seqlens_q: entry 2 must be at least the one before it, 3, but is 2"},
      {packed, BEND(ints(p.cu_seqlens_q)[2] = 7), "cu_seqlens_q: entry 2 must be at most T_q, 6, but is 7"},
      {packed, BEND(ints(p.cu_seqlens_kv)[1] = -1),
       "cu_seqlens_kv: entry 1 must be at least the one before it, 0, but is -1"},
      {packed, BEND(ints(p.cu_seqlens_kv)[2] = 11), "cu_seqlens_kv: entry 2 must be at most T_kv, 10, but is 11"},
      {packed, BEND(p.k.extent[0] = p.v.extent[0] = 2; p.k.stride[0] = p.v.stride[0] = 0),
       "k: extent 0 must be 1 with cu_seqlens_kv (packed rows), but is 2"},
      {packed, BEND(p.cu_seqlens_kv = {}), "k: extent 0 (B) must equal the number of sequences, 2, but is 1"},
      {packed, BEND(p.max_seqlen_q = 2),
       "max_seqlen_q: must be at least every sequence's rows, 3 in sequence 0, but is 2"},
      {packed, BEND(p.max_seqlen_kv = 4),
       "max_seqlen_kv: must be at least every sequence's keys, 5 in sequence 1, but is 4"},
      {packed, BEND(p.seqlens_kv = m.int32s({4, 6})),
       "seqlens_kv: entry 1 must be from 0 to what its k and v hold, 5, but is 6"},
      {packed, BEND(p.mask = m.tensor(FFPA_BOOL, {2, 1, 2, 5})),
       "mask: extent 2 must be 1 or at least the longest sequence's N_q, 3, but is 2"},
      {packed, BEND(p.bias = m.tensor(FFPA_FP32, {2, 1, 3, 4})),
       "bias: extent 3 must be 1 or at least the longest sequence's N_kv, 5, but is 4"},
      {packed, BEND(p.block_table = m.int32s(2, 1, {0, 0})),
       "block_table: must be absent with cu_seqlens_kv: k and v are packed or paged, not both"},
      {packed, BEND(p.kv_batch_idx = m.int32s({0, 0})),
       "kv_batch_idx: must be absent with cu_seqlens_kv: packed k and v have one batch"},
      {packed, BEND(p.o.extent[2] = 5), "o: extent 2 (T_q) must equal q's, 6, but is 5"},
  });
}

TEST(Validation, LengthsAndTables) {
  run({
      {small, BEND(p.seqlens_kv = m.int32s({5})),
       "seqlens_kv: extent 0 (B) must equal the number of sequences, 2, but is 1"},
      {small, BEND(p.seqlens_kv = m.int32s({5, 6})),
       "seqlens_kv: entry 1 must be from 0 to what its k and v hold, 5, but is 6"},
      {small, BEND(p.seqlens_kv = m.int32s({-1, 5})),
       "seqlens_kv: entry 0 must be from 0 to what its k and v hold, 5, but is -1"},
      {small, BEND(p.max_seqlen_q = 2),
       "max_seqlen_q: must be at least every sequence's rows, 3 in sequence 0, but is 2"},
      {small, BEND(p.max_seqlen_kv = 4),
       "max_seqlen_kv: must be at least every sequence's keys, 5 in sequence 0, but is 4"},
      {small, BEND(p.max_seqlen_kv = 4; p.seqlens_kv = m.int32s({4, 0})), ""},
      {small, BEND(p.kv_batch_idx = m.int32s({0, 2})),
       "kv_batch_idx: entry 1 must be from 0 to k's last batch row, 1, but is 2"},
      {small, BEND(p.kv_batch_idx = m.int32s({0, 1, 0})),
       "kv_batch_idx: extent 0 (B) must equal the number of sequences, 2, but is 3"},
      {paged, BEND(p.kv_batch_idx = m.int32s({0, 1})),
       "kv_batch_idx: must be absent with block_table, which already says where each sequence lies"},
      {paged, BEND(p.block_table = m.int32s({0, 1})), "block_table: rank must be 2, but is 1"},
      {paged, BEND(p.block_table = m.int32s(1, 2, {0, 1})),
       "block_table: extent 0 (B) must equal the number of sequences, 2, but is 1"},
      {paged, BEND(ints(p.block_table)[1] = 4), "block_table: entry [0, 1] must be a page, from 0 to 3, but is 4"},
      {paged, BEND(ints(p.block_table)[3] = -1), "block_table: entry [1, 0] must be a page, from 0 to 3, but is -1"},
      {paged, BEND(ints(p.seqlens_kv)[0] = 9), "block_table: entry [0, 2] must be a page, from 0 to 3, but is 99"},
      {paged, BEND(ints(p.seqlens_kv)[0] = 10),
       "seqlens_kv: entry 0 must be from 0 to what its k and v hold, 9, but is 10"},
      {paged, BEND(p.seqlens_kv = {}; p.max_seqlen_kv = 8),
       "max_seqlen_kv: must be at least every sequence's keys, 9 in sequence 0, but is 8"},
      {paged, BEND(p.v.extent[2] = 2), "v: extent 2 (page rows) must equal k's, 3, but is 2"},
      {paged, BEND(p.v.extent[0] = 3), "v: extent 0 (P) must equal k's, 4, but is 3"},
      {paged, BEND(p.k.extent[2] = p.v.extent[2] = 0),
       "k: extent 2 (page rows) must be at least 1 with block_table, but is 0"},
      {paged, BEND(p.mask = m.tensor(FFPA_BOOL, {1, 1, 1, 4})),
       "mask: extent 3 must be 1 or at least the longest sequence's N_kv, 5, but is 4"},
  });
}

// Nothing behind a device pointer is touched: these point nowhere.
TEST(Validation, DeviceMemoryIsNotRead) {
  const auto f = packed();
  uintptr_t nowhere = 4096;
  for (ffpa_tensor* t : {&f->p.q, &f->p.k, &f->p.v, &f->p.o, &f->p.lse, &f->p.cu_seqlens_q, &f->p.cu_seqlens_kv}) {
    t->device_type = FFPA_CUDA;
    t->data = reinterpret_cast<void*>(nowhere += 4096);
  }
  ffpa_plan plan;
  f->p.engine = FFPA_ENGINE_REF;
  EXPECT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_NOT_SUPPORTED);
  EXPECT_NE(std::string(ffpa_last_error()).find("q: must lie in cpu memory, but lies in cuda memory"),
            std::string::npos)
      << ffpa_last_error();
  f->p.mask = f->memory.tensor(FFPA_BOOL, {2, 1, 3, 5});
  f->p.mask.device_type = FFPA_CUDA;
  EXPECT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_INVALID_ARGUMENT);
  EXPECT_STREQ(ffpa_last_error(), "max_seqlen_q: must be given with mask when lengths lie in device memory, but is 0");
}

// -------------------------------------------------------------------------------------------------------------
// backward

struct BackwardCase {
  std::function<void(Backward&)> bend;
  std::string text;
  ffpa_status status = FFPA_INVALID_ARGUMENT;
};

#define BEND_BACK(...)                               \
  [](Backward& b) {                                  \
    [[maybe_unused]] ffpa_backward_problem& p = b.p; \
    [[maybe_unused]] Memory& m = b.memory;           \
    __VA_ARGS__;                                     \
  }

TEST(Validation, Backward) {
  const std::vector<BackwardCase> cases = {
      {BEND_BACK(), ""},
      {BEND_BACK(p.dq = p.dk = {}), ""},
      {BEND_BACK(p.dout.stride[0] = p.dout.stride[1] = p.dout.stride[2] = p.dout.stride[3] = 0), ""},
      {BEND_BACK(p.dlse = m.tensor(FFPA_FP32, {2, 4, 3})), ""},
      {BEND_BACK(p.dq = p.dk = p.dv = {}; p.forward.bias = m.tensor(FFPA_FP32, {1, 4, 3, 1});
                 p.dbias = m.tensor(FFPA_FP32, {1, 4, 3, 1})),
       ""},
      {BEND_BACK(p.forward.sinks = m.tensor(FFPA_FP32, {4}); p.dsinks = m.tensor(FFPA_FP32, {4})), ""},
      {BEND_BACK(p.forward.o.stride[0] = 0), ""},  // o is read here
      {BEND_BACK(p.forward.struct_size = 0),
       "problem.forward.struct_size: must be " + std::to_string(sizeof(ffpa_forward_problem)) +
           " (set by ffpa_forward_problem_init), but is 0"},
      {BEND_BACK(p.struct_size = 1), "problem.struct_size: must be " + std::to_string(sizeof(ffpa_backward_problem)) +
                                         " (set by ffpa_backward_problem_init), but is 1"},
      {BEND_BACK(p.dq = p.dk = p.dv = {}), "dq, dk, dv, dbias, dsinks: at least one must be given, but all are absent"},
      {BEND_BACK(p.forward.lse = {}), "lse: must be given, but is absent"},
      {BEND_BACK(p.forward.o = {}), "o: must be given, but is absent"},
      {BEND_BACK(p.dout = {}), "dout: must be given, but is absent"},
      {BEND_BACK(p.dout.extent[2] = 2), "dout: extent 2 (N_q) must equal q's, 3, but is 2"},
      {BEND_BACK(p.dout.dtype = FFPA_BF16), "dout: dtype must be q's, fp32, but is bf16"},
      {BEND_BACK(p.dlse = m.tensor(FFPA_FP16, {2, 4, 3})), "dlse: dtype must be fp32 when q is fp32, but is fp16"},
      {BEND_BACK(p.dq.extent[3] = 7), "dq: extent 3 must equal q's, 8, but is 7"},
      {BEND_BACK(p.dk.dtype = FFPA_FP64), "dk: dtype must be k's, fp32, but is fp64"},
      {BEND_BACK(p.dv.extent[0] = 1), "dv: extent 0 must equal v's, 2, but is 1"},
      {BEND_BACK(p.dv.rank = 3), "dv: rank must be 4, but is 3"},
      {BEND_BACK(p.dk.stride[0] = 0),
       "dk: is written, so its strides must place elements without overlap, but extents are [2, 2, 5, 8] and strides "
       "[0, 40, 8, 1]"},
      {BEND_BACK(p.dk.data = p.dq.data),
       "dq: is written, so it must not share memory with dk, but both start at the same address"},
      {BEND_BACK(p.dk.data = static_cast<float*>(p.dv.data) + 6),
       "dk: is written, so it must not share memory with dv, but starts 24 bytes behind its start and meets it"},
      {BEND_BACK(p.dv.data = p.dout.data),
       "dv: is written, so it must not share memory with dout, but both start at the same address"},
      {BEND_BACK(p.dbias = m.tensor(FFPA_FP32, {1, 1, 3, 5})), "dbias: must be absent when bias is"},
      {BEND_BACK(p.dsinks = m.tensor(FFPA_FP32, {4})), "dsinks: must be absent when sinks is"},
      {BEND_BACK(p.forward.bias = m.tensor(FFPA_FP32, {1, 1, 3, 5}); p.dbias = m.tensor(FFPA_FP32, {2, 1, 3, 5})),
       "dbias: extent 0 must equal bias's, 1, but is 2"},
      {BEND_BACK(p.forward.k = p.dk = m.tensor(FFPA_FP32, {4, 2, 3, 8});
                 p.forward.v = p.dv = m.tensor(FFPA_FP32, {4, 2, 3, 6});
                 p.forward.block_table = m.int32s(2, 1, {0, 1})),
       "block_table: must be absent in the backward, which takes no paged k and v", FFPA_NOT_SUPPORTED},
  };
  for (const BackwardCase& c : cases) {
    SCOPED_TRACE(c.text);
    const auto b = backward();
    c.bend(*b);
    ffpa_plan plan;
    const ffpa_status status = ffpa_backward_plan(&b->p, &plan);
    if (c.text.empty()) {
      EXPECT_EQ(status, FFPA_OK) << ffpa_last_error();
    } else {
      EXPECT_EQ(status, c.status);
      EXPECT_EQ(ffpa_last_error(), c.text);
    }
  }
}

}  // namespace
}  // namespace ffpa::test
