// ffpa.hpp: C++20 over ffpa.h, header-only. SPDX-License-Identifier: Apache-2.0
//
//   std::vector<float> q(...), k(...), v(...), o(...);
//   ffpa::ForwardProblem p;                          // every option at its default; fields as in ffpa.h
//   p.q = ffpa::tensor(q, {B, H_q, N_q, D_qk});      // row-major; strides may be given, in elements
//   p.k = ffpa::tensor(k, {B, H_kv, N_kv, D_qk});
//   p.v = ffpa::tensor(v, {B, H_kv, N_kv, D_v});
//   p.o = ffpa::tensor(o, {B, H_q, N_q, D_v});
//   p.causal = 1;
//   ffpa::run(p);                                    // plan, workspace and run in one
//
// In a loop, plan once and keep the workspace:
//   const ffpa_plan plan = ffpa::plan(p);
//   ffpa::Workspace workspace;
//   for (...) ffpa::run(p, plan, workspace);
//
// Errors: every function that can fail throws ffpa::Error, whose what() names argument, rule and value, and whose
// status() is the C status. Nothing was written then. Memory behind a tensor belongs to the caller and must outlive the
// runs that use it.
#ifndef FFPA_FFPA_HPP_
#define FFPA_FFPA_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ffpa/ffpa.h"

