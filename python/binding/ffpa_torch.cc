// libffpa_torch.so: ffpa's ops in torch's registry. SPDX-License-Identifier: Apache-2.0
//
// A thin layer: torch's arguments become an ffpa problem, outputs and workspace come from torch's allocator, libffpa
// does the rest. Fakes, autograd and everything that a person calls are in python/ffpa. Tensors are [B, H, N, D] as in
// ffpa.h.
//
// A boxed kernel gets an array of StableIValues: it owns the tensors in it (Handle) and the boxes of optionals, and
// hands over the results in the array's first places. An exception becomes a RuntimeError with the text of
// ffpa_last_error().
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "ffpa/ffpa.h"
#include "shims.h"

namespace {

void check(AOTITorchError error, const char* what) {
  if (error) throw std::runtime_error(std::string("ffpa: torch refused ") + what);
}

void check(ffpa_status status) {
  if (status == FFPA_OK) return;
  const char* kind =
      status == FFPA_NOT_SUPPORTED ? "not supported: " : "";  // _ops.py turns it into NotImplementedError
  throw std::runtime_error(kind + std::string(ffpa_last_error()));
}

// Owns a tensor.
class Handle {
 public:
  Handle() = default;
  explicit Handle(AtenTensorHandle tensor) : tensor_(tensor) {}
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

// Walks the arguments of a boxed kernel in the order of the schema.
class Arguments {
 public:
  explicit Arguments(StableIValue* values) : next_(values) {}
  Handle tensor() { return Handle(reinterpret_cast<AtenTensorHandle>(*next_++)); }
  Handle optional_tensor() {
    auto* box = reinterpret_cast<StableIValue*>(*next_++);
    if (!box) return Handle();
    Handle tensor(reinterpret_cast<AtenTensorHandle>(*box));
    delete box;
    return tensor;
  }
  double real() {
    double value;
    std::memcpy(&value, next_++, sizeof value);
    return value;
  }
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  bool flag() { return *next_++ & 0xFF; }

