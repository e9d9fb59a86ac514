// SPDX-License-Identifier: Apache-2.0
#include "api/checks.h"

#include <algorithm>
#include <array>
#include <span>

namespace ffpa {
namespace {

std::string list(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += words(i ? ", " : "", values[i]);
  return text + "]";
}

// Extents as a work count and strides as byte offsets must stay within int64: every engine relies on it and adds up
// without checks.
void check_sizes(const Arg& arg) {
  const ffpa_tensor& t = arg.t;
  const int64_t bytes = dtype_bytes(t.dtype);
  int64_t count = bytes, reach = bytes;
  for (int axis = 0; axis < t.rank; ++axis) {
    int64_t span = 0;
    if (__builtin_mul_overflow(count, std::max<int64_t>(t.extent[axis], 1), &count))
      refuse(arg.name, ": extents must multiply to less than 2^63 bytes, but are ", list(t.extent, t.rank));
    if (__builtin_mul_overflow(t.extent[axis], t.stride[axis], &span) || __builtin_mul_overflow(span, bytes, &span) ||
        __builtin_add_overflow(reach, span, &reach))
      refuse(arg.name, ": extents times strides must stay below 2^63 bytes, but extents are ", list(t.extent, t.rank),
             " and strides ", list(t.stride, t.rank));
  }
}

// Sorted by stride, each axis must step over all that the smaller ones reach. Interleaved layouts that would pass a
// finer test are refused too: no tensor library makes them.
void check_no_overlap(const Arg& arg) {
  const ffpa_tensor& t = arg.t;
  int axes[FFPA_MAX_RANK] = {}, count = 0;  // by stride, smallest first
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.extent[axis] == 0) return;
    if (t.extent[axis] == 1) continue;
    int at = count++;
    for (; at > 0 && t.stride[axes[at - 1]] > t.stride[axis]; --at) axes[at] = axes[at - 1];
    axes[at] = axis;
  }
  int64_t reach = 1;
  for (int i = 0; i < count; ++i) {
    const int axis = axes[i];
    if (t.stride[axis] < reach)
      refuse(arg.name, ": is written, so its strides must place elements without overlap, but extents are ",
             list(t.extent, t.rank), " and strides ", list(t.stride, t.rank));
    reach += (t.extent[axis] - 1) * t.stride[axis];
  }
}

// Bytes that may be stepped over from 0 to `most` times.
struct Step {
  uint64_t bytes, most;
};

// Whether some choice of steps, largest first, covers `distance` exactly; `reach` is all of them taken. What the smaller steps reach
// bounds how often the first is taken, so where strides nest two choices are left on each level. `budget` counts choices; when it is
// spent the answer is no.
bool covers(std::span<const Step> steps, uint64_t reach, uint64_t distance, int* budget) {
  if (distance == 0 || distance > reach) return distance == 0;
  const auto [bytes, most] = steps.front();
  const uint64_t rest = reach - bytes * most;
  const uint64_t fewest = distance > rest ? (distance - rest - 1) / bytes + 1 : 0;
  for (uint64_t n = std::min(most, distance / bytes) + 1; n-- > fewest;) {
    if (--*budget < 0) return false;
    if (covers(steps.subspan(1), rest, distance - n * bytes, budget)) return true;
  }
  return false;
}

uint64_t address(const ffpa_tensor& t) { return reinterpret_cast<uintptr_t>(t.data); }

// From the first byte of a tensor with elements to its last.
uint64_t span_bytes(const ffpa_tensor& t) {
  int64_t last = 0;
  for (int axis = 0; axis < t.rank; ++axis) last += (t.extent[axis] - 1) * t.stride[axis];
  return static_cast<uint64_t>((last + 1) * dtype_bytes(t.dtype) - 1);
}

