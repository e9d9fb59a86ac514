// Rules of a single tensor or number, each worded with argument, rule and value. SPDX-License-Identifier: Apache-2.0
//
// A broken rule throws Refused, so that the rules of validate*.cc read as a list; `worded` turns it into a Status.
// Nothing of it leaves src/api.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "core/kernel.h"
#include "core/problem.h"
#include "core/words.h"

namespace ffpa {

struct Refused {
  Status status;
};

template <class... Pieces>
[[noreturn]] void refuse(const Pieces&... pieces) {
  throw Refused{{FFPA_INVALID_ARGUMENT, words(pieces...)}};
}
template <class... Pieces>
[[noreturn]] void not_supported(const Pieces&... pieces) {
  throw Refused{{FFPA_NOT_SUPPORTED, words(pieces...)}};
}

template <class Rules>
Status worded(Rules&& rules) {
  try {
    std::forward<Rules>(rules)();
    return {};
  } catch (Refused& refused) {
    return std::move(refused.status);
  }
}

// A tensor with the name the caller knows it by.
struct Arg {
  const char* name;
  const ffpa_tensor& t;
  int64_t extent(int axis) const { return t.extent[axis]; }
};

enum class Use { kRead, kWritten };

// Rank, extents, strides, null data, alignment to the element, device. Call it first: the other rules rely on it.
// `device`: the tensor whose device this one must share (q).
void check_tensor(const Arg& arg, int rank, Use use, const Arg& device);
// Absent, and not half filled in.
bool given(const Arg& arg);
void check_given(const Arg& arg);
void check_absent(const Arg& arg, const char* rule);
void check_dtype(const Arg& arg, std::initializer_list<int32_t> allowed, const char* rule);
void check_dtype_of(const Arg& arg, const Arg& other);          // "k: dtype must be q's, fp32, but is bf16"
void check_fp32_or_dtype_of(const Arg& arg, const Arg& other);  // "bias: dtype must be fp32 or q's, fp16, but is bf16"
// "k: extent 3 (D_qk) must equal q's, 64, but is 32"
void check_extent(const Arg& arg, int axis, const char* symbol, const char* whose, int64_t wanted);
// The same for an axis that may be 1 (broadcast).
void check_broadcast(const Arg& arg, int axis, const char* symbol, int64_t wanted);
void check_flag(const char* name, int32_t value);
void check_range(const char* name, int64_t value, int64_t lowest, int64_t highest);
// A written tensor must not share a byte with another one, as far as that can be told cheaply (checks.cc says how far).
void check_apart(const Arg& written, const Arg& other);
// An empty tensor may come with a null pointer; engines add strides to pointers before they look at extents, so it gets
// an address.
void give_address(ffpa_tensor& t);

// Host-readable int32 vectors. False if the values cannot be read here (device memory).
inline bool readable(const Arg& arg) { return present(arg.t) && arg.t.device_type == FFPA_CPU; }

// The rules of cu_seqlens, seqlens, tables: shared by attention and append.
void check_int32_vector(const Arg& arg, const char* symbol, const char* whose, int64_t extent, const Arg& device);
// Values of an int32 [B] vector in [0, highest]; `bound` words the limit.
void check_entries(const Arg& arg, int64_t highest, const char* bound);
// block_table [B, pages per sequence] over `pages` [P, H_kv, page rows, D].
void check_block_table(const Arg& table, const Arg& pages, const char* whose, int64_t n_seqs, const Arg& device);
// The entries of block_table that hold the first `rows_in_use` keys of sequence b must be pages.
void check_pages(const Arg& table, int64_t b, int64_t rows_in_use, int64_t page_rows, int64_t pages);

}  // namespace ffpa