 private:
  StableIValue* next_;
};

int32_t dtype_of_torch(int32_t dtype) {
  static const int32_t names[][2] = {{aoti_torch_dtype_float64(), FFPA_FP64}, {aoti_torch_dtype_float32(), FFPA_FP32},
                                     {aoti_torch_dtype_float16(), FFPA_FP16}, {aoti_torch_dtype_bfloat16(), FFPA_BF16},
                                     {aoti_torch_dtype_bool(), FFPA_BOOL},    {aoti_torch_dtype_int32(), FFPA_INT32},
                                     {aoti_torch_dtype_int64(), FFPA_INT64}};
  for (const auto& [torch, ours] : names)
    if (torch == dtype) return ours;
  return FFPA_DTYPE_NONE;
}

int32_t dtype_to_torch(int32_t dtype) {
  switch (dtype) {
    case FFPA_FP64: return aoti_torch_dtype_float64();
    case FFPA_FP32: return aoti_torch_dtype_float32();
    case FFPA_FP16: return aoti_torch_dtype_float16();
    default: return aoti_torch_dtype_bfloat16();
  }
}

ffpa_tensor view(const char* name, const Handle& handle) {
  ffpa_tensor t{};
  if (!handle) return t;
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  check(aoti_torch_get_dim(handle.get(), &rank), name);
  check(aoti_torch_get_sizes(handle.get(), &sizes), name);
  check(aoti_torch_get_strides(handle.get(), &strides), name);
  check(aoti_torch_get_dtype(handle.get(), &dtype), name);
  check(aoti_torch_get_device_type(handle.get(), &t.device_type), name);
  check(aoti_torch_get_device_index(handle.get(), &t.device_index), name);
  check(aoti_torch_get_data_ptr(handle.get(), &t.data), name);
  if (rank < 1 || rank > FFPA_MAX_RANK)
    throw std::runtime_error(std::string(name) + ": rank must be from 1 to 4, but is " + std::to_string(rank));
  t.dtype = dtype_of_torch(dtype);
  if (t.dtype == FFPA_DTYPE_NONE)
    throw std::runtime_error(std::string(name) +
                             ": dtype must be one that ffpa knows (fp64, fp32, fp16, bf16, bool, int32, " +
                             "int64), but is torch's number " + std::to_string(dtype));
  if (t.device_type == FFPA_CPU) t.device_index = 0;
  t.rank = static_cast<int32_t>(rank);
  std::copy_n(sizes, rank, t.extent);
  std::copy_n(strides, rank, t.stride);
  return t;
}

// A new tensor and its view.
struct Output {
  Handle handle;
  ffpa_tensor t{};
};

Output empty(const char* name, ffpa_tensor t) {
  Output out{{}, t};
  AtenTensorHandle tensor = nullptr;
  check(aoti_torch_empty_strided(t.rank, t.extent, t.stride, dtype_to_torch(t.dtype), t.device_type, t.device_index,
                                 &tensor),
        name);
  out.handle = Handle(tensor);
  check(aoti_torch_get_data_ptr(tensor, &out.t.data), name);
  return out;
}

// Dense strides in the order of memory that `like` has; _ops.py computes the same for fakes. Axes that say nothing
// about the order (stride 0 or extent 1) stay where they are.
ffpa_tensor dense_like(ffpa_tensor like) {
  std::array<int, FFPA_MAX_RANK> order{0, 1, 2, 3};
  for (int i = 1; i < like.rank; ++i)
    for (int at = i, j = i - 1; j >= 0; --j) {
      const int a = order[j], b = order[at];
      if (like.stride[a] == 0 || like.stride[b] == 0 || like.extent[a] == 1 || like.extent[b] == 1) continue;
      if (like.stride[a] >= like.stride[b]) break;
      std::swap(order[j], order[at]);
      at = j;
    }
  int64_t step = 1;
  for (int i = like.rank - 1; i >= 0; --i) {
    like.stride[order[i]] = step;
    step *= std::max<int64_t>(like.extent[order[i]], 1);
  }
  like.data = nullptr;
  return like;
}

ffpa_tensor lse_like(const ffpa_tensor& q) {
  ffpa_tensor t = q;
  t.rank = 3;
  t.dtype = q.dtype == FFPA_FP64 ? FFPA_FP64 : FFPA_FP32;
  t.extent[3] = t.stride[3] = 0;
  t.stride[2] = 1;
  t.stride[1] = std::max<int64_t>(t.extent[2], 1);
  t.stride[0] = t.stride[1] * std::max<int64_t>(t.extent[1], 1);
  t.data = nullptr;
  return t;
}

// The current stream of a CUDA device, by the shim in libtorch_cuda.so; null on the CPU.
void* current_stream(const ffpa_tensor& q) {
  if (q.device_type != FFPA_CUDA) return nullptr;
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Get>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (!get) throw std::runtime_error("ffpa: this torch has no CUDA streams (libtorch_cuda.so is not loaded)");
  check(get(q.device_index, &stream), "its current stream");
  return stream;
}

Handle workspace(const ffpa_plan& plan, const ffpa_tensor& q, void** data) {
  *data = nullptr;
  if (plan.workspace_bytes == 0) return Handle();
  ffpa_tensor t{};
  const int64_t bytes = static_cast<int64_t>(plan.workspace_bytes) + 255, one = 1;  // room to align to 256
  AtenTensorHandle tensor = nullptr;
  check(aoti_torch_empty_strided(1, &bytes, &one, aoti_torch_dtype_uint8(), q.device_type, q.device_index, &tensor),
        "workspace");
  Handle handle(tensor);
  check(aoti_torch_get_data_ptr(tensor, &t.data), "workspace");
  *data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(t.data) + 255) & ~uintptr_t{255});
  return handle;
}

int32_t cpu_threads() {
  uint32_t threads = 0;
  check(torch_get_num_threads(&threads), "its number of threads");
  return static_cast<int32_t>(threads);
}

constexpr const char* kInputs =
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? "
    "cu_seqlens_q, "
    "Tensor? cu_seqlens_kv, Tensor? seqlens_kv, Tensor? block_table, Tensor? kv_batch_idx, Tensor? dropout_state";
constexpr const char* kOptions =
    "float scale, float softcap, float dropout_p, bool causal, bool bottom_right, int window_left, int window_right, "
    "int max_seqlen_q, int max_seqlen_kv, bool deterministic, bool batch_invariant, int num_splits, int engine, int "
    "kernel";