// Whether two tensors with elements have a byte in common: whether steps of a forwards and of b backwards lead from a's first byte to
// b's last. Told exactly wherever both have the strides of one buffer (views that interleave, such as q and o in [N, 4, H, D]);
// strides that leave more than kBudget choices count as apart.
bool share_a_byte(const ffpa_tensor& a, const ffpa_tensor& b) {
  constexpr int kBudget = 2000;
  const uint64_t span_a = span_bytes(a), span_b = span_bytes(b);
  if (address(a) + span_a < address(b) || address(b) + span_b < address(a)) return false;
  std::array<Step, 2 * FFPA_MAX_RANK + 1> steps;  // one a stride, and one over the bytes of an element
  size_t count = 0;
  const auto add = [&](int64_t bytes, int64_t most) {
    if (bytes == 0 || most == 0) return;
    const Step step{static_cast<uint64_t>(bytes), static_cast<uint64_t>(most)};
    const auto at =
        std::find_if(steps.begin(), steps.begin() + count, [&](const Step& s) { return s.bytes <= step.bytes; });
    if (at != steps.begin() + count && at->bytes == step.bytes) {
      at->most += step.most;
      return;
    }
    std::move_backward(at, steps.begin() + count, steps.begin() + count + 1);
    *at = step;
    ++count;
  };
  for (const ffpa_tensor* t : {&a, &b}) {
    const int64_t element = dtype_bytes(t->dtype);
    add(1, element - 1);
    for (int axis = 0; axis < t->rank; ++axis) add(t->stride[axis] * element, t->extent[axis] - 1);
  }
  int budget = kBudget;
  return covers({steps.data(), count}, span_a + span_b, address(b) + span_b - address(a), &budget);
}

}  // namespace

bool given(const Arg& arg) {
  const ffpa_tensor& t = arg.t;
  if (t.rank == 0 && (t.data || t.dtype != FFPA_DTYPE_NONE))
    refuse(arg.name, ": rank must be at least 1 (an absent tensor is all zero), but is 0");
  return present(t);
}

void check_given(const Arg& arg) {
  if (!given(arg)) refuse(arg.name, ": must be given, but is absent");
}

void check_absent(const Arg& arg, const char* rule) {
  if (given(arg)) refuse(arg.name, ": ", rule);
}

void check_tensor(const Arg& arg, int rank, Use use, const Arg& device) {
  const ffpa_tensor& t = arg.t;
  check_given(arg);
  if (t.rank != rank) refuse(arg.name, ": rank must be ", rank, ", but is ", t.rank);
  if (t.device_type != FFPA_CPU && t.device_type != FFPA_CUDA)
    refuse(arg.name, ": device_type must be 0 (cpu) or 1 (cuda), but is ", t.device_type);
  if (t.device_type == FFPA_CPU ? t.device_index != 0 : t.device_index < 0)
    refuse(arg.name, ": device_index must be ", t.device_type == FFPA_CPU ? "0 on the cpu" : "at least 0", ", but is ",
           t.device_index);
  if (t.device_type != device.t.device_type || t.device_index != device.t.device_index)
    refuse(arg.name, ": must lie on ", device.name, "'s device, ", device_name(device.t.device_type), " ",
           device.t.device_index, ", but lies on ", device_name(t.device_type), " ", t.device_index);
  if (dtype_bytes(t.dtype) == 0 && t.dtype != FFPA_FP4_E2M1)
    refuse(arg.name, ": dtype must be one of ffpa_dtype, but is ", t.dtype);
  bool empty = false;
  for (int axis = 0; axis < rank; ++axis) {
    if (t.extent[axis] < 0 || t.extent[axis] > INT32_MAX)
      refuse(arg.name, ": extent ", axis, " must be from 0 to 2^31 - 1, but is ", t.extent[axis]);
    if (t.stride[axis] < 0) refuse(arg.name, ": stride ", axis, " must be at least 0, but is ", t.stride[axis]);
    empty |= t.extent[axis] == 0;
  }
  check_sizes(arg);
  if (!t.data && !empty)
    refuse(arg.name, ": data must not be null unless an extent is 0, but extents are ", list(t.extent, rank));
  if (const int64_t bytes = dtype_bytes(t.dtype); bytes > 1 && reinterpret_cast<uintptr_t>(t.data) % bytes != 0)
    refuse(arg.name, ": data must be aligned to its dtype's ", bytes, " bytes, but is off by ",
           reinterpret_cast<uintptr_t>(t.data) % bytes);
  if (use == Use::kWritten) check_no_overlap(arg);
}

void check_dtype(const Arg& arg, std::initializer_list<int32_t> allowed, const char* rule) {
  if (std::find(allowed.begin(), allowed.end(), arg.t.dtype) == allowed.end())
    refuse(arg.name, ": dtype must be ", rule, ", but is ", dtype_name(arg.t.dtype));
}