namespace ffpa {

// ------------------------------------------------------------------------------------------------------------ errors

class Error : public std::runtime_error {
 public:
  Error(ffpa_status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  ffpa_status status() const noexcept { return status_; }

 private:
  ffpa_status status_;
};

// Throws unless FFPA_OK.
inline void check(ffpa_status status) {
  if (status != FFPA_OK) throw Error(status, ffpa_last_error());
}

// ----------------------------------------------------------------------------------------------------------- tensors

// 16-bit floats by their bits; how they are computed with is the caller's business.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// The ffpa_dtype of a C++ type. Specialise it for a 16-bit type of your own.
template <class T>
inline constexpr ffpa_dtype dtype_of = FFPA_DTYPE_NONE;
template <>
inline constexpr ffpa_dtype dtype_of<double> = FFPA_FP64;
template <>
inline constexpr ffpa_dtype dtype_of<float> = FFPA_FP32;
template <>
inline constexpr ffpa_dtype dtype_of<Half> = FFPA_FP16;
template <>
inline constexpr ffpa_dtype dtype_of<BFloat16> = FFPA_BF16;
template <>
inline constexpr ffpa_dtype dtype_of<bool> = FFPA_BOOL;
template <>
inline constexpr ffpa_dtype dtype_of<std::int32_t> = FFPA_INT32;
template <>
inline constexpr ffpa_dtype dtype_of<std::int64_t> = FFPA_INT64;

template <class T>
concept Element = dtype_of<std::remove_cv_t<T>> != FFPA_DTYPE_NONE;

// Where memory lies. The default is the CPU.
struct Device {
  ffpa_device_type type = FFPA_CPU;
  std::int32_t index = 0;
};

// A view of memory at `data`: 1 to 4 extents; strides in elements, row-major if left out. Which tensors are written
// ffpa.h says: the others may be const.
template <Element T>
ffpa_tensor tensor(T* data, std::initializer_list<std::int64_t> extents,
                   std::initializer_list<std::int64_t> strides = {}, Device device = {}) {
  if (extents.size() < 1 || extents.size() > FFPA_MAX_RANK)
    throw Error(FFPA_INVALID_ARGUMENT, "tensor: must have 1 to 4 extents, but has " + std::to_string(extents.size()));
  if (strides.size() != 0 && strides.size() != extents.size())
    throw Error(FFPA_INVALID_ARGUMENT, "tensor: must have as many strides as extents, " +
                                           std::to_string(extents.size()) + ", but has " +
                                           std::to_string(strides.size()));
  ffpa_tensor t{};
  t.data = const_cast<std::remove_cv_t<T>*>(data);
  t.dtype = dtype_of<std::remove_cv_t<T>>;
  t.device_type = device.type;
  t.device_index = device.index;
  for (const std::int64_t extent : extents) t.extent[t.rank++] = extent;
  std::int64_t step = 1;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    t.stride[axis] = strides.size() ? strides.begin()[axis] : step;
    if (__builtin_mul_overflow(step, t.extent[axis], &step))
      throw Error(FFPA_INVALID_ARGUMENT, "tensor: extents must multiply to less than 2^63");
  }
  return t;
}

// The same of a vector, array or span on the CPU, whose size is held against what the extents and strides reach.
template <std::ranges::contiguous_range Range>
  requires Element<std::ranges::range_value_t<Range>>
ffpa_tensor tensor(Range&& range, std::initializer_list<std::int64_t> extents,
                   std::initializer_list<std::int64_t> strides = {}) {
  const ffpa_tensor t = tensor(std::ranges::data(range), extents, strides);
  std::int64_t reach = 1;
  for (int axis = 0; axis < t.rank; ++axis) {
    std::int64_t span = 0;
    if (t.extent[axis] <= 0) return t;  // empty, or refused by validation
    if (__builtin_mul_overflow(t.extent[axis] - 1, t.stride[axis], &span) ||
        __builtin_add_overflow(reach, span, &reach))
      reach = INT64_MAX;
  }
  const auto size = static_cast<std::uint64_t>(std::ranges::size(range));
  if (static_cast<std::uint64_t>(reach) > size)
    throw Error(FFPA_INVALID_ARGUMENT, "tensor: extents and strides must stay within the range's " +
                                           std::to_string(size) + " elements, but reach " + std::to_string(reach));
  return t;
}

// ---------------------------------------------------------------------------------------------------------- problems

// The C structs with their defaults set; shapes and options are described in ffpa.h.
struct ForwardProblem : ffpa_forward_problem {
  ForwardProblem() { ffpa_forward_problem_init(this); }
};
struct BackwardProblem : ffpa_backward_problem {
  BackwardProblem() { ffpa_backward_problem_init(this); }
};
struct AppendProblem : ffpa_append_problem {
  AppendProblem() { ffpa_append_problem_init(this); }
};

// Host memory for runs: aligned to 256 bytes, grows when asked for more, freed with this object. Not for two runs at a
// time.
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(std::size_t bytes) { at_least(bytes); }
  // Memory of at least `bytes` bytes; nullptr for 0 while none was asked for. Contents are not kept when it grows.
  void* at_least(std::size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;
      memory_.reset(::operator new(bytes, kAlignment));
      bytes_ = bytes;
    }
    return memory_.get();
  }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  struct Free {
    void operator()(void* p) const noexcept { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t bytes_ = 0;
};

// ------------------------------------------------------------------------------------------------------ plan and run

// Validates, picks the kernel, states workspace_bytes.
inline ffpa_plan plan(const ffpa_forward_problem& problem) {
  ffpa_plan p;
  check(ffpa_forward_plan(&problem, &p));
  return p;
}
inline ffpa_plan plan(const ffpa_backward_problem& problem) {
  ffpa_plan p;
  check(ffpa_backward_plan(&problem, &p));
  return p;
}

// With memory of the caller's: plan.workspace_bytes bytes, 256-byte aligned, on the problem's device. `stream`: a
// cudaStream_t.
inline void run(const ffpa_forward_problem& problem, const ffpa_plan& plan, std::span<std::byte> workspace,
                void* stream = nullptr) {
  check(ffpa_forward_run(&problem, &plan, workspace.data(), workspace.size(), stream));
}
inline void run(const ffpa_backward_problem& problem, const ffpa_plan& plan, std::span<std::byte> workspace,
                void* stream = nullptr) {
  check(ffpa_backward_run(&problem, &plan, workspace.data(), workspace.size(), stream));
}

// On the CPU, with a workspace that grows as needed.
template <class Problem>
  requires std::is_base_of_v<ffpa_forward_problem, Problem> || std::is_base_of_v<ffpa_backward_problem, Problem>
void run(const Problem& problem, const ffpa_plan& plan, Workspace& workspace) {
  void* memory = workspace.at_least(plan.workspace_bytes);
  run(problem, plan, std::span(static_cast<std::byte*>(memory), workspace.bytes()));
}

// On the CPU, once.
template <class Problem>
  requires std::is_base_of_v<ffpa_forward_problem, Problem> || std::is_base_of_v<ffpa_backward_problem, Problem>
void run(const Problem& problem) {
  Workspace workspace;
  run(problem, plan(problem), workspace);
}

// What would run and why every better kernel was refused, a line each; an invalid problem is explained by its error.
inline std::string explain(const ffpa_forward_problem& problem) {
  std::string text(ffpa_forward_explain(&problem, nullptr, 0) - 1, '\0');
  ffpa_forward_explain(&problem, text.data(), text.size() + 1);
  return text;
}
inline std::string explain(const ffpa_backward_problem& problem) {
  std::string text(ffpa_backward_explain(&problem, nullptr, 0) - 1, '\0');
  ffpa_backward_explain(&problem, text.data(), text.size() + 1);
  return text;
}

// Rows into a K/V cache; see ffpa_append_problem.
inline void append(const ffpa_append_problem& problem, void* stream = nullptr) { check(ffpa_append(&problem, stream)); }

// ----------------------------------------------------------------------------------------------------- build and
// machine

// Every kernel of this build, best first within a pass.
inline std::vector<ffpa_kernel_info> kernels() {
  std::vector<ffpa_kernel_info> all(static_cast<std::size_t>(ffpa_kernel_count()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].struct_size = sizeof(ffpa_kernel_info);
    check(ffpa_kernel_at(static_cast<int>(i), &all[i]));
  }
  return all;
}

inline std::vector<ffpa_device_info> devices(ffpa_device_type type) {
  std::vector<ffpa_device_info> all(static_cast<std::size_t>(ffpa_device_count(type)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].struct_size = sizeof(ffpa_device_info);
    check(ffpa_device_at(type, static_cast<int>(i), &all[i]));
  }
  return all;
}

// "0.1.0" of the library that is loaded.
inline std::string version() {
  const int v = ffpa_version();
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

}  // namespace ffpa
#endif  // FFPA_FFPA_HPP_