// kInputs and kOptions as a problem; keeps the tensors alive.
struct Problem {
  ffpa_forward_problem f;
  std::array<Handle, 13> inputs;

  void read_inputs(Arguments& args) {
    ffpa_forward_problem_init(&f);
    const std::pair<const char*, ffpa_tensor*> names[] = {{"q", &f.q},
                                                          {"k", &f.k},
                                                          {"v", &f.v},
                                                          {"mask", &f.mask},
                                                          {"bias", &f.bias},
                                                          {"alibi_slopes", &f.alibi_slopes},
                                                          {"sinks", &f.sinks},
                                                          {"cu_seqlens_q", &f.cu_seqlens_q},
                                                          {"cu_seqlens_kv", &f.cu_seqlens_kv},
                                                          {"seqlens_kv", &f.seqlens_kv},
                                                          {"block_table", &f.block_table},
                                                          {"kv_batch_idx", &f.kv_batch_idx},
                                                          {"dropout_state", &f.dropout_state}};
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = i < 3 ? args.tensor() : args.optional_tensor();
    for (size_t i = 0; i < inputs.size(); ++i) *names[i].second = view(names[i].first, inputs[i]);
  }
  void read_options(Arguments& args) {
    f.has_scale = 1;
    f.scale = args.real();
    f.softcap = args.real();
    f.dropout_p = args.real();
    f.causal = args.flag();
    f.anchor = args.flag() ? FFPA_BOTTOM_RIGHT : FFPA_TOP_LEFT;
    f.window_left = args.integer();
    f.window_right = args.integer();
    f.max_seqlen_q = args.integer();
    f.max_seqlen_kv = args.integer();
    f.deterministic = args.flag();
    f.batch_invariant = args.flag();
    f.num_splits = static_cast<int32_t>(args.integer());
    f.engine = static_cast<int32_t>(args.integer());
    const int kernel = static_cast<int>(args.integer());  // index for ffpa_kernel_at, -1 = not forced
    if (kernel >= 0) {
      ffpa_kernel_info info{};
      info.struct_size = sizeof info;
      check(ffpa_kernel_at(kernel, &info));
      f.kernel = info.name;
    }
    if (f.q.device_type == FFPA_CPU) f.num_threads = cpu_threads();
  }
  void need_rank_4() const {
    const std::pair<const char*, const ffpa_tensor*> inputs4[] = {{"q", &f.q}, {"k", &f.k}, {"v", &f.v}};
    for (const auto& [name, t] : inputs4)
      if (t->rank != 4)
        throw std::runtime_error(std::string(name) + ": rank must be 4, but is " + std::to_string(t->rank));
  }
};

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  Problem p;
  p.read_inputs(args);
  p.read_options(args);
  p.need_rank_4();
  ffpa_tensor o_like = p.f.q;
  o_like.extent[3] = p.f.v.extent[3];
  Output o = empty("o", dense_like(o_like)), lse = empty("lse", lse_like(p.f.q));
  p.f.o = o.t;
  p.f.lse = lse.t;
  ffpa_plan plan;
  check(ffpa_forward_plan(&p.f, &plan));
  void* data;
  const Handle memory = workspace(plan, p.f.q, &data);
  check(ffpa_forward_run(&p.f, &plan, data, plan.workspace_bytes, current_stream(p.f.q)));
  stack[0] = o.handle.hand_over();
  stack[1] = lse.handle.hand_over();
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  ffpa_backward_problem b;
  ffpa_backward_problem_init(&b);
  const Handle dout = args.tensor(), dlse = args.optional_tensor();
  Problem p;
  p.read_inputs(args);
  const Handle o = args.tensor(), lse = args.tensor();
  p.read_options(args);
  p.need_rank_4();
  p.f.o = view("o", o);
  p.f.lse = view("lse", lse);
  b.forward = p.f;
  b.dout = view("dout", dout);
  b.dlse = view("dlse", dlse);
  const std::pair<ffpa_tensor*, const ffpa_tensor*> gradients[] = {
      {&b.dq, &p.f.q}, {&b.dk, &p.f.k}, {&b.dv, &p.f.v}, {&b.dbias, &p.f.bias}, {&b.dsinks, &p.f.sinks}};
  ffpa_tensor none = lse_like(p.f.q);
  none.rank = 1;
  none.dtype = p.f.q.dtype;
  none.extent[0] = 0;
  none.stride[0] = 1;
  std::array<Output, 5> out;
  for (size_t i = 0; i < out.size(); ++i) {
    const bool wanted = args.flag();
    out[i] = empty("gradient", wanted ? dense_like(*gradients[i].second) : none);
    if (wanted) *gradients[i].first = out[i].t;
  }
  ffpa_plan plan;
  check(ffpa_backward_plan(&b, &plan));
  void* data;
  const Handle memory = workspace(plan, p.f.q, &data);
  check(ffpa_backward_run(&b, &plan, data, plan.workspace_bytes, current_stream(p.f.q)));
  for (size_t i = 0; i < out.size(); ++i) stack[i] = out[i].handle.hand_over();
}