void check_dtype_of(const Arg& arg, const Arg& other) {
  if (arg.t.dtype != other.t.dtype)
    refuse(arg.name, ": dtype must be ", other.name, "'s, ", dtype_name(other.t.dtype), ", but is ",
           dtype_name(arg.t.dtype));
}

void check_fp32_or_dtype_of(const Arg& arg, const Arg& other) {
  if (arg.t.dtype != FFPA_FP32 && arg.t.dtype != other.t.dtype)
    refuse(arg.name, ": dtype must be fp32 or ", other.name, "'s, ", dtype_name(other.t.dtype), ", but is ",
           dtype_name(arg.t.dtype));
}

void check_extent(const Arg& arg, int axis, const char* symbol, const char* whose, int64_t wanted) {
  if (arg.extent(axis) != wanted)
    refuse(arg.name, ": extent ", axis, " (", symbol, ") must equal ", whose, ", ", wanted, ", but is ",
           arg.extent(axis));
}

void check_broadcast(const Arg& arg, int axis, const char* symbol, int64_t wanted) {
  if (arg.extent(axis) != 1 && arg.extent(axis) != wanted)
    refuse(arg.name, ": extent ", axis, " must be 1 or ", symbol, ", ", wanted, ", but is ", arg.extent(axis));
}

void check_flag(const char* name, int32_t value) {
  if (value != 0 && value != 1) refuse(name, ": must be 0 or 1, but is ", value);
}

void check_range(const char* name, int64_t value, int64_t lowest, int64_t highest) {
  if (value < lowest || value > highest) {
    if (highest == INT64_MAX) refuse(name, ": must be at least ", lowest, ", but is ", value);
    refuse(name, ": must be from ", lowest, " to ", highest, ", but is ", value);
  }
}

void check_apart(const Arg& written, const Arg& other) {
  if (&other.t == &written.t || !has_elements(written.t) || !has_elements(other.t)) return;
  if (!share_a_byte(written.t, other.t)) return;
  const uint64_t at = address(written.t), from = address(other.t);
  const std::string rule = words(written.name, ": is written, so it must not share memory with ", other.name, ", but ");
  if (at == from) refuse(rule, "both start at the same address");
  refuse(rule, "starts ", at > from ? at - from : from - at, " bytes ", at > from ? "behind" : "before",
         " its start and meets it");
}

void give_address(ffpa_tensor& t) {
  alignas(256) static char nothing[256];
  if (present(t) && !t.data) t.data = nothing;
}

void check_int32_vector(const Arg& arg, const char* symbol, const char* whose, int64_t extent, const Arg& device) {
  check_tensor(arg, 1, Use::kRead, device);
  check_dtype(arg, {FFPA_INT32}, "int32");
  check_extent(arg, 0, symbol, whose, extent);
}

void check_entries(const Arg& arg, int64_t highest, const char* bound) {
  if (!readable(arg)) return;
  for (int64_t b = 0; b < arg.extent(0); ++b)
    if (const int64_t value = int32_at(arg.t, b); value < 0 || value > highest)
      refuse(arg.name, ": entry ", b, " must be from 0 to ", bound, ", ", highest, ", but is ", value);
}

void check_block_table(const Arg& table, const Arg& pages, const char* whose, int64_t n_seqs, const Arg& device) {
  check_tensor(table, 2, Use::kRead, device);
  check_dtype(table, {FFPA_INT32}, "int32");
  check_extent(table, 0, "B", whose, n_seqs);
  if (pages.extent(2) < 1) refuse(pages.name, ": extent 2 (page rows) must be at least 1 with block_table, but is 0");
}

void check_pages(const Arg& table, int64_t b, int64_t rows_in_use, int64_t page_rows, int64_t pages) {
  if (!readable(table)) return;
  const int32_t* row = static_cast<const int32_t*>(table.t.data) + b * table.t.stride[0];
  for (int64_t i = 0; i * page_rows < rows_in_use; ++i)
    if (const int64_t page = row[i * table.t.stride[1]]; page < 0 || page >= pages)
      refuse(table.name, ": entry [", b, ", ", i, "] must be a page, from 0 to ", pages - 1, ", but is ", page);
}

}  // namespace ffpa
