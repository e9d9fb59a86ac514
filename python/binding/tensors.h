// Tensors between torch and the C ABI: ownership, views, allocation. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "ffpa/ffpa.h"
#include "torch_shim.h"

namespace ffpa::binding {

// torch prints its own text to stderr and keeps it from us, so this names the call only.
inline void check(AOTITorchError error, const char* call) {
  if (error) throw std::runtime_error(std::string("torch refused ") + call);
}

// An owned tensor, or none.
class Handle {
 public:
  Handle() = default;
  explicit Handle(AtenTensorHandle owned) : tensor_(owned) {}
  Handle(Handle&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~Handle() {
    if (tensor_) aoti_torch_delete_tensor_object(tensor_);
  }
  explicit operator bool() const { return tensor_ != nullptr; }
  AtenTensorHandle get() const { return tensor_; }
  StableIValue hand_over() { return reinterpret_cast<StableIValue>(std::exchange(tensor_, nullptr)); }

 private:
  AtenTensorHandle tensor_ = nullptr;
};

// The arguments of an op, taken from the stack in the order of its schema. Taking does not throw, so that whatever is
// refused later, everything is released.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  Handle tensor() { return Handle(reinterpret_cast<AtenTensorHandle>(*next_++)); }
  Handle optional_tensor() {
    const std::optional<StableIValue> value = optional();
    return value ? Handle(reinterpret_cast<AtenTensorHandle>(*value)) : Handle();
  }
  bool boolean() { return *next_++ & 0xff; }
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  double real() { return as_real(*next_++); }
  std::optional<double> optional_real() {
    const std::optional<StableIValue> value = optional();
    return value ? std::optional<double>(as_real(*value)) : std::nullopt;
  }
  StringHandle optional_string() {
    const std::optional<StableIValue> value = optional();
    return value ? reinterpret_cast<StringHandle>(*value) : nullptr;
  }

 private:
  std::optional<StableIValue> optional() {
    auto* boxed = reinterpret_cast<StableIValue*>(*next_++);
    if (!boxed) return std::nullopt;
    const StableIValue value = *boxed;
    delete boxed;  // torch made it with new
    return value;
  }
  static double as_real(StableIValue bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  StableIValue* next_;
};

// An owned string, or none.
class Text {
 public:
  explicit Text(StringHandle owned) : string_(owned) {}
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  ~Text() {
    if (string_) torch_delete_string(string_);
  }
  const char* c_str() const {  // null if none
    const char* text = nullptr;
    if (string_) check(torch_string_c_str(string_, &text), "a string's text");
    return text;
  }

