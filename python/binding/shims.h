// The part of torch's stable C interface that the binding uses, declared here so that building needs no torch.
// All of it is in torch 2.10 and later (torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h). The
// opaque names are torch's own, so tests/binding/drift.cc can include this file and then torch's headers: a wrong
// declaration does not compile. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using AOTITorchError = int32_t;
// An argument or result of a boxed kernel: a number's bits, a tensor handle, or for an optional a pointer to one (0 =
// none).
using StableIValue = uint64_t;

extern "C" {
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* result);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** result);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* result);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* result);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* result);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* result);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** result);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** result);
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_uint8();
AOTITorchError aoti_torch_library_init_fragment(const char* ns, const char* file, uint32_t line,
                                                TorchLibraryHandle* result);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line,
                                            TorchLibraryHandle* result);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t), uint64_t built_for);
AOTITorchError torch_get_num_threads(uint32_t* result);
}