void append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  ffpa_append_problem a;
  ffpa_append_problem_init(&a);
  const std::pair<const char*, ffpa_tensor*> names[] = {{"k_new", &a.k_new},
                                                        {"v_new", &a.v_new},
                                                        {"k_cache", &a.k_cache},
                                                        {"v_cache", &a.v_cache},
                                                        {"seqlens_kv", &a.seqlens_kv},
                                                        {"block_table", &a.block_table},
                                                        {"kv_batch_idx", &a.kv_batch_idx},
                                                        {"rotary_cos", &a.rotary_cos},
                                                        {"rotary_sin", &a.rotary_sin},
                                                        {"q", &a.q}};
  std::array<Handle, 10> inputs;
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = i < 4 ? args.tensor() : args.optional_tensor();
  for (size_t i = 0; i < inputs.size(); ++i) *names[i].second = view(names[i].first, inputs[i]);
  a.rotary_interleaved = args.flag();
  a.rotary_q_fixed = args.flag();
  Output rotated;
  if (a.q.rank) {
    rotated = empty("q_rotated", dense_like(a.q));
    a.q_rotated = rotated.t;
  } else {
    ffpa_tensor none = a.k_new;
    none.rank = 1;
    none.extent[0] = 0;
    none.stride[0] = 1;
    rotated = empty("q_rotated", none);
  }
  if (a.k_new.device_type == FFPA_CPU) a.num_threads = cpu_threads();
  check(ffpa_append(&a, current_stream(a.k_new)));
  stack[0] = rotated.handle.hand_over();
}

// A second copy of this library in one process fails at the first `def` and stays quiet: its ops are there already.
bool register_ops() {
  static const std::string schemas[] = {
      std::string("forward(") + kInputs + ", " + kOptions + ") -> (Tensor, Tensor)",
      std::string("backward(Tensor dout, Tensor? dlse, ") + kInputs + ", Tensor o, Tensor lse, " + kOptions +
          ", bool need_dq, bool need_dk, bool need_dv, bool need_dbias, bool need_dsinks) -> "
          "(Tensor, Tensor, Tensor, Tensor, Tensor)",
      "append(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? seqlens_kv, Tensor? "
      "block_table, "
      "Tensor? kv_batch_idx, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? q, bool rotary_interleaved, bool "
      "rotary_q_fixed) "
      "-> Tensor"};
  const std::pair<const char*, void (*)(StableIValue*, uint64_t, uint64_t)> kernels[] = {
      {"forward", forward}, {"backward", backward}, {"append", append}};
  constexpr uint64_t kTorch210 = (2ULL << 56) | (10ULL << 48);
  TorchLibraryHandle fragment = nullptr;
  if (aoti_torch_library_init_fragment("ffpa", "ffpa_torch.cc", 1, &fragment)) return false;
  for (const std::string& schema : schemas)
    if (aoti_torch_library_def(fragment, schema.c_str())) return false;
  for (const char* key : {"CPU", "CUDA"}) {
    TorchLibraryHandle implementation = nullptr;
    if (aoti_torch_library_init_impl("ffpa", key, "ffpa_torch.cc", 1, &implementation)) return false;
    for (const auto& [name, kernel] : kernels)
      if (torch_library_impl(implementation, name, kernel, kTorch210)) return false;
  }
  return true;
}

[[maybe_unused]] const bool registered = register_ops();

}  // namespace