 private:
  StringHandle string_;
};

inline int32_t dtype_of(const char* name, int32_t torch_dtype) {
  static const struct {
    int32_t torch, ours;
  } kNames[] = {
      {aoti_torch_dtype_float32(), FFPA_FP32}, {aoti_torch_dtype_bfloat16(), FFPA_BF16},
      {aoti_torch_dtype_float16(), FFPA_FP16}, {aoti_torch_dtype_float64(), FFPA_FP64},
      {aoti_torch_dtype_bool(), FFPA_BOOL},    {aoti_torch_dtype_int32(), FFPA_INT32},
      {aoti_torch_dtype_int64(), FFPA_INT64},  {aoti_torch_dtype_float8_e4m3fn(), FFPA_FP8_E4M3},
      {aoti_torch_dtype_int8(), FFPA_INT8},
  };
  for (const auto& known : kNames)
    if (known.torch == torch_dtype) return known.ours;
  throw std::runtime_error(std::string(name) +
                           ": dtype must be one that ffpa knows (fp64, fp32, fp16, bf16, bool, int32, int64), but is "
                           "torch's number " +
                           std::to_string(torch_dtype));
}

enum class Use { kRead, kWritten };

// The view of a tensor that the C ABI takes; all zero for none.
inline ffpa_tensor view(const char* name, const Handle& handle, Use use = Use::kRead) {
  ffpa_tensor t{};
  if (!handle) return t;
  static const int32_t cpu = aoti_torch_device_type_cpu();
  int64_t rank = 0;
  int64_t *extents = nullptr, *strides = nullptr;
  int32_t dtype = 0, device_type = 0;
  check(aoti_torch_get_dim(handle.get(), &rank), "a tensor's rank");
  check(aoti_torch_get_sizes(handle.get(), &extents), "a tensor's sizes");
  check(aoti_torch_get_strides(handle.get(), &strides), "a tensor's strides");
  check(aoti_torch_get_dtype(handle.get(), &dtype), "a tensor's dtype");
  check(aoti_torch_get_device_type(handle.get(), &device_type), "a tensor's device");
  if (rank < 1 || rank > FFPA_MAX_RANK)  // 0 would mean "absent" to the C ABI, and more it has no room for
    throw std::runtime_error(std::string(name) + ": must have from 1 to " + std::to_string(FFPA_MAX_RANK) +
                             " dimensions, but has " + std::to_string(rank));
  if (use == Use::kRead) {  // does not copy a copy-on-write tensor
    const void* data = nullptr;
    check(torch_get_const_data_ptr(handle.get(), &data), "a tensor's data");
    t.data = const_cast<void*>(data);
  } else {
    check(torch_get_mutable_data_ptr(handle.get(), &t.data), "a tensor's data");
  }
  t.dtype = dtype_of(name, dtype);
  if (device_type != cpu) {
    t.device_type = FFPA_CUDA;  // the ops are registered for these two
    check(aoti_torch_get_device_index(handle.get(), &t.device_index), "a tensor's device");
  }
  t.rank = static_cast<int32_t>(rank);
  std::memcpy(t.extent, extents, sizeof(int64_t) * rank);
  std::memcpy(t.stride, strides, sizeof(int64_t) * rank);
  return t;
}

inline Handle empty(const ffpa_tensor& on, int32_t rank, const int64_t* extent, const int64_t* stride, int32_t dtype) {
  static const int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
  AtenTensorHandle made = nullptr;
  check(aoti_torch_empty_strided(rank, extent, stride, dtype, on.device_type == FFPA_CPU ? cpu : cuda, on.device_index,
                                 &made),
        "memory");
  return Handle(made);
}

// What an output that nobody wants is returned as.
inline Handle nothing(const ffpa_tensor& on) {
  const int64_t extent = 0, stride = 1;
  return empty(on, 1, &extent, &stride, aoti_torch_dtype_float32());
}

// Strides of a tensor of the extents given, without holes, whose dimensions lie in memory in the order of `like`'s. Where
// `like` is broadcast (a stride of 0 over more than one element) it has no such order: then row-major. The fakes in
// python/ffpa/_ops.py follow the same rule.
inline void dense_strides(const ffpa_tensor& like, const int64_t* extent, int64_t* stride) {
  int order[FFPA_MAX_RANK];  // outermost first
  bool broadcast = false;
  for (int axis = 0; axis < like.rank; ++axis) {
    broadcast |= like.stride[axis] == 0 && like.extent[axis] > 1;
    int place = axis;
    for (; place > 0 && like.stride[order[place - 1]] < like.stride[axis]; --place) order[place] = order[place - 1];
    order[place] = axis;
  }
  int64_t step = 1;
  for (int place = like.rank - 1; place >= 0; --place) {
    const int axis = broadcast ? place : order[place];
    stride[axis] = step;
    step *= extent[axis] > 1 ? extent[axis] : 1;
  }
}

inline Handle dense_like(const ffpa_tensor& like, const int64_t* extent, int32_t dtype) {
  int64_t stride[FFPA_MAX_RANK];
  dense_strides(like, extent, stride);
  return empty(like, like.rank, extent, stride, dtype);
}

inline int32_t torch_dtype(const Handle& of) {
  int32_t dtype = 0;
  check(aoti_torch_get_dtype(of.get(), &dtype), "a tensor's dtype");
  return dtype;
}

}  // namespace ffpa::binding
